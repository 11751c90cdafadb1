"""Drivers that run statements on an application's connection, in its transaction.

Recognized by the type of the connection, without importing drivers that are not installed:

    asyncio     asyncpg, psycopg, SQLAlchemy (AsyncConnection, AsyncSession)
    threads     psycopg, psycopg2, SQLAlchemy (Connection, Session), Django, sqlite3

SQLModel's sessions are SQLAlchemy's.  A driver never begins or ends a transaction: the application
does.  SQLAlchemy begins one with the first statement that goes through it.  So statements go
through the session or connection that was handed in, and never through the driver's connection
below it: what that sends before SQLAlchemy began is not undone by a rollback.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, cast

from outbox.drivers.blocking import as_async, resolve
from outbox.drivers.statement import numbered, pyformat
from outbox.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from outbox.drivers.statement import Call, Plan, Rows

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Driver:
    """How to use one type of connection."""

    is_async: bool
    execute: Callable[[Any, Call], Awaitable[Rows]]
    """Returns the rows; on a blocking connection without suspending."""
    dialect: Callable[[Any], str]
    """Returns the SQL dialect of a connection."""
    has_transaction: Callable[[Any], bool]
    """Whether a transaction is open, or the next statement begins one."""
    begin: str
    """How an application begins a transaction, for messages."""
    below: str = ""
    """What to do if the connection belongs to another library, for messages."""
    connect: Callable[[Any], Any] | None = None
    """Returns the connection of a session, or an awaitable of it."""
    flush: Callable[[Any], Awaitable[None]] | None = None
    """Sends what a session holds back."""


class OpenConnection:
    """A connection that can run statements now."""

    __slots__ = ("_connection", "_given", "driver")

    def __init__(self, driver: Driver, given: Any, connection: Any) -> None:
        self.driver = driver
        self._given = given
        self._connection = connection

    @property
    def dialect(self) -> str:
        """The SQL dialect."""
        return self.driver.dialect(self._connection)

    @property
    def has_transaction(self) -> bool:
        """Whether a transaction is open, or the next statement begins one."""
        return self.driver.has_transaction(self._connection)

    async def flush(self) -> None:
        """Send what a session holds back: it precedes the next statement, and may fail."""
        if self.driver.flush is not None:
            await self.driver.flush(self._given)

    def execute(self, call: Call) -> Awaitable[Rows]:
        """Run a statement; returns its rows."""
        return self.driver.execute(self._connection, call)

    async def execute_plan(self, plan: Plan[T]) -> T:
        """Run the statements of a plan; returns its result."""
        try:
            call = next(plan)
            while True:
                call = plan.send(await self.execute(call))
        except StopIteration as end:
            return cast("T", end.value)


async def open_connection(given: Any, driver: Driver | None = None) -> OpenConnection:
    """Prepare an application's connection or session for statements.

    Raises:
        UsageError: it is of an unsupported type.
    """
    driver = driver or driver_of(given)
    connection = given if driver.connect is None else await resolve(driver.connect(given))
    return OpenConnection(driver, given, connection)


def driver_of(given: Any) -> Driver:
    """Return the driver of a connection or session.

    Raises:
        UsageError: it is of an unsupported type.
    """
    # Django's connection proxy has the class of what it stands for.
    return _driver_of(given.__class__)


@cache
def _driver_of(kind: type) -> Driver:
    for name in names_of(kind):
        if driver := DRIVERS.get(name):
            return driver
        if advice := _NOT_CONNECTIONS.get(name):
            raise UsageError(f"connection: {type_name(kind)} is not a connection; {advice}")
    raise UsageError(
        f"connection: {type_name(kind)} is not a connection of asyncpg, psycopg, psycopg2, "
        "SQLAlchemy, Django or sqlite3; hand in its driver's connection, or publish with SQL: "
        "SELECT relay.publish_text(…); see docs/howto/publish-from-sql.md#other-drivers"
    )


def names_of(kind: type) -> tuple[tuple[str, str], ...]:
    """Return the package and name of a type and of its parents, the nearest first."""
    return tuple((each.__module__.partition(".")[0], each.__qualname__) for each in kind.__mro__)


def type_name(kind: type) -> str:
    """Return the name of a type for messages."""
    module = kind.__module__
    return kind.__qualname__ if module == "builtins" else f"{module}.{kind.__qualname__}"


# ------------------------------------------------------------------------- execution


async def _asyncpg(connection: Any, call: Call) -> Rows:
    sql, names = numbered(call.sql)
    rows: Rows = await connection.fetch(sql, *(call.parameters[name] for name in names))
    return rows


async def _psycopg(connection: Any, call: Call) -> Rows:
    from psycopg import AsyncConnection, AsyncCursor, Cursor
    from psycopg.rows import tuple_row

    is_async = isinstance(connection, AsyncConnection)
    # Not `connection.cursor()`: an application may have chosen a kind with other parameters.
    kind: Any = AsyncCursor if is_async else Cursor
    cursor = kind(connection, row_factory=tuple_row)
    if not connection.info.pipeline_status:
        return await _on_cursor(cursor, pyformat(call.sql), call)
    # In a pipeline a result arrives when it is synchronized.
    pipeline = connection.pipeline()
    async with pipeline if is_async else as_async(pipeline) as opened:
        return await _on_cursor(cursor, pyformat(call.sql), call, opened.sync)


def _psycopg2(connection: Any, call: Call) -> Awaitable[Rows]:
    from psycopg2.extensions import cursor

    return _on_cursor(connection.cursor(cursor_factory=cursor), pyformat(call.sql), call)


def _django(connection: Any, call: Call) -> Awaitable[Rows]:
    return _on_cursor(connection.cursor(), pyformat(call.sql), call)


def _sqlite(connection: Any, call: Call) -> Awaitable[Rows]:
    cursor = connection.cursor()
    cursor.row_factory = None
    return _on_cursor(cursor, call.sql, call)


async def _on_cursor(
    cursor: Any, sql: str, call: Call, synchronize: Callable[[], Any] | None = None
) -> Rows:
    try:
        await resolve(cursor.execute(sql, call.parameters))
        if synchronize is not None:
            await resolve(synchronize())
        rows: Rows = await resolve(cursor.fetchall()) if _has_rows(cursor) else ()
        return rows
    finally:
        await resolve(cursor.close())


def _has_rows(cursor: Any) -> bool:
    # psycopg builds its `description` anew each time.
    result = getattr(cursor, "pgresult", None)
    return bool(cursor.description) if result is None else result.nfields > 0


async def _sqlalchemy(connection: Any, call: Call) -> Rows:
    # In the style of the driver where it is known: `text` costs as much as a small statement.
    match connection.dialect.paramstyle:
        case "pyformat":
            running = connection.exec_driver_sql(pyformat(call.sql), call.parameters)
        case "numeric_dollar":
            sql, names = numbered(call.sql)
            running = connection.exec_driver_sql(
                sql, tuple(call.parameters[name] for name in names)
            )
        case _:
            running = connection.execute(_text(call.sql), call.parameters)
    result = await resolve(running)
    rows: Rows = result.fetchall() if result.returns_rows else ()
    return rows


@cache
def _text(sql: str) -> Any:
    from sqlalchemy import text

    return text(sql)


async def _memory(transaction: Any, call: Call) -> Rows:
    rows: Rows = await transaction.execute(call)
    return rows


async def _flush_session(session: Any) -> None:
    from sqlalchemy.exc import InvalidRequestError

    try:
        await resolve(session.flush())
    except InvalidRequestError as error:
        # Called by a listener of the flush itself.
        if "already flushing" not in str(error):
            raise


# ----------------------------------------------------------------------- transactions


# PQTRANS_IDLE and PQTRANS_ACTIVE: a pipeline has statements in flight.
_OUTSIDE = (0, 1)


def _asyncpg_has_transaction(connection: Any) -> Any:
    # A closed one raises the driver's own error later.
    return connection.is_closed() or connection.is_in_transaction()


def _psycopg_has_transaction(connection: Any) -> bool:
    # Without autocommit the first statement begins a transaction.  Of a closed connection the
    # status is unknown, and the driver raises its own error later.
    return not connection.autocommit or connection.info.transaction_status not in _OUTSIDE


def _psycopg2_has_transaction(connection: Any) -> bool:
    if not _psycopg_has_transaction(connection):
        # `with connection:` begins one with the first statement, also in autocommit.
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
    return _psycopg_has_transaction(connection)


def _sqlalchemy_has_transaction(connection: Any) -> bool:
    blocking = getattr(connection, "sync_connection", connection)
    if blocking is None:
        raise UsageError("connection: it was not started; use `async with engine.connect()`")
    pooled = blocking.connection
    raw = pooled.driver_connection
    if blocking.dialect.name == "sqlite":
        return _sqlite_has_transaction(raw)
    # In autocommit the application may have sent BEGIN itself.
    return not pooled.dbapi_connection.autocommit or driver_of(raw).has_transaction(raw)


def _django_has_transaction(connection: Any) -> bool:
    return connection.in_atomic_block or not connection.get_autocommit()


def _sqlite_has_transaction(connection: Any) -> bool:
    return connection.isolation_level is not None or connection.in_transaction


# -------------------------------------------------------------------------- the table


def _postgresql(_: Any) -> str:
    return "postgresql"


def _sqlalchemy_dialect(connection: Any) -> str:
    return str(connection.dialect.name)


_PSYCOPG = Driver(
    is_async=False,
    execute=_psycopg,
    dialect=_postgresql,
    has_transaction=_psycopg_has_transaction,
    begin="with connection.transaction():",
)
_PSYCOPG_ASYNC = replace(_PSYCOPG, is_async=True, begin="async with connection.transaction():")
_ASYNCPG = replace(
    _PSYCOPG_ASYNC,
    execute=_asyncpg,
    has_transaction=_asyncpg_has_transaction,
    below=" (with SQLAlchemy, hand in its session or connection, not the driver's)",
)
_PSYCOPG2 = replace(
    _PSYCOPG, execute=_psycopg2, has_transaction=_psycopg2_has_transaction, begin="with connection:"
)
_SQLALCHEMY = Driver(
    is_async=False,
    execute=_sqlalchemy,
    dialect=_sqlalchemy_dialect,
    has_transaction=_sqlalchemy_has_transaction,
    begin="with engine.begin() as connection:",
)
_SESSION = replace(
    _SQLALCHEMY,
    connect=lambda session: session.connection(),
    flush=_flush_session,
    begin="with session.begin():",
)
_SQLALCHEMY_ASYNC = replace(_SQLALCHEMY, is_async=True, begin=f"async {_SQLALCHEMY.begin}")
_SESSION_ASYNC = replace(_SESSION, is_async=True, begin=f"async {_SESSION.begin}")
_DJANGO = Driver(
    is_async=False,
    execute=_django,
    dialect=lambda connection: str(connection.vendor),
    has_transaction=_django_has_transaction,
    begin="with transaction.atomic():",
)
_SQLITE = Driver(
    is_async=False,
    execute=_sqlite,
    dialect=lambda _: "sqlite",
    has_transaction=_sqlite_has_transaction,
    begin='connection.execute("BEGIN")',
)
_MEMORY = Driver(
    is_async=True,
    execute=_memory,
    dialect=lambda _: "memory",
    has_transaction=lambda _: True,
    begin="with database.transaction() as connection:",
)
DRIVERS = {
    ("outbox", "MemoryTransaction"): _MEMORY,
    ("asyncpg", "Connection"): _ASYNCPG,
    ("asyncpg", "PoolConnectionProxy"): _ASYNCPG,
    ("psycopg", "AsyncConnection"): _PSYCOPG_ASYNC,
    ("psycopg", "Connection"): _PSYCOPG,
    # Defined in C, so its module is that of its Python interface.
    ("psycopg2", "connection"): _PSYCOPG2,
    ("sqlalchemy", "AsyncConnection"): _SQLALCHEMY_ASYNC,
    ("sqlalchemy", "AsyncSession"): _SESSION_ASYNC,
    ("sqlalchemy", "async_scoped_session"): _SESSION_ASYNC,
    ("sqlalchemy", "Connection"): _SQLALCHEMY,
    ("sqlalchemy", "Session"): _SESSION,
    ("sqlalchemy", "scoped_session"): _SESSION,
    ("sqlite3", "Connection"): _SQLITE,
    # The type of `django.db.connection`, a proxy for the thread's connection.
    ("django", "ConnectionProxy"): _DJANGO,
    ("django", "BaseDatabaseWrapper"): _DJANGO,
}

_OF_POOL = "acquire a connection of the pool, and begin a transaction on it"
_OF_ENGINE = "use the connection of `{}with engine.begin() as connection:`, or a session"
_OF_SESSIONS = "use the session of `{}with sessions.begin() as session:`"
_OF_CURSOR = "use its connection"
_NOT_CONNECTIONS = {
    ("asyncpg", "Pool"): _OF_POOL,
    ("psycopg_pool", "BasePool"): _OF_POOL,
    ("psycopg2", "AbstractConnectionPool"): _OF_POOL,
    ("sqlalchemy", "Engine"): _OF_ENGINE.format(""),
    ("sqlalchemy", "AsyncEngine"): _OF_ENGINE.format("async "),
    ("sqlalchemy", "sessionmaker"): _OF_SESSIONS.format(""),
    ("sqlalchemy", "async_sessionmaker"): _OF_SESSIONS.format("async "),
    ("flask_sqlalchemy", "SQLAlchemy"): "use its session: `db.session`",
    ("peewee", "Database"): "use `database.connection()`",
    ("databases", "Database"): "use `database.connection().raw_connection`",
    ("databases", "Connection"): "use `connection.raw_connection`",
    ("pony", "Database"): "use `database.get_connection()`",
    ("piccolo", "PostgresTransaction"): "use `transaction.connection`",
    ("psycopg", "BaseCursor"): _OF_CURSOR,
    ("psycopg2", "cursor"): _OF_CURSOR,
    ("django", "CursorWrapper"): _OF_CURSOR,
    ("django", "ConnectionHandler"): 'use one of its connections: `connections["default"]`',
}
