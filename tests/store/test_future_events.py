"""Delayed events enter the outbox once, also with concurrent relays."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

import outbox
from outbox.store.schedules import future_events, schedule_runs
from outbox.store.schedules.future_events import FutureEventStore
from tests.support.plans import explain
from tests.support.schedules import add_schedule
from tests.support.tiers import sampled

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
async def store(database: Database) -> FutureEventStore:
    return FutureEventStore(await database.connect(**PATH), 1)


async def test_the_next_due_time_is_known(db: Connection[Any], store: FutureEventStore) -> None:
    assert await store.due_in_s() == (None, None)
    await outbox.publish(
        db, "a", 1, deliver_at=datetime.now(UTC) + timedelta(milliseconds=50), autocommit=True
    )
    due_in_s, of_tenants = await store.due_in_s()
    assert due_in_s is not None
    assert due_in_s < 0.1
    assert of_tenants is None


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
    db: Connection[Any], store: FutureEventStore
) -> None:
    await _future(db, 3, 1, 2, 1, 3, ago_s=10)
    assert await store.move_due() == 5
    assert await _numbers(db) == [1, 3, 2, 0, 4]
    assert await store.move_due() == 0
    assert await db.fetchval("SELECT count(*) FROM future_event") == 0


async def test_only_due_events_are_moved(db: Connection[Any], store: FutureEventStore) -> None:
    await _future(db, 0, 3600, ago_s=1)
    assert await store.move_due() == 1
    assert await _numbers(db) == [0]


async def test_concurrent_relays_move_due_once_and_in_order(
    database: Database, db: Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(future_events, "DELAYED_EVENTS_MAX", 7)
    await _future(db, *range(100), ago_s=200)
    stores = [FutureEventStore(await database.connect(**PATH), n) for n in range(3)]
    moved = 0

    async def drain(store: FutureEventStore) -> None:
        nonlocal moved
        while moved < 100:
            some = await store.move_due()
            moved += some

    async with asyncio.timeout(60):
        await asyncio.gather(*map(drain, stores))
    assert await _numbers(db) == list(range(100))


async def test_moving_future_events_waits_for_no_other_relay(
    database: Database, db: Connection[Any], store: FutureEventStore
) -> None:
    await _future(db, 0, 1, 2, ago_s=10)
    moving = await database.connect(**PATH)
    transaction = moving.transaction()
    await transaction.start()
    await moving.write(future_events.LOCK_FUTURE)
    due = [row["id"] for row in await moving.fetch(future_events.READ_DUE_EVENTS, 2)]
    assert await moving.write(future_events.MOVE_FUTURE, due) == 2
    async with asyncio.timeout(20):
        assert await store.move_due() == 0
    await transaction.rollback()
    assert await store.move_due() == 3
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
        due = [row["id"] for row in await db.fetch(future_events.READ_DUE_EVENTS, 200)]
        for sql, *arguments in (
            (schedule_runs.READ_DUE_IN,),
            (schedule_runs.READ_DUE, 100),
            (future_events.READ_DUE_EVENTS, 200),
            (future_events.MOVE_FUTURE.sql, due),
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
