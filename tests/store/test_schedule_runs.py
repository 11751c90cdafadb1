"""Runs and future events enter the outbox once, also with concurrent relays."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from outbox.core.model.start import BEGINNING
from outbox.operations.schedules import changes as schedule_changes
from outbox.store.schedules import schedule_runs
from outbox.store.schedules.schedule_runs import ScheduleRunStore
from tests.support.relay import OK, Network, add_endpoint, all_ended, publish, running
from tests.support.schedules import DAY, add_schedule, journal, let_be_due, published
from tests.support.waiting import until

if TYPE_CHECKING:
    from datetime import datetime

    from asyncpg import Connection

    from outbox.core.model.response import AttemptResult
    from tests.support.postgres import Database
    from tests.support.relay import Sent

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
    await add_schedule(db, payload={"n": 1}, key="k", headers={"X-Mine": "yes"})
    (tick,) = await let_be_due(db, 1)
    assert (await store.run_due_schedules()).schedules == 1
    row = await db.fetchrow("SELECT * FROM outbox")
    assert (row["type"], row["key"], row["tenant"], row["payload"]) == (
        "a.b",
        "k",
        None,
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


async def test_an_event_has_not_ended_until_feeds_have_given_it_to_their_endpoints(
    database: Database, db: Connection[Any]
) -> None:
    async def ended() -> list[int]:
        rows = await db.fetch(schedule_runs.READ_ENDED, [1, 2, 3])
        return sorted(row["outbox_id"] for row in rows)

    responds = asyncio.Event()

    async def script(sent: Sent) -> AttemptResult:
        if sent.url.endswith("/second"):
            await responds.wait()
        return OK

    await add_endpoint(database, "first")
    async with running(database, Network()):
        await publish(database, {"n": 1})
        await publish(database, {"n": 2}, type="c.d")
        await publish(database, {"n": 3})
        await all_ended(database)
    assert await ended() == [1, 2, 3]
    await add_endpoint(database, "second", types=["a.*"], filter="@.n > 2", start=BEGINNING)
    assert await ended() == [1, 2], "neither the other type nor what the filter rejects is fed"
    async with running(database, Network(script)):
        fed = "SELECT count(*) = 1 FROM feed WHERE end_reason = 'arrived' AND fed = 1"
        await until(lambda: db.fetchval(fed), what="the endpoint to subscribe")
        assert await ended() == [1, 2], "it is pending in the batch that fed it"
        responds.set()
        await all_ended(database)
    assert await ended() == [1, 2, 3]
