"""One interface to open a transaction on every driver that an inbox supports."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sqlite3
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from outbox.receiver.inbox.memory import MemoryDatabase

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from django.db.backends.postgresql.base import DatabaseWrapper

    from outbox.receiver.inbox.inbox import Inbox
    from outbox.receiver.inbox.process import DeliveryResult
    from outbox.receiver.message import Message


class Transaction(Protocol):
    """An inbox and an effect in one transaction of a driver."""

    async def receive(self, message: Message, **how: Any) -> DeliveryResult: ...
    async def newest(self, key: str, message: Message) -> bool: ...
    async def execute(self, sql: str) -> None: ...
    async def call(self, name: str, *arguments: Any) -> Any: ...


class AsyncTransaction:
    def __init__(self, inbox: Inbox, connection: Any, execute: Callable[[str], Any]) -> None:
        self._inbox, self._connection, self._execute = inbox, connection, execute

    async def receive(self, message: Message, **how: Any) -> DeliveryResult:
        return await self._inbox.receive_async(self._connection, message, **how)

    async def newest(self, key: str, message: Message) -> bool:
        return await self._inbox.is_newest_async(self._connection, key, message)

    async def execute(self, sql: str) -> None:
        await self._execute(sql)

    async def call(self, name: str, *arguments: Any) -> Any:
        return await getattr(self._inbox, f"{name}_async")(self._connection, *arguments)


class ThreadedTransaction:
    """Runs in threads, so that a call that waits for a lock does not block the test."""

    def __init__(self, inbox: Inbox, connection: Any, execute: Callable[[str], Any]) -> None:
        self._inbox, self._connection, self._execute = inbox, connection, execute

    async def receive(self, message: Message, **how: Any) -> DeliveryResult:
        return await asyncio.to_thread(self._inbox.receive, self._connection, message, **how)

    async def newest(self, key: str, message: Message) -> bool:
        return await asyncio.to_thread(self._inbox.is_newest, self._connection, key, message)

    async def execute(self, sql: str) -> None:
        await asyncio.to_thread(self._execute, sql)

    async def call(self, name: str, *arguments: Any) -> Any:
        return await asyncio.to_thread(getattr(self._inbox, name), self._connection, *arguments)


class Opener:
    """Transactions of one driver on one database."""

    def __init__(self, inbox: Inbox, dsn: str, file: Path) -> None:
        self.inbox, self.dsn, self.file = inbox, dsn, file

    def transaction(self) -> contextlib.AbstractAsyncContextManager[Transaction]:
        raise NotImplementedError

    async def prepare(self) -> None:
        async with self.transaction() as transaction:
            await transaction.call("create")
            await transaction.execute("CREATE TABLE IF NOT EXISTS effect (number bigint)")


class Asyncpg(Opener):
    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Transaction]:
        import asyncpg

        connection = await asyncpg.connect(self.dsn)
        try:
            async with connection.transaction():
                yield AsyncTransaction(self.inbox, connection, connection.execute)
        finally:
            await connection.close()


class AsyncpgPool(Opener):
    """A pool's connections are proxies."""

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Transaction]:
        import asyncpg

        async with (
            asyncpg.create_pool(self.dsn, min_size=1, max_size=1) as pool,
            pool.acquire() as connection,
            connection.transaction(),
        ):
            yield AsyncTransaction(self.inbox, connection, connection.execute)


class PsycopgAsync(Opener):
    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Transaction]:
        import psycopg
        from psycopg.rows import dict_row

        # Row factories that an application chooses do not affect the inbox.
        connection = await psycopg.AsyncConnection.connect(self.dsn, row_factory=dict_row)
        async with connection:
            yield AsyncTransaction(self.inbox, connection, connection.execute)


class Psycopg(Opener):
    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Transaction]:
        import psycopg
        from psycopg.rows import dict_row

        with psycopg.Connection.connect(self.dsn, row_factory=dict_row) as connection:
            yield ThreadedTransaction(self.inbox, connection, connection.execute)


class Psycopg2(Opener):
    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Transaction]:
        import psycopg2

        connection = psycopg2.connect(self.dsn)

        def execute(sql: str) -> None:
            with connection.cursor() as cursor:
                cursor.execute(sql)

        try:
            with connection:
                yield ThreadedTransaction(self.inbox, connection, execute)
        finally:
            connection.close()


class SQLAlchemyAsync(Opener):
    driver = "asyncpg"

    @cached_property
    def engine(self) -> Any:
        from sqlalchemy import NullPool
        from sqlalchemy.ext.asyncio import create_async_engine

        dsn = self.dsn.replace("postgresql:", f"postgresql+{self.driver}:")
        return create_async_engine(dsn, poolclass=NullPool)

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Transaction]:
        from sqlalchemy import text
        from sqlalchemy.ext.asyncio import AsyncSession

        async with AsyncSession(self.engine) as session, session.begin():
            yield AsyncTransaction(self.inbox, session, lambda sql: session.execute(text(sql)))


class SQLAlchemyAsyncConnection(SQLAlchemyAsync):
    driver = "psycopg"

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Transaction]:
        from sqlalchemy import text

        async with self.engine.begin() as connection:
            yield AsyncTransaction(
                self.inbox, connection, lambda sql: connection.execute(text(sql))
            )


class SQLAlchemyConnection(Opener):
    @cached_property
    def engine(self) -> Any:
        """Without a pool: no connection remains open after a transaction."""
        from sqlalchemy import NullPool, create_engine

        dsn = self.dsn.replace("postgresql:", "postgresql+psycopg:")
        return create_engine(dsn, poolclass=NullPool)

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Transaction]:
        from sqlalchemy import text

        with self.engine.begin() as connection:
            yield ThreadedTransaction(
                self.inbox, connection, lambda sql: connection.execute(text(sql))
            )


class SQLAlchemySQLite(SQLAlchemyConnection):
    @cached_property
    def engine(self) -> Any:
        from sqlalchemy import NullPool, create_engine

        arguments = {"check_same_thread": False}
        return create_engine(f"sqlite:///{self.file}", connect_args=arguments, poolclass=NullPool)


class SQLAlchemySession(SQLAlchemyConnection):
    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Transaction]:
        from sqlalchemy import text
        from sqlalchemy.orm import Session

        with Session(self.engine) as session, session.begin():
            yield ThreadedTransaction(self.inbox, session, lambda sql: session.execute(text(sql)))


class SQLite(Opener):
    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Transaction]:
        connection = sqlite3.connect(
            self.file, timeout=30, isolation_level=None, check_same_thread=False
        )
        try:
            await asyncio.to_thread(connection.execute, "BEGIN IMMEDIATE")
            yield ThreadedTransaction(self.inbox, connection, connection.execute)
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        else:
            connection.execute("COMMIT")
        finally:
            connection.close()


class Django(Opener):
    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Transaction]:
        import django
        import django.conf
        from django.db.utils import ConnectionHandler
        from psycopg.conninfo import conninfo_to_dict

        if not django.conf.settings.configured:
            django.conf.settings.configure()
            django.setup()
        parts = conninfo_to_dict(self.dsn)
        settings = {
            "default": {
                "ENGINE": "django.db.backends.postgresql",
                "NAME": parts["dbname"],
                "USER": parts.get("user", ""),
                "HOST": parts.get("host", ""),
                "PORT": str(parts.get("port", "")),
            }
        }
        connection: DatabaseWrapper = ConnectionHandler(settings)["default"]
        connection.inc_thread_sharing()

        def execute(sql: str) -> None:
            with connection.cursor() as cursor:
                cursor.execute(sql)

        # Django refuses to run where an event loop is running.
        await asyncio.to_thread(connection.set_autocommit, False)
        try:
            yield ThreadedTransaction(self.inbox, connection, execute)
            await asyncio.to_thread(connection.commit)
        finally:
            await asyncio.to_thread(connection.close)


class AsyncMemory(Opener):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.database = MemoryDatabase()
        self.effects: list[int] = []

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Transaction]:
        done: list[int] = []

        async def execute(sql: str) -> None:
            done.extend(int(n) for n in re.findall(r"VALUES \((\d+)\)", sql))

        async with self.database.transaction_async() as transaction:
            yield AsyncTransaction(self.inbox, transaction, execute)
        self.effects.extend(done)


class Memory(AsyncMemory):
    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Transaction]:
        done: list[int] = []

        def execute(sql: str) -> None:
            done.extend(int(n) for n in re.findall(r"VALUES \((\d+)\)", sql))

        with self.database.transaction() as transaction:
            yield ThreadedTransaction(self.inbox, transaction, execute)
        self.effects.extend(done)


OPENERS = (
    AsyncMemory,
    Memory,
    Asyncpg,
    AsyncpgPool,
    PsycopgAsync,
    Psycopg,
    Psycopg2,
    SQLAlchemyAsync,
    SQLAlchemyAsyncConnection,
    SQLAlchemyConnection,
    SQLAlchemySession,
    SQLAlchemySQLite,
    SQLite,
    Django,
)
