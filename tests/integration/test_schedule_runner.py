"""Schedules and future events: a relay publishes them when they are due."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

import outbox
from outbox.operations.schedules import changes as schedule_changes
from outbox.relay.sequencing import schedule_runner
from outbox.store.schedules import future_events
from outbox.store.schedules.schedule_runs import ScheduleRunResult, ScheduleRunStore
from tests.support.pgbouncer import find_the_schema, pgbouncer
from tests.support.relay import (
    OK,
    REFUSED,
    Network,
    Sent,
    add_endpoint,
    all_ended,
    killed_at_the_end,
    running,
)
from tests.support.schedules import add_schedule, let_be_due, published
from tests.support.tiers import sampled
from tests.support.waiting import until

if TYPE_CHECKING:
    from asyncpg import Connection

    from outbox.core.model.response import AttemptResult
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

QUICK = {"poll_s": 0.05}


@pytest.fixture
async def db(database: Database) -> Connection[Any]:
    return await database.connect(server_settings={"search_path": "relay"})


def ticks(network: Network) -> list[str]:
    return [sent.headers["x-schedule-time"] for sent in network.accepted]


async def test_a_request_names_the_schedule_and_the_tick(
    database: Database, db: Connection[Any]
) -> None:
    await add_endpoint(database)
    await add_schedule(db, payload={"n": 1}, headers={"X-Mine": "yes"})
    (tick,) = await let_be_due(db, 1)
    network = Network()
    async with running(database, network, **QUICK):
        await until(lambda: network.accepted, what="the tick")
        await schedule_changes.run_schedule_now(db, "relay", "daily", actor="test")
        await until(lambda: len(network.accepted) == 2, what="the run by hand")
    by_clock, by_hand = network.accepted
    assert by_clock.body["data"] == {"n": 1}
    assert by_clock.headers["x-schedule"] == by_hand.headers["x-schedule"] == "daily"
    assert by_clock.headers["x-schedule-time"] == f"{tick:%Y-%m-%dT%H:%M:%SZ}"
    assert by_clock.headers["x-mine"] == "yes"
    assert "x-schedule-run" not in by_clock.headers
    assert by_hand.headers["x-schedule-run"] == "by-hand"


async def test_a_future_event_is_sent_at_its_due_time(
    database: Database, db: Connection[Any]
) -> None:
    await add_endpoint(database)
    at = datetime.now(UTC) + timedelta(seconds=0.5)
    late = await outbox.publish(
        db, "a", "late", deliver_at=at + timedelta(hours=1), autocommit=True
    )
    event_id = await outbox.publish(db, "a", "soon", deliver_at=at, autocommit=True)
    network = Network()
    # The relay wakes by its timer: the next poll would be in a minute.
    async with running(database, network, poll_s=60):
        await until(lambda: network.accepted, what="the event")
    (sent,) = network.accepted
    assert sent.body["id"] == str(event_id)
    assert datetime.fromisoformat(sent.body["timestamp"]) >= at
    assert [row["event_id"] for row in await db.fetch("SELECT * FROM future_event")] == [late]


async def test_held_events_keep_their_pace_without_notifications(
    database: Database, db: Connection[Any]
) -> None:
    """The sequencer polls seldom, but each pass waits until the last one is sequenced."""
    held = """
        SELECT publish_shared(tenant => 'acme', passes => false, costs => array_fill(1000, '{8}'),
                              held_max => 100000, types => array_fill('a'::text, '{8}'),
                              payloads => array_fill('1'::jsonb, '{8}'))
    """
    await db.execute(held)
    async with running(database, Network(), poll_s=60, notify=False):
        left = "SELECT NOT EXISTS (SELECT FROM future_event)"
        # 8,000 deliveries at 5,000 per second; by polls it would be a minute for each 1,000.
        await until(lambda: db.fetchval(left), what="the held events to be moved")


async def test_each_tick_is_published_once_while_replicas_restart(
    database: Database, db: Connection[Any]
) -> None:
    await add_endpoint(database)
    await add_schedule(db)
    expected: Counter[datetime] = Counter()
    network = Network()

    async def all_published() -> bool:
        return Counter(await published(db)) == expected

    async with running(database, network, **QUICK):
        for _ in range(4):
            async with killed_at_the_end(database, network, **QUICK):
                for _ in range(3):
                    expected.update(await let_be_due(db, 3))
                    await until(all_published, what="the ticks")
                expected.update(await let_be_due(db, 3))
            await until(all_published, what="the ticks after the end of one")
        # The leader is killed, whichever replica it is, when work is due.
        for _ in range(3):
            expected.update(await let_be_due(db, 2))
            await db.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE application_name LIKE 'outbox-relay%'"
            )
            await until(all_published, what="the ticks after the sessions were lost")
        await all_ended(database)
    assert Counter(await published(db)) == expected


class DelayedNetwork(Network):
    """Responds on demand, with a response that is set by then."""

    def __init__(self) -> None:
        super().__init__(self._wait)
        self.release = asyncio.Event()
        self.response: AttemptResult = OK

    async def _wait(self, _: Sent) -> AttemptResult:
        await self.release.wait()
        return self.response


@pytest.mark.parametrize("response", sampled([OK, REFUSED]))
async def test_a_run_waits_for_the_previous_run(
    database: Database,
    db: Connection[Any],
    response: AttemptResult,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until the run is delivered or dead-lettered in each lane."""
    monkeypatch.setattr("outbox.core.schedules.schedule.OVERLAP_POLL_MIN_S", 0.05)
    monkeypatch.setattr("outbox.core.schedules.schedule.OVERLAP_POLL_MAX_S", 0.05)
    await add_endpoint(database, "quick")
    await add_endpoint(database, "slow")
    await add_schedule(db, overlap="wait")
    await add_schedule(db, "other")
    due = await let_be_due(db, 3)
    network = DelayedNetwork()
    network.response = response
    due_at_sql = "SELECT extract(epoch FROM due_at) FROM schedule WHERE name = 'daily'"
    async with running(database, network, **QUICK):
        await until(lambda: len(network.sent) == 2, what="the first run, at both endpoints")
        due_at = await db.fetchval(due_at_sql)

        async def polled_again() -> bool:
            return bool(await db.fetchval(due_at_sql) != due_at)

        await until(polled_again, what="a poll of the last run")
        # Other schedules run meanwhile.
        await let_be_due(db, 1, "other")

        async def other_ran() -> bool:
            return len(await published(db, "other")) == 1

        await until(other_ran, what="the other schedule")
        assert await published(db) == due[:1]
        network.release.set()

        async def all_ran() -> bool:
            return await published(db) == due

        await until(all_ran, what="the other runs")
        await all_ended(database)


@pytest.mark.full
async def test_a_run_without_deliveries_does_not_block_the_next_run(
    database: Database, db: Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox.core.schedules.schedule.OVERLAP_POLL_MAX_S", 0.05)
    await add_schedule(db, overlap="wait")
    due = await let_be_due(db, 2)

    async def both_ran() -> bool:
        return await published(db) == due

    async with running(database, Network(), **QUICK):
        await until(both_ran, what="both runs")


@pytest.mark.full
async def test_a_schedule_error_in_the_database_does_not_delay_deliveries(
    database: Database, db: Connection[Any], logs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule_runner, "REFUSED_RETRY_S", 3600)
    polls = 0
    run_due_schedules = ScheduleRunStore.run_due_schedules

    async def counted(store: ScheduleRunStore) -> ScheduleRunResult:
        nonlocal polls
        polls += 1
        return await run_due_schedules(store)

    monkeypatch.setattr(ScheduleRunStore, "run_due_schedules", counted)
    await add_endpoint(database)
    await add_schedule(db)
    await let_be_due(db, 1)
    await db.execute("ALTER TABLE schedule ADD CONSTRAINT none_changes CHECK (false) NOT VALID")
    network = Network()
    async with running(database, network, **QUICK):
        await outbox.publish(db, "a", 1, autocommit=True)
        await until(lambda: network.accepted, what="the event")
        await until(lambda: polls > 5, what="some polls")
    assert [entry["event"] for entry in logs].count("schedule is invalid") == 1


@pytest.mark.full
@pytest.mark.pgbouncer
async def test_schedules_run_behind_a_transaction_pooling_proxy(
    database: Database, db: Connection[Any]
) -> None:
    await find_the_schema(database)
    await add_endpoint(database)
    await add_schedule(db)
    due = await let_be_due(db, 5)
    soon = datetime.now(UTC) + timedelta(seconds=0.2)
    await outbox.publish(
        db, "a", "future", headers={"X-Schedule-Time": "x"}, deliver_at=soon, autocommit=True
    )
    network = Network()
    async with pgbouncer(database, pool_size=4) as proxy:
        options = {"dsn": proxy.dsn(), "pooled": True, "poll_s": 0.1}
        async with running(database, network, **options), running(database, network, **options):
            await until(lambda: len(network.accepted) == 6, what="all of it")
    assert sorted(ticks(network)) == sorted(["x", *(f"{at:%Y-%m-%dT%H:%M:%SZ}" for at in due)])


async def test_a_held_event_without_a_share_is_published(
    database: Database, db: Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule_runner, "SEARCH_SHARES_EVERY_S", 0.1)
    monkeypatch.setattr(future_events, "SEARCH_EVERY_S", 0.1)
    await add_endpoint(database, tenant="acme")
    network = Network()
    async with running(database, network, **QUICK):
        await db.execute(
            "SELECT publish_shared(tenant => 'acme', passes => false, costs => '{1}', "
            "held_max => 10, types => '{a.b}', payloads => '{1}'); DELETE FROM tenant_share"
        )
        await until(lambda: network.accepted, what="the event")
