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
from outbox.receiver.blocking import resolve
from outbox.receiver.inbox.statements import Dialect

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from outbox.receiver.inbox.process import Call, Plan, Rows

T = TypeVar("T")

_PARAMETER = re.compile(r"(?<!:):([a-z_]+)")


@dataclass(frozen=True, slots=True)
class Driver:
    """How to use one type of connection."""

    execute: Callable[[Any, Call], Awaitable[Rows]]
    """Returns the rows; on a blocking connection without suspending."""
    dialect: Callable[[Any], str]
    """Returns the SQL dialect of a connection."""
    commits_each: Callable[[Any], bool]
    """Whether a connection is in autocommit mode without an open transaction."""


def dialect_of(connection: Any) -> Dialect:
    """Return the SQL dialect of a connection.

    Raises:
        UsageError: neither PostgreSQL nor SQLite, or an unsupported connection.
    """
    name = _driver_of(connection.__class__).dialect(connection)
    if name in get_args(Dialect):
        return cast("Dialect", name)
    raise UsageError(f"connection: an inbox works in PostgreSQL and SQLite, not in {name}")


def require_transaction(connection: Any) -> None:
    """Refuse a connection in autocommit mode.

    Raises:
        UsageError: the delivery would be committed before its effect.
    """
    if _driver_of(connection.__class__).commits_each(connection):
        raise UsageError(
            "connection: begin a transaction first, so that the delivery and its effect are "
            "committed together"
        )


async def execute_plan(connection: Any, plan: Plan[T]) -> T:
    """Run the statements of a plan; returns its result."""
    execute = _driver_of(connection.__class__).execute
    try:
        call = next(plan)
        while True:
            call = plan.send(await execute(connection, call))
    except StopIteration as end:
        return cast("T", end.value)


@cache
def _driver_of(kind: type) -> Driver:
    for parent in kind.__mro__:
        package = parent.__module__.partition(".")[0]
        if driver := _DRIVERS.get((package, parent.__qualname__)):
            return driver
    raise UsageError(
        f"connection: {kind.__module__}.{kind.__qualname__} is not a connection "
        "of asyncpg, psycopg, SQLAlchemy, Django or sqlite3"
    )


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


def _psycopg(connection: Any, call: Call) -> Awaitable[Rows]:
    from psycopg.rows import tuple_row

    cursor = connection.cursor(row_factory=tuple_row)
    return _on_cursor(cursor, _pyformat(call.sql), call)


def _django(connection: Any, call: Call) -> Awaitable[Rows]:
    return _on_cursor(connection.cursor(), _pyformat(call.sql), call)


def _sqlite(connection: Any, call: Call) -> Awaitable[Rows]:
    cursor = connection.cursor()
    cursor.row_factory = None
    return _on_cursor(cursor, call.sql, call)


async def _on_cursor(cursor: Any, sql: str, call: Call) -> Rows:
    try:
        await resolve(cursor.execute(sql, call.parameters))
        rows: Rows = await resolve(cursor.fetchall()) if cursor.description else ()
        return rows
    finally:
        await resolve(cursor.close())


async def _sqlalchemy(connection: Any, call: Call) -> Rows:
    result = await resolve(connection.execute(_text(call.sql), call.parameters))
    rows: Rows = result.fetchall() if result.returns_rows else ()
    return rows


@cache
def _text(sql: str) -> Any:
    from sqlalchemy import text

    return text(sql)


async def _memory(transaction: Any, call: Call) -> Rows:
    rows: Rows = await transaction.execute(call)
    return rows


def _postgresql(_: Any) -> str:
    return "postgresql"


def _sqlalchemy_dialect(connection: Any) -> str:
    name: str = _bound(connection).dialect.name
    return name


def _bound(connection: Any) -> Any:
    # A session names its engine, a connection its dialect.
    return connection if hasattr(connection, "dialect") else connection.get_bind()


def _asyncpg_commits_each(connection: Any) -> bool:
    return not connection.is_in_transaction()


def _psycopg_commits_each(connection: Any) -> bool:
    # Without autocommit the first statement begins a transaction.
    return bool(connection.autocommit) and not connection.info.transaction_status


def _sqlalchemy_commits_each(connection: Any) -> bool:
    bound = _bound(connection)
    level = bound.get_execution_options().get("isolation_level")
    return "AUTOCOMMIT" in (level, getattr(bound.dialect, "_on_connect_isolation_level", None))


def _django_commits_each(connection: Any) -> bool:
    return bool(connection.get_autocommit()) and not connection.in_atomic_block


def _sqlite_commits_each(connection: Any) -> bool:
    return connection.isolation_level is None and not connection.in_transaction


_ASYNCPG = Driver(_asyncpg, _postgresql, _asyncpg_commits_each)
_PSYCOPG = Driver(_psycopg, _postgresql, _psycopg_commits_each)
_SQLALCHEMY = Driver(_sqlalchemy, _sqlalchemy_dialect, _sqlalchemy_commits_each)
_DJANGO = Driver(_django, lambda connection: str(connection.vendor), _django_commits_each)
_DRIVERS = {
    ("outbox", "MemoryTransaction"): Driver(_memory, lambda _: "memory", lambda _: False),
    ("asyncpg", "Connection"): _ASYNCPG,
    ("asyncpg", "PoolConnectionProxy"): _ASYNCPG,
    ("psycopg", "AsyncConnection"): _PSYCOPG,
    ("psycopg", "Connection"): _PSYCOPG,
    ("sqlalchemy", "AsyncConnection"): _SQLALCHEMY,
    ("sqlalchemy", "AsyncSession"): _SQLALCHEMY,
    ("sqlalchemy", "async_scoped_session"): _SQLALCHEMY,
    ("sqlalchemy", "Connection"): _SQLALCHEMY,
    ("sqlalchemy", "Session"): _SQLALCHEMY,
    ("sqlalchemy", "scoped_session"): _SQLALCHEMY,
    ("sqlite3", "Connection"): Driver(_sqlite, lambda _: "sqlite", _sqlite_commits_each),
    # The type of `django.db.connection`, a proxy for the thread's connection.
    ("django", "ConnectionProxy"): _DJANGO,
    ("django", "BaseDatabaseWrapper"): _DJANGO,
}
