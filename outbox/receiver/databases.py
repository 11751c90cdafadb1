"""What applications have, as something that opens transactions.

    asyncio     asyncpg.Pool; psycopg_pool.AsyncConnectionPool; SQLAlchemy's AsyncEngine
                and async_sessionmaker
    threads     psycopg_pool.ConnectionPool; SQLAlchemy's Engine and sessionmaker;
                a path of a SQLite file
    both        MemoryDatabase; a function that gives a context manager, which enters a
                transaction, gives its connection, commits at the end of its block and
                rolls back if the block fails

They are told apart by the names of their types, so that nothing need be installed that
is not used.
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
    """How to open a transaction of asyncio.

    Raises:
        UsageError: it is nothing that can.
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
        raise UsageError("database: this one works in threads; use Receiver, not AsyncReceiver")
    own: AsyncTransactions = _own(database)
    return own


def transactions(database: Any) -> Transactions:
    """How to open a transaction in a thread.

    Raises:
        UsageError: it is nothing that can.
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
        raise UsageError("database: this one works with asyncio; use AsyncReceiver, not Receiver")
    own: Transactions = _own(database)
    return own


class SQLite:
    """One connection to a SQLite file, for one transaction at a time.

    A second connection would only wait for the lock of the first.

    Raises:
        UsageError: the file cannot be opened.
    """

    def __init__(self, path: str | Path) -> None:
        self._mutex = threading.Lock()
        try:
            self._connection = sqlite3.connect(
                path, timeout=SQLITE_WAIT_S, isolation_level=None, check_same_thread=False
            )
            # Readers do not hold up what is received; as durable as the default one.
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = FULL")
        except sqlite3.Error as error:
            raise UsageError(f"database: cannot open {str(path)!r} as SQLite: {error}") from None

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """A transaction that may write from its beginning, so that none fails half-way."""
        with self._mutex:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                # A commit may fail, too, and leave the transaction open; or a handler may
                # have ended it.
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
            f"database: a {kind.__module__}.{kind.__qualname__} is none; give a pool, an engine, "
            "the path of a SQLite file, MemoryDatabase(), or a function that opens a transaction"
        )
    return database
