from __future__ import annotations

import asyncio
import struct
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rstream import schema
from rstream.amqp import AMQPMessage, amqp_decoder
from rstream.encoding import encode_frame

from outbox.core.brokers.port import Message
from outbox_brokers.rabbitmq.connection import (
    SILENT_HEARTBEATS,
    Lost,
    Rejected,
    StreamConnection,
)
from outbox_brokers.rabbitmq.lanes import Publishing, fit, publish_frames
from outbox_brokers.rabbitmq.messages import (
    MalformedChunk,
    Stored,
    encode,
    identify,
    last_entry,
)
from tests.support.virtual_time import run_virtual

if TYPE_CHECKING:
    import random

HEADERS = (("X-Delivery", "d-1"), ("X-Lane", "lane"), ("X-Sequence", "7"))
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=300)


@given(st.dictionaries(TEXT, TEXT, max_size=150), st.binary(max_size=600))
def test_an_independent_decoder_reads_headers_and_body(
    headers: dict[str, str], body: bytes
) -> None:
    decoded = amqp_decoder(encode(Message(1, "d", tuple(headers.items()), body)))
    properties = decoded.application_properties or {}
    assert {name.decode(): value.decode() for name, value in properties.items()} == headers
    assert bytes(decoded.body) == body


def test_a_message_is_read_as_rstreams_own() -> None:
    own = bytes(AMQPMessage(body=b"hello", application_properties=dict(HEADERS)))
    ours = encode(Message(7, "d-1", HEADERS, b"hello"))
    assert identify(own) == identify(ours) == Stored("lane", 7, "d-1")


@given(st.binary(max_size=200))
def test_other_bytes_are_no_delivery(data: bytes) -> None:
    assert identify(data) is None
    assert identify(encode(Message(1, "d", HEADERS[:2], data))) is None


def _chunk(entries: bytes, count: int, *, kind: int = 0, magic: int = 0x50) -> bytes:
    head = struct.pack(">BBHIqQQIIII", magic, kind, count, count, 0, 1, 0, 0, len(entries), 0, 0)
    return head + entries


def _entry(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


def test_the_last_message_of_a_chunk_is_read() -> None:
    batch = b"\x80" + struct.pack(">HII", 1, 6, 6) + _entry(b"in")
    assert last_entry(_chunk(_entry(b"one") + _entry(b"two"), 2)) == b"two"
    assert last_entry(_chunk(batch + _entry(b"two"), 2)) == b"two"
    assert last_entry(_chunk(_entry(b"one") + batch, 2)) is None
    assert last_entry(_chunk(_entry(b"one"), 1, kind=1)) is None
    assert last_entry(_chunk(b"", 0)) is None
    for wrong in (b"", _chunk(_entry(b"one"), 1, magic=0x40), _chunk(_entry(b"one")[:-1], 1)):
        with pytest.raises(MalformedChunk):
            last_entry(wrong)


# ---------------------------------------------------------------------- confirms


async def test_only_a_contiguous_start_counts_as_stored(rng: random.Random) -> None:
    ids = [3, 4, 7, 8, 9]
    for _ in range(200):
        publishing = Publishing(ids)
        order = rng.sample(ids, len(ids))
        for done in range(len(order)):
            publishing.confirmed((order[done],))
            confirmed = set(order[: done + 1])
            expected = 2
            for each in ids:
                if each not in confirmed:
                    break
                expected = each
            assert publishing.through(2) == expected
            assert publishing.ended.done() == (done == len(order) - 1)


async def test_an_error_ends_an_append_and_leaves_the_rest_in_doubt() -> None:
    publishing = Publishing([1, 2, 3])
    publishing.confirmed((1, 3))
    publishing.failed([(2, 18)])
    assert publishing.ended.done()
    assert publishing.through(0) == 1
    assert publishing.has_response
    other = Publishing([1, 2, 3])
    other.failed([(2, 18)])
    assert not other.has_response


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=40))
def test_no_frame_is_longer_than_the_limit(sizes: list[int]) -> None:
    window = [Message(n, "d", HEADERS, b"x" * size) for n, size in enumerate(sizes, 1)]
    encoded = fit(window, 2000)
    if len(encoded) < len(window):
        # Within the overhead of a frame, a message that is left out would not fit.
        assert len(encode(window[len(encoded)])) > 2000 - 40
    if not encoded:
        return
    data = publish_frames(5, range(1, len(encoded) + 1), encoded, 2000)
    found: list[bytes] = []
    while data:
        size = int.from_bytes(data[:4], "big")
        assert size <= 2000
        frame, data = data[4 : 4 + size], data[4 + size :]
        count, place = int.from_bytes(frame[5:9], "big"), 9
        for _ in range(count):
            number, length = struct.unpack_from(">QI", frame, place)
            found.append(frame[place + 12 : place + 12 + length])
            assert number == len(found)
            place += 12 + length
        assert place == len(frame)
    assert found == encoded


# ---------------------------------------------------------------------- the connection


class _Transport:
    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.aborted = False

    def write(self, data: bytes) -> None:
        self.writes.append(data)

    def abort(self) -> None:
        self.aborted = True


def _connected() -> tuple[StreamConnection, _Transport]:
    connection, transport = StreamConnection(), _Transport()
    connection.connection_made(transport)  # type: ignore[arg-type]
    return connection, transport


async def test_what_is_sent_in_one_iteration_shares_a_system_call() -> None:
    connection, transport = _connected()
    for data in (b"one", b"two", b"three"):
        connection.send(data)
    await asyncio.sleep(0)
    assert transport.writes == [b"onetwothree"]
    connection.send(b"never")
    connection.abort("the test ends it")
    await asyncio.sleep(0)
    assert transport.writes == [b"onetwothree"]
    connection.send(b"never")


async def test_the_end_of_a_connection_ends_all_that_waits() -> None:
    connection, transport = _connected()
    publishing = Publishing([1])
    connection.publishers[0] = publishing
    asked = [connection.request(schema.Metadata, streams=["s"]) for _ in range(2)]
    connection.connection_lost(None)
    later = connection.request(schema.Metadata, streams=["s"])
    for each in (*asked, later):
        with pytest.raises(Lost):
            await each
    await publishing.ended
    assert publishing.error is not None
    assert transport.aborted


def test_a_silent_server_is_found_by_its_missing_heartbeats() -> None:
    """Time is virtual: a stall of a real loop may reach the limit before the first heartbeat."""

    async def wait_for_the_end() -> tuple[StreamConnection, _Transport]:
        connection, transport = _connected()
        connection.start_heartbeats(60.0)
        await asyncio.sleep(60.0 * (SILENT_HEARTBEATS + 1))
        return connection, transport

    connection, transport = run_virtual(wait_for_the_end())
    assert transport.aborted
    assert encode_frame(schema.Heartbeat()) in transport.writes
    assert connection.lost is not None
    assert "heartbeat" in connection.lost.detail


async def test_an_error_is_no_confirm_and_ends_the_connection() -> None:
    connection, transport = _connected()
    publishing, another = Publishing([1, 2]), Publishing([7])
    connection.publishers.update({4: publishing, 5: another})
    error = schema.PublishingError(2, 18)
    connection.data_received(encode_frame(schema.PublishError(4, [error])))
    assert publishing.failed_ids == {2: 18}
    assert not publishing.has_response
    assert another.error is not None
    assert transport.aborted


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
async def test_frames_are_parsed_however_they_arrive(size: int) -> None:
    connection, _ = _connected()
    publishing = Publishing([1, 2])
    connection.publishers[4] = publishing
    asked = connection.request(schema.DeclarePublisher, publisher_id=4, stream="s", reference="r")
    response = bytearray(encode_frame(schema.DeclarePublisherResponse(1, 16)))
    response[4] |= 0x80
    data = bytes(response) + encode_frame(schema.PublishConfirm(4, [2, 1]))
    for place in range(0, len(data), size):
        connection.data_received(data[place : place + size])
    with pytest.raises(Rejected) as error:
        await asked
    assert error.value.code == 16
    assert publishing.is_confirmed
    assert connection.lost is None


@given(st.binary(min_size=8, max_size=64))
def test_malformed_bytes_end_the_connection_and_raise_nothing(data: bytes) -> None:
    async def receive() -> None:
        connection, transport = _connected()
        connection.data_received(data)
        connection.data_received(b"\x00\x00\x00\x04\xff\xff\x00\x01" + b"\x00" * 10)
        connection.data_received(b"\x00\x00\x00\x04\x7f\xff\x00\x01")
        assert transport.aborted == (connection.lost is not None)

    asyncio.run(receive())
