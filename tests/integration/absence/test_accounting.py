"""Accounting: a block of ids has an event for each id that is not dead, open gaps left out.

It is exact: what is regular makes no difference, also while a relay works, and each damage makes
one of as many events as are damaged.
"""

from __future__ import annotations

import asyncio
import random
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import asyncpg
import orjson
import pytest

from outbox.core.sequencing.partition_window import Retention
from outbox.operations.status import read_overview
from outbox.relay.session_state import Readiness
from outbox.store.connection.connect import connect
from outbox.store.connection.dsn import parse
from outbox.store.database_stats import read_database_stats
from outbox_doctor.maintenance.resequence import resequence
from tests.support.books import BLOCK, INSERT, INSERT_WITH_ID, sequence_events
from tests.support.checkout import ROOT
from tests.support.detaching import ATTACH, DETACH
from tests.support.doctor import reported_findings
from tests.support.relay import Network, add_endpoint, running
from tests.support.roles import dsn_of, role
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from tests.support.books import Books

pytestmark = [pytest.mark.costly, pytest.mark.system]

UNSEQUENCED = "SELECT age_s, created_at FROM unsequenced_events()"
FORGET = """
UPDATE event_account SET batch = 0; DELETE FROM event_block; DELETE FROM event_void
"""


async def test_what_is_regular_makes_no_difference(books: Books) -> None:
    """One case after the other in one database, so each is also the past of the next ones."""
    # A rollback.
    await books.publish(3)
    await books.roll_back(2)
    await books.publish(1)
    await books.sequence()
    await books.assert_agree()

    # An open gap, with rows that are committed and not sequenced; and when it commits late.
    other = await books.database.connect(server_settings={"search_path": "relay"})
    await other.execute("BEGIN")
    await other.execute(INSERT)
    await books.publish(2)
    await books.sequence()
    await books.assert_agree()
    await other.execute("COMMIT")
    await books.assert_agree()
    await books.sequence()
    await books.assert_agree()

    # A setval within a block, over some blocks, and over more ids than are counted in blocks.
    for to in (1000, 10 * BLOCK + 5, 1 << 31):
        await books.leap(to)
        await books.sequence()
        await books.assert_agree()
    # Only the last one is too long.
    assert await books.db.fetchval("SELECT count(*) FROM event_void") == 1

    # An event at each side of a block's border.
    await books.leap((1 << 31) + 2 * BLOCK - 2)
    await books.publish(2)
    await books.sequence()
    await books.assert_agree()

    # The next period of ids: the rest of the first one is dead, and a batch straddles the border.
    await books.end_periods(Retention(None, None, None))
    await books.publish(1)
    await books.sequence()
    await books.assert_agree()
    assert await books.db.fetchval("SELECT count(DISTINCT period) FROM event_block") == 2
    assert await books.db.fetchval("SELECT count(*) FROM event_void") == 2

    # The log, with all dead ids, is dropped before the events.
    await books.publish(1)
    await books.roll_back(3)
    await books.publish(1)
    await books.sequence()
    await books.end_periods(Retention(None, 0, None))
    await books.publish(1)
    await books.sequence()
    assert await books.db.fetchval("SELECT count(*) FROM batch WHERE NOT isempty(dead)") < 2
    await books.assert_agree()

    # The events are dropped.
    for _ in range(2):
        await books.end_periods(Retention(0, 0, 0))
        await books.publish(2)
        await books.roll_back(1)
        await books.publish(1)
        await books.sequence()
        await books.assert_agree()
    assert await books.db.fetchval("SELECT min(period) FROM event_block") > 0
    assert await books.db.fetchval("SELECT count(*) FROM event_void") == 0


@dataclass(frozen=True)
class Damage:
    """What happens behind the relay's back, after the events of `sequence_events`."""

    damage: str
    difference: dict[tuple[int, int], int]
    verified: set[str]
    """Checks of `outbox verify` that report it."""
    reports: str = ""
    """What doctor says."""
    repair: str = ""


DELETE = "DELETE FROM outbox WHERE id = 4"
UNREADY = """
UPDATE pg_index SET indisready = {0}, indisvalid = {0} WHERE indrelid = 'outbox_0'::regclass
"""

DAMAGES = {
    "a deleted event": Damage(
        DELETE,
        {(0, 0): -1},
        {"all there"},
        "ids 0 to 1048575: 3 events instead of 4: some are gone",
        INSERT_WITH_ID.format(4),
    ),
    "a truncated table": Damage(
        "TRUNCATE outbox", {(0, 0): -4, (0, 4096): -1}, {"all there"}, "0 events instead of 4"
    ),
    "a detached partition": Damage(
        DETACH,
        {(0, 0): -4, (0, 4096): -1},
        {"all there"},
        "0 events instead of 4",
        ATTACH,
    ),
    "an explicit id": Damage(
        INSERT_WITH_ID.format(3),
        {(0, 0): 1},
        {"lost", "all there"},
        "5 events instead of 4: some were skipped",
    ),
    "an explicit id in a range of many dead ids": Damage(
        INSERT_WITH_ID.format(7 * BLOCK),
        {(0, 7): 1},
        {"lost", "all there"},
        "1 event instead of 0: some were skipped",
    ),
    "an explicit id instead of a deleted event": Damage(
        f"{DELETE}; {INSERT_WITH_ID.format(3)}", {}, {"lost"}
    ),
    "id 0": Damage(
        INSERT_WITH_ID.format(0),
        {(0, 0): 1},
        {"all there", "assigned"},
        "has the id 0, which the sequence does not assign",
        "DELETE FROM outbox WHERE id = 0",
    ),
}


@pytest.mark.parametrize("kind", DAMAGES)
async def test_a_damage_is_a_difference_of_as_many_events(kind: str, books: Books) -> None:
    damage = DAMAGES[kind]
    await sequence_events(books)
    await books.db.execute(damage.damage)
    assert await books.differences() == damage.difference
    assert set(await books.verify()) == damage.verified
    found = await reported_findings(books.db, "accounting")
    assert [f for f in found if damage.reports in f.message] or not damage.difference
    if damage.repair:
        await books.db.execute(damage.repair)
        await books.assert_agree()


async def test_an_event_without_an_index_entry_is_distinguished(books: Books) -> None:
    """The relay reads by the index, so only a count of the table itself sees such events."""
    await sequence_events(books)
    await books.db.execute(
        "INSERT INTO outbox (type, payload) SELECT 'a.b', '{}' FROM generate_series(1, 1000)"
    )
    await books.db.execute("ANALYZE outbox")  # Else a small table may be read as a whole.
    await books.sequence()
    await books.db.execute(UNREADY.format(False))
    await books.publish(3)
    await books.db.execute(UNREADY.format(True))
    await books.publish(1)
    await books.sequence()
    assert await books.differences() == {}
    (example,) = (await books.verify())["all there"]
    assert example.endswith("1005, 1002 by the index, 1002 expected")
    await books.db.execute("REINDEX TABLE outbox_0")
    assert set(await books.verify()) == {"lost", "all there"}
    await resequence(books.db, "relay", actor="test")
    await books.sequence()
    await books.assert_agree()


@pytest.mark.parametrize("is_counted", [True, False])
async def test_events_that_are_sequenced_after_all_are_not_dead(
    is_counted: bool, books: Books
) -> None:
    await sequence_events(books)
    if not is_counted:
        await books.roll_back(1)
        await books.publish(1)
        await books.sequence()
        await books.db.execute(FORGET)
    # In a block, and twice in the range that is not counted in blocks.
    for event_id in (3, 7 * BLOCK, 7 * BLOCK + 2):
        await books.db.execute(INSERT_WITH_ID.format(event_id))
    if is_counted:
        assert await books.differences() == {(0, 0): 1, (0, 7): 2}
    done = await resequence(books.db, "relay", actor="test")
    assert done.events == 3
    await books.assert_agree()
    await books.sequence()
    await books.assert_agree()


async def test_a_difference_is_reported_until_it_ends(books: Books) -> None:
    journal = "SELECT data FROM journal WHERE kind = 'events_unaccounted' ORDER BY id"
    await sequence_events(books)
    for deleted in (1, 2):
        await books.db.execute(f"DELETE FROM outbox WHERE id = {deleted}")
        await books.differences()
        assert len(await books.db.fetch(journal)) == deleted
        assert (await read_database_stats(books.db)).unaccounted_events == deleted
        assert (await read_overview(books.db, "relay")).unaccounted_events == deleted
    data = orjson.loads((await books.db.fetch(journal))[-1]["data"])
    assert data == {"first_id": 0, "last_id": BLOCK - 1, "events": 2, "expected": 4}
    (found,) = await reported_findings(books.db, "accounting")
    assert found.action
    # The owner accepts that they are gone.
    await books.db.execute(found.action[found.action.index("UPDATE ") :])
    await books.assert_agree()
    assert (await read_database_stats(books.db)).unaccounted_events == 0


async def test_a_log_is_not_dropped_before_its_dead_ids_are_counted(books: Books) -> None:
    await sequence_events(books)
    await books.end_periods(Retention(None, None, None))
    drop = "SELECT count(*) FROM drop_period('log', 0)"
    await books.db.execute(FORGET)
    assert await books.db.fetchval(drop) == 0
    await books.accounting.count_dead_ids()
    assert await books.db.fetchval(drop) == 1


async def test_a_relay_at_work_makes_no_difference(books: Books) -> None:
    """Rows that are committed and not sequenced are in open gaps, or above the cursor."""
    ended = asyncio.Event()

    async def produce() -> None:
        async with books.database.connection(server_settings={"search_path": "relay"}) as db:
            while not ended.is_set():
                transaction = db.transaction()
                await transaction.start()
                await db.execute(INSERT)
                await asyncio.sleep(0.002)
                await (transaction.rollback() if random.random() < 0.2 else transaction.commit())

    await add_endpoint(books.database)
    examined = differences = 0
    async with running(books.database, Network()), asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(produce())
        while examined < 60:
            await books.accounting.count_dead_ids()
            row = await books.db.fetchrow("SELECT * FROM account(0, 0)")
            examined += row["expected"] > 0
            differences += row["expected"] != row["present"]
        assert await books.differences() == {}
        ended.set()
    assert differences == 0


async def test_a_relay_reports_a_difference(
    books: Books, logs: list[MutableMapping[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox.relay.maintenance.EVERY_S", 0.05)
    monkeypatch.setattr("outbox.relay.maintenance.HOURLY_S", 0.05)
    await sequence_events(books)
    monkeypatch.setattr("outbox.relay.delivery.endpoint_supervisor.SURVEY_EVERY_S", 0.05)
    async with running(books.database, Network()) as relay:
        await books.db.execute(DELETE)
        await until(lambda: [each for each in logs if each.get("expected") == 4])
        warning = "1 event missing or superfluous; see outbox doctor"
        await until(lambda: relay.readiness() == Readiness(ready=True, reason=warning))
    (reported,) = {
        (each["log_level"], each["first_id"], each["last_id"], each["events"])
        for each in logs
        if "expected" in each
    }
    assert reported == ("error", 0, BLOCK - 1, 3)


async def test_row_security_is_an_error_instead_of_a_difference(books: Books) -> None:
    """A policy does not apply to the owner; if it is forced, nothing is counted."""
    await sequence_events(books)
    await books.db.execute(
        "ALTER TABLE outbox ENABLE ROW LEVEL SECURITY; CREATE POLICY half ON outbox USING (id > 2)"
    )
    async with role(books.database, "relay") as name:
        dsn = parse(dsn_of(books.database, name), source="test", env={})
        relay = await connect(dsn, schema="relay")
        await relay.execute("SET row_security = on")
        account = "SELECT expected, present FROM account(0, 0)"
        assert tuple(await relay.fetchrow(account)) == (4, 4)
        # Owners who are no superusers are subject to a forced policy, as this role is to any.
        for function in ("account(bigint, bigint)", "unsequenced_events()"):
            await books.db.execute(f'ALTER FUNCTION {function} OWNER TO "{name}"')
        with pytest.raises(asyncpg.InsufficientPrivilegeError, match="row-level security"):
            await books.db.fetchrow(account)
        with pytest.raises(asyncpg.InsufficientPrivilegeError, match="row-level security"):
            await books.db.fetchrow(UNSEQUENCED)
        relay.terminate()
        for function in ("account(bigint, bigint)", "unsequenced_events()"):
            await books.db.execute(f"ALTER FUNCTION {function} OWNER TO CURRENT_USER")


async def test_an_exporter_sees_the_oldest_unsequenced_event(books: Books) -> None:
    """Without a relay, and with a role that has these two privileges only."""
    async with role(books.database) as name:
        await books.db.execute(f"""
            GRANT USAGE ON SCHEMA relay TO "{name}";
            GRANT EXECUTE ON FUNCTION relay.unsequenced_events() TO "{name}"
        """)
        exporter = await asyncpg.connect(dsn_of(books.database, name))

        async def oldest() -> Any:
            return await exporter.fetchrow("SELECT * FROM relay.unsequenced_events()")

        async def created_at(event_id: int) -> Any:
            return await books.db.fetchval("SELECT created_at FROM outbox WHERE id = $1", event_id)

        assert tuple(await oldest()) == (0.0, None)
        await books.publish(2)
        first = await oldest()
        assert first["created_at"] == await created_at(1)
        assert first["age_s"] > 0
        await books.sequence()
        assert tuple(await oldest()) == (0.0, None)
        # An event that commits late is in a gap until it is sequenced.
        other = await books.database.connect(server_settings={"search_path": "relay"})
        await other.execute("BEGIN")
        await other.execute(INSERT)
        await books.publish(1)
        await books.sequence()
        assert tuple(await oldest()) == (0.0, None)
        await other.execute("COMMIT")
        assert (await oldest())["created_at"] == await created_at(3)
        await books.sequence()
        assert tuple(await oldest()) == (0.0, None)
        # The sequencer never reads this one.
        await books.db.execute(INSERT_WITH_ID.format(0))
        assert (await oldest())["created_at"] == await created_at(0)
        await exporter.close()


async def test_ids_without_a_log_are_not_accounted(books: Books) -> None:
    """Their dead ids are not known; the migration begins with the oldest log that is kept."""
    await books.publish(2)
    await books.roll_back(3)
    await books.publish(2)
    await books.sequence()
    await books.end_periods(Retention(None, 0, None))
    await books.publish(2)
    await books.roll_back(1)
    await books.publish(1)
    await books.sequence()
    await books.db.execute(f"{FORGET}; DELETE FROM event_account")
    (statement,) = re.findall(
        r"INSERT INTO event_account[^;]*", (ROOT / "schema/0014_absence.sql").read_text()
    )
    await books.db.execute(statement)
    assert await books.db.fetchval("SELECT first_id FROM event_account") > 7
    await books.assert_agree()
    await books.db.execute("DELETE FROM outbox WHERE id = (SELECT max(id) FROM outbox)")
    assert sum((await books.differences()).values()) == -1
