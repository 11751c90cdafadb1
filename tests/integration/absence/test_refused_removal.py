"""Deleting, truncating and renumbering events is refused: they would count as rolled back.

DETACH and DROP cannot be refused.  What a detached partition leads to is tested beside this.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from outbox.core.sequencing.partition_window import AHEAD, WIDTH
from outbox.store.connection.migrate import migrate
from outbox.store.retention.partitions import PartitionStore
from outbox_doctor.check import Severity
from tests.support.detaching import DETACH
from tests.support.doctor import reported_findings, sql_of
from tests.support.dumps import drop_schema, dump, restore
from tests.support.relay import publish
from tests.support.roles import role

if TYPE_CHECKING:
    from asyncpg import Connection

    from tests.support.postgres import Database

pytestmark = pytest.mark.system

PATH = {"server_settings": {"search_path": "relay"}}
INSERT = "INSERT INTO outbox (type, payload) VALUES ('a.b', '{}') RETURNING id"
ALLOW = "SET LOCAL relay.remove = 'on'"
HAND_MADE = f"""
CREATE TABLE own (LIKE outbox INCLUDING DEFAULTS INCLUDING CONSTRAINTS);
ALTER TABLE outbox ATTACH PARTITION own FOR VALUES FROM ({9 * WIDTH}) TO ({10 * WIDTH})
"""

REMOVALS = {
    "delete": "DELETE FROM outbox",
    "delete one": "DELETE FROM outbox WHERE id = 12",
    "delete from the partition": "DELETE FROM outbox_0",
    "delete in a CTE": "WITH gone AS (DELETE FROM outbox RETURNING 1) SELECT FROM gone",
    "truncate": "TRUNCATE outbox",
    "truncate the partition": "TRUNCATE ONLY outbox_0",
    "truncate all": "TRUNCATE {all} CASCADE",
    "renumber": "UPDATE outbox SET id = DEFAULT",
    "renumber by a trigger": "UPDATE outbox SET headers = '{}'",
    "renumber across partitions": "UPDATE outbox SET id = DEFAULT",
}
RENUMBER = """
CREATE FUNCTION renumber() RETURNS trigger LANGUAGE plpgsql AS
    'BEGIN NEW.id := NEW.id + 100; RETURN NEW; END';
CREATE TRIGGER renumber BEFORE UPDATE ON outbox FOR EACH ROW EXECUTE FUNCTION renumber()
"""
ALL_TABLES = """
SELECT string_agg(quote_ident(relname), ', ') FROM pg_class
 WHERE relnamespace = 'relay'::regnamespace AND relkind = 'r'
"""
DAMAGED = {
    "as restored with --disable-triggers": """
        ALTER TABLE outbox DISABLE TRIGGER ALL; ALTER TABLE outbox ENABLE TRIGGER ALL;
        ALTER TABLE outbox_0 DISABLE TRIGGER ALL; ALTER TABLE outbox_0 ENABLE TRIGGER ALL;
    """,
    "disabled": "ALTER TABLE outbox_0 DISABLE TRIGGER refuse_truncate",
    "dropped": "DROP TRIGGER refuse_delete ON outbox; DROP TRIGGER refuse_truncate ON outbox_1",
    "a partition made by hand": HAND_MADE,
}


@pytest.fixture
async def db(database: Database) -> Connection[Any]:
    return await database.connect(**PATH)


async def _count(db: Connection[Any]) -> int:
    count: int = await db.fetchval("SELECT count(*) FROM outbox")
    return count


async def _prepare(db: Connection[Any], how: str) -> str:
    """Store events; returns the statement that removes or renumbers them."""
    await db.execute("SELECT setval('outbox_id_seq', 10)")
    await db.execute(
        "INSERT INTO outbox (type, payload) SELECT 'a.b', '1' FROM generate_series(1, 3)"
    )
    if how == "renumber by a trigger":
        await db.execute(RENUMBER)
    if how == "renumber across partitions":
        await db.execute(f"SELECT setval('outbox_id_seq', {WIDTH})")
    return REMOVALS[how].replace("{all}", await db.fetchval(ALL_TABLES))


async def test_each_way_is_refused(db: Connection[Any], subtests: pytest.Subtests) -> None:
    """By the owner, also in a session that applies replicated changes."""
    for how in REMOVALS:
        for replica in ("origin", "replica"):
            with subtests.test(how=how, session_replication_role=replica):
                transaction = db.transaction()
                await transaction.start()
                statement = await _prepare(db, how)
                if "by a trigger" in how:
                    await db.execute("ALTER TABLE outbox ENABLE ALWAYS TRIGGER renumber")
                await db.execute(f"SET LOCAL session_replication_role = {replica}")
                with pytest.raises(
                    asyncpg.RestrictViolationError,
                    match=r"events of relay\.outbox may not be (deleted|truncated|renumbered)",
                ) as refused:
                    await db.execute(statement)
                assert ALLOW in (refused.value.hint or "")
                await transaction.rollback()


async def test_each_way_is_possible_on_request(
    db: Connection[Any], subtests: pytest.Subtests
) -> None:
    for how in REMOVALS:
        with subtests.test(how=how):
            transaction = db.transaction()
            await transaction.start()
            statement = await _prepare(db, how)
            before = await db.fetch("SELECT id FROM outbox")
            await db.execute(f"{ALLOW}; {statement}")
            assert await db.fetch("SELECT id FROM outbox") != before
            await transaction.rollback()


async def test_what_does_not_remove_events_is_not_refused(db: Connection[Any]) -> None:
    await db.execute(INSERT)
    await db.execute("UPDATE outbox SET payload = NULL, erased_at = now()")
    await db.execute("UPDATE outbox SET id = DEFAULT WHERE false; DELETE FROM outbox WHERE false")
    assert await _count(db) == 1


async def test_new_partitions_refuse_it_too(
    database: Database, db: Connection[Any], subtests: pytest.Subtests
) -> None:
    """Those that a relay makes, and after the next maintenance those that somebody else made."""
    async with role(database, "relay") as name:
        async with database.connection(user=name, **PATH) as connection:
            await connection.execute(f"SELECT add_partition('outbox', {AHEAD + 1})")
            await db.execute(HAND_MADE)
            assert await PartitionStore(connection).guard()
            assert not await PartitionStore(connection).guard()
        for number, child in ((AHEAD + 1, f"outbox_{AHEAD + 1}"), (9, "own")):
            with subtests.test(partition=child):
                await db.execute(f"SELECT setval('outbox_id_seq', {number * WIDTH})")
                await db.execute(INSERT)
                for statement in (f"DELETE FROM {child}", f"TRUNCATE {child}", "TRUNCATE outbox"):
                    with pytest.raises(asyncpg.RestrictViolationError):
                        await db.execute(f"SET session_replication_role = replica; {statement}")
                with pytest.raises(asyncpg.RestrictViolationError):
                    await db.execute("UPDATE outbox SET id = DEFAULT")


async def test_the_triggers_cost_no_lock_that_a_producer_waits_for(
    database: Database, db: Connection[Any]
) -> None:
    """Maintenance gives up instead of waiting, and repeats it."""
    await db.execute("ALTER TABLE outbox_0 DISABLE TRIGGER refuse_truncate")
    producer = await database.connect(**PATH)
    store = PartitionStore(await database.connect(**PATH))
    async with producer.transaction():
        await producer.execute(INSERT)
        with pytest.raises(asyncpg.LockNotAvailableError):
            await store.guard()
        await producer.execute(INSERT)
    assert await store.guard()


@pytest.mark.parametrize("repair", ["doctor", "migrate", "maintenance"])
async def test_missing_triggers_are_named_and_repaired(
    db: Connection[Any], repair: str, subtests: pytest.Subtests
) -> None:
    for how, damage in DAMAGED.items():
        with subtests.test(how=how):
            await db.execute(damage)
            found = await reported_findings(db, "removal")
            assert {f.severity for f in found} == {Severity.PROBLEM}
            if repair == "doctor":
                for finding in found:
                    assert finding.action
                    await db.execute(finding.action.partition("or run: ")[2])
            elif repair == "migrate":
                assert await migrate(db, "relay") == []
                assert await reported_findings(db, "trigger") == []
            else:
                await PartitionStore(db).guard()
            assert await reported_findings(db, "removal") == []


async def test_a_restore_creates_its_triggers_itself(database: Database) -> None:
    """A relay whose maintenance falls into it would create them first, and the restore fail."""
    dumped = re.sub(r"^\\(un)?restrict .*\n", "", await dump(database), flags=re.MULTILINE)
    await drop_schema(database)
    tables, *triggers = re.split(r"^(?=CREATE TRIGGER)", dumped, flags=re.MULTILINE)
    for part in (tables, *triggers):
        async with database.connection(**PATH) as db:
            if part is not tables:
                assert not await PartitionStore(db).guard(), part
        await restore(database, part)
    async with database.connection(**PATH) as db:
        assert not await PartitionStore(db).guard()
        await db.execute("DROP TRIGGER refuse_delete ON outbox")
        assert await PartitionStore(db).guard()


async def test_missing_triggers_are_repaired_in_a_schema_of_any_name(database: Database) -> None:
    async with database.connection() as db:
        await migrate(db, "Shop")
    async with database.connection(server_settings={"search_path": '"Shop"'}) as db:
        await db.execute("DROP TRIGGER refuse_delete ON outbox")
        assert await PartitionStore(db).guard()
        assert not await PartitionStore(db).guard()


async def test_a_foreign_table_cannot_become_a_partition(db: Connection[Any]) -> None:
    """PostgreSQL refuses it, because of the primary key."""
    await db.execute(
        "CREATE FOREIGN DATA WRAPPER other; CREATE SERVER other FOREIGN DATA WRAPPER other"
    )
    columns = await db.fetchval("""
        SELECT string_agg(format('%I %s %s', attname, format_type(atttypid, atttypmod),
                                 CASE WHEN attnotnull THEN 'NOT NULL' END), ', ')
          FROM pg_attribute WHERE attrelid = 'outbox'::regclass AND attnum > 0""")
    checks = await db.fetchval("""
        SELECT string_agg(format('CONSTRAINT %I %s', conname, pg_get_constraintdef(oid)), ', ')
          FROM pg_constraint WHERE conrelid = 'outbox'::regclass AND contype = 'c'""")
    await db.execute(f"CREATE FOREIGN TABLE far ({columns}, {checks}) SERVER other")
    attach = f"ATTACH PARTITION far FOR VALUES FROM ({9 * WIDTH}) TO ({10 * WIDTH})"
    with pytest.raises(asyncpg.PostgresError, match="foreign table"):
        await db.execute(f"ALTER TABLE outbox {attach}")


async def test_retention_empties_partitions_of_another_owner(
    database: Database, db: Connection[Any]
) -> None:
    await publish(database, 1, 2)
    await db.execute(f"""
        INSERT INTO period (kind, number) VALUES ('events', 1);
        UPDATE period SET dropped_at = now() - interval '2 hours'
         WHERE kind = 'events' AND number = 0;
        SELECT setval('outbox_id_seq', {WIDTH})
    """)
    async with (
        role(database, "relay") as name,
        database.connection(user=name, **PATH) as connection,
    ):
        assert await PartitionStore(connection).drop() == (0, 1, [])
    assert await _count(db) == 0


@pytest.mark.one_major
async def test_retention_does_not_leave_the_setting_behind(
    database: Database, db: Connection[Any]
) -> None:
    await publish(database, 1)
    await db.execute("""
        INSERT INTO period (kind, number) VALUES ('events', 1);
        UPDATE period SET dropped_at = now() - interval '2 hours'
         WHERE kind = 'events' AND number = 0
    """)
    async with db.transaction():
        await db.execute("SELECT empty_partition('outbox', 0)")
        await db.execute(INSERT)
        with pytest.raises(asyncpg.RestrictViolationError):
            await db.execute("DELETE FROM outbox")


@pytest.mark.one_major
@pytest.mark.parametrize(
    ("schema", "setting"), [('odd "näme"', "odd__n_me_.remove"), ("1st", "_st.remove")]
)
async def test_the_settings_name_follows_the_schemas(
    empty_database: Database, schema: str, setting: str
) -> None:
    db = await empty_database.connect()
    await migrate(db, schema)
    quoted = '"' + schema.replace('"', '""') + '"'
    await db.execute(f"INSERT INTO {quoted}.outbox (type, payload) VALUES ('a', '1')")
    delete = f"DELETE FROM {quoted}.outbox"
    with pytest.raises(asyncpg.RestrictViolationError) as refused:
        await db.execute(delete)
    assert f"SET LOCAL {setting} = 'on'" in (refused.value.hint or "")
    await db.execute(f"BEGIN; SET LOCAL {setting} = 'on'; {delete}; COMMIT")


CARRIERS = {
    "database": "DATABASE {database}",
    "role": "ROLE {role}",
    "role in the database": "ROLE {role} IN DATABASE {database}",
}


@pytest.mark.one_major
async def test_who_may_remove_events_by_default_is_named(
    database: Database, db: Connection[Any], subtests: pytest.Subtests
) -> None:
    async with role(database, "producer") as name:
        for carrier, subject in CARRIERS.items():
            with subtests.test(carrier=carrier):
                named = subject.format(database=f'"{database.name}"', role=f'"{name}"')
                await db.execute(f"ALTER {named} SET relay.remove = 'on'")
                (finding,) = await reported_findings(db, "may remove")
                assert named in finding.message
                await db.execute(sql_of(finding))
                assert await reported_findings(db, "may remove") == []
    await db.execute("SET relay.remove = 'on'")
    (finding,) = await reported_findings(db, "may remove")
    assert "this session may delete events" in finding.message


async def test_a_detached_partition_can_be_dropped(db: Connection[Any]) -> None:
    """The limit that the guide names: no trigger fires at DETACH and DROP."""
    await db.execute(INSERT)
    await db.execute(DETACH)
    with pytest.raises(asyncpg.RestrictViolationError):
        await db.execute("TRUNCATE outbox_0")
    await db.execute("DROP TABLE outbox_0")
    assert await _count(db) == 0
