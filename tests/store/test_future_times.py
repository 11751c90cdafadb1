"""What a clock of the database that was ahead for a moment leaves behind ends with its return.

Each stored time is bounded where it is read: one that only a wrong clock can have written does not
count.  The rows are written here as such a clock would have written them.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from outbox.core.model.api_token import TokenSettings
from outbox.core.schedules.cron import Cron
from outbox.core.schedules.schedule import AHEAD_MAX, restart_at, ticks_from
from outbox.core.sequencing.filter_budget import AGAIN_AFTER_S
from outbox.operations.replays.jobs import FIND_RELAY
from outbox.operations.status import read_overview
from outbox.operations.tokens import api as api_tokens
from outbox.operations.tokens import fetch as fetch_tokens
from outbox.store.cluster import sessions
from outbox.store.cluster.replicas import ReplicaStore, read_names
from outbox.store.connection.secrets import READ_RELAYS_WITHOUT_KEY
from outbox.store.operational_events import PUBLISH_LAGGING
from outbox.store.retention.partitions import PartitionStore
from outbox.store.schedules.future_events import FutureEventStore
from outbox.store.schedules.put_off import PutOffStore
from outbox.store.schedules.schedule_runs import ScheduleRunStore
from outbox.store.schema.migration_statements import REQUIRE_STOPPED_RELAYS
from outbox.store.sequencing.routing import RoutingStore
from tests.support.doctor import findings_of
from tests.support.relay import (
    Network,
    add_endpoint,
    fetchval,
    publish,
    register,
    running,
)
from tests.support.schedules import add_schedule, journal, published
from tests.support.waiting import until

if TYPE_CHECKING:
    from asyncpg import Connection

    from tests.support.postgres import Database

pytestmark = [pytest.mark.system, pytest.mark.one_major]

SESSION = {"server_settings": {"search_path": "relay"}}
AHEAD = timedelta(days=30)
MINUTE = timedelta(minutes=1)


@pytest.fixture
async def db(database: Database) -> Connection[Any]:
    return await database.connect(**SESSION)


# ------------------------------------------------------------------ schedules

EVERY_MINUTE, DAILY = Cron("* * * * *", "UTC"), Cron("0 3 * * *", "UTC")
NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)


def test_a_schedule_goes_on_only_if_its_last_decided_tick_is_far_ahead() -> None:
    for cron, next_at, expected in (
        # The next tick is the first one from now, however far away.
        (EVERY_MINUTE, NOON + MINUTE, None),
        (DAILY, NOON + timedelta(hours=15), None),
        # The clock was set back a little after a tick.
        (EVERY_MINUTE, NOON + timedelta(minutes=10), None),
        (DAILY, NOON, None),
        # It was wrong.
        (EVERY_MINUTE, NOON + AHEAD_MAX + 3 * MINUTE, NOON + MINUTE),
        (EVERY_MINUTE, NOON + AHEAD, NOON + MINUTE),
        (DAILY, NOON + timedelta(hours=39), NOON + timedelta(hours=15)),
    ):
        assert restart_at(cron, next_at, NOON) == expected
    # Five minutes before the daily tick, which was published five minutes later.
    just_before = datetime(2026, 6, 1, 2, 55, tzinfo=UTC)
    assert restart_at(DAILY, datetime(2026, 6, 2, 3, tzinfo=UTC), just_before) is None


def test_a_changed_schedule_counts_from_a_plausible_tick() -> None:
    assert ticks_from(None, NOON) == NOON
    assert ticks_from(NOON - MINUTE, NOON) == NOON
    assert ticks_from(NOON + 5 * MINUTE, NOON) == NOON + 5 * MINUTE
    assert ticks_from(NOON + AHEAD, NOON) == NOON


@pytest.mark.parametrize("misfire", ["once", "skip"])
async def test_a_schedule_runs_again_after_a_clock_that_was_ahead(
    database: Database, db: Connection[Any], misfire: str
) -> None:
    """`skip` has published nothing, so the time of its last run says nothing."""
    await add_schedule(db, "minutely", cron="* * * * *", misfire=misfire)
    await add_schedule(db, "yearly", cron="@yearly")
    ahead = "date_trunc('minute', now()) + interval '30 days'"
    await db.execute(
        f"UPDATE schedule SET next_at = {ahead}, due_at = {ahead} WHERE name = 'minutely'"
    )
    if misfire == "once":
        await db.execute(f"UPDATE schedule SET last_at = {ahead} - interval '1 minute', "
                         f"last_run_at = {ahead} WHERE name = 'minutely'")  # fmt: skip
    yearly = await db.fetchval("SELECT next_at FROM schedule WHERE name = 'yearly'")
    async with running(database, Network()):
        soon = "SELECT next_at < now() + interval '2 minutes' FROM schedule WHERE name = 'minutely'"
        await until(lambda: fetchval(database, soon), what="the schedule to be due soon")
        await db.execute("UPDATE schedule SET due_at = now(), next_at = now() - interval '1 s' "
                         "WHERE name = 'minutely'")  # fmt: skip
        if misfire == "once":
            await until(lambda: fetchval(database, "SELECT count(*) > 0 FROM outbox"), what="a run")
    (entry,) = await journal(db, "schedule_restarted")
    assert entry["name"] == "minutely"
    assert datetime.fromisoformat(entry["was"]) - datetime.fromisoformat(entry["next"]) > (
        AHEAD - timedelta(minutes=2)
    )
    assert await db.fetchval("SELECT next_at FROM schedule WHERE name = 'yearly'") == yearly
    assert await published(db, "yearly") == []


async def test_a_schedule_that_was_added_or_resumed_by_a_wrong_clock_goes_on(
    database: Database, db: Connection[Any]
) -> None:
    """It has not run since, so only its next run tells."""
    await add_schedule(db, "new", cron="* * * * *")
    await add_schedule(db, "resumed", cron="* * * * *")
    await add_schedule(db, "yearly", cron="@yearly")
    await db.execute("UPDATE schedule SET last_at = now() - interval '1 day' WHERE name <> 'new'")
    ahead = "date_trunc('minute', now()) + interval '30 days'"
    await db.execute(f"UPDATE schedule SET next_at = {ahead}, due_at = {ahead}"
                     " WHERE name <> 'yearly'")  # fmt: skip
    assert await PutOffStore(db, 1).restart() == (["new", "resumed"], True)
    assert await PutOffStore(db, 1).restart() == ([], True)


async def test_a_poll_that_was_put_off_is_due_again(
    database: Database, db: Connection[Any]
) -> None:
    """A schedule that waits for its last run, and a delayed event that was refused."""
    await add_schedule(db, "waits", overlap="wait")
    await db.execute("UPDATE schedule SET due_at = now() + interval '30 days'")
    await db.execute("UPDATE schedule SET next_at = now() - interval '1 minute', last_at = NULL")
    await db.execute(
        "INSERT INTO future_event (event_id, type, payload, deliver_at, retry_at, problem) "
        "VALUES (gen_random_uuid(), 'a.b', '{}', now(), now() + interval '30 days', 'refused'), "
        "(gen_random_uuid(), 'a.b', '{}', now() + interval '20 days', NULL, NULL)"
    )
    store, runs, events = PutOffStore(db, 1), ScheduleRunStore(db, 1), FutureEventStore(db, 1)
    assert (await runs.run_due_schedules()).schedules == await events.move_due() == 0
    assert await store.restart() == (["waits"], True)
    assert (await runs.run_due_schedules()).schedules == 1
    assert await events.move_due() == 1
    assert await store.restart() == ([], True)
    assert await db.fetchval("SELECT count(*) FROM future_event") == 1, "it is planned for later"


async def test_a_schedule_that_is_being_changed_is_found_later(
    database: Database, db: Connection[Any]
) -> None:
    await add_schedule(db)
    await db.execute("UPDATE schedule SET due_at = now() + interval '30 days'")
    store = PutOffStore(await database.connect(**SESSION), 1)
    async with db.transaction():
        await db.execute("SELECT FROM schedule FOR UPDATE")
        assert await store.restart() == ([], False)
    assert await store.restart() == (["daily"], True)


# ------------------------------------------------------------------- the rest


async def test_the_maintenance_lease_of_a_wrong_clock_has_expired(database: Database) -> None:
    first, second = [PartitionStore(await database.connect(**SESSION)) for _ in range(2)]
    assert await first.renew_lease()
    assert not await second.renew_lease()
    later = "UPDATE lock SET expires_at = expires_at + interval '1 day' WHERE name = 'maintenance'"
    await fetchval(database, later)
    assert await second.renew_lease()
    assert not await first.renew_lease()


async def test_a_lease_of_a_wrong_clock_has_ended(database: Database, db: Connection[Any]) -> None:
    """Nobody waits for a killed replica for as long as its clock was ahead."""
    await register(ReplicaStore(db), name="killed")
    assert await read_names(db) == ["killed"]
    await db.execute("UPDATE replica SET expires_at = expires_at + interval '30 days'")
    assert await read_names(db) == []
    assert await db.fetch(READ_RELAYS_WITHOUT_KEY, "a key") == []
    assert not await db.fetchval(FIND_RELAY)
    (found,) = [f for f in await findings_of(db, "relays") if "killed" in f.message]
    assert found.message.endswith("its lease was last renewed by a clock that was ahead")
    await db.execute(REQUIRE_STOPPED_RELAYS.replace("{migration}", "0099"))
    assert await db.fetchval("SELECT expires_at = 'epoch' FROM replica")


async def test_what_a_relay_lacked_by_a_wrong_clock_is_not_reported(db: Connection[Any]) -> None:
    replica = await register(ReplicaStore(db))
    for at, reason in (("now() + interval '30 days'", None), ("now()", "no descriptor")):
        await db.execute(
            f"""INSERT INTO journal (kind, actor, at, data)
                VALUES ('resources_exhausted', 'replica {replica}', {at},
                        '{{"reason": "no descriptor"}}')"""
        )
        (found,) = (await read_overview(db, "relay")).replicas
        assert found.problem == reason


async def test_a_filter_that_a_wrong_clock_stopped_is_evaluated(
    database: Database, db: Connection[Any]
) -> None:
    await add_endpoint(database, filter="@.n == 1")
    store = RoutingStore(db)
    for at, is_evaluated in (("now()", False), ("now() + interval '30 days'", True)):
        await db.execute(f"UPDATE subscription SET filter_stopped_at = {at}")
        (route,) = await store.routes(AGAIN_AFTER_S)
        assert (route.filter is not None) is is_evaluated


@pytest.mark.parametrize("kind", ["token", "fetch_token"])
async def test_the_use_of_a_token_is_recorded_again(
    database: Database, db: Connection[Any], kind: str
) -> None:
    await add_endpoint(database)
    if kind == "token":
        settings = TokenSettings(name="t", scopes=("read",))
        secret = (await api_tokens.add_token(db, "relay", settings, actor="test")).secret
        find: Any = api_tokens.find_token
    else:
        secret = (await fetch_tokens.add_fetch_token(db, "relay", "shop", actor="test")).token
        find = fetch_tokens.find_fetcher
    await db.execute(f"UPDATE {kind} SET last_used_at = now() + interval '30 days'")
    assert await find(db, "relay", secret) is not None
    assert await db.fetchval(f"SELECT last_used_at <= clock_timestamp() FROM {kind}")


async def test_a_session_that_hung_before_the_clock_was_set_back_is_ended(
    database: Database, db: Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a clock that stands before its last change; found twice, as ever."""
    sql = sessions.TERMINATE_STUCK_SESSIONS
    set_back = sql.replace("clock_timestamp()", "(clock_timestamp() - interval '1 day')")
    monkeypatch.setattr(sessions, "TERMINATE_STUCK_SESSIONS", set_back)
    store = ReplicaStore(db)
    name = "outbox-relay:0badcafe"
    session = await database.connect(server_settings={"application_name": name})
    await session.execute("BEGIN")
    pid = session.get_server_pid()
    waits = f"SELECT wait_event_type = 'Client' FROM pg_stat_activity WHERE pid = {pid}"
    await until(lambda: fetchval(database, waits), what="it to wait for its client")
    assert await store.terminate_stuck_sessions(60.0) == []
    (ended,) = await store.terminate_stuck_sessions(60.0)
    assert ended.pid == pid


async def test_a_lag_that_a_wrong_clock_reported_is_reported_again(database: Database) -> None:
    await add_endpoint(database, "ops", types=["outbox.**"])
    connection: Any = await database.connect(**SESSION)
    me = await register(ReplicaStore(connection))
    await connection.execute("UPDATE cursor SET writer = $1", me)
    await connection.execute("UPDATE lag_report SET lagging_at = now() + interval '30 days'")
    await publish(database, 1)
    assert await connection.write(PUBLISH_LAGGING, me, 0.0, 600.0, None, None) == 1
