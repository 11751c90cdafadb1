"""Runs and future events enter the outbox once, also with concurrent relays."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import asyncpg
import orjson
import pytest

import outbox
from outbox.operations import schedule_changes
from outbox.store.schedules import schedule_runs
from outbox.store.schedules.schedule_runs import ScheduleRunStore
from tests.support.plans import explain
from tests.support.schedules import DAY, add_schedule, journal, let_be_due, published
from tests.support.tiers import sampled
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncpg import Connection

    from tests.support.postgres import Database

pytestmark = pytest.mark.system

PATH = {"server_settings": {"search_path": "relay"}}


@pytest.fixture
async def db(database: Database) -> Connection[Any]:
    return await database.connect(**PATH)


@pytest.fixture
async def store(database: Database) -> ScheduleRunStore:
    return ScheduleRunStore(await database.connect(**PATH), 1)


# -------------------------------------------------------------------- schedules


async def test_a_run_publishes_the_event_of_its_schedule(
    db: Connection[Any], store: ScheduleRunStore
) -> None:
    await add_schedule(db, payload={"n": 1}, key="k", tenant="acme", headers={"X-Mine": "yes"})
    (tick,) = await let_be_due(db, 1)
    assert (await store.run_due_schedules()).schedules == 1
    row = await db.fetchrow("SELECT * FROM outbox")
    assert (row["type"], row["key"], row["tenant"], row["payload"]) == (
        "a.b",
        "k",
        "acme",
        '{"n": 1}',
    )
    assert orjson.loads(row["headers"]) == {
        "X-Mine": "yes",
        "X-Schedule": "daily",
        "X-Schedule-Time": f"{tick:%Y-%m-%dT%H:%M:%SZ}",
    }
    kept = await db.fetchrow("SELECT * FROM schedule")
    assert (kept["last_at"], kept["last_outbox_id"], kept["last_event_id"]) == (
        tick,
        row["id"],
        row["event_id"],
    )
    assert kept["next_at"] == kept["due_at"] == tick + DAY
    assert (await store.run_due_schedules()).schedules == 0


async def test_concurrent_relays_publish_each_run_once(
    database: Database, db: Connection[Any]
) -> None:
    names = [f"s{n}" for n in range(3)]
    for name in names:
        await add_schedule(db, name)
    stores = [ScheduleRunStore(await database.connect(**PATH), n) for n in range(3)]
    expected: dict[str, list[datetime]] = {name: [] for name in names}
    for _ in range(30):
        for name in names:
            expected[name] += await let_be_due(db, 3, name)
        await asyncio.gather(*(store.run_due_schedules() for store in stores))
    for name in names:
        assert await published(db, name) == expected[name]


async def test_a_rolled_back_run_is_published_later(
    database: Database, db: Connection[Any], store: ScheduleRunStore
) -> None:
    """A replica ends after it wrote the event and before it committed."""
    await add_schedule(db)
    due = await let_be_due(db, 1)
    dying = await database.connect(**PATH)
    transaction = dying.transaction()
    await transaction.start()
    (row,) = await dying.fetch(schedule_runs.READ_DUE, 10)
    await dying.write(schedule_runs.LOCK_SCHEDULES, [row["id"]], [row["revision"]])
    await dying.write(schedule_runs.PUBLISH_RUNS, [row["id"]], [row["next_at"]], None)
    assert (
        await store.run_due_schedules()
    ).schedules == 0  # It is locked, and the poll does not wait.
    dying.terminate()

    async def ticked() -> bool:
        return (await store.run_due_schedules()).schedules == 1

    await until(ticked, what="the dead one's lock to be let go")
    assert await published(db) == due


async def test_missed_runs_continue_after_a_full_chunk(
    db: Connection[Any], store: ScheduleRunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule_runs, "RUNS_MAX", 4)
    await add_schedule(db)
    due = await let_be_due(db, 10)
    chunks = 0
    while (await store.run_due_schedules()).schedules:
        chunks += 1
    assert chunks == 3
    assert await published(db) == due
    assert await journal(db, "schedule_skipped") == []


async def test_once_publishes_the_newest_run_with_the_number_missed(
    db: Connection[Any], store: ScheduleRunStore
) -> None:
    await add_schedule(db, misfire="once")
    due = await let_be_due(db, 10)
    await store.run_due_schedules()
    assert await published(db) == [due[-1]]
    (reported,) = await journal(db, "schedule_skipped")
    assert reported == {
        "name": "daily",
        "misfire": "once",
        "from": due[0].isoformat(),
        "before": due[-1].isoformat(),
    }


async def test_skip_omits_runs_older_than_the_grace(
    db: Connection[Any], store: ScheduleRunStore
) -> None:
    await add_schedule(db, misfire="skip", grace_s=25 * 3600)
    due = await let_be_due(db, 10)
    await store.run_due_schedules()
    assert await published(db) == due[-2:]
    (reported,) = await journal(db, "schedule_skipped")
    assert (reported["from"], reported["before"]) == (due[0].isoformat(), due[-2].isoformat())
    await add_schedule(db, "prompt", misfire="skip", grace_s=60)
    due = await let_be_due(db, 2, "prompt")
    await store.run_due_schedules()
    assert await published(db, "prompt") == []
    assert await db.fetchval("SELECT next_at FROM schedule WHERE name = 'prompt'") == due[-1] + DAY


async def test_a_paused_schedule_does_not_run(db: Connection[Any], store: ScheduleRunStore) -> None:
    await add_schedule(db)
    await let_be_due(db, 3)
    await schedule_changes.pause_schedules(db, "relay", ["daily"], actor="test")
    assert (await store.run_due_schedules()).schedules == 0
    (resumed,) = await schedule_changes.resume_schedules(db, "relay", ["daily"], actor="test")
    assert resumed.next_at is not None
    assert resumed.next_at > resumed.now
    assert (await store.run_due_schedules()).schedules == 0


async def test_an_unreadable_schedule_does_not_block_others(
    db: Connection[Any], store: ScheduleRunStore
) -> None:
    await add_schedule(db, "broken")
    await add_schedule(db)
    await let_be_due(db, 2, "broken")
    await let_be_due(db, 1)
    await db.execute("UPDATE schedule SET timezone = 'Atlantis' WHERE name = 'broken'")
    ticked = await store.run_due_schedules()
    assert [name for name, _ in ticked.broken] == ["broken"]
    assert len(await published(db)) == 1
    assert await published(db, "broken") == []
    assert (await store.run_due_schedules()).schedules == 0


async def test_the_next_due_time_is_known(db: Connection[Any], store: ScheduleRunStore) -> None:
    assert await store.due_in_s() is None
    await add_schedule(db)
    due_in_s = await store.due_in_s()
    assert due_in_s is not None
    assert 80_000 < due_in_s < 86_400
    await outbox.publish(
        db, "a", 1, deliver_at=datetime.now(UTC) + timedelta(milliseconds=50), autocommit=True
    )
    due_in_s = await store.due_in_s()
    assert due_in_s is not None
    assert due_in_s < 0.1


# ---------------------------------------------------------------- future events


async def _future(
    db: Connection[Any], *seconds: float, key: str | None = "k", ago_s: float = 0.0
) -> None:
    """Insert numbered future events, and make them due."""
    now = datetime.now(UTC)
    for n, s in enumerate(seconds):
        await outbox.publish(
            db, "a", n, key=key, deliver_at=now + timedelta(seconds=60 + s), autocommit=True
        )
    await db.execute(
        "UPDATE future_event SET deliver_at = deliver_at - make_interval(secs => $1)", 60 + ago_s
    )


async def _numbers(db: Connection[Any]) -> list[int]:
    return [int(r["payload"]) for r in await db.fetch("SELECT payload FROM outbox ORDER BY id")]


async def test_future_events_are_ordered_by_time_then_insertion(
    db: Connection[Any], store: ScheduleRunStore
) -> None:
    await _future(db, 3, 1, 2, 1, 3, ago_s=10)
    assert await store.move_future_events() == 5
    assert await _numbers(db) == [1, 3, 2, 0, 4]
    assert await store.move_future_events() == 0
    assert await db.fetchval("SELECT count(*) FROM future_event") == 0


async def test_only_due_events_are_moved(db: Connection[Any], store: ScheduleRunStore) -> None:
    await _future(db, 0, 3600, ago_s=1)
    assert await store.move_future_events() == 1
    assert await _numbers(db) == [0]


async def test_concurrent_relays_move_future_events_once_and_in_order(
    database: Database, db: Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule_runs, "DELAYED_EVENTS_MAX", 7)
    await _future(db, *range(100), ago_s=200)
    stores = [ScheduleRunStore(await database.connect(**PATH), n) for n in range(3)]
    moved = 0

    async def drain(store: ScheduleRunStore) -> None:
        nonlocal moved
        while moved < 100:
            some = await store.move_future_events()
            moved += some

    async with asyncio.timeout(60):
        await asyncio.gather(*map(drain, stores))
    assert await _numbers(db) == list(range(100))


async def test_moving_future_events_waits_for_no_other_relay(
    database: Database, db: Connection[Any], store: ScheduleRunStore
) -> None:
    await _future(db, 0, 1, 2, ago_s=10)
    moving = await database.connect(**PATH)
    transaction = moving.transaction()
    await transaction.start()
    await moving.write(schedule_runs.LOCK_FUTURE)
    due = [row["id"] for row in await moving.fetch(schedule_runs.READ_DUE_FUTURE, 2)]
    assert await moving.write(schedule_runs.MOVE_FUTURE, due) == 2
    async with asyncio.timeout(20):
        assert await store.move_future_events() == 0
    await transaction.rollback()
    assert await store.move_future_events() == 3
    assert await _numbers(db) == [0, 1, 2]


@pytest.mark.parametrize("analyzed", sampled([False, True]), ids=("unknown", "analyzed"))
async def test_polls_are_cheap_with_many_future_events(
    database: Database, db: Connection[Any], analyzed: bool
) -> None:
    """A poll reads only due events, with and without statistics."""
    await db.execute(
        "INSERT INTO future_event (event_id, type, payload, deliver_at) "
        "SELECT gen_random_uuid(), 'a', '1', now() + n * interval '1 hour' "
        "FROM generate_series(1, 20000) n"
    )
    await add_schedule(db)
    await db.execute(
        "INSERT INTO schedule (name, cron, timezone, type, payload, misfire, grace_s, overlap, "
        "next_at, due_at) SELECT 's' || n, '@yearly', 'UTC', 'a', '1', 'once', 1, 'allow', t, t "
        "FROM generate_series(1, 10000) n, LATERAL (SELECT now() + n * interval '1 hour' AS t) x"
    )
    if analyzed:
        await db.execute("ANALYZE future_event")
        await db.execute("ANALYZE schedule")
    for generic in (False, True):
        await _future(db, 0, 1, 2, ago_s=10)
        due = [row["id"] for row in await db.fetch(schedule_runs.READ_DUE_FUTURE, 200)]
        for sql, *arguments in (
            (schedule_runs.READ_DUE_IN,),
            (schedule_runs.READ_DUE, 100),
            (schedule_runs.READ_DUE_FUTURE, 200),
            (schedule_runs.MOVE_FUTURE.sql, due),
        ):
            plan = await explain(db, sql, *arguments, generic=generic)
            # Rows that are dead, and not cleaned away yet, are met on the way.
            assert plan.rows <= 10, plan
            # Without the pages of the outbox, into which they are moved.
            assert sum(scan.pages for scan in plan.scans) <= 30, plan


async def test_the_rules_of_the_outbox_apply_to_moved_events(
    database: Database, db: Connection[Any]
) -> None:
    """What the outbox would reject when due is rejected at once, with the same message."""
    later = "deliver_at => now() + interval '1 day'"
    refusals: Sequence[tuple[str, str]] = (
        (f"'a b', '1', {later}", "type_must_be_1_to_255"),
        (f"'a', '1', key => '', {later}", "key_must_be_1_to_512_bytes"),
        (f"'a', '1', tenant => '', {later}", "tenant_must_be_1_to_255_bytes"),
        (f"'a', '1', headers => '[]', {later}", "headers_must_be_an_object_of_strings"),
        (f"'a', to_jsonb(repeat('x', 262144)), {later}", "payload_must_be_at_most_262144_bytes"),
        (f"'outbox.a', '1', {later}", '"outbox." is reserved'),
        ("'a', '1', deliver_at => 'infinity'", "deliver_at_must_be_from_year_1_to_9999"),
        (f"'a', '1', {later}, expires_at => now()", "expires_at_must_be_after_deliver_at"),
    )
    for arguments, says in refusals:
        with pytest.raises(asyncpg.CheckViolationError, match=says):
            await db.execute(f"SELECT publish({arguments})")
    assert await db.fetchval("SELECT count(*) FROM future_event") == 0
