"""Responses that are lost, bytes that arrive late, errors in the middle of an append."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from outbox.core.brokers.port import Appended, Position, Stop, StopKind
from outbox_brokers.rabbitmq.messages import encode
from outbox_brokers.rabbitmq.position import delete_publisher
from outbox_devtools.destination_suite import IN_DOUBT
from packages.brokers.tests.rabbitmq.conftest import (
    LANE,
    OWNER,
    message,
    messages,
)
from tests.support.brokers.rabbitmq_raw import raw_client
from tests.support.brokers.wire import wire_to
from tests.support.waiting import until

if TYPE_CHECKING:
    from outbox_brokers.rabbitmq.broker import RabbitMqBroker
    from packages.brokers.tests.rabbitmq.conftest import Stage

pytestmark = pytest.mark.full

CONFIRM_BYTES = 37
"""One frame that confirms three messages."""


async def _append_after_doubt(
    stage: Stage, broker: RabbitMqBroker, at: int, result: Appended
) -> int:
    """Open the lane after an append of three was cut, send the rest; returns the new position."""
    last = at + 3
    if result.stop is None:
        assert result.through == last
        return last
    assert result.stop.kind in IN_DOUBT
    position = await stage.position(broker, at)
    assert result.through <= position.sequence <= last
    assert position.delivery == (f"d-{position.sequence}" if position.sequence else None)
    rest = messages(*range(position.sequence + 1, last + 1))
    if rest:
        assert await broker.append(LANE, OWNER, position.sequence, rest) == Appended(last)
    return last


@pytest.mark.parametrize("side", ["requests", "responses"])
async def test_an_append_cut_after_any_byte_is_stored_once(stage: Stage, side: str) -> None:
    async with wire_to(stage.server.port) as wire:
        broker = stage.broker(port=wire.port)
        await stage.position(broker)
        wire.count()
        await broker.append(LANE, OWNER, 0, messages(1, 2, 3))
        at, size = 3, wire.request_bytes if side == "requests" else wire.response_bytes
        stops = 0
        for cut in range(1, size + 8):
            await stage.position(broker, at)
            wire.cut_after(**{side: cut})
            result = await broker.append(LANE, OWNER, at, messages(*range(at + 1, at + 4)))
            wire.cut_after()
            stops += result.stop is not None
            at = await _append_after_doubt(stage, broker, at, result)
        # All but the last bytes are needed; the server may confirm in one frame or in several.
        assert stops >= (size if side == "requests" else CONFIRM_BYTES) - 1
    assert await stage.held() == list(range(1, at + 1))


async def test_the_test_of_cuts_finds_copies_under_another_name(stage: Stage) -> None:
    await stage.position(stage.broker())
    async with wire_to(stage.server.port) as wire:
        broker = stage.broker(port=wire.port)
        await stage.position(broker)
        wire.mute = True
        append = asyncio.create_task(broker.append(LANE, OWNER, 0, messages(1)))
        await until(stage.held, what="the message")
        await broker.aclose()
        assert (await append).stop is not None
    # A relay that would use another name, and not open the lane, stores it again.
    await stage.raw.publish(stage.stream, "another", [(1, encode(message(1)))])
    assert await stage.held() == [1, 1]


async def test_an_opening_that_is_cut_opens_the_lane_the_next_time(stage: Stage) -> None:
    first = stage.broker()
    await stage.position(first)
    await first.append(LANE, OWNER, 0, messages(1, 2))
    async with wire_to(stage.server.port) as wire:
        await stage.position(stage.broker(port=wire.port), 2)
        requests, responses = wire.request_bytes, wire.response_bytes
        for side, size in (("requests", requests), ("responses", responses)):
            for cut in range(1, size, 37):
                wire.cut_after(**{side: cut})
                broker = stage.broker(port=wire.port)
                standing = await broker.open(LANE, OWNER, 2, None)
                assert isinstance(standing, Stop), (side, cut)
                assert standing.kind in (StopKind.UNAVAILABLE, StopKind.UNKNOWN), standing
                wire.cut_after()
                await broker.aclose()
        assert (await stage.position(stage.broker(port=wire.port), 2)).sequence == 2
    assert await stage.held() == [1, 2]


async def test_late_bytes_of_a_former_owner_store_no_copy(stage: Stage) -> None:
    async with wire_to(stage.server.port) as wire:
        former = stage.broker(port=wire.port)
        await stage.position(former)
        wire.hold()
        append = asyncio.create_task(former.append(LANE, OWNER, 0, messages(1, 2, 3)))
        await until(lambda: wire.held_bytes, what="the request")
        await former.aclose()
        assert (await append) == Appended(0, (await append).stop)

        new = stage.broker()
        assert (await stage.position(new)).sequence == 0
        assert await new.append(LANE, OWNER, 0, messages(1, 2, 3)) == Appended(3)
        await wire.release()
        assert await new.append(LANE, OWNER, 3, messages(4)) == Appended(4)
        assert (await stage.position(new, 4)).delivery == "d-4"
    assert await stage.held() == [1, 2, 3, 4]


async def test_late_bytes_may_store_a_dead_lettered_sequence_in_order(stage: Stage) -> None:
    """There is no fence: this is what is not promised, and the next opening finds it."""
    async with wire_to(stage.server.port) as wire:
        former = stage.broker(port=wire.port)
        await stage.position(former)
        wire.hold()
        append = asyncio.create_task(former.append(LANE, OWNER, 0, messages(1, 2, 3)))
        await until(lambda: wire.held_bytes, what="the request")
        await former.aclose()
        await append

        new = stage.broker()
        await stage.position(new)
        assert await new.append(LANE, OWNER, 0, messages(1, 2)) == Appended(2)
        # Sequence 3 is dead-lettered here.
        await wire.release()
        await until(lambda: _holds(stage, 3), what="the late message")
        assert (await stage.position(new, 2)).sequence == 3
        assert await new.append(LANE, OWNER, 3, messages(4)) == Appended(4)
    assert await stage.held() == [1, 2, 3, 4]


async def _holds(stage: Stage, count: int) -> bool:
    return len(await stage.held()) == count


async def test_nothing_is_sent_after_a_time_out(stage: Stage) -> None:
    broker = stage.broker(timeout_s=1.0)
    await stage.position(broker)
    large = [message(each, body=b"x" * 1_000_000) for each in range(1, 41)]
    with stage.server.frozen():
        result = await broker.append(LANE, OWNER, 0, large)
        assert result.through == 0
        assert result.stop is not None
        assert result.stop.kind is StopKind.UNKNOWN
    # The server reads what its kernel had accepted, and no more: a part of the 40 MB.
    new = stage.broker()
    position = await until(lambda: _settled(stage, new), what="the server")
    assert position < 40
    assert await stage.held() == list(range(1, position + 1))


async def _settled(stage: Stage, broker: RabbitMqBroker) -> int | None:
    """The lane's position, once it is the same twice."""
    first = await broker.open(LANE, OWNER, 0, None)
    second = await broker.open(LANE, OWNER, 0, None)
    if isinstance(first, Stop) or first != second:
        return None
    return first.sequence  # type: ignore[union-attr]


async def test_a_cancelled_append_gives_up_its_connection(stage: Stage) -> None:
    async with wire_to(stage.server.port) as wire:
        broker = stage.broker(port=wire.port)
        await stage.position(broker)
        wire.mute = True
        append = asyncio.create_task(broker.append(LANE, OWNER, 0, messages(1)))
        await until(stage.held, what="the message")
        append.cancel()
        with pytest.raises(asyncio.CancelledError):
            await append
        wire.mute = False
        # Not even tried: the lane must be opened first.
        moved = await broker.append(LANE, OWNER, 0, messages(1))
        assert moved.stop is not None
        assert moved.stop.kind is StopKind.MOVED
        assert (await stage.position(broker)).sequence == 1
        assert wire.connections == 2
    assert await stage.held() == [1]


async def test_a_refused_publish_is_retried_after_opening(stage: Stage) -> None:
    broker = stage.broker()
    await stage.position(broker)
    assert await broker.append(LANE, OWNER, 0, messages(1)) == Appended(1)
    state = broker._lanes[LANE]
    await delete_publisher(state.connection, state.slot)
    result = await broker.append(LANE, OWNER, 1, messages(2, 3))
    assert result.through == 1
    assert result.stop is not None
    assert result.stop.kind is StopKind.UNAVAILABLE
    assert "publisher does not exist (code 18)" in result.stop.detail
    assert state.connection.lost is not None
    assert await stage.position(broker, 1) == Position(1, "d-1")
    assert await broker.append(LANE, OWNER, 1, messages(2, 3)) == Appended(3)
    assert await stage.held() == [1, 2, 3]


async def test_a_killed_writer_leaves_a_prefix(stage: Stage) -> None:
    broker = stage.broker()
    await stage.position(broker)
    # A writer that is killed between the first chunk of a stream and its index entry leaves a chunk
    # that RabbitMQ before 3.13 counts, and does not deliver.
    assert await broker.append(LANE, OWNER, 0, messages(1)) == Appended(1)
    at = 1
    kills = 0
    async with asyncio.timeout(60):
        while kills < 3:
            killing = asyncio.create_task(asyncio.to_thread(stage.server.kill_writer, stage.stream))
            stop = None
            while stop is None:
                window = messages(*range(at + 1, at + 1001))
                at, stop, _ = await broker.append(LANE, OWNER, at, window)
            await killing
            position = await stage.position(broker, at)
            if stop.kind is StopKind.MOVED:
                assert position.sequence == at  # The writer ended between two appends.
            else:
                assert stop.kind in (*IN_DOUBT, StopKind.UNAVAILABLE), stop
                assert position.sequence >= at
                kills += 1
            at = position.sequence
            assert await stage.held() == list(range(1, at + 1))


async def test_a_killed_server_keeps_what_it_confirmed_and_a_prefix_of_the_rest(
    stage: Stage,
) -> None:
    broker = stage.broker()
    at = (await stage.position(broker)).sequence
    for _ in range(20):
        result = await broker.append(LANE, OWNER, at, messages(*range(at + 1, at + 1001)))
        at = result.through
    append = asyncio.create_task(
        broker.append(LANE, OWNER, at, messages(*range(at + 1, at + 1001)))
    )
    await asyncio.sleep(0)  # The request is on its way.
    stage.server.kill()
    result = await append
    assert result.through >= at
    refused = await broker.open(LANE, OWNER, at, None)
    assert isinstance(refused, Stop)
    assert refused.kind is StopKind.UNAVAILABLE
    # In this thread: the server ends with the thread that started it.
    stage.server.start()
    position = (await stage.position(broker, at)).sequence
    assert position >= result.through
    rest = messages(position + 1)
    assert await broker.append(LANE, OWNER, position, rest) == Appended(position + 1)
    async with raw_client(stage.server.port) as raw:
        assert await raw.sequences(stage.stream) == list(range(1, position + 2))


async def test_a_relay_with_a_dead_connection_to_a_stream_goes_on_beside_others(
    stage: Stage,
) -> None:
    broker = stage.broker()
    lanes = [f"lane-{each}" for each in range(8)]
    for lane in lanes:
        await broker.open(lane, OWNER, 0, None)
    stage.server.kill_writer(f"{stage.prefix}.{lanes[0]}")
    at = dict.fromkeys(lanes, 0)

    async def deliver(lane: str) -> bool:
        result = await broker.append(lane, OWNER, at[lane], [message(at[lane] + 1, lane=lane)])
        at[lane] = result.through
        if result.stop is not None:
            standing = await broker.open(lane, OWNER, at[lane], None)
            if not isinstance(standing, Stop):
                at[lane] = standing.sequence  # type: ignore[union-attr]
        return at[lane] >= 5

    for lane in lanes:
        await until(lambda lane=lane: deliver(lane), what=lane)
    for lane in lanes:
        held = await stage.raw.sequences(f"{stage.prefix}.{lane}")
        assert held == list(range(1, at[lane] + 1))
