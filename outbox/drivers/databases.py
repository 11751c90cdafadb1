"""Adapters from an application's database to a function that opens its transactions.

    asyncio     asyncpg.Pool; psycopg_pool.AsyncConnectionPool; SQLAlchemy's AsyncEngine,
                async_sessionmaker and async_scoped_session
    threads     psycopg_pool.ConnectionPool; psycopg2.pool.ThreadedConnectionPool;
                SQLAlchemy's Engine, sessionmaker and scoped_session; django.db.connection,
                whose alias names the database; the path of a SQLite file
    both        MemoryDatabase; a function that returns one of these, or a context manager
                which begins a transaction, yields its connection, commits at the end of the
                block and rolls back on an error

SQLModel uses SQLAlchemy's engines and sessionmakers.  All are recognized by the names of their
types, so that unused drivers need not be installed.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import sqlite3
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from outbox.drivers.connections import DRIVERS, names_of, type_name
from outbox.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping
    from pathlib import Path

    Transactions: TypeAlias = Callable[[], contextlib.AbstractContextManager[Any]]
    AsyncTransactions: TypeAlias = Callable[[], contextlib.AbstractAsyncContextManager[Any]]
    Openers: TypeAlias = Mapping[tuple[str, str], Callable[[Any], Any]]

SQLITE_WAIT_S = 30.0
_ADDRESS = re.compile(r"://|(?:^|\s)(?:host|hostaddr|dbname|user|service)\s*=")
DIALECTS = ("postgresql", "sqlite")
SUPPORTED = (
    "a pool, an engine, a sessionmaker, django.db.connection, a SQLite path, MemoryDatabase(), "
    "or a function that opens a transaction"
)


def async_transactions(database: Any) -> AsyncTransactions:
    """Return a function that opens an asyncio transaction.

    Raises:
        UsageError: the database is of an unsupported type.
    """
    opened: AsyncTransactions = _transactions(database, is_async=True)
    return opened


def transactions(database: Any) -> Transactions:
    """Return a function that opens a transaction in a thread.

    Raises:
        UsageError: the database is of an unsupported type.
    """
    opened: Transactions = _transactions(database, is_async=False)
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


# ------------------------------------------------------------------------ transactions


@contextlib.asynccontextmanager
async def _pooled_async(acquire: Callable[[], Any]) -> AsyncIterator[Any]:
    async with acquire() as connection, connection.transaction():
        yield connection


@contextlib.contextmanager
def _pooled(acquire: Callable[[], Any]) -> Iterator[Any]:
    with acquire() as connection, connection.transaction():
        yield connection


@contextlib.contextmanager
def _psycopg2(pool: Any, slots: threading.Semaphore) -> Iterator[Any]:
    with slots:
        connection = pool.getconn()
        try:
            with connection:
                yield connection
        finally:
            # The pool drops a connection that was lost.
            pool.putconn(connection)


@contextlib.asynccontextmanager
async def _scoped_async(sessions: Any) -> AsyncIterator[Any]:
    try:
        async with sessions.begin():
            yield sessions()
    finally:
        await sessions.remove()


@contextlib.contextmanager
def _scoped(sessions: Any) -> Iterator[Any]:
    """The session that the handlers get from `sessions` in this thread."""
    transaction = sessions.begin()
    try:
        with transaction:
            yield sessions()
    finally:
        sessions.remove()


@contextlib.contextmanager
def _atomic(alias: str) -> Iterator[Any]:
    from django.db import close_old_connections, connections
    from django.db.transaction import atomic

    # As Django does before and after a request of its own: the adapters run outside of those.
    close_old_connections()
    try:
        # Durable: inside another transaction this one would not be committed at its end.
        with atomic(alias, durable=True):
            yield connections[alias]
    finally:
        close_old_connections()


def _of_engine(engine: Any) -> Any:
    _check_dialect(engine.dialect.name)
    return engine.begin


def _of_psycopg2(pool: Any) -> Any:
    # The pool raises if it has no free connection: the transactions wait for each other.
    return partial(_psycopg2, pool, threading.Semaphore(pool.maxconn))


def _of_django(connection: Any) -> Any:
    _check_dialect(connection.vendor)
    if not connection.settings_dict["AUTOCOMMIT"]:
        raise UsageError('database: with "AUTOCOMMIT": False Django commits nothing; leave it out')
    return partial(_atomic, connection.alias)


def _of_path(path: str | Path) -> Transactions:
    return SQLite(path).transaction


def _check_address(database: Any) -> None:
    """Refuse the address of a database, which is not shown: it may contain a password."""
    if isinstance(database, str) and _ADDRESS.search(database):
        raise UsageError(
            "database: an address is no database; open it, such as by "
            "asyncpg.create_pool(address), psycopg_pool.ConnectionPool(address) or "
            "sqlalchemy.create_engine(address), and give what that returns"
        )


def _check_dialect(name: str) -> None:
    if name not in DIALECTS:
        raise UsageError(f"database: it must be PostgreSQL or SQLite, not {name}")


# --------------------------------------------------------------------------- the tables

# Package and name of a type of database, and how to open its transactions.
_OF_ASYNCIO: Openers = {
    ("asyncpg", "Pool"): lambda pool: partial(_pooled_async, pool.acquire),
    ("psycopg_pool", "AsyncConnectionPool"): lambda pool: partial(_pooled_async, pool.connection),
    ("sqlalchemy", "AsyncEngine"): _of_engine,
    ("sqlalchemy", "async_sessionmaker"): lambda sessions: sessions.begin,
    ("sqlalchemy", "async_scoped_session"): lambda sessions: partial(_scoped_async, sessions),
    ("outbox", "MemoryDatabase"): lambda memory: memory.transaction_async,
}
_OF_THREADS: Openers = {
    ("psycopg_pool", "ConnectionPool"): lambda pool: partial(_pooled, pool.connection),
    ("psycopg2", "ThreadedConnectionPool"): _of_psycopg2,
    ("sqlalchemy", "Engine"): _of_engine,
    ("sqlalchemy", "sessionmaker"): lambda sessions: sessions.begin,
    ("sqlalchemy", "scoped_session"): lambda sessions: partial(_scoped, sessions),
    ("django", "ConnectionProxy"): _of_django,
    ("django", "BaseDatabaseWrapper"): _of_django,
    ("builtins", "str"): _of_path,
    ("pathlib", "Path"): _of_path,
    ("outbox", "MemoryDatabase"): lambda memory: memory.transaction,
}
_NEEDS_THREADS = "database: it needs threads; use Receiver, not AsyncReceiver"
_NEEDS_ASYNCIO = "database: it needs asyncio; use AsyncReceiver, not Receiver"
_NOT_COMMITTED = "rolls back at the end of its block; use `engine.begin` or `sessions.begin`"
_NOT_DATABASES = {
    ("psycopg2", "SimpleConnectionPool"): "is not for threads; use ThreadedConnectionPool",
    ("django", "ConnectionHandler"): 'has several databases; use one: `connections["default"]`',
    ("django", "Atomic"): "yields no connection; use django.db.connection",
    # What a function returned: as a context manager each of these only closes.
    ("sqlalchemy", "AsyncConnection"): _NOT_COMMITTED,
    ("sqlalchemy", "AsyncSession"): _NOT_COMMITTED,
    ("sqlalchemy", "Connection"): _NOT_COMMITTED,
    ("sqlalchemy", "Session"): _NOT_COMMITTED,
}


def _transactions(database: Any, *, is_async: bool) -> Any:
    if (opener := _opener_of(database, is_async=is_async)) is not None:
        return opener(database)
    # Also of a connection that can be called, as those of sqlite3 can.
    is_connection = not DRIVERS.keys().isdisjoint(names_of(type(database)))
    if is_connection or not callable(database):
        what = "is one connection, for one request at a time" if is_connection else "is unsupported"
        raise UsageError(f"database: {type_name(type(database))} {what}; use {SUPPORTED}")
    _check_function(database, is_async=is_async)

    def begin() -> Any:
        returned = database()
        opener = _opener_of(returned, is_async=is_async)
        return returned if opener is None else opener(returned)()

    return begin


def _opener_of(database: Any, *, is_async: bool) -> Callable[[Any], Any] | None:
    """Return how to open transactions of a database; None if its type is not in a table.

    Raises:
        UsageError: its type is known to be wrong here.
    """
    _check_address(database)
    openers, others = (_OF_ASYNCIO, _OF_THREADS) if is_async else (_OF_THREADS, _OF_ASYNCIO)
    names = names_of(type(database))
    for name in names:
        if name in openers:
            return openers[name]
        if advice := _NOT_DATABASES.get(name):
            raise UsageError(f"database: {type_name(type(database))} {advice}")
    if not others.keys().isdisjoint(names):
        raise UsageError(_NEEDS_THREADS if is_async else _NEEDS_ASYNCIO)
    return None


def _check_function(function: Callable[[], Any], *, is_async: bool) -> None:
    """Refuse a function that yields and is no context manager, or is one of the other kind."""
    inner = inspect.unwrap(function)
    of_asyncio = inspect.isasyncgenfunction(inner)
    if not of_asyncio and not inspect.isgeneratorfunction(inner):
        return
    if inner is function:
        decorator = "asynccontextmanager" if of_asyncio else "contextmanager"
        raise UsageError(f"database: the function yields; decorate it with @contextlib.{decorator}")
    if of_asyncio is not is_async:
        raise UsageError(_NEEDS_THREADS if is_async else _NEEDS_ASYNCIO)
