"""The tables of an inbox are created once, whatever other sessions hold."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from outbox.receiver import Inbox
from outbox.receiver.inbox import statements
from tests.support.roles import dsn_of, role
from tests.support.waiting import until

if TYPE_CHECKING:
    from asyncpg import Connection

    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

TABLES = "SELECT count(*) FROM pg_class WHERE relname LIKE 'outbox\\_%' AND relkind = 'r'"
WAITING = "SELECT count(*) FROM pg_locks WHERE NOT granted AND pid = $1"
LOCK_KEY = """
SELECT pg_advisory_lock(hashtextextended('outbox receiver makes its tables', 0))
"""


async def create(connection: Connection[Any]) -> None:
    async with connection.transaction():
        await Inbox().create_async(connection)


async def until_waiting(database: Database, connection: Connection[Any]) -> None:
    pid = connection.get_server_pid()
    async with database.connection() as observer:
        await until(lambda: observer.fetchval(WAITING, pid), what="it to wait")


async def test_a_role_that_may_only_connect_cannot_delay_it(database: Database) -> None:
    async with role(database) as name, database.connection() as connection:
        other = await asyncpg.connect(dsn_of(database, name))
        try:
            # The key that earlier versions locked.
            await other.execute(LOCK_KEY)
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await other.execute("CREATE TABLE public.outbox_inbox ()")
            async with asyncio.timeout(20):
                await create(connection)
            locks = await connection.fetchval(
                "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = $1",
                connection.get_server_pid(),
            )
            assert locks == 0
        finally:
            await other.close()


@pytest.mark.parametrize("commits", [True, False])
async def test_sessions_that_create_at_once_have_the_same_tables(
    database: Database, commits: bool
) -> None:
    async with (
        database.connection() as first,
        database.connection() as second,
        database.connection() as third,
    ):
        before = await first.fetchval(TABLES)
        transaction = first.transaction()
        await transaction.start()
        await Inbox().create_async(first)
        async with asyncio.TaskGroup() as group:
            for each in (second, third):
                group.create_task(create(each))
                await until_waiting(database, each)
            await (transaction.commit() if commits else transaction.rollback())
        assert await first.fetchval(TABLES) == before + 4


async def test_the_wait_for_another_session_is_bounded(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = statements._CREATE_TOGETHER.replace(f"'{statements.CREATE_LOCK_TIMEOUT_S}s'", "'0.1s'")
    assert text != statements._CREATE_TOGETHER
    monkeypatch.setattr(
        statements, "_POSTGRESQL", replace(statements._POSTGRESQL, create_together=text)
    )
    async with database.connection() as first, database.connection() as second:
        async with first.transaction():
            await Inbox().create_async(first)
            with pytest.raises(asyncpg.LockNotAvailableError):
                await create(second)
        # The application's own limit is back after it.
        await second.execute("DROP TABLE outbox_request")
        async with second.transaction():
            await second.execute("SET LOCAL lock_timeout = '7s'")
            await Inbox().create_async(second)
            assert await second.fetchval("SHOW lock_timeout") == "7s"


async def test_a_name_that_is_used_otherwise_is_an_error(database: Database) -> None:
    async with database.connection() as connection:
        await connection.execute("CREATE TYPE outbox_lane AS ENUM ()")
        with pytest.raises(asyncpg.DuplicateObjectError):
            await create(connection)


async def test_the_schema_for_migrations_creates_the_same_tables(database: Database) -> None:
    async with database.connection() as connection:
        before = await connection.fetchval(TABLES)
        await connection.execute(Inbox().schema())
        assert await connection.fetchval(TABLES) == before + 4
        assert "\n    delivery_id text PRIMARY KEY" in Inbox().schema()
