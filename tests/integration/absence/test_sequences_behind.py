"""Sequences behind their tables, as after logical replication or a restore of data alone."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any

import pytest

from outbox.core.sequencing.partition_window import WIDTH
from outbox.store.connection.migrate import migrate
from outbox_doctor.check import Severity
from tests.support.doctor import findings, reported_findings, sql_of, the_one
from tests.support.documents import ROOT
from tests.support.dumps import restore, run
from tests.support.postgres import Server
from tests.support.relay import (
    OK,
    REFUSED,
    Network,
    add_endpoint,
    all_ended,
    exceptions,
    publish,
    running,
)
from tests.support.roles import dsn_of, role
from tests.support.schedules import add_schedule
from tests.support.waiting import until

if TYPE_CHECKING:
    from asyncpg import Connection

    from tests.support.postgres import Database

pytestmark = [pytest.mark.system, pytest.mark.slow]

PATH = {"server_settings": {"search_path": "relay"}}
# The sequences of identity columns, but for that of the events.
SEQUENCES = """
SELECT d.refobjid::regclass::text AS relation, s.oid::regclass::text AS name
  FROM pg_class s JOIN pg_depend d ON d.objid = s.oid AND d.deptype = 'i'
 WHERE s.relkind = 'S' AND s.relnamespace = 'relay'::regnamespace
   AND d.refobjid <> 'outbox'::regclass
 ORDER BY 1
"""
STATE = "SELECT last_value, is_called FROM {}"


async def _fill(database: Database, db: Connection[Any]) -> None:
    """Deliver, dead-letter, and use each feature that has an id."""
    await add_endpoint(database, "shop", lanes=2)
    await add_endpoint(database, "refusing")
    await add_schedule(db)
    async with running(database, Network(lambda sent: REFUSED if sent.seq == 2 else OK)):
        await publish(database, 1, 2, 3)
        await all_ended(database)


async def _reset_sequences(db: Connection[Any]) -> dict[str, str]:
    """Set back every sequence; returns those that are behind, with their table."""
    behind = {}
    for relation, name in await db.fetch(SEQUENCES):
        await db.execute(f"SELECT setval('{name}', 1, false)")
        if await db.fetchval(f"SELECT count(*) FROM {relation}"):
            behind[name] = relation
    return behind


@pytest.fixture
async def db(database: Database) -> Connection[Any]:
    return await database.connect(**PATH)


@pytest.mark.parametrize("repair", ["doctor", "migrate", "relay"])
async def test_sequences_of_the_relay_are_named_and_advanced(
    database: Database, db: Connection[Any], repair: str
) -> None:
    await _fill(database, db)
    behind = await _reset_sequences(db)
    assert {"journal_id_seq", "lane_id_seq", "schedule_id_seq"} <= behind.keys()
    async with role(database, "reader") as name, database.connection(user=name, **PATH) as reader:
        found = await reported_findings(reader, "sequences")
    assert {f.severity for f in found} == {Severity.PROBLEM}
    assert [f.message.partition(" ")[0] for f in found] == [f"relay.{name}" for name in behind]
    network = Network()
    if repair == "doctor":
        for finding in found:
            await db.execute(sql_of(finding))
    elif repair == "migrate":
        assert await migrate(db, "relay") == []
    else:
        async with (
            role(database, "relay") as name,
            running(database, network, dsn=dsn_of(database, name)),
        ):
            await publish(database, 4)
            await until(lambda: network.accepted, what="the event")
            await all_ended(database)
    assert await reported_findings(db, "sequences") == []
    await add_endpoint(database, "new", lanes=3)
    async with running(database, network):
        await publish(database, 5)
        await all_ended(database)
    assert network.data().count(5) == 3
    assert await exceptions(database) == {}


@pytest.mark.one_major
async def test_a_sequence_that_is_ahead_is_not_set_back(db: Connection[Any]) -> None:
    await db.execute("SELECT setval('journal_id_seq', 1000)")
    await migrate(db, "relay")
    assert await db.fetchval("SELECT last_value FROM journal_id_seq") == 1000


@pytest.mark.one_major
async def test_the_sequence_of_the_events_is_set_by_a_person(
    database: Database, db: Connection[Any]
) -> None:
    """What it assigns decides which events are sequenced: the relay stops, and doctor says how."""
    await _fill(database, db)
    await db.execute("SELECT setval('outbox_id_seq', 1, false)")
    await migrate(db, "relay")
    finding = await the_one(db, "sequence")
    assert "below 3, which is sequenced already: sequencing stops" in finding.message
    await db.execute(sql_of(finding))
    network = Network()
    async with running(database, network):
        await publish(database, 4)
        await all_ended(database)
    assert network.data().count(4) == 2


# ------------------------------------------------------------------ emptied tables


@pytest.mark.one_major
@pytest.mark.parametrize(
    ("statement", "check"),
    [
        ("TRUNCATE outbox", "emptied"),
        ("TRUNCATE outbox RESTART IDENTITY", "sequence"),
        ("DELETE FROM outbox", "emptied"),
        ("TRUNCATE batch", "rows"),
        ("ALTER SEQUENCE outbox_id_seq RESTART", "sequence"),
        ("ALTER SEQUENCE journal_id_seq RESTART", "sequences"),
    ],
)
async def test_what_was_emptied_or_reset_is_named(
    database: Database, db: Connection[Any], statement: str, check: str
) -> None:
    await _fill(database, db)
    assert await reported_findings(db, check) == []
    await db.execute(f"SET LOCAL relay.remove = 'on'; {statement}")
    found = await reported_findings(db, check)
    assert found
    assert {f.severity for f in found} == {Severity.PROBLEM}


@pytest.mark.one_major
async def test_a_dropped_period_is_not_an_emptied_outbox(
    database: Database, db: Connection[Any]
) -> None:
    await _fill(database, db)
    await db.execute(f"""
        INSERT INTO period (kind, number) VALUES ('events', 1);
        UPDATE period SET dropped_at = now() WHERE kind = 'events' AND number = 0;
        ALTER TABLE outbox DETACH PARTITION outbox_0; DROP TABLE outbox_0;
        SELECT setval('outbox_id_seq', {WIDTH})
    """)
    assert await reported_findings(db, "emptied") == []


# ------------------------------------------------------------- logical replication

SYNCHRONIZED = """
SELECT bool_and(srsubstate = 'r') AND count(*) > 30 FROM pg_subscription_rel
"""
CAUGHT_UP = """
SELECT confirmed_flush_lsn >= $1::text::pg_lsn FROM pg_replication_slots WHERE slot_name = 'move'
"""
GUIDE = ROOT / "docs/howto/move-by-logical-replication.md"


def _publications() -> str:
    """The statements of the guide for the old server."""
    blocks: list[str] = re.findall(r"```sql\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    return next(each for each in blocks if each.startswith("CREATE PUBLICATION"))


@pytest.mark.full
async def test_a_database_is_moved_by_logical_replication(pg_major: int) -> None:
    """As the guide says, while events are published, sequenced and delivered."""
    server = Server(pg_major, {"wal_level": "logical"})
    with server.embedded:
        async with server.database() as old, server.database(migrated=False) as new:
            source, target = await old.connect(**PATH), await new.connect()
            await _fill(old, source)
            options = ("--schema-only", "--schema", "relay")
            await restore(new, await asyncio.to_thread(run, old, "pg_dump", *options))
            await source.execute(_publications())
            # In the same cluster the slot is made first: the subscription would wait for itself.
            await source.execute("SELECT pg_create_logical_replication_slot('move', 'pgoutput')")
            await target.execute(
                f"CREATE SUBSCRIPTION move CONNECTION '{old.dsn}' PUBLICATION "
                "outbox_events, outbox_state WITH (create_slot = false)"
            )
            await until(lambda: target.fetchval(SYNCHRONIZED), what="the first copy")
            await publish(old, 4, 5)
            async with running(old, Network()):
                await all_ended(old)
            await publish(old, 6)
            # A removal there does not end the replication.
            await source.execute("SET LOCAL relay.remove = 'on'; DELETE FROM outbox WHERE id = 1")
            end = await source.fetchval("SELECT pg_current_wal_lsn()::text")
            await until(lambda: source.fetchval(CAUGHT_UP, end), what="the target to catch up")
            await target.execute("DROP SUBSCRIPTION move")
            await target.execute("SET search_path = relay")
            assert {f.check for f in await findings(target) if f.severity is Severity.PROBLEM} >= {
                "sequence",
                "sequences",
            }
            assert await migrate(target, "relay") == []
            await target.execute(sql_of(await the_one(target, "sequence")))
            network = Network()
            async with running(new, network):
                await publish(new, 7)
                await all_ended(new)
            # The pending event, by the lanes before or the new ones, and the new one.
            assert {6, 7} <= set(network.data())
            assert await target.fetchval("SELECT count(*) FROM outbox") == 7
            assert await exceptions(new) == {}
