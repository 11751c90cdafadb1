"""Test suites empty the outbox tables, although deleting events is refused."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import sqlalchemy as sa

import outbox
from outbox.core.model.sql_names import search_path
from outbox.errors import CannotRun, Conflict, SchemaMissing, UsageError
from outbox.store.connection.migrate import migrate
from outbox.testing import deliver_now_async, reset, reset_async
from tests.support.relay import (
    ADD_REPLICA,
    END_LEASES,
    add_endpoint,
    exceptions,
    fetchval,
    publish,
)
from tests.support.schedules import add_schedule
from tests.support.tiers import sampled

if TYPE_CHECKING:
    from asyncpg import Connection

    from tests.support.postgres import Database

pytestmark = pytest.mark.system

PATH = {"server_settings": {"search_path": "relay"}}
TABLES = """
SELECT c.oid::regclass::text FROM pg_class c
 WHERE c.relnamespace = $1::text::regnamespace AND c.relkind IN ('r', 'p') AND NOT c.relispartition
"""
SEQUENCES = """
SELECT sequencename, last_value FROM pg_sequences WHERE schemaname = 'relay' ORDER BY 1
"""
PARTITIONS = """
SELECT inhrelid::regclass::text, pg_get_expr(c.relpartbound, c.oid)
  FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid WHERE c.relkind = 'r' ORDER BY 1
"""
TIMES = {"applied_at", "at", "began_at", "committed_at", "created_at"}
WRITTEN_BY = {("incarnation", "id"), ("incarnation", "by_xid")}
"""Columns that are not the same in two new databases, but for times."""


async def content(db: Connection[Any]) -> dict[str, Any]:
    """All rows of the schema, but for times; its sequences and partitions."""
    found: dict[str, Any] = {
        "holds": await db.fetchval("SELECT incarnation_holds()"),
        "sequences": await db.fetch(SEQUENCES),
        "partitions": await db.fetch(PARTITIONS),
    }
    for (table,) in await db.fetch(TABLES, "relay"):
        rows = await db.fetch(f"SELECT * FROM {table}")
        found[table] = sorted(
            str(
                {
                    name: value
                    for name, value in row.items()
                    if name not in TIMES and (table, name) not in WRITTEN_BY
                }
            )
            for row in rows
        )
    return found


async def test_a_reset_database_is_like_a_new_one(database: Database) -> None:
    db = await database.connect(**PATH)
    new = await content(db)
    await add_endpoint(database, "shop", lanes=3)
    await add_schedule(db)
    await publish(database, 1, 2, 3, key="k")
    await outbox.publish(db, "a.b", 1, once="k", autocommit=True)
    await deliver_now_async(database.dsn)
    await db.execute("""
        SELECT end_period('events', 0);
        UPDATE period SET last_batch = 1, dropped_at = now() WHERE number = 0;
        ALTER TABLE outbox DETACH PARTITION outbox_0; DROP TABLE outbox_0
    """)
    await publish(database, 4)
    assert await content(db) != new
    await reset_async(database.dsn)
    assert await content(db) == new
    # It works as before.
    await add_endpoint(database, "shop")
    await publish(database, 5)
    report = await deliver_now_async(database.dsn)
    assert [message.sequence for message in report.delivered] == [1]
    assert await exceptions(database) == {}


async def test_it_is_called_in_a_thread_without_an_event_loop(database: Database) -> None:
    await publish(database, 1)
    with pytest.raises(UsageError, match=r"use await outbox\.testing\.reset_async"):
        reset(database.dsn)
    await asyncio.to_thread(reset, database.dsn)
    assert await fetchval(database, "SELECT count(*) FROM outbox") == 0


@pytest.mark.one_major
async def test_it_is_refused(database: Database, empty_database: Database) -> None:
    with pytest.raises(SchemaMissing):
        await reset_async(empty_database.dsn)
    await publish(database, 1)
    db = await database.connect(**PATH)
    await db.execute(ADD_REPLICA)
    with pytest.raises(Conflict, match="is running on this database"):
        await reset_async(database.dsn)
    await db.execute(END_LEASES)
    await db.execute("CREATE TABLE public.note (event bigint REFERENCES relay.outbox)")
    with pytest.raises(CannotRun, match="referenced in a foreign key constraint"):
        await reset_async(database.dsn)
    assert await db.fetchval("SELECT count(*) FROM outbox") == 1


@pytest.mark.one_major
async def test_a_schema_with_a_difficult_name(empty_database: Database) -> None:
    schema = 'odd "näme"'
    db = await empty_database.connect(server_settings={"search_path": search_path(schema)})
    await migrate(db, schema)
    await outbox.publish(db, "a.b", 1, autocommit=True, schema=schema)
    await reset_async(empty_database.dsn, schema=schema)
    assert await db.fetchval("SELECT count(*) FROM outbox") == 0


# ------------------------------------------------------------ suites with a clean-up of their own


def truncate_all(connection: sa.Connection) -> None:
    """Empty every table with one statement, as database cleaners do."""
    tables = connection.scalars(
        sa.text("""
        SELECT string_agg(format('%I.%I', schemaname, tablename), ', ') FROM pg_tables
         WHERE schemaname NOT IN ('pg_catalog', 'information_schema')""")
    ).one()
    connection.execute(sa.text(f"TRUNCATE {tables} RESTART IDENTITY CASCADE"))


def delete_all(connection: sa.Connection) -> None:
    """Delete the rows of every table of the metadata, as the documentation of SQLAlchemy does."""
    metadata = sa.MetaData()
    metadata.reflect(connection, schema="relay", only=["outbox"])
    for table in reversed(metadata.sorted_tables):
        connection.execute(table.delete())


@pytest.mark.one_major
@pytest.mark.parametrize("clean_up", sampled([truncate_all, delete_all]))
async def test_the_clean_up_of_a_suite_needs_one_option_in_its_dsn(
    database: Database, clean_up: Any
) -> None:
    await publish(database, 1)
    url = database.dsn.replace("postgresql:", "postgresql+psycopg:")

    def run(**options: Any) -> None:
        engine = sa.create_engine(url, poolclass=sa.NullPool, connect_args=options)
        with engine.begin() as connection:
            clean_up(connection)

    with pytest.raises(sa.exc.IntegrityError) as refused:
        await asyncio.to_thread(run)
    assert isinstance(refused.value.orig, psycopg.errors.RestrictViolation)
    assert "relay.remove = 'on'" in str(refused.value)
    await asyncio.to_thread(run, options="-c relay.remove=on")
    assert await fetchval(database, "SELECT count(*) FROM outbox") == 0


@pytest.mark.full
@pytest.mark.one_major
async def test_dropping_the_schema_is_not_refused(database: Database) -> None:
    """Suites that migrate anew for each run drop it, as after `alembic downgrade base`."""
    db = await database.connect()
    await publish(database, 1)
    await db.execute("DROP SCHEMA relay CASCADE")
    await migrate(db, "relay")
    assert await db.fetchval("SELECT count(*) FROM relay.outbox") == 0
