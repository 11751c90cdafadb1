"""A schema that an application uses, too: its tables and functions are left alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import outbox.testing
from outbox.store.connection.migrate import migrate
from outbox.store.schema.migration_files import table_names
from outbox_doctor.check import Severity
from tests.support.doctor import findings
from tests.support.roles import role

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from asyncpg import Connection

    from tests.support.postgres import Database

pytestmark = [pytest.mark.one_major, pytest.mark.system]

PATH = {"server_settings": {"search_path": "relay"}}
APPLICATION = """
CREATE SCHEMA relay;
CREATE TABLE relay.customer (id bigint GENERATED ALWAYS AS IDENTITY, name text);
INSERT INTO relay.customer OVERRIDING SYSTEM VALUE VALUES (7, 'a');
ALTER TABLE relay.customer ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;
CREATE POLICY all_rows ON relay.customer USING (true);
CREATE FUNCTION relay.user_lookup() RETURNS bigint LANGUAGE sql SECURITY DEFINER
    AS 'SELECT count(*) FROM relay.customer';
"""


@pytest.fixture
async def shared(empty_database: Database) -> AsyncIterator[Connection[Any]]:
    """A connection of the owner, after `outbox migrate`."""
    async with empty_database.connection(**PATH) as connection:
        await connection.execute(APPLICATION)
        await migrate(connection, "relay")
        yield connection


async def test_the_application_s_objects_are_left_alone(
    shared: Connection[Any], empty_database: Database
) -> None:
    settings = "SELECT proconfig FROM pg_proc WHERE proname = 'user_lookup'"
    assert await shared.fetchval(settings) is None
    assert await shared.fetch("SELECT * FROM sequences_behind()") == []
    checks = {each.check: each for each in await findings(shared)}
    assert checks["row security"].severity is Severity.OK
    await outbox.testing.reset_async(empty_database.dsn)
    assert await shared.fetchval("SELECT name FROM customer") == "a"


async def test_the_tables_of_the_migrations_are_all_tables(database: Database) -> None:
    """Those of an empty schema, after all migrations."""
    async with database.at_hand() as connection:
        rows = await connection.fetch(
            "SELECT relname FROM pg_class WHERE relnamespace = 'relay'::regnamespace"
            " AND relkind IN ('r', 'p') AND NOT relispartition AND relname <> 'migration'"
        )
    assert {row["relname"] for row in rows} == set(table_names())


async def test_an_operator_s_role_may_run_migrate_when_there_is_nothing_to_do(
    database: Database,
) -> None:
    async with role(database, "operator") as name, database.connection(user=name) as connection:
        assert await migrate(connection, "relay") == []


async def test_an_error_keeps_its_own_text(database: Database) -> None:
    """A policy on one of our tables need not be the cause of a missing privilege."""
    async with role(database, "relay") as name, database.connection(**PATH) as owner:
        await owner.execute("ALTER TABLE lane_block ENABLE ROW LEVEL SECURITY")
        await owner.execute("CREATE TABLE public.theirs (id bigint)")
        async with database.connection(user=name, **PATH) as connection:
            with pytest.raises(Exception, match="denied for table theirs; row level security"):
                await connection.fetch("SELECT FROM public.theirs")
