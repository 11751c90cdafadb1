"""An inbox records each event once, with every supported driver."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from outbox.receiver.catch_up import lanes_behind
from outbox.receiver.fetch import LaneProgress
from outbox.receiver.inbox.inbox import Inbox
from outbox.receiver.inbox.process import DeliveryOutcome
from outbox.receiver.lane_order import LaneGaps, LaneState, OrderKind, SequenceState, StoredLane
from outbox.receiver.message import Message, parse
from tests.receiver.connections import (
    OPENERS,
    AsyncMemory,
    Asyncpg,
    Django,
    Memory,
    Opener,
    Psycopg,
    SQLAlchemySession,
    SQLAlchemySQLite,
    SQLite,
)
from tests.receiver.deliveries import DAY, delivery, signed
from tests.support.tiers import sampled

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.postgres import Database

pytestmark = pytest.mark.costly


def at(month: int = DAY.month, day: int = DAY.day) -> float:
    """Another day of that year, in epoch seconds."""
    return DAY.replace(month=month, day=day).timestamp()


def message(seq: int, previous: int | None = None, **changes: Any) -> Message:
    lane_ends = changes.pop("lane_ends", False)
    return parse(*signed(delivery(seq, **changes), previous=previous, lane_ends=lane_ends))[0]


DIRECT = (AsyncMemory, Memory, Asyncpg, Psycopg, SQLite)
"""Drivers that run every test by default; the others wrap one of them."""
USUAL = (*DIRECT, SQLAlchemySession, Django)
"""Drivers that run the central tests by default."""
on_every_driver_if_full = pytest.mark.parametrize(
    "opener",
    sampled(OPENERS, lambda kind: kind in DIRECT),
    indirect=True,
    ids=lambda kind: kind.__name__,
)


@pytest.fixture(params=sampled(OPENERS, lambda kind: kind in USUAL), ids=lambda kind: kind.__name__)
async def opener(
    request: pytest.FixtureRequest, empty_database: Database, tmp_path: Path
) -> Opener:
    kind: type[Opener] = request.param
    opened = kind(Inbox(), empty_database.dsn, tmp_path / "inbox.sqlite")
    await opened.prepare()
    return opened


def effect(number: int) -> str:
    return f"INSERT INTO effect VALUES ({number})"


async def effects(opener: Opener, database: Database) -> list[int]:
    if isinstance(opener, AsyncMemory):
        return sorted(opener.effects)
    if isinstance(opener, (SQLite, SQLAlchemySQLite)):
        import sqlite3

        with sqlite3.connect(opener.file) as connection:
            rows = connection.execute("SELECT number FROM effect ORDER BY number").fetchall()
        connection.close()
        return [n for (n,) in rows]
    async with database.connection() as db:
        return [row["number"] for row in await db.fetch("SELECT * FROM effect ORDER BY 1")]


async def test_each_event_is_recorded_once(opener: Opener, empty_database: Database) -> None:
    came = []
    for what in (
        message(1),
        message(2),
        message(2),
        message(5, 3),  # 3 is missing, 4 was dead-lettered.
        message(3),
        message(1),
        message(6, replay_of=("a-1-0", 4), outbox_id=4, event_id=delivery(4).event_id),
        message(7, replay_of=("a-1-0", 2), outbox_id=2, event_id=delivery(2).event_id),
        message(8, lane_ends=True),
    ):
        async with opener.transaction() as transaction:
            taken = await transaction.receive(what)
            if taken.fresh:
                await transaction.execute(effect(what.sequence))
            assert taken.observation is not None
            came.append((what.sequence, taken.outcome, taken.observation.kind))
            seen = taken.observation
        if what.sequence == 5:
            assert (seen.missing, seen.holes) == (((3, 3),), ((4, 4),))
        if what.sequence == 3:
            assert seen.was is SequenceState.MISSING
        if what.sequence == 6:
            assert seen.closed is SequenceState.HOLE
    fresh, again = DeliveryOutcome.FRESH, DeliveryOutcome.DUPLICATE
    assert came == [
        (1, fresh, OrderKind.IN_ORDER),
        (2, fresh, OrderKind.IN_ORDER),
        (2, again, OrderKind.DUPLICATE),
        (5, fresh, OrderKind.GAP),
        (3, fresh, OrderKind.OLD),
        (1, again, OrderKind.DUPLICATE),
        (6, fresh, OrderKind.IN_ORDER),
        (7, again, OrderKind.IN_ORDER),
        (8, fresh, OrderKind.IN_ORDER),
    ]
    assert await effects(opener, empty_database) == [1, 2, 3, 5, 6, 8]
    async with opener.transaction() as transaction:
        lane = (await transaction.call("lanes"))["a-1-0"]
    assert (lane.state.high, lane.state.ended) == (8, True)
    assert not lane.state.missing
    assert not lane.state.holes


@on_every_driver_if_full
async def test_a_replay_in_another_lane_is_recorded_once(opener: Opener) -> None:
    """An event is replayed in the lanes of a new generation, whether it was received or not."""

    def replay(seq: int, of: int, was: str = "a-1-0") -> Message:
        event = {"outbox_id": of, "event_id": delivery(of).event_id}
        return message(seq, lane="a-2-0", replay_of=(was, of), **event)

    fresh, twice = DeliveryOutcome.FRESH, DeliveryOutcome.DUPLICATE
    for what, outcome in (
        (message(1), fresh),
        (message(4), fresh),  # 2 and 3 are missing.
        (replay(1, 1), twice),  # It was processed, and its response was lost.
        (replay(2, 2), fresh),
        (message(2), twice),  # It was only delayed.
        (message(3), fresh),
        (replay(3, 3), twice),
        (replay(4, 9), fresh),
        (message(9), twice),  # It arrives in its own lane after its replay.
        (replay(5, 30, "a-0-0"), fresh),  # Its lane is no longer tracked.
    ):
        async with opener.transaction() as transaction:
            taken = await transaction.receive(what)
        assert taken.outcome is outcome, what
    async with opener.transaction() as transaction:
        lane = (await transaction.call("lanes"))["a-1-0"]
    assert (lane.state.high, lane.state.missing) == (9, ((5, 8),))


async def test_a_catch_up_records_what_it_did_not_process(opener: Opener) -> None:
    for what in (message(1), message(4)):  # 2 and 3 are missing.
        async with opener.transaction() as transaction:
            await transaction.receive(what)
    gaps = LaneGaps(9, dead_lettered=((2, 2), (5, 6)), unavailable=((3, 3), (7, 9)))
    for lost in (((3, 3), (7, 9)), ()):
        async with opener.transaction() as transaction:
            assert await transaction.call("record_gaps", "a-1-0", gaps) == lost
    async with opener.transaction() as transaction:
        # A lane of which it received nothing.
        none_sent = LaneGaps(2, dead_lettered=((1, 2),), unavailable=())
        assert await transaction.call("record_gaps", "a-1-1", none_sent) == ()
    for what in (message(5), message(10)):  # The first one is a copy that comes late.
        async with opener.transaction() as transaction:
            taken = await transaction.receive(what)
            assert (taken.fresh, taken.missing) == (True, ())
    async with opener.transaction() as transaction:
        lanes = await transaction.call("lanes")
    assert lanes["a-1-0"].state == LaneState(10, holes=((2, 2), (6, 6)), unknown=((3, 3), (7, 9)))
    assert lanes["a-1-1"].state == LaneState(2, holes=((1, 2),))


def test_the_lanes_that_a_receiver_is_behind_in() -> None:
    def lane(name: str, high: int, **state: Any) -> dict[str, StoredLane]:
        return {name: StoredLane(name, LaneState(high, **state), 0)}

    known = (
        lane("a-1-0", 3)
        | lane("a-1-1", 6, missing=((2, 2),))
        | lane("a-2-0", 5, unknown=((1, 4),))
        | lane("a-2-2", 9)
    )
    progress = [
        LaneProgress("a-0-0", 4, 0),  # From before this receiver existed.
        LaneProgress("a-1-0", 6, 1),  # 4 to 6 are missing at its end.
        LaneProgress("a-1-1", 6, 1),
        LaneProgress("a-1-2", 2, 1),  # It received nothing, but existed at the time.
        LaneProgress("a-2-0", 5, 2),
        LaneProgress("a-2-1", 9, 2),  # Nor this lane, after lanes of an older generation.
        LaneProgress("a-2-2", 9, 2),
        LaneProgress("a-3-0", 0, 3),
    ]
    behind = ["a-1-0", "a-1-1", "a-1-2", "a-2-1"]
    assert lanes_behind(known, progress) == behind
    assert lanes_behind(known, progress, from_start=True) == ["a-0-0", *behind]


async def test_a_rolled_back_delivery_is_new_again(
    opener: Opener, empty_database: Database
) -> None:
    class Crash(Exception):
        pass

    for _ in range(2):
        with contextlib.suppress(Crash):
            async with opener.transaction() as transaction:
                assert (await transaction.receive(message(1))).fresh
                await transaction.execute(effect(1))
                raise Crash
    async with opener.transaction() as transaction:
        assert (await transaction.receive(message(1))).fresh
        await transaction.execute(effect(1))
    assert await effects(opener, empty_database) == [1]


@on_every_driver_if_full
async def test_concurrent_copies_wait_for_each_other(
    opener: Opener, empty_database: Database
) -> None:
    """For a number whose lane is known, and for the first number of a lane."""
    for number in (1, 2):

        async def one(number: int = number) -> DeliveryOutcome:
            async with opener.transaction() as transaction:
                taken = await transaction.receive(message(number))
                if taken.fresh:
                    await transaction.execute(effect(number))
                return taken.outcome

        outcomes = await asyncio.gather(*(one() for _ in range(5)))
        assert sorted(outcomes) == [DeliveryOutcome.DUPLICATE] * 4 + [DeliveryOutcome.FRESH]
    assert await effects(opener, empty_database) == [1, 2]


@on_every_driver_if_full
async def test_a_sequence_used_by_another_delivery_is_a_conflict(opener: Opener) -> None:
    async with opener.transaction() as transaction:
        await transaction.receive(message(1))
        await transaction.receive(message(2))
    for _ in range(2):  # It leaves no changes.
        async with opener.transaction() as transaction:
            taken = await transaction.receive(message(2, outbox_id=77))
            assert taken.outcome is DeliveryOutcome.CONFLICT
    async with opener.transaction() as transaction:
        assert (await transaction.receive(message(2))).outcome is DeliveryOutcome.DUPLICATE


@on_every_driver_if_full
async def test_an_early_delivery_reports_the_missing_ones(opener: Opener) -> None:
    async with opener.transaction() as transaction:
        await transaction.receive(message(1))
    async with opener.transaction() as transaction:
        taken = await transaction.receive(message(4), gaps=False)
        assert (taken.outcome, taken.missing) == (DeliveryOutcome.EARLY, ((2, 3),))
    for number in (2, 3, 4):
        async with opener.transaction() as transaction:
            assert (await transaction.receive(message(number), gaps=False)).fresh


async def test_an_older_event_never_overwrites_a_newer_state(opener: Opener) -> None:
    newest = []
    for what in (
        message(1),
        message(3),
        message(2),
        message(3),
        message(9, replay_of=("a-1-0", 1)),
        message(10),
        message(1, lane="a-2-0"),  # A new generation of lanes.
        message(11, replay_of=("a-1-0", 4), published_at=at(day=30)),
        message(2, lane="a-2-0", backfill_id=7, published_at=at(day=1)),
        message(3, lane="a-2-0"),
        message(4, lane="a-2-0", replay_of=("a-1-0", 5), published_at=at(month=3, day=1)),
        # Its number is higher than all others except the replayed delivery.
        message(5, lane="a-2-0"),
        message(6, lane="a-2-0", published_at=at(month=5)),
        message(7, lane="a-2-0", published_at=at(month=2, day=1)),
    ):
        async with opener.transaction() as transaction:
            newest.append(await transaction.newest("account 7", what))
            assert await transaction.newest(f"other {len(newest)}", what)
    output = "".join("+" if each else "-" for each in newest)
    assert output == "++-+-++--++-++"


async def test_expired_deliveries_are_deleted_and_their_copies_stay_duplicates(
    opener: Opener, empty_database: Database
) -> None:
    if isinstance(opener, AsyncMemory):
        pytest.skip("it forgets by itself, see test_memory")
    for number in (1, 2, 3):
        async with opener.transaction() as transaction:
            await transaction.receive(message(number))
    async with opener.transaction() as transaction:
        assert await transaction.call("expire") == 0
    await _age(opener, empty_database, 8, "sequence < 3")
    async with opener.transaction() as transaction:
        assert await transaction.call("expire") == 2
    async with opener.transaction() as transaction:
        for number in (1, 2, 3):
            assert (await transaction.receive(message(number))).outcome is DeliveryOutcome.DUPLICATE
        # It is unknown whether this is a copy of a deleted row, unless it is younger than the rows
        # that were deleted.
        taken = await transaction.receive(message(2, outbox_id=77))
        assert taken.outcome is DeliveryOutcome.DUPLICATE
        young = datetime.now(tz=UTC) - timedelta(days=6)
        taken = await transaction.receive(message(2, outbox_id=78, published_at=young.timestamp()))
        assert taken.outcome is DeliveryOutcome.CONFLICT
        taken = await transaction.receive(message(3, outbox_id=79))
        assert taken.outcome is DeliveryOutcome.CONFLICT
        # The replay of a deleted row is recognized by the number that it replays.
        event = {"outbox_id": 2, "event_id": delivery(2).event_id}
        taken = await transaction.receive(message(4, replay_of=("a-1-0", 2), **event))
        assert taken.outcome is DeliveryOutcome.DUPLICATE


async def _age(opener: Opener, database: Database, days: int, where: str) -> None:
    if isinstance(opener, (SQLite, SQLAlchemySQLite)):
        import sqlite3

        with sqlite3.connect(opener.file) as connection:
            aged = f"received_at = received_at - {days} * 86400"
            connection.execute(f"UPDATE outbox_inbox SET {aged} WHERE {where}")
        connection.close()
        return
    async with database.connection() as db:
        aged = f"received_at = received_at - interval '{days} days'"
        await db.execute(f"UPDATE outbox_inbox SET {aged} WHERE {where}")
