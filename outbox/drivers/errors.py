"""What an error of an application's database means, whichever driver raised it.

SQLAlchemy and Django wrap the errors of drivers: the SQLSTATE is that of any error below.  Drivers
are recognized by the names of their types, so that unused ones need not be installed.
"""

from __future__ import annotations

import re
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple

from outbox.drivers.connections import names_of

if TYPE_CHECKING:
    from collections.abc import Iterator

# SQLSTATEs, see appendix A of the PostgreSQL documentation.
NO_PRIVILEGE = "42501"
LOCK_NOT_GRANTED = ("55P03", "40P01")
"""A lock time-out; or a deadlock, where deadlock_timeout is shorter."""
CREATED_MEANWHILE = ("23505", "42P06")
"""Two sessions have created the same schema or its history, and the other one has committed."""
NOT_STORED = "OB003"
"""A trigger or a rule suppressed an INSERT: see schema/0014_absence.sql."""
NO_POSITION = ("OB004", "OB005", "OB006", "OB007", "OB008")
"""A snapshot has no position: see schema/0027_positions.sql."""


class ServerError(NamedTuple):
    """What the server reported."""

    sqlstate: str | None
    """The SQLSTATE; None if the error is not the server's."""
    constraint: str | None
    message: str
    hint: str | None


class DatabaseCondition(Enum):
    """A condition that may end without a change of the program."""

    UNAVAILABLE = auto()
    """There is no connection, or the server cannot serve it."""
    BUSY = auto()
    """Others use the connections or rows, or a time limit was reached."""


def server_error(error: BaseException) -> ServerError:
    """Return what the server reported, from an error of any driver."""
    sqlstate = None
    for cause in _chain(error):
        error = cause
        sqlstate = sqlstate or getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    diagnostics = getattr(error, "diag", error)
    message = getattr(diagnostics, "message_primary", None) or str(error).partition("\n")[0]
    hint = getattr(diagnostics, "message_hint", None) or getattr(diagnostics, "hint", None)
    return ServerError(sqlstate, getattr(diagnostics, "constraint_name", None), message, hint)


def condition_of(error: Exception) -> DatabaseCondition | None:
    """Return the condition of the database that an error reports; None for any other error.

    An OSError counts, because asyncpg passes those of its sockets on; so the caller must know
    that it comes from a database.
    """
    if sqlstate := server_error(error).sqlstate:
        return _BY_SQLSTATE.get(sqlstate) or _BY_SQLSTATE.get(sqlstate[:2])
    if isinstance(error, OSError):
        return DatabaseCondition.UNAVAILABLE
    for cause in _chain(error):
        if found := _by_type(cause):
            return found
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    # An error can be its own cause.
    chain = [error]
    while True:
        yield error
        orig = getattr(error, "orig", None)
        cause = orig if isinstance(orig, BaseException) else error.__cause__
        if cause is None or cause in chain:
            return
        chain.append(cause)
        error = cause


def _by_type(error: BaseException) -> DatabaseCondition | None:
    if code := getattr(error, "sqlite_errorcode", None):
        return _BY_SQLITE_CODE.get(code & 0xFF)
    # SQLAlchemy's dialects know which errors of their drivers are lost connections.
    if getattr(error, "connection_invalidated", False):
        return DatabaseCondition.UNAVAILABLE
    for name in names_of(type(error)):
        if name in _WITHOUT_SQLSTATE:
            condition, pattern = _WITHOUT_SQLSTATE[name]
            return condition if re.search(pattern, str(error)) else None
    return None


# https://www.postgresql.org/docs/current/errcodes-appendix.html
_BY_SQLSTATE = {
    "08": DatabaseCondition.UNAVAILABLE,  # connection exception; all errors of PgBouncer
    "28": DatabaseCondition.UNAVAILABLE,  # the login was refused
    "3D": DatabaseCondition.UNAVAILABLE,  # no such database, reported at the login
    "53": DatabaseCondition.UNAVAILABLE,  # insufficient resources: connections, disk, memory
    "57": DatabaseCondition.UNAVAILABLE,  # shutdown, start or crash of the server
    "58": DatabaseCondition.UNAVAILABLE,  # system error, such as of a disk
    "57014": DatabaseCondition.BUSY,  # query canceled, as by statement_timeout
    "40001": DatabaseCondition.BUSY,  # serialization failure
    "40P01": DatabaseCondition.BUSY,  # deadlock detected
    "55P03": DatabaseCondition.BUSY,  # lock not available, as by lock_timeout
    "25P03": DatabaseCondition.BUSY,  # idle in transaction session timeout
    "25P04": DatabaseCondition.BUSY,  # transaction timeout
}

# https://www.sqlite.org/rescode.html
_BY_SQLITE_CODE = {
    5: DatabaseCondition.BUSY,
    6: DatabaseCondition.BUSY,  # SQLITE_LOCKED
    7: DatabaseCondition.UNAVAILABLE,  # SQLITE_NOMEM
    10: DatabaseCondition.UNAVAILABLE,  # SQLITE_IOERR
    13: DatabaseCondition.UNAVAILABLE,  # SQLITE_FULL
    14: DatabaseCondition.UNAVAILABLE,  # SQLITE_CANTOPEN
}

_ANY = ""
# Errors without an SQLSTATE: their condition, and the messages for which it is true.
_WITHOUT_SQLSTATE: dict[tuple[str, str], tuple[DatabaseCondition | None, str]] = {
    # libpq has none when it cannot connect, and when it loses a connection.
    ("psycopg", "OperationalError"): (DatabaseCondition.UNAVAILABLE, _ANY),
    ("psycopg2", "OperationalError"): (DatabaseCondition.UNAVAILABLE, _ANY),
    # A rollback on a lost connection raises these, instead of the error before it.
    ("psycopg2", "InterfaceError"): (DatabaseCondition.UNAVAILABLE, "connection already closed"),
    ("asyncpg", "InterfaceError"): (DatabaseCondition.UNAVAILABLE, "connection is closed"),
    # No server of several has the role that `target_session_attrs` demands.
    ("asyncpg", "TargetServerAttributeNotMatched"): (DatabaseCondition.UNAVAILABLE, _ANY),
    # All connections of a pool are in use.
    ("psycopg_pool", "TooManyRequests"): (DatabaseCondition.BUSY, _ANY),
    ("psycopg2", "PoolError"): (DatabaseCondition.BUSY, "exhausted"),
    ("sqlalchemy", "TimeoutError"): (DatabaseCondition.BUSY, _ANY),
    # An OperationalError, but the application has not opened the pool, or closed it.
    ("psycopg_pool", "PoolClosed"): (None, _ANY),
}
