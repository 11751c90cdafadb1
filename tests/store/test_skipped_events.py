"""Committed events whose ids had been declared dead are found, reported and sequenced."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from outbox.errors import CannotRun
from outbox.relay import maintenance
from outbox.store import change
from outbox.store.connection.store_connection import StoreConnection
from outbox.store.sequencing import skipped_events
from outbox.store.sequencing.skipped_events import SkippedEvents, SkippedEventStore
from outbox_doctor.check import Severity
from outbox_doctor.maintenance import resequence as module
from outbox_doctor.maintenance.resequence import Resequenced, resequence
from tests.support.doctor import findings_of, the_one
from tests.support.plans import explain
from tests.support.relay import (
    Network,
    add_endpoint,
    all_ended,
    exceptions,
    publish,
    running,
)
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from asyncpg import Connection

    from tests.support.postgres import Database

pytestmark = pytest.mark.system

PATH = {"server_settings": {"search_path": "relay"}}

ROLL_BACK = "SELECT nextval('outbox_id_seq')"
DEAD = "SELECT bool_or(dead @> $1::bigint) FROM batch"


@pytest.fixture
async def db(database: Database) -> Connection[Any]:
    return await database.connect(**PATH)


async def copy_event(db: Connection[Any], event_id: int, data: int) -> None:
    """COPY can set the id of an event."""
    columns = ["id", "type", "key", "payload"]
    records = [(event_id, "a.b", "k", str(data))]
    await db.copy_records_to_table("outbox", columns=columns, records=records)


async def skip_events(database: Database, db: Connection[Any], count: int) -> list[int]:
    """Let a relay declare ids dead, with events before and after; returns the ids."""
    ids = []
    for n in range(count):
        await publish(database, n)
        ids.append(await db.fetchval(ROLL_BACK))
        await publish(database, n)
        # An event closes a gap only after another batch.
        await until(lambda: _is_dead(db, ids[-1]), what="the id to be declared dead")
    await all_ended(database)
    return ids


async def _is_dead(db: Connection[Any], event_id: int) -> bool:
    return bool(await db.fetchval(DEAD, event_id))


async def journal(db: Connection[Any]) -> list[dict[str, Any]]:
    rows = await db.fetch("SELECT data FROM journal WHERE kind = 'events_skipped' ORDER BY id")
    return [orjson.loads(row["data"]) for row in rows]


@pytest.mark.full
@pytest.mark.one_major
async def test_a_running_relay_reports_skipped_events_and_sequences_them_on_request(
    database: Database,
    db: Connection[Any],
    logs: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(maintenance, "EVERY_S", 0.05)
    await add_endpoint(database)
    network = Network()
    async with running(database, network):
        ids = await skip_events(database, db, 2)
        for n, event_id in enumerate(ids):
            await copy_event(db, event_id, 100 + n)
        await publish(database, 7)
        await all_ended(database)
        # A search may run between the two.
        entry = {"events": 2, "first_ids": ids}
        await until(lambda: _has_last_entry(db, entry), what="the journal")
        finding = await the_one(db, "skipped events")
        assert finding.severity is Severity.PROBLEM
        assert finding.message.startswith(f"2 committed events skipped, from id {ids[0]}, {ids[1]}")
        assert finding.action is not None
        assert finding.action.startswith("outbox resequence")
        assert set(await exceptions(database)) == {"lost", "complete", "all there"}

        planned = await resequence(db, "relay", actor="ann", dry_run=True)
        assert planned == Resequenced(True, 2, 2, tuple(ids))
        assert "lost" in await exceptions(database)
        assert await resequence(db, "relay", actor="ann") == replace(planned, dry_run=False)
        await publish(database, 8)
        await all_ended(database)
        await until(lambda: _reaches(db, ids), what="the skipped events to be sequenced")
        await all_ended(database)
        assert [f.severity for f in await findings_of(db, "skipped events")] == [Severity.OK]
    errors = [entry for entry in logs if entry["event"].startswith("committed events were not")]
    assert errors[-1]["first_ids"] == ids
    data = [data for _, data in sorted({(s.seq, s.body["data"]) for s in network.accepted})]
    # They come late, in the order of their ids.
    assert [each for each in data if each >= 100] == [100, 101]
    assert data.index(100) > data.index(7)
    # Each once: the relay sends nothing of a batch that it may not record.
    assert len(data) == len(network.sent) == 8
    assert await exceptions(database) == {}


async def _has_last_entry(db: Connection[Any], entry: dict[str, Any]) -> bool:
    return (await journal(db))[-1:] == [entry]


async def _reaches(db: Connection[Any], ids: list[int]) -> bool:
    count = "SELECT count(*) = $2 FROM delivery WHERE outbox_id = ANY ($1::bigint[])"
    return bool(await db.fetchval(count, ids, len(ids)))


@pytest.mark.one_major
async def test_an_event_with_deliveries_is_not_sequenced_again(
    database: Database, db: Connection[Any]
) -> None:
    await add_endpoint(database)
    network = Network()
    async with running(database, network):
        await publish(database, 1, 2)
        await all_ended(database)
        await db.execute("UPDATE batch SET dead = '{[2,3)}' WHERE batch = 1")
        done = await resequence(db, "relay", actor="ann")
        assert (done.events, done.batches) == (0, 1)
        await publish(database, 3)
        await all_ended(database)
    # A relay whose registration ended may send one again, under the same number.
    assert sorted({(s.seq, s.body["data"]) for s in network.accepted}) == [(1, 1), (2, 2), (3, 3)]
    assert await exceptions(database) == {}


# Batches with one skipped event each.
SKIPPED = """
INSERT INTO batch (batch, high, dead)
SELECT n, 10 * n, int8multirange(int8range(10 * n - 5, 10 * n - 4)) FROM generate_series(1, 5) n;
INSERT INTO outbox (id, type, payload)
OVERRIDING SYSTEM VALUE SELECT 10 * n - 5, 'a.b', '1' FROM generate_series(1, 5) n
"""
REGISTER = """
INSERT INTO replica (name, version, label, lease_s, expires_at)
VALUES ('frozen', '1', 'outbox-relay:frozen', 5, now())
"""
RESEQUENCED = "SELECT count(*) FROM journal WHERE kind = 'events_resequenced'"


@pytest.mark.one_major
async def test_many_batches_are_corrected_in_portions(
    db: Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BATCHES_PER_MESSAGE", 2)
    await db.execute(SKIPPED)
    done = await resequence(db, "relay", actor="ann")
    assert done == Resequenced(False, 5, 5, (5, 15, 25, 35, 45))
    assert await db.fetchval("SELECT array_agg(lo ORDER BY lo) FROM gap") == [5, 15, 25, 35, 45]
    assert await db.fetchval(RESEQUENCED) == 3
    assert await resequence(db, "relay", actor="ann") == Resequenced(False, 0, 0, ())
    assert await db.fetchval(RESEQUENCED) == 3


@pytest.mark.one_major
async def test_a_relay_that_cannot_be_fenced_prevents_the_change(
    database: Database, db: Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would go on with the open gaps that it has read."""
    monkeypatch.setattr(change, "CHANGE_LOCK_TIMEOUT_S", 0.1)
    await db.execute(SKIPPED)
    await db.execute(REGISTER)
    holder = await database.connect(**PATH)
    await holder.execute("BEGIN; SELECT FROM replica FOR KEY SHARE")
    with pytest.raises(CannotRun, match=r"holds a lock for over 0\.1 s; nothing was changed"):
        await resequence(db, "relay", actor="test")
    assert await db.fetchval("SELECT count(*) FROM gap") == 0


@pytest.mark.one_major
async def test_only_the_batches_found_are_read_under_the_locks(db: Connection[Any]) -> None:
    await db.execute(SKIPPED)
    await db.execute(
        """INSERT INTO batch (batch, high, dead)
           SELECT n, 10 * n, int8multirange(int8range(10 * n - 5, 10 * n))
             FROM generate_series(6, 20000) n; ANALYZE batch, outbox"""
    )
    await db.fetch(module.READ_SKIPPED, [1])  # The plan of a function counts as its pages.
    plan = await explain(db, module.READ_SKIPPED, [1, 2, 3, 4, 5], generic=False)
    assert plan.pages < 200, str(plan)


def before_the_message(
    monkeypatch: pytest.MonkeyPatch, disturb: Callable[[Any], Awaitable[object]]
) -> None:
    """Run something between the first plan and its message, on the same connection."""
    kind = StoreConnection
    write_together, disturbed = kind.write_together, False

    async def write(self: StoreConnection, *calls: Any, **options: Any) -> Any:
        nonlocal disturbed
        if not disturbed:
            disturbed = True
            await disturb(self)
        return await write_together(self, *calls, **options)

    monkeypatch.setattr(kind, "write_together", write)


@pytest.mark.one_major
async def test_events_that_change_after_the_plan_are_read_again(
    db: Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    await db.execute(SKIPPED)
    remove = "SET LOCAL relay.remove = 'on'; DELETE FROM outbox WHERE id = 25"
    before_the_message(monkeypatch, lambda c: c.execute(remove))
    done = await resequence(db, "relay", actor="ann")
    assert done == Resequenced(False, 4, 4, (5, 15, 35, 45))
    assert await db.fetchval("SELECT count(*) FROM gap WHERE lo = 25") == 0


@pytest.mark.one_major
async def test_a_relay_that_registers_after_the_plan_is_fenced(
    db: Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    await db.execute(SKIPPED)
    before_the_message(monkeypatch, lambda c: c.execute(REGISTER))
    await resequence(db, "relay", actor="ann")
    assert await db.fetchval("SELECT count(*) FROM replica") == 0
    assert await db.fetchval("SELECT count(*) FROM gap") == 5


@pytest.mark.one_major
async def test_all_batches_are_searched_eventually(
    db: Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(skipped_events, "BATCHES_PER_SEARCH", 2)
    await db.execute(
        """INSERT INTO batch (batch, high, dead)
           SELECT n, 10 * n, int8multirange(int8range(10 * n - 5, 10 * n - 3))
             FROM generate_series(1, 9) n"""
    )
    await copy_event(db, 16, 1)  # Skipped by batch 2.
    store = SkippedEventStore(db, "test")
    found = [await store.find() for _ in range(8)]
    expected = SkippedEvents(1, (16,))
    # Batches 9 and 8, then 7 and 6, 5 and 4, 3 and 2, and what is left; then from the start.
    assert found == [None, None, expected, None, None, None, expected, None]
    assert await journal(db) == [{"events": 1, "first_ids": [16]}]


@pytest.mark.one_major
async def test_the_reports_that_are_remembered_are_bounded(
    db: Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A producer that always inserts explicit ids has a new result at each search."""
    monkeypatch.setattr(skipped_events, "REPORTED_MAX", 2)
    await db.execute("INSERT INTO batch (batch, high, dead) VALUES (1, 100, '{[1,100)}')")
    store = SkippedEventStore(db, "test")
    for event_id in range(1, 21):
        await copy_event(db, event_id, 1)
        await store.find()
        await store.find()
    entries = await journal(db)
    assert [entry["events"] for entry in entries] == list(range(1, 21))
    assert {len(entry["first_ids"]) for entry in entries[10:]} == {10}
    assert len(store._reported) == 2


@pytest.mark.one_major
async def test_a_search_reads_no_more_batches_than_it_examines(db: Connection[Any]) -> None:
    await db.execute(
        """INSERT INTO batch (batch, high, dead)
           SELECT n, 10 * n, CASE n % 10 WHEN 0 THEN int8multirange(int8range(10 * n - 5, 10 * n))
                                        ELSE '{}' END
             FROM generate_series(1, 20000) n; ANALYZE batch"""
    )
    sql = skipped_events.FIND_SKIPPED_EVENTS
    plan = await explain(db, sql, 50, None, generic=True)
    assert sum(scan.rows for scan in plan.scans if scan.relation.startswith("batch")) <= 3 * 50
