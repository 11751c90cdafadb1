"""One replica leads, the others stand by: who takes over from whom, and when."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from outbox.relay.sequencing.cursor import Turn
from outbox.store.event_reads import AWAKE
from tests.support import ranges
from tests.support.judge import SPOTLESS, judge
from tests.support.postgres import Server
from tests.support.sequencers import REAL, add_endpoints, session, settings
from tests.support.sleeper import Sleeper, sleeper
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection

    from asyncpg import Connection

    from outbox.core.delivery.message import Delivery
    from outbox.relay.sequencing.cursor import Sequenced
    from outbox.relay.sequencing.sequencer import Sequencer
    from tests.support.postgres import Database

pytestmark = pytest.mark.costly

INSERT = "INSERT INTO relay.outbox (type, payload) VALUES ('app.any', '{}') RETURNING id"
FLAG = "SELECT last_value FROM relay.wakeup"
LEADER = "SELECT writer FROM relay.cursor"
REPLICA = """
INSERT INTO relay.replica (id, name, version, pids, lease_s, expires_at) OVERRIDING SYSTEM VALUE
VALUES ($1, 'test', '0', '{}', 60, clock_timestamp() + interval '1 minute')
"""
POLL_S = 0.4


@pytest.fixture
async def database(database: Database) -> Database:
    """A database with an endpoint."""
    await add_endpoints(database, 1)
    return database


@asynccontextmanager
async def replica(database: Database, **options: Any) -> AsyncIterator[Sleeper]:
    """A running sequencer whose replica holds its lease."""
    async with sleeper(database, **{"poll_s": POLL_S, **options}) as relay:
        async with database.connection() as connection:
            await connection.execute(REPLICA, relay.sequencer.cursor._me)
        yield relay


async def leader_is(connection: Connection[Any], relay: Sleeper) -> bool:
    return bool(await connection.fetchval(LEADER) == relay.sequencer.cursor._me)


async def test_who_stands_by_leaves_a_leader_that_moves_alone(database: Database) -> None:
    producer = await database.connect()
    async with replica(database) as first:
        await first.asleep()
        async with replica(database) as second:
            for _ in range(20):
                await first.sequenced(await producer.fetchval(INSERT))
            assert not second.sequencer.cursor.leads
            assert await leader_is(producer, first)


async def test_who_leaves_lets_another_lead_at_once(database: Database) -> None:
    producer = await database.connect()
    async with replica(database) as first:
        await first.asleep()
        async with replica(database) as second:
            first.sequencer.stop()
            await first.ended()
            await first.sequencer.leave()
            assert await producer.fetchval(LEADER) is None
            second.sequencer.look()
            await second.sequenced(await producer.fetchval(INSERT))


async def test_a_ring_while_it_is_not_looking_is_kept(database: Database) -> None:
    """Who leaves rings once, and a trickle rings all the time."""
    producer = await database.connect()
    async with replica(database) as first:
        await first.asleep()
        async with replica(database, poll_s=60) as second:
            for looks in (1, 2, 3):
                await until(lambda looks=looks: second.store.looks >= looks, what="a look")
                second.sequencer.look()
            first.sequencer.stop()
            await first.ended()
            await first.sequencer.leave()
            second.sequencer.look()
            await until(lambda: leader_is(producer, second), what="the other one to lead")


async def test_who_looks_each_tick_is_not_taken_for_stuck(database: Database) -> None:
    """Without notifications an event may lie for a tick, and nothing is wrong."""
    producer = await database.connect()
    async with replica(database, notified=False) as first:
        await until(lambda: first.sequencer.cursor.leads, what="the first one to lead")
        async with replica(database, notified=False) as second:
            for _ in range(8):
                await first.sequenced(await producer.fetchval(INSERT))
            assert not second.sequencer.cursor.leads


def test_patience_grows_with_each_take_over_and_is_forgotten_in_a_calm(
    unconnected: Sequencer,
) -> None:
    unconnected._took_over_at = 100.0
    times_s = []
    for unconnected._take_overs in range(9):
        times_s.append(unconnected._patience_s(101.0))
    assert times_s == [1.5, 3, 6, 12, 24, 30, 30, 30, 30]
    assert unconnected._patience_s(161.0) == 1.5


@pytest.fixture
async def unconnected(database: Database) -> Sequencer:
    """A sequencer with a tick of a second that does nothing."""
    return await ranges.sequencer(database)


async def test_a_stop_right_before_it_falls_asleep_is_heard(unconnected: Sequencer) -> None:
    await unconnected.turn()
    unconnected.stop()
    assert await unconnected._fall_asleep() is Turn.IDLE
    assert await unconnected._bell.wait(0)


async def test_who_stands_by_leaves_without_a_word(database: Database) -> None:
    """The flag is the leader's: were it "awake" now, nobody would ring the one that sleeps."""
    producer = await database.connect()
    async with replica(database) as first:
        await first.asleep()
        async with replica(database) as second:
            await until(lambda: second.store.looks, what="the other one to look")
            second.sequencer.stop()
            await second.ended()
            await second.sequencer.leave()
        assert await producer.fetchval(FLAG) > AWAKE
        await first.sequenced(await producer.fetchval(INSERT))


async def test_a_leader_that_is_stuck_delays_events_by_at_most_a_tick(database: Database) -> None:
    """Its lease goes on, its connections live, and its sequencer does nothing."""
    producer = await database.connect()
    async with replica(database) as stuck:
        await stuck.asleep()
        stuck.task.cancel()
        async with replica(database) as other:
            own_id = await producer.fetchval(INSERT)
            await other.sequenced(own_id, within_s=3 * POLL_S)


async def test_a_late_event_in_a_young_gap_is_reason_enough_to_take_over(
    database: Database,
) -> None:
    slow, quick = await database.connect(), await database.connect()
    async with replica(database) as stuck:
        await stuck.asleep()
        await slow.execute("BEGIN")
        late = await slow.fetchval(INSERT)
        await stuck.sequenced(await quick.fetchval(INSERT))
        stuck.task.cancel()
        async with replica(database) as other:
            await slow.execute("COMMIT")
            await other.sequenced(late)


async def test_a_leader_whose_lease_ran_out_is_replaced_at_the_first_look(
    database: Database,
) -> None:
    producer = await database.connect()
    async with replica(database) as gone:
        await gone.asleep()
        gone.task.cancel()
        await producer.execute("UPDATE relay.replica SET expires_at = clock_timestamp()")
        async with replica(database) as other:
            await until(lambda: leader_is(producer, other), what="the other one to lead")


async def test_who_was_overtaken_writes_nothing_and_stands_by(database: Database) -> None:
    producer = await database.connect()
    one, other = [await ranges.sequencer(database) for _ in range(2)]
    await producer.execute(INSERT)
    assert await one.turn() is Turn.MOVED
    await producer.execute(INSERT)
    assert await other.turn() is Turn.MOVED
    await producer.execute(INSERT)
    assert await one.turn() is Turn.OVERTAKEN
    assert not one.cursor.leads
    assert await other.turn() is Turn.MOVED
    assert await judge(producer) == SPOTLESS


async def test_a_change_of_who_gets_what_is_seen_without_an_event(database: Database) -> None:
    producer = await database.connect()
    one = await ranges.sequencer(database)
    assert await one.turn() is Turn.IDLE
    await producer.execute("UPDATE relay.cursor SET version = version + 1")
    assert await one.turn() is Turn.OVERTAKEN
    assert await one.turn() is Turn.IDLE
    assert await one.turn() is Turn.IDLE


async def test_a_held_cursor_row_stops_a_leaders_batch_and_loses_nothing(
    database: Database,
) -> None:
    producer, operator = await database.connect(), await database.connect()
    one = await ranges.sequencer(database)
    assert await one.turn() is Turn.IDLE
    await producer.execute(INSERT)
    await operator.execute("BEGIN; SELECT FROM relay.cursor FOR UPDATE")
    assert await one.turn() is Turn.OVERTAKEN
    assert await one.turn() is Turn.TAKEN
    await operator.execute("COMMIT")
    assert await one.turn() is Turn.MOVED
    assert await judge(producer) == SPOTLESS


# ------------------------------------------------------------ what lanes are given


class Giving:
    """A sequencer in a database with one lane, which wants what it is given."""

    def __init__(self) -> None:
        self.asked: list[set[int]] = []
        self.batches: list[Sequenced] = []

    async def begin(self, database: Database) -> None:
        connection = await session(database)
        self.lane_id = await connection.fetchval("SELECT id FROM lane")
        self.sequencer, store = REAL.build(
            connection, settings(database), on_batch=self.batches.append
        )
        self.sequencer.cursor._wants = self._wants
        await store.check()

    def _wants(self, lane_ids: Collection[int]) -> dict[int, Any]:
        self.asked.append(set(lane_ids))
        return {self.lane_id: SimpleNamespace(endpoint_id=None, name="lane")}

    async def turn(self) -> list[Delivery]:
        """What the lane was given by the next batch."""
        assert await self.sequencer.turn() is Turn.MOVED
        return list(self.batches[-1].given.get(self.lane_id, ()))


@pytest.fixture
async def giving(database: Database) -> Giving:
    giving = Giving()
    await giving.begin(database)
    return giving


async def test_lanes_that_want_their_events_get_them_with_the_batch(
    database: Database, giving: Giving
) -> None:
    producer = await database.connect()
    for key in ("one", "two"):
        await producer.execute(
            "INSERT INTO relay.outbox (type, key, payload, expires_at)"
            " VALUES ('app.any', $1, '{\"a\": 1}', 'infinity')",
            key,
        )
    got = await giving.turn()
    assert giving.asked == [{giving.lane_id}]
    assert [(each.seq, each.batch, each.key) for each in got] == [(1, 1, "one"), (2, 1, "two")]
    assert {(each.lane, each.type, each.payload) for each in got} == {
        ("lane", "app.any", b'{"a": 1}')
    }
    # As the reader reads it: times that Python has no name for are near its last one.
    assert {each.expires_at and each.expires_at.year for each in got} == {9999}


async def test_large_events_are_left_to_be_read(database: Database, giving: Giving) -> None:
    """The row stays locked until all that comes back is sent, so it must fit into buffers."""
    producer = await database.connect()
    await producer.execute(
        "INSERT INTO relay.outbox (type, payload) SELECT 'app.any', to_jsonb(repeat('x', n))"
        " FROM unnest(ARRAY[1000, 1000, 32000, 1]) n"
    )
    assert [each.seq for each in await giving.turn()] == [1, 2]


async def test_a_large_batch_is_left_to_be_read(
    database: Database, giving: Giving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox.relay.sequencing.cursor.GIVEN_MAX", 2)
    producer = await database.connect()
    await producer.execute(
        "INSERT INTO relay.outbox (type, payload) SELECT 'app.any', '{}' FROM generate_series(1, 3)"
    )
    assert await giving.turn() == []
    assert giving.asked == []
    assert [dict(batch.given) for batch in giving.batches] == [{}]


# ------------------------------------------------------------------ a crowd


@pytest.fixture
async def slow_disk(pg_major: int) -> AsyncIterator[Database]:
    """A database with an endpoint; whoever sets `commit_delay` commits slowly."""
    server = Server(pg_major, {"fsync": True})
    async with server.embedded, server.database() as database:
        await add_endpoints(database, 1)
        yield database


async def test_producers_that_hold_up_each_other_are_not_asked_to_notify(
    slow_disk: Database,
) -> None:
    """Who notifies commits alone: with a slow disk that is one at a time."""
    producers = [await slow_disk.connect() for _ in range(6)]
    for producer in producers:
        await producer.execute("SET commit_siblings = 0; SET commit_delay = 100000")
    async with sleeper(slow_disk, thick_events=10_000) as relay:
        await relay.asleep()
        ids = await asyncio.gather(*(each.fetchval(INSERT) for each in producers))
        await relay.sequenced(*ids)
        assert await producers[0].fetchval(FLAG) == AWAKE
        # And once they are gone it sleeps again.
        await relay.asleep()
        assert await producers[0].fetchval(FLAG) > AWAKE
