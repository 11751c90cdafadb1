"""The journal separates what people change from what relays do by themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from outbox.operations import journal
from outbox.operations.endpoints import states as endpoint_states
from outbox.operations.events.queries import PLAN_BY_ID
from outbox.operations.journal import JournalFilter, list_journal
from outbox.operations.rows import ID_MAX
from tests.support.plans import explain
from tests.support.relay import BUSY, Network, add_endpoint, fetchval, publish, running
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from asyncpg import Connection

    from outbox.operations.journal import By
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

PATH = {"server_settings": {"search_path": "relay"}}
BY_RELAY = """
INSERT INTO journal (kind, actor, endpoint_id)
SELECT 'sequencing_stopped', 'replica 7', $2::uuid FROM generate_series(1, $1)
"""


@pytest.fixture
async def db(database: Database) -> Connection[Any]:
    return await database.connect(**PATH)


async def kinds(
    db: Connection[Any], by: By, endpoint_ids: Sequence[UUID] | None = None, **only: Any
) -> list[str]:
    """The kinds of all pages."""
    found: list[str] = []
    before: int | None = ID_MAX
    while before is not None:
        page = await list_journal(
            db,
            "relay",
            endpoint_ids=endpoint_ids,
            only=JournalFilter(by=by, **only),
            limit=3,
            before=before,
        )
        found += [row.kind for row in page]
        before = None
        if page.more:
            before = page[-1].id if page.cursor is None else page.cursor
    return found


async def test_entries_of_a_running_relay_are_not_those_of_people(
    database: Database, db: Connection[Any]
) -> None:
    added = await add_endpoint(database)
    async with running(database, Network(lambda _: BUSY)):
        await publish(database, 1, 2)
        failing = "SELECT count(*) FROM journal WHERE kind = 'endpoint_health'"
        await until(lambda: fetchval(database, failing), what="the breaker to open")
        await endpoint_states.pause_endpoints(db, "relay", ["shop"], actor="ann@host")
    by_relays, by_people, by_all = [await kinds(db, by) for by in ("relays", "people", "all")]
    assert by_people == ["endpoint_paused", "endpoint_added"]
    assert {"endpoint_claimed", "endpoint_health", "endpoint_released"} <= set(by_relays)
    assert sorted(by_relays + by_people) == sorted(by_all)
    assert await kinds(db, "people", [added.id]) == by_people
    assert await kinds(db, "people", kind="endpoint_added") == ["endpoint_added"]
    assert await kinds(db, "people", kind="endpoint_claimed") == []


async def test_a_change_with_the_name_of_a_relay_as_its_actor_is_that_of_people(
    database: Database, db: Connection[Any]
) -> None:
    await add_endpoint(database)
    await endpoint_states.pause_endpoints(db, "relay", ["shop"], actor="replica 7")
    await db.execute("INSERT INTO journal (kind, actor) VALUES ('erased', 'replica 7@host')")
    assert await kinds(db, "people") == ["erased", "endpoint_paused", "endpoint_added"]
    assert await kinds(db, "relays") == []


async def test_a_page_scans_a_bounded_number_of_entries(
    database: Database, db: Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "SCANNED_MAX", 4)
    shop, other = [(await add_endpoint(database, name)).id for name in ("shop", "other")]
    await db.execute(BY_RELAY, 10, shop)
    newest = await list_journal(db, "relay", only=JournalFilter(by="people"))
    last = await fetchval(database, "SELECT max(id) FROM journal")
    assert (list(newest), newest.more, newest.cursor) == ([], True, last - 3)
    for only in (None, [shop, other], [shop]):
        added = ["endpoint_added"] * (2 if only is None else len(only))
        assert await kinds(db, "people", only) == added
        assert len(await kinds(db, "relays", only)) == 10
    assert await kinds(db, "people", []) == []
    # Without `by`, a page ends with its last row.
    (row, *_) = page = await list_journal(db, "relay", only=JournalFilter(kind="endpoint_added"))
    assert (row.endpoint, page.more, page.cursor) == ("other", False, None)


async def test_rare_entries_of_people_are_found_by_walking_an_index(
    database: Database, db: Connection[Any]
) -> None:
    shop = (await add_endpoint(database)).id
    await db.execute("ALTER TABLE journal SET (autovacuum_enabled = off)")
    await db.execute(BY_RELAY, 20_000, shop)
    last, scanned_max = await db.fetchval("SELECT max(id) FROM journal"), 500
    only = await JournalFilter(by="people").arguments(db)
    arguments = (last + 1, 50, *only, last + 1 - scanned_max)
    cases: list[tuple[str, tuple[Any, ...]]] = [
        (journal.LIST_ALL, arguments),
        (journal.LIST_OF_ENDPOINTS, (*arguments, [shop], True)),
        (journal.FIND_FLOOR, (last + 1, scanned_max)),
        (journal.FIND_FLOOR_OF_ENDPOINTS, (last + 1, scanned_max, [shop])),
    ]
    for analyzed in (False, True):
        if analyzed:
            await db.execute("ANALYZE journal, endpoint")
        for sql, values in cases:
            async with db.transaction():
                await db.execute(PLAN_BY_ID)
                plan = await explain(db, sql, *values, generic=analyzed)
            read = [scan for scan in plan.scans if scan.relation == "journal"]
            assert {scan.node for scan in read} <= {"Index Scan", "Index Only Scan"}, str(plan)
            assert sum(scan.rows for scan in read) <= scanned_max, str(plan)
