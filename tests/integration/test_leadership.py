"""Leadership: one replica leads, the others stand by; which replica takes over, and when."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from outbox.relay.sequencing.cursor import BatchResult
from outbox.store.cluster.leadership import AWAKE
from tests.support import ranges
from tests.support.cursor_checks import NO_VIOLATIONS, check_cursor
from tests.support.postgres import Server
from tests.support.sequencers import REAL, add_endpoints, session, settings
from tests.support.sleeper import Sleeper, sleeper
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from asyncpg import Connection

    from outbox.core.model.delivery import EventContent
    from outbox.relay.sequencing.cursor import SequencedBatch
    from outbox.relay.sequencing.sequencer import Sequencer
    from tests.support.postgres import Database

pytestmark = pytest.mark.costly

INSERT = "INSERT INTO relay.outbox (type, payload) VALUES ('app.any', '{}') RETURNING id"
FLAG = "SELECT last_value FROM relay.wakeup"
LEADER = "SELECT writer FROM relay.cursor"
# Its sequencer may be registered at this moment, see `Registered`.
REPLICA = """
INSERT INTO relay.replica (id, label, name, version, lease_s, expires_at) OVERRIDING SYSTEM VALUE
VALUES ($1, 'outbox-relay:' || $1::bigint, 'test', '0', 60, clock_timestamp() + interval '1 minute')
    ON CONFLICT (id) DO UPDATE SET label = excluded.label, name = excluded.name,
       lease_s = excluded.lease_s, expires_at = excluded.expires_at
"""
POLL_S = 0.4


@pytest.fixture
async def database(database: Database) -> Database:
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


async def test_a_standby_does_not_replace_an_active_leader(database: Database) -> None:
    producer = await database.connect()
    async with replica(database) as first:
        await first.asleep()
        async with replica(database) as second:
            for _ in range(20):
                await first.sequenced(await producer.fetchval(INSERT))
            assert not second.sequencer.cursor.leads
            assert await leader_is(producer, first)


async def test_a_leader_that_stops_is_replaced_at_once(database: Database) -> None:
    producer = await database.connect()
    async with replica(database) as first:
        await first.asleep()
        async with replica(database) as second:
            first.sequencer.stop()
            await first.ended()
            await first.sequencer.release_leadership()
            # The other one may lead by now.
            assert not await leader_is(producer, first)
            second.wakeups.standby.set()
            await second.sequenced(await producer.fetchval(INSERT))


async def test_a_wake_event_during_a_pause_is_kept(database: Database) -> None:
    """A leaving leader sends one wake event; single events send one each."""
    producer = await database.connect()
    async with replica(database) as first:
        await first.asleep()
        async with replica(database, poll_s=60) as second:
            for polls in (1, 2, 3):
                await until(lambda polls=polls: second.store.polls >= polls, what="a poll")
                second.wakeups.standby.set()
            first.sequencer.stop()
            await first.ended()
            await first.sequencer.release_leadership()
            second.wakeups.standby.set()
            await until(lambda: leader_is(producer, second), what="the other one to lead")


async def test_a_leader_that_polls_each_tick_is_not_considered_stuck(database: Database) -> None:
    """Without notifications an event may wait for a tick; that is normal."""
    producer = await database.connect()
    async with replica(database, notified=False) as first:
        await until(lambda: first.sequencer.cursor.leads, what="the first one to lead")
        async with replica(database, notified=False) as second:
            for _ in range(8):
                await first.sequenced(await producer.fetchval(INSERT))
            assert not second.sequencer.cursor.leads


def test_the_takeover_delay_grows_with_each_takeover_and_resets_when_idle(
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
    """An idle sequencer with a tick of one second."""
    return await ranges.sequencer(database)


async def test_a_stop_right_before_sleep_is_not_lost(unconnected: Sequencer) -> None:
    await unconnected.sequence_batch()
    unconnected.stop()
    assert await unconnected._fall_asleep() is BatchResult.EMPTY
    assert await unconnected._wake_event.wait(0)


async def test_a_stopping_standby_leaves_the_flag_unchanged(database: Database) -> None:
    """Only the leader sets the flag: with "awake", no producer would notify the sleeping leader."""
    producer = await database.connect()
    async with replica(database) as first:
        await first.asleep()
        async with replica(database) as second:
            await until(lambda: second.store.polls, what="a poll of the other one")
            second.sequencer.stop()
            await second.ended()
            await second.sequencer.release_leadership()
        assert await producer.fetchval(FLAG) > AWAKE
        await first.sequenced(await producer.fetchval(INSERT))


async def test_a_stuck_leader_delays_events_by_at_most_a_tick(database: Database) -> None:
    """Its lease is renewed and its connections live, but its sequencer does nothing."""
    producer = await database.connect()
    async with replica(database) as stuck:
        await stuck.asleep()
        stuck.task.cancel()
        async with replica(database) as other:
            own_id = await producer.fetchval(INSERT)
            await other.sequenced(own_id, within_s=3 * POLL_S)


async def test_a_late_event_in_a_young_gap_triggers_a_takeover(
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


async def test_a_leader_with_an_expired_lease_is_replaced_at_the_first_poll(
    database: Database,
) -> None:
    producer = await database.connect()
    async with replica(database) as gone:
        await gone.asleep()
        gone.task.cancel()
        await producer.execute("UPDATE relay.replica SET expires_at = clock_timestamp()")
        async with replica(database) as other:
            await until(lambda: leader_is(producer, other), what="the other one to lead")


async def test_a_replaced_leader_writes_nothing_and_becomes_a_standby(database: Database) -> None:
    producer = await database.connect()
    one, other = [await ranges.sequencer(database) for _ in range(2)]
    await producer.execute(INSERT)
    assert await one.sequence_batch() is BatchResult.WRITTEN
    await producer.execute(INSERT)
    assert await other.sequence_batch() is BatchResult.WRITTEN
    await producer.execute(INSERT)
    assert await one.sequence_batch() is BatchResult.STALE
    assert not one.cursor.leads
    assert await other.sequence_batch() is BatchResult.WRITTEN
    assert await check_cursor(producer) == NO_VIOLATIONS


async def test_a_subscription_change_is_detected_without_an_event(database: Database) -> None:
    producer = await database.connect()
    one = await ranges.sequencer(database)
    assert await one.sequence_batch() is BatchResult.EMPTY
    await producer.execute("UPDATE relay.cursor SET version = version + 1")
    assert await one.sequence_batch() is BatchResult.STALE
    assert await one.sequence_batch() is BatchResult.EMPTY
    assert await one.sequence_batch() is BatchResult.EMPTY


async def test_a_locked_cursor_row_delays_a_batch_and_loses_nothing(
    database: Database,
) -> None:
    producer, operator = await database.connect(), await database.connect()
    one = await ranges.sequencer(database)
    assert await one.sequence_batch() is BatchResult.EMPTY
    await producer.execute(INSERT)
    await operator.execute("BEGIN; SELECT FROM relay.cursor FOR UPDATE")
    for _ in range(2):
        assert await one.sequence_batch() is BatchResult.LOCKED
    await operator.execute("COMMIT")
    assert await one.sequence_batch() is BatchResult.WRITTEN
    assert await check_cursor(producer) == NO_VIOLATIONS


# ---------------------------------------------------- events returned with a batch


class ReturningSequencer:
    """A sequencer whose lanes wait for the events of its batches, or do not."""

    def __init__(self) -> None:
        self.batches: list[SequencedBatch] = []
        self.lanes_wait = True

    async def begin(self, database: Database) -> None:
        connection = await session(database)
        self.sequencer, store = REAL.build(connection, settings(database), on_batch=self._record)
        await store.check()

    def _record(self, sequenced: SequencedBatch) -> bool:
        self.batches.append(sequenced)
        return self.lanes_wait

    async def turn(self) -> dict[int, EventContent]:
        """The events that are returned with the next batch, by sequence."""
        assert await self.sequencer.sequence_batch() is BatchResult.WRITTEN
        batch = self.batches[-1]
        return {
            seq: batch.contents[outbox_id]
            for _, seq, outbox_id in batch.deliveries.new
            if outbox_id in batch.contents
        }


@pytest.fixture
async def returning(database: Database) -> ReturningSequencer:
    returning = ReturningSequencer()
    await returning.begin(database)
    return returning


async def test_waiting_lanes_get_their_events_with_the_batch(
    database: Database, returning: ReturningSequencer
) -> None:
    producer = await database.connect()
    for key in ("one", "two"):
        await producer.execute(
            "INSERT INTO relay.outbox (type, key, payload, expires_at)"
            " VALUES ('app.any', $1, '{\"a\": 1}', '9999-01-01')",
            key,
        )
    got = await returning.turn()
    assert {seq: each.key for seq, each in got.items()} == {1: "one", 2: "two"}
    assert {(each.type, each.payload) for each in got.values()} == {("app.any", b'{"a": 1}')}
    # The same value as the reader's: times beyond Python's calendar are close to its last one.
    expiry = {datetime.fromtimestamp(each.expires_at or 0, UTC).year for each in got.values()}
    assert expiry == {9999}


async def test_large_events_are_not_returned_with_the_batch(
    database: Database, returning: ReturningSequencer
) -> None:
    """They are stored apart from their rows, so reading them takes longer."""
    producer = await database.connect()
    await producer.execute(
        "INSERT INTO relay.outbox (type, payload) SELECT 'app.any', to_jsonb(("
        "   SELECT string_agg(md5(n * i || ''), '') FROM generate_series(1, n) i))"
        " FROM unnest(ARRAY[30, 30, 300, 1]) n"
    )
    assert sorted(await returning.turn()) == [1, 2, 4]


async def test_events_are_returned_only_while_lanes_wait_for_few(
    database: Database, returning: ReturningSequencer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox.relay.sequencing.cursor.CONTENT_EVENTS_MAX", 2)
    producer = await database.connect()

    async def returned(events: int, *, lanes_wait: bool) -> bool:
        returning.lanes_wait = lanes_wait
        await producer.execute(
            "INSERT INTO relay.outbox (type, payload) SELECT 'app.any', '{}' "
            "FROM generate_series(1, $1::int)",
            events,
        )
        return bool(await returning.turn())

    assert await returned(1, lanes_wait=True)
    assert await returned(3, lanes_wait=True)
    assert not await returned(1, lanes_wait=True)
    assert await returned(1, lanes_wait=False)
    assert not await returned(1, lanes_wait=True)


# -------------------------------------------------------- commit contention


@pytest.fixture
async def slow_disk(pg_major: int) -> AsyncIterator[Database]:
    """A database with an endpoint; sessions that set `commit_delay` commit slowly."""
    server = Server(pg_major, {"fsync": True})
    async with server.embedded, server.database() as database:
        await add_endpoints(database, 1)
        yield database


@pytest.mark.full
@pytest.mark.slow
async def test_producers_that_contend_for_commits_need_not_notify(
    slow_disk: Database,
) -> None:
    """A notifying transaction commits alone (no group commit): with a slow disk, one at a time."""
    producers = [await slow_disk.connect() for _ in range(6)]
    for producer in producers:
        await producer.execute("SET commit_siblings = 0; SET commit_delay = 100000")
    async with sleeper(slow_disk, busy_events=10_000) as relay:
        await relay.asleep()
        awake = relay.store.flags["set"]
        ids = await asyncio.gather(*(each.fetchval(INSERT) for each in producers))
        await relay.sequenced(*ids)
        # Counted, because it may sleep again by now.
        assert relay.store.flags["set"] > awake
        # The relay sleeps again once the producers stop.
        await relay.asleep()
        assert await producers[0].fetchval(FLAG) > AWAKE
