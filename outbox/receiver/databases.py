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
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from outbox.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping
    from pathlib import Path

    Transactions: TypeAlias = Callable[[], contextlib.AbstractContextManager[Any]]
    AsyncTransactions: TypeAlias = Callable[[], contextlib.AbstractAsyncContextManager[Any]]
    Openers: TypeAlias = Mapping[tuple[str, str], Callable[[Any], Any]]

SQLITE_WAIT_S = 30.0


def async_transactions(database: Any) -> AsyncTransactions:
    """Return a function that opens an asyncio transaction.

    Raises:
        UsageError: the database is of an unsupported type.
    """
    needs = "it needs threads; use Receiver, not AsyncReceiver"
    opened: AsyncTransactions = _open(database, _OF_ASYNCIO, _OF_THREADS, needs)
    return opened


def transactions(database: Any) -> Transactions:
    """Return a function that opens a transaction in a thread.

    Raises:
        UsageError: the database is of an unsupported type.
    """
    needs = "it needs asyncio; use AsyncReceiver, not Receiver"
    opened: Transactions = _open(database, _OF_THREADS, _OF_ASYNCIO, needs)
    return opened


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


@contextlib.asynccontextmanager
async def _pooled_async(acquire: Callable[[], Any]) -> AsyncIterator[Any]:
    async with acquire() as connection, connection.transaction():
        yield connection


@contextlib.contextmanager
def _pooled(acquire: Callable[[], Any]) -> Iterator[Any]:
    with acquire() as connection, connection.transaction():
        yield connection


# Package and name of a type of database, and how to open its transactions.
_OF_ASYNCIO: Openers = {
    ("asyncpg", "Pool"): lambda pool: partial(_pooled_async, pool.acquire),
    ("psycopg_pool", "AsyncConnectionPool"): lambda pool: partial(_pooled_async, pool.connection),
    ("sqlalchemy", "AsyncEngine"): lambda engine: engine.begin,
    ("sqlalchemy", "async_sessionmaker"): lambda sessions: sessions.begin,
    ("outbox", "MemoryDatabase"): lambda memory: memory.transaction_async,
}
_OF_THREADS: Openers = {
    ("psycopg_pool", "ConnectionPool"): lambda pool: partial(_pooled, pool.connection),
    ("sqlalchemy", "Engine"): lambda engine: engine.begin,
    ("sqlalchemy", "sessionmaker"): lambda sessions: sessions.begin,
    ("builtins", "str"): lambda path: SQLite(path).transaction,
    ("pathlib", "Path"): lambda path: SQLite(path).transaction,
    ("outbox", "MemoryDatabase"): lambda memory: memory.transaction,
}


def _open(database: Any, openers: Openers, others: Openers, needs: str) -> Any:
    names = [(kind.__module__.partition(".")[0], kind.__name__) for kind in type(database).__mro__]
    for name in names:
        if name in openers:
            return openers[name](database)
    if not others.keys().isdisjoint(names):
        raise UsageError(f"database: {needs}")
    if not callable(database):
        kind = type(database)
        raise UsageError(
            f"database: {kind.__module__}.{kind.__qualname__} is not supported; use a pool, an "
            "engine, a SQLite path, MemoryDatabase(), or a function that opens a transaction"
        )
    return database
