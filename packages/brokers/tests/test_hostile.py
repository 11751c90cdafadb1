"""Servers that send more than they were asked for: a relay neither keeps nor parses it."""

from __future__ import annotations

import asyncio
import logging
import struct
import time
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("rstream")
pytest.importorskip("nats")
pytest.importorskip("redis")
pytest.importorskip("confluent_kafka")

from rstream.constants import Key

from outbox.core.brokers.port import Message, Owner, Stop
from outbox.core.model.response import DETAIL_CHARS_MAX
from outbox.destinations.broker import BrokerAddress
from outbox.destinations.brokers import Brokers
from outbox.network.egress import EgressPolicy
from outbox_brokers.rabbitmq.connection import StreamConnection
from outbox_brokers.rabbitmq.position import _Tail
from tests.support.brokers.hostile import ATTACKS, attacking
from tests.support.waiting import until

if TYPE_CHECKING:
    from outbox.destinations.broker import Broker

pytestmark = pytest.mark.system

WRITTEN_BYTES_MAX = 8 << 20
"""More than a relay takes from any server, with what the kernel holds of it."""
CHUNK_BYTES_MAX = 72 << 20
"""The same where a chunk of a stream is awaited."""
LANE = "events-1-0"
AT_ONCE = 16
PAUSE_S_MAX = 5.0
"""An attack that does not end lasts longer; usual ones take some milliseconds."""


async def open_or_append(broker: Broker) -> Stop | object:
    message = Message(1, "d1", (("X-Sequence", "1"),), b"{}")
    owner = Owner("db", 1)
    standing = await broker.open(LANE, owner, 0, None)
    if isinstance(standing, Stop):
        return standing
    return (await broker.append(LANE, owner, 0, [message])).stop


@pytest.mark.full
@pytest.mark.parametrize("name", ATTACKS)
async def test_a_hostile_broker_costs_little_and_ends_no_session(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever it sends: the call returns, in time, with one line that is safe to display."""
    pauses = asyncio.create_task(longest_pause())
    await attack(name)
    pauses.cancel()
    await asyncio.wait([pauses])
    assert pauses.result() < PAUSE_S_MAX
    assert errors_in(caplog) == []


@pytest.mark.parametrize("broker", ["redis", "nats", "rabbitmq", "kafka"])
async def test_all_attacks_of_a_broker_at_once(
    broker: str, caplog: pytest.LogCaptureFixture
) -> None:
    names = [name for name in ATTACKS if name.startswith(broker)]
    places = asyncio.Semaphore(AT_ONCE)

    async def run(name: str) -> str | None:
        async with places:
            try:
                await attack(name)
            except Exception as error:
                return f"{name}: {type(error).__name__}: {error}"
            return None

    found = await asyncio.gather(*map(run, names))
    assert [each for each in found if each is not None] == []
    assert errors_in(caplog) == []


async def attack(name: str) -> None:
    brokers = Brokers(EgressPolicy(["127.0.0.0/8"]))
    async with attacking(ATTACKS[name]) as server, asyncio.timeout(30):
        credentials = "user:password" if name.startswith("rabbitmq") else None
        address = BrokerAddress(server.url, credentials, timeout_s=1, connect_timeout_s=1)
        broker = brokers.connect(address)
        try:
            result = await open_or_append(broker)
            detail = getattr(result, "detail", "")
            assert len(detail) <= DETAIL_CHARS_MAX
            assert detail.isprintable()
        finally:
            await broker.aclose()
            await brokers.aclose()
        await until(lambda: not server.open)
    assert server.connections >= 1
    is_chunk = "chunk" in name
    assert server.written_bytes < (CHUNK_BYTES_MAX if is_chunk else WRITTEN_BYTES_MAX)


def errors_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR]


async def longest_pause() -> float:
    """Until cancelled: how long the event loop did not come to this task."""
    longest = 0.0
    try:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.01)
            longest = max(longest, time.monotonic() - before - 0.01)
    except asyncio.CancelledError:
        return longest


def delivered(size: int) -> bytes:
    """A frame with a chunk of a stream of RabbitMQ."""
    body = struct.pack(">HHB", Key.Deliver.value, 1, 0) + bytes(size)
    return struct.pack(">I", len(body)) + body


class _Nowhere:
    def abort(self) -> None: ...


def subscribed() -> tuple[StreamConnection, _Tail]:
    """An authenticated connection with a subscription that waits for one chunk."""
    connection = StreamConnection()
    connection.connection_made(_Nowhere())  # type: ignore[arg-type]
    connection._tuned.set_result(None)  # type: ignore[arg-type]
    tail = _Tail(connection)
    connection.subscriptions[0] = tail.received
    connection.subscribed.add(0)
    return connection, tail


async def test_chunks_that_were_not_asked_for_are_not_kept() -> None:
    connection, tail = subscribed()
    for _ in range(3):
        connection.data_received(delivered(5_000_000))
    assert tail.entries.qsize() == 1
    assert "not asked for" in str(connection.lost)


async def test_a_chunk_that_arrives_late_does_not_end_the_connection() -> None:
    """Other lanes use it, too; a large frame is one only after the subscription has ended."""
    connection, _ = subscribed()
    chunk = delivered(2_000_000)
    connection.data_received(chunk[:100_000])
    del connection.subscriptions[0]
    connection.data_received(chunk[100_000:])
    assert connection.lost is None
    connection.subscribed.clear()
    connection.data_received(chunk)
    assert connection.lost is not None
