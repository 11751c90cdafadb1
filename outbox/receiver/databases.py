"""Adapters from an application's pool or engine to a function that opens transactions.

    asyncio     asyncpg.Pool; psycopg_pool.AsyncConnectionPool; SQLAlchemy's AsyncEngine
                and async_sessionmaker
    threads     psycopg_pool.ConnectionPool; SQLAlchemy's Engine and sessionmaker;
                the path of a SQLite file
    both        MemoryDatabase; a function that returns a context manager, which begins a
                transaction, yields its connection, commits at the end of the block and
                rolls back on an error

They are recognized by the names of their types, so that unused drivers need not be
installed.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from outbox.errors import UsageError
from outbox.receiver.inbox.memory import MemoryDatabase

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    Transactions: TypeAlias = Callable[[], contextlib.AbstractContextManager[Any]]
    AsyncTransactions: TypeAlias = Callable[[], contextlib.AbstractAsyncContextManager[Any]]

SQLITE_WAIT_S = 30.0


def async_transactions(database: Any) -> AsyncTransactions:
    """Return a function that opens an asyncio transaction.

    Raises:
        UsageError: the database is of an unsupported type.
    """
    if isinstance(database, MemoryDatabase):
        return database.transaction_async
    kinds = _kinds(database)
    if ("asyncpg", "Pool") in kinds:

        @contextlib.asynccontextmanager
        async def of_asyncpg() -> AsyncIterator[Any]:
            async with database.acquire() as connection, connection.transaction():
                yield connection

        return of_asyncpg
    opened: AsyncTransactions
    if ("psycopg_pool", "AsyncConnectionPool") in kinds:

        @contextlib.asynccontextmanager
        async def of_psycopg() -> AsyncIterator[Any]:
            async with database.connection() as connection, connection.transaction():
                yield connection

        return of_psycopg
    if kinds & {("sqlalchemy", "AsyncEngine"), ("sqlalchemy", "async_sessionmaker")}:
        opened = database.begin
        return opened
    if kinds & _OF_THREADS or isinstance(database, (str, Path)):
        raise UsageError("database: it needs threads; use Receiver, not AsyncReceiver")
    transaction: AsyncTransactions = _own(database)
    return transaction


def transactions(database: Any) -> Transactions:
    """Return a function that opens a transaction in a thread.

    Raises:
        UsageError: the database is of an unsupported type.
    """
    if isinstance(database, MemoryDatabase):
        return database.transaction
    if isinstance(database, (str, Path)):
        return SQLite(database).transaction
    kinds = _kinds(database)
    opened: Transactions
    if ("psycopg_pool", "ConnectionPool") in kinds:

        @contextlib.contextmanager
        def of_psycopg() -> Iterator[Any]:
            with database.connection() as connection, connection.transaction():
                yield connection

        return of_psycopg
    if kinds & {("sqlalchemy", "Engine"), ("sqlalchemy", "sessionmaker")}:
        opened = database.begin
        return opened
    if kinds & _OF_ASYNCIO:
        raise UsageError("database: it needs asyncio; use AsyncReceiver, not Receiver")
    transaction: Transactions = _own(database)
    return transaction


class SQLite:
    """A single connection to a SQLite file, for one transaction at a time.

    SQLite allows one writer, so a second connection would only wait for its lock.

    Raises:
        UsageError: the file cannot be opened.
    """

    def __init__(self, path: str | Path) -> None:
        self._mutex = threading.Lock()
        try:
            self._connection = sqlite3.connect(
                path, timeout=SQLITE_WAIT_S, isolation_level=None, check_same_thread=False
            )
            # In WAL mode readers do not block the receiver; FULL keeps commits durable.
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = FULL")
        except sqlite3.Error as error:
            raise UsageError(f"database: cannot open {str(path)!r} as SQLite: {error}") from None

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Open a write transaction; BEGIN IMMEDIATE avoids SQLITE_BUSY at a later upgrade."""
        with self._mutex:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                # A failed COMMIT can leave the transaction open, and a handler can have
                # ended it.
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise


_OF_ASYNCIO = {
    ("asyncpg", "Pool"),
    ("psycopg_pool", "AsyncConnectionPool"),
    ("sqlalchemy", "AsyncEngine"),
    ("sqlalchemy", "async_sessionmaker"),
}
_OF_THREADS = {
    ("psycopg_pool", "ConnectionPool"),
    ("sqlalchemy", "Engine"),
    ("sqlalchemy", "sessionmaker"),
}


def _kinds(database: Any) -> set[tuple[str, str]]:
    return {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(database).__mro__}


def _own(database: Any) -> Any:
    if not callable(database):
        kind = type(database)
        raise UsageError(
            f"database: {kind.__module__}.{kind.__qualname__} is not supported; use a pool, an "
            "engine, a SQLite path, MemoryDatabase(), or a function that opens a transaction"
        )
    return database
