"""Operations on schedules."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from outbox.core.schedules.schedule import ScheduleSettings
from outbox.errors import CannotRun, NotFound, SchemaMissing, UsageError
from outbox.operations.schedules import changes as schedule_changes
from outbox.operations.schedules import queries as schedules
from outbox.store.connection.migrate import migrate
from outbox.store.schedules.schedule_runs import ScheduleRunStore
from tests.support.schedules import DAY, add_schedule, journal, let_be_due, published
from tests.support.waiting import until

if TYPE_CHECKING:
    from asyncpg import Connection

    from tests.support.postgres import Database

PATH = {"server_settings": {"search_path": "relay"}}
pytestmark = pytest.mark.one_major


@pytest.fixture
async def db(database: Database) -> Connection[Any]:
    return await database.connect(**PATH)


async def test_the_first_tick_is_the_next_one(db: Connection[Any]) -> None:
    settings = ScheduleSettings(
        name="nightly",
        cron="30 2 * * *",
        timezone="Europe/Berlin",
        type="report.due",
        payload={"deep": [1]},
        key="k",
        tenant="acme",
        headers={"X-Mine": "yes"},
        misfire="skip",
        grace_s=90.0,
        overlap="wait",
    )
    added = await schedule_changes.add_schedule(db, "relay", settings, actor="anna")
    assert replace(await schedules.get_schedule(db, "relay", "nightly"), now=added.now) == added
    for name in ("name", "cron", "timezone", "type", "key", "tenant", "misfire", "overlap"):
        assert getattr(added, name) == getattr(settings, name)
    assert added.payload.text == '{"deep": [1]}'
    assert (added.headers, added.grace_s) == (settings.headers, 90.0)
    assert (added.state, added.state_by, added.last_at) == ("active", "anna", None)
    assert added.next_at is not None
    assert timedelta(0) < added.next_at - added.now <= timedelta(hours=25)
    first, second, third = added.next_runs
    assert first == added.next_at
    assert {at.strftime("%H:%M") for at in (first, second, third)} <= {"02:30", "03:00"}
    assert await journal(db, "schedule_added") == [
        {
            "name": "nightly",
            "cron": "30 2 * * *",
            "timezone": "Europe/Berlin",
            "type": "report.due",
        }
    ]


async def test_a_name_is_unique(database: Database, db: Connection[Any]) -> None:
    others = [await database.connect(**PATH) for _ in range(4)]
    done = await asyncio.gather(*(add_schedule(each) for each in others), return_exceptions=True)
    refused = [each for each in done if each is not None]
    assert len(refused) == 3
    for each in refused:
        assert isinstance(each, UsageError)
        assert str(each) == 'schedule "daily" exists already; use replace to change it'


async def test_a_change_publishes_no_run_twice(database: Database, db: Connection[Any]) -> None:
    """Also when the clock of the database was set back a little; not for days by a wrong clock."""
    await add_schedule(db)
    store = ScheduleRunStore(await database.connect(**PATH), 1)
    (tick,) = await let_be_due(db, 1)
    await store.run_due_schedules()
    now: datetime = await db.fetchval("SELECT now()")
    ahead = (now + timedelta(minutes=30)).replace(second=0, microsecond=0)
    await db.execute("UPDATE schedule SET last_at = $1", ahead)
    settings = ScheduleSettings(name="daily", cron="* * * * *", type="b.c")
    changed = await schedule_changes.add_schedule(db, "relay", settings, actor="test", replace=True)
    assert (changed.next_at, changed.type) == (ahead + timedelta(minutes=1), "b.c")
    await schedule_changes.pause_schedules(db, "relay", ["daily"], actor="test")
    (resumed,) = await schedule_changes.resume_schedules(db, "relay", ["daily"], actor="test")
    assert resumed.next_at == ahead + timedelta(minutes=1)
    assert len(await journal(db, "schedule_changed")) == 1
    assert await published(db) == [tick]
    await db.execute("UPDATE schedule SET last_at = $1", now + 3 * DAY)
    changed = await schedule_changes.add_schedule(db, "relay", settings, actor="test", replace=True)
    assert changed.next_at is not None
    assert changed.next_at < ahead


async def test_pausing_and_resuming_are_journalled(db: Connection[Any]) -> None:
    await add_schedule(db, "a")
    await add_schedule(db, "b")
    paused = await schedule_changes.pause_schedules(
        db, "relay", ["b", "a", "b"], actor="anna", comment="moving"
    )
    assert [(s.name, s.state, s.next_at, s.next_runs) for s in paused] == [
        ("b", "paused", None, []),
        ("a", "paused", None, []),
    ]
    assert (paused[0].state_by, paused[0].state_comment) == ("anna", "moving")
    await schedule_changes.pause_schedules(db, "relay", ["a"], actor="anna")
    resumed = await schedule_changes.resume_schedules(db, "relay", ["a"], actor="anna")
    assert resumed[0].next_at is not None
    assert await journal(db, "schedule_paused") == [
        {"name": "a", "comment": "moving"},
        {"name": "b", "comment": "moving"},
    ]
    assert await journal(db, "schedule_resumed") == [{"name": "a"}]
    with pytest.raises(NotFound, match='there is no schedule "aa"; did you mean "a"'):
        await schedule_changes.pause_schedules(db, "relay", ["b", "aa"], actor="anna")


async def test_a_manual_run_does_not_change_the_schedule(db: Connection[Any]) -> None:
    await add_schedule(db)
    await schedule_changes.pause_schedules(db, "relay", ["daily"], actor="test")
    before = await schedules.get_schedule(db, "relay", "daily")
    first, second = [
        (await schedule_changes.run_schedule_now(db, "relay", "daily", actor="anna")).id
        for _ in range(2)
    ]
    assert first != second
    after = await schedules.get_schedule(db, "relay", "daily")
    assert (after.state, after.next_at) == (before.state, before.next_at)
    assert after.last_event == second
    rows = await db.fetch("SELECT event_id, headers ->> 'X-Schedule-Run' AS run FROM outbox")
    assert [(r["event_id"], r["run"]) for r in rows] == [(first, "by-hand"), (second, "by-hand")]
    assert [each["event"] for each in await journal(db, "schedule_run")] == [
        str(first),
        str(second),
    ]


async def test_a_removed_schedule_is_not_found(db: Connection[Any]) -> None:
    await add_schedule(db)
    await schedule_changes.remove_schedules(db, "relay", ["daily"], actor="anna")
    with pytest.raises(NotFound, match='no schedule "daily"; see: outbox schedule list'):
        await schedules.get_schedule(db, "relay", "daily")
    assert [each["name"] for each in await journal(db, "schedule_removed")] == ["daily"]
    await add_schedule(db)


async def test_pages_are_in_byte_order_of_names(db: Connection[Any]) -> None:
    for name in ("b", "B", "a", "_"):
        await add_schedule(db, name)
    names = [s.name for s in await schedules.list_schedules(db, "relay", limit=3)]
    assert names == ["B", "_", "a"]
    assert [s.name for s in await schedules.list_schedules(db, "relay", after="a")] == ["b"]


async def test_a_payload_over_the_limit_is_rejected(
    database: Database, db: Connection[Any]
) -> None:
    with pytest.raises(UsageError, match="payload must be at most 262144 bytes"):
        await add_schedule(db, payload="x" * 262_144)
    await add_schedule(db, payload="x" * 2000)
    with pytest.raises(CannotRun, match="a schedule or a delayed event") as caught:
        await migrate(db, "relay", payload_bytes_max=1536)
    assert "is larger than 1536 bytes (schedule)" in str(caught.value)
    assert await db.fetchval("SELECT payload_bytes_max()") == 262_144
    await migrate(db, "relay", payload_bytes_max=3000)
    with pytest.raises(UsageError, match="payload must be at most 3000 bytes"):
        await add_schedule(db, "other", payload="x" * 3000)


async def test_future_events_are_counted(db: Connection[Any]) -> None:
    assert (await schedules.count_future_events(db, "relay")).first_at is None
    await db.execute("SELECT publish('a', '1', deliver_at => '2100-01-01Z')")
    await db.execute("SELECT publish('a', '1', deliver_at => '2101-01-01Z')")
    found = await schedules.count_future_events(db, "relay")
    assert found.events == 2
    assert found.first_at == datetime.fromisoformat("2100-01-01T00:00:00+00:00")


async def test_a_missing_schema_is_an_error(empty_database: Database) -> None:
    connection = await empty_database.connect(**PATH)
    with pytest.raises(SchemaMissing):
        await schedules.list_schedules(connection, "relay")


async def test_a_change_waits_for_a_relay_that_publishes_a_run(
    database: Database, db: Connection[Any]
) -> None:
    await add_schedule(db)
    relay = await database.connect(server_settings={"search_path": "relay"})
    async with relay.transaction():
        await relay.execute("UPDATE schedule SET last_run_at = clock_timestamp()")
        pausing = asyncio.create_task(
            schedule_changes.pause_schedules(db, "relay", ["daily"], actor="test")
        )
        waits = "SELECT count(*) > 0 FROM pg_locks WHERE NOT granted"
        await until(lambda: relay.fetchval(waits), what="the change to wait")
    (paused,) = await pausing
    assert paused.state == "paused"
    assert paused.last_run_at is not None
