"""Where a lane stands: streams that are absent, deleted, trimmed or used by another writer."""

from __future__ import annotations

import asyncio

import pytest

from outbox.core.brokers.port import (
    Appended,
    Capabilities,
    Foreign,
    Owner,
    Position,
    Stop,
    StopKind,
)
from outbox.core.brokers.take_over import Acknowledge, Hold, HoldReason, LaneBooks, Proceed, decide
from outbox_brokers.rabbitmq.broker import CAPABILITIES
from outbox_brokers.rabbitmq.messages import encode
from packages.brokers.tests.rabbitmq.conftest import (
    LANE,
    OWNER,
    REFERENCE,
    Stage,
    message,
    messages,
)
from tests.support.brokers.wire import wire_to
from tests.support.waiting import until

pytestmark = pytest.mark.full


def _books(delivered: int, acked: int | None = None, last: int = 100) -> LaneBooks:
    return LaneBooks(LANE, delivered, delivered if acked is None else acked, last)


def test_there_is_neither_compare_and_set_nor_a_fence() -> None:
    assert Capabilities(compare=False, prefix=True, fence=False, position=True) == CAPABILITIES


async def test_a_stream_that_does_not_exist_has_no_position_0(stage: Stage) -> None:
    broker = stage.broker(query="")
    standing = await broker.open(LANE, OWNER, 0, None)
    assert isinstance(standing, Stop)
    assert standing.kind is StopKind.MISCONFIGURED
    assert stage.stream in standing.detail
    assert "create=1" in standing.detail


async def test_create_is_for_lanes_that_were_never_delivered_to(stage: Stage) -> None:
    broker = stage.broker(query="create=1")
    standing = await broker.open(LANE, OWNER, 3, None)
    decision = decide(standing, _books(3), None)
    assert isinstance(decision, Hold)
    assert decision.reason is HoldReason.FORGOT
    assert not await stage.raw.exists(stage.stream)
    assert await broker.open(LANE, OWNER, 0, None) == Position(0, None)
    assert await stage.raw.exists(stage.stream)


@pytest.mark.parametrize("anew", [False, True])
async def test_a_deleted_stream_is_noticed_while_the_owner_is_alive(
    stage: Stage, anew: bool
) -> None:
    broker = stage.broker()
    await stage.position(broker)
    await broker.append(LANE, OWNER, 0, messages(1, 2, 3))
    await stage.raw.delete(stage.stream)
    if anew:
        await stage.raw.create(stage.stream)
    # Nothing is stored before the lane is opened again.
    result = await broker.append(LANE, OWNER, 3, messages(4))
    assert result.through == 3
    assert result.stop is not None
    standing = await until(lambda: _definite(broker, 3), what="the deletion")
    assert standing == Position(0, None)
    decision = decide(standing, _books(3), None)
    assert isinstance(decision, Hold)
    assert decision.reason is HoldReason.FORGOT
    if anew:
        assert await stage.held() == []
        # The refill, with the sequences that were lost.
        assert await broker.append(LANE, OWNER, 0, messages(1, 2, 3)) == Appended(3)
        assert await stage.held() == [1, 2, 3]


async def _definite(broker: object, after: int) -> object:
    standing = await broker.open(LANE, OWNER, after, None)  # type: ignore[attr-defined]
    return None if isinstance(standing, Stop) else standing


async def test_without_opening_the_server_confirms_onto_an_empty_stream(stage: Stage) -> None:
    """Why a lane is opened after the stream was deleted: the confirm says nothing."""
    await stage.raw.create(stage.stream)
    await stage.raw.publish(stage.stream, REFERENCE, [(4, encode(message(4)))])
    assert await stage.held() == [4]


async def test_a_dead_letter_is_a_hole_that_is_no_loss(stage: Stage) -> None:
    broker = stage.broker()
    await stage.position(broker)
    assert await broker.append(LANE, OWNER, 0, messages(1, 2)) == Appended(2)
    assert await broker.append(LANE, OWNER, 2, messages(4, 6)) == Appended(6)
    assert await stage.held() == [1, 2, 4, 6]
    # A dead letter at the end: the stream rightly stands below the last acknowledged one.
    position = await stage.position(stage.broker(), 6)
    assert decide(position, _books(6, acked=8), "d-6") == Proceed(6)


async def test_a_take_over_acknowledges_what_was_stored(stage: Stage) -> None:
    former = stage.broker()
    await stage.position(former)
    await former.append(LANE, OWNER, 0, messages(1, 2, 3))
    position = await stage.position(stage.broker(), 1)
    assert position == Position(3, "d-3")
    assert decide(position, _books(1), "d-3") == Acknowledge(3)


async def test_a_restored_database_is_held(stage: Stage) -> None:
    broker = stage.broker()
    await stage.position(broker)
    await broker.append(LANE, OWNER, 0, messages(1, 2, 3))
    position = await stage.position(stage.broker(), 1)
    # Its sequence 3 is another delivery, or is not assigned yet.
    for books, expected, reason in (
        (_books(1), "other-3", HoldReason.FOREIGN),
        (_books(1, last=2), None, HoldReason.AHEAD),
    ):
        decision = decide(position, books, expected)
        assert isinstance(decision, Hold)
        assert decision.reason is reason


async def test_a_copied_database_is_foreign(stage: Stage) -> None:
    broker = stage.broker()
    await stage.position(broker)
    await broker.append(LANE, OWNER, 0, messages(1, 2))
    copy = stage.broker()
    standing = await copy.open(LANE, Owner("db-copy", 9), 0, None)
    assert isinstance(standing, Foreign)
    assert "another database" in standing.detail
    moved = await copy.append(LANE, Owner("db-copy", 9), 0, messages(1))
    assert moved.stop is not None
    assert moved.stop.kind is StopKind.MOVED
    # The copy's attempt changed nothing, also not for the lanes of its connection.
    assert await copy.open(LANE, OWNER, 2, None) == Position(2, "d-2")
    assert await stage.held() == [1, 2]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        pytest.param(REFERENCE, b"plain", id="our name"),
        pytest.param(None, b"plain", id="no name"),
        pytest.param("somebody", b"", id="nothing"),
        pytest.param("somebody", b"\x00\x53\x75\xa0\x02hi", id="AMQP"),
        pytest.param("somebody", b"\x00\x53\x74\xd1\xff\xff\xff\xff\xff\xff\xff\xff", id="hostile"),
        pytest.param("somebody", encode(message(1, lane="another")), id="another lane"),
    ],
)
async def test_another_writer_is_foreign(stage: Stage, name: str | None, data: bytes) -> None:
    broker = stage.broker()
    await stage.position(broker)
    await broker.append(LANE, OWNER, 0, messages(1))
    await stage.raw.publish(stage.stream, name, [(1000, data)])
    assert isinstance(await broker.open(LANE, OWNER, 1, None), Foreign)


async def test_a_batch_of_another_writer_is_foreign(stage: Stage) -> None:
    broker = stage.broker()
    await stage.position(broker)
    await stage.raw.publish_batch(stage.stream, "somebody", 1, encode(message(1)))
    assert isinstance(await broker.open(LANE, OWNER, 0, None), Foreign)


async def test_a_higher_id_of_our_own_name_is_ahead(stage: Stage) -> None:
    """The server would confirm and drop all sequences up to it."""
    broker = stage.broker()
    await stage.position(broker)
    await stage.raw.publish(stage.stream, REFERENCE, [(1000, encode(message(1000)))])
    decision = decide(await broker.open(LANE, OWNER, 0, None), _books(0), None)
    assert isinstance(decision, Hold)
    assert decision.reason is HoldReason.AHEAD


@pytest.mark.parametrize(("size", "emptied"), [(1, False), (20, True)])
async def test_a_trimmed_stream_keeps_its_position(stage: Stage, size: int, emptied: bool) -> None:
    arguments = {"max-length-bytes": 20_000, "stream-max-segment-size-bytes": 10_000}
    await stage.raw.create(stage.stream, arguments)
    broker = stage.broker()
    await stage.position(broker)
    at = 0

    async def trimmed() -> bool:
        nonlocal at
        window = [message(at + each, body=b"x" * 3000) for each in range(1, size + 1)]
        assert await broker.append(LANE, OWNER, at, window) == Appended(at + size)
        at += size
        held = await stage.held()
        # A chunk that fills several segments is removed whole: nothing is left to read.
        return not held if emptied else bool(held) and held[0] > 1

    await until(trimmed, what="retention")
    position = await stage.position(stage.broker(), at)
    assert position == Position(at, None if emptied else f"d-{at}")
    assert decide(position, _books(at), f"d-{at}") == Proceed(at)
    assert await broker.append(LANE, OWNER, at, messages(at + 1)) == Appended(at + 1)


async def test_what_does_not_follow_the_position_is_not_sent(stage: Stage) -> None:
    broker = stage.broker()
    never_opened = await broker.append(LANE, OWNER, 0, messages(1))
    await stage.position(broker)
    await broker.append(LANE, OWNER, 0, messages(1, 2))
    again = await broker.append(LANE, OWNER, 0, messages(1, 2))
    for result in (never_opened, again):
        assert result.through == 0
        assert result.stop is not None
        assert result.stop.kind is StopKind.MOVED
    with pytest.raises(ValueError, match="do not increase"):
        await broker.append(LANE, OWNER, 2, messages(4, 3))
    assert await stage.held() == [1, 2]


async def test_lanes_share_connections_and_fill_several(stage: Stage) -> None:
    broker = stage.broker(timeout_s=60)
    lanes = [f"lane-{each}" for each in range(300)]
    opened = await asyncio.gather(*[broker.open(each, OWNER, 0, None) for each in lanes])
    assert opened == [Position(0, None)] * len(lanes)
    for at in (0, 1):
        results = await asyncio.gather(
            *[broker.append(each, OWNER, at, [message(at + 1, lane=each)]) for each in lanes]
        )
        assert results == [Appended(at + 1)] * len(lanes)
    for lane in lanes[::50]:
        assert await stage.raw.sequences(f"{stage.prefix}.{lane}") == [1, 2]


async def test_opening_a_lane_again_takes_no_further_slot(stage: Stage) -> None:
    async with wire_to(stage.server.port) as wire:
        broker = stage.broker(port=wire.port)
        for _ in range(300):
            assert await broker.open(LANE, OWNER, 0, None) == Position(0, None)
        assert wire.connections == 1
