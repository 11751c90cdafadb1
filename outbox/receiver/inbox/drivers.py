"""Drivers that run the inbox's statements on the application's connection.

Recognized by the type of the connection, without importing drivers that are not installed:

    asyncio     asyncpg, psycopg, SQLAlchemy (AsyncConnection, AsyncSession)
    threads     psycopg, SQLAlchemy (Connection, Session), Django, sqlite3

A driver never begins or ends a transaction: the application does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args

from outbox.errors import UsageError
from outbox.receiver.inbox.statements import Dialect

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator

    from outbox.receiver.inbox.process import Call, Rows

T = TypeVar("T")

_PARAMETER = re.compile(r"(?<!:):([a-z_]+)")


_known: dict[type, Driver] = {}


@dataclass(frozen=True, slots=True)
class Driver:
    """How to use one type of connection."""

    name: str
    is_async: bool
    execute: Callable[[Any, Call], Any]
    """Returns the rows, or a coroutine that does."""
    dialect: Callable[[Any], str]
    """Returns the SQL dialect of a connection."""
    commits_each: Callable[[Any], bool]
    """Whether a connection is in autocommit mode without an open transaction."""


def driver_of(connection: Any) -> Driver:
    """Return the driver of a connection.

    Raises:
        UsageError: the connection is of an unsupported type.
    """
    kind = type(connection)
    driver = _known.get(kind) or _driver_of_type(kind)
    if driver is None:
        raise UsageError(
            f"connection: {kind.__module__}.{kind.__qualname__} is not a connection "
            "of asyncpg, psycopg, SQLAlchemy, Django or sqlite3"
        )
    _known[kind] = driver
    return driver


def dialect_of(connection: Any) -> Dialect:
    """Return the SQL dialect of a connection.

    Raises:
        UsageError: neither PostgreSQL nor SQLite, or an unsupported connection.
    """
    name = driver_of(connection).dialect(connection)
    if name in get_args(Dialect):
        return cast("Dialect", name)
    raise UsageError(f"connection: an inbox works in PostgreSQL and SQLite, not in {name}")


def require_transaction(connection: Any) -> None:
    """Refuse a connection in autocommit mode.

    Raises:
        UsageError: the delivery would be committed before its effect.
    """
    if driver_of(connection).commits_each(connection):
        raise UsageError(
            "connection: begin a transaction first, so that the delivery and its effect are "
            "committed together"
        )


def run(connection: Any, steps: Generator[Call, Rows, T]) -> T:
    """Run a plan of statements on a blocking connection."""
    execute = driver_of(connection).execute
    try:
        call = next(steps)
        while True:
            call = steps.send(execute(connection, call))
    except StopIteration as end:
        result: T = end.value
        return result


async def run_async(connection: Any, steps: Generator[Call, Rows, T]) -> T:
    """Run a plan of statements on an asyncio connection."""
    execute: Callable[[Any, Call], Awaitable[Rows]] = driver_of(connection).execute
    try:
        call = next(steps)
        while True:
            call = steps.send(await execute(connection, call))
    except StopIteration as end:
        result: T = end.value
        return result


def _driver_of_type(kind: type) -> Driver | None:
    for parent in kind.__mro__:
        module, name = parent.__module__, parent.__qualname__
        if driver := _DRIVERS.get((module.partition(".")[0], name)):
            return driver
        if module.startswith("django.db.backends.") and name == "BaseDatabaseWrapper":
            return _DJANGO
    return None


# ------------------------------------------------------------------- parameter styles


@cache
def _numbered(sql: str) -> tuple[str, tuple[str, ...]]:
    """Convert :name parameters to $1, $2 …; returns the SQL and the names in order."""
    names: list[str] = []

    def number(match: re.Match[str]) -> str:
        name = match[1]
        if name not in names:
            names.append(name)
        return f"${names.index(name) + 1}"

    return _PARAMETER.sub(number, sql), tuple(names)


@cache
def _pyformat(sql: str) -> str:
    return _PARAMETER.sub(r"%(\1)s", sql)


# ------------------------------------------------------------------------- the drivers


async def _asyncpg(connection: Any, call: Call) -> Rows:
    sql, names = _numbered(call.sql)
    rows: Rows = await connection.fetch(sql, *(call.parameters[name] for name in names))
    return rows


async def _psycopg_async(connection: Any, call: Call) -> Rows:
    from psycopg.rows import tuple_row

    async with connection.cursor(row_factory=tuple_row) as cursor:
        await cursor.execute(_pyformat(call.sql), call.parameters)
        return await cursor.fetchall() if cursor.description else ()


def _psycopg(connection: Any, call: Call) -> Rows:
    from psycopg.rows import tuple_row

    with connection.cursor(row_factory=tuple_row) as cursor:
        cursor.execute(_pyformat(call.sql), call.parameters)
        return cursor.fetchall() if cursor.description else ()


async def _sqlalchemy_async(connection: Any, call: Call) -> Rows:
    result = await connection.execute(_text(call.sql), call.parameters)
    rows: Rows = result.fetchall() if result.returns_rows else ()
    return rows


def _sqlalchemy(connection: Any, call: Call) -> Rows:
    result = connection.execute(_text(call.sql), call.parameters)
    rows: Rows = result.fetchall() if result.returns_rows else ()
    return rows


@cache
def _text(sql: str) -> Any:
    from sqlalchemy import text

    return text(sql)


def _django(connection: Any, call: Call) -> Rows:
    with connection.cursor() as cursor:
        cursor.execute(_pyformat(call.sql), call.parameters)
        rows: Rows = cursor.fetchall() if cursor.description else ()
        return rows


def _sqlite(connection: Any, call: Call) -> Rows:
    cursor = connection.cursor()
    cursor.row_factory = None
    try:
        rows: Rows = cursor.execute(call.sql, call.parameters).fetchall()
        return rows
    finally:
        cursor.close()


def _postgresql(_: Any) -> str:
    return "postgresql"


def _memory(_: Any) -> str:
    return "memory"


def _never(_: Any) -> bool:
    return False


def _of_bind(connection: Any) -> str:
    # A session names its engine, a connection its dialect.
    bound = connection if hasattr(connection, "dialect") else connection.get_bind()
    name: str = bound.dialect.name
    return name


def _asyncpg_commits_each(connection: Any) -> bool:
    return not connection.is_in_transaction()


def _psycopg_commits_each(connection: Any) -> bool:
    # Without autocommit the first statement begins a transaction.
    return bool(connection.autocommit) and not connection.info.transaction_status


def _sqlalchemy_commits_each(connection: Any) -> bool:
    bound = connection if hasattr(connection, "dialect") else connection.get_bind()
    level = bound.get_execution_options().get("isolation_level")
    return "AUTOCOMMIT" in (level, getattr(bound.dialect, "_on_connect_isolation_level", None))


def _django_commits_each(connection: Any) -> bool:
    return bool(connection.get_autocommit()) and not connection.in_atomic_block


def _sqlite_commits_each(connection: Any) -> bool:
    return connection.isolation_level is None and not connection.in_transaction


_ASYNCPG = Driver("asyncpg", True, _asyncpg, _postgresql, _asyncpg_commits_each)
_SQLALCHEMY = Driver("SQLAlchemy", False, _sqlalchemy, _of_bind, _sqlalchemy_commits_each)
_SQLALCHEMY_ASYNC = Driver(
    "SQLAlchemy", True, _sqlalchemy_async, _of_bind, _sqlalchemy_commits_each
)
_DJANGO = Driver("Django", False, _django, lambda c: str(c.vendor), _django_commits_each)
_DRIVERS = {
    ("outbox", "MemoryTransaction"): Driver(
        "memory", False, lambda connection, call: connection.execute(call), _memory, _never
    ),
    ("outbox", "AsyncMemoryTransaction"): Driver(
        "memory", True, lambda connection, call: connection.execute_async(call), _memory, _never
    ),
    ("asyncpg", "Connection"): _ASYNCPG,
    ("asyncpg", "PoolConnectionProxy"): _ASYNCPG,
    ("psycopg", "AsyncConnection"): Driver(
        "psycopg", True, _psycopg_async, _postgresql, _psycopg_commits_each
    ),
    ("psycopg", "Connection"): Driver(
        "psycopg", False, _psycopg, _postgresql, _psycopg_commits_each
    ),
    ("sqlalchemy", "AsyncConnection"): _SQLALCHEMY_ASYNC,
    ("sqlalchemy", "AsyncSession"): _SQLALCHEMY_ASYNC,
    ("sqlalchemy", "async_scoped_session"): _SQLALCHEMY_ASYNC,
    ("sqlalchemy", "Connection"): _SQLALCHEMY,
    ("sqlalchemy", "Session"): _SQLALCHEMY,
    ("sqlalchemy", "scoped_session"): _SQLALCHEMY,
    ("sqlite3", "Connection"): Driver(
        "sqlite3", False, _sqlite, lambda _: "sqlite", _sqlite_commits_each
    ),
    # The type of `django.db.connection`, a proxy for the thread's connection.
    ("django", "ConnectionProxy"): _DJANGO,
}
