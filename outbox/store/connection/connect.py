"""Database connections, and mapping of database errors to outbox errors."""

from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import asyncpg

from outbox.core.model.schema_name import schema_missing
from outbox.core.model.sql_names import quote_literal, search_path
from outbox.errors import CannotRun, DatabaseUnavailable, OutboxError, UsageError
from outbox.store.connection.pgbouncer import PooledWorker
from outbox.store.connection.row_security import RowSecurityError, require_unprotected
from outbox.store.connection.store_connection import StoreConnection
from outbox.store.connection.time_range import limit_times
from outbox.store.errors import ResponseLost
from outbox.store.schema.server_product import (
    FOREIGN_PARAMETERS,
    READ_VERSION,
    explain_foreign_product,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from asyncpg import Connection

    from outbox.store.connection.dsn import Dsn

SERVER_VERSION_MIN = 14
"""PostgreSQL 14 introduced multiranges, in which gaps are stored."""

ENCODING = "UTF8"

# The client detects a dead server after about 25 s.
_KEEPALIVES = {"keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3}

SEND_TIMEOUT_S = 30.0
"""The server ends a session whose client has acknowledged no data for this time."""
PROBES = 5
"""Keepalive probes of the server within that time."""
TRANSACTION_TIMEOUT_S = 600.0
"""Limit of a transaction, from PostgreSQL 17 on.  It is the only time-out of the server for a
client that stops between the messages of one statement (the backend is "active" then), so it is
far above the duration of our transactions: a slow database must not lose its sessions."""
TRANSACTION_TIMEOUT_SINCE = 17

# Messages of proxies that reject startup parameters (PgBouncer, Odyssey, pgcat).
_PROXY_REFUSALS = ("unsupported startup parameter", "startup parameter")

CONNECTION_ERRORS = (
    OSError,  # A TimeoutError is one.
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    # Raised by asyncpg when the server closed the connection while sending a result.
    asyncpg.InternalClientError,
)
"""Every error that a statement may raise: the server rejected it, or the connection was lost."""

LOST_ERRORS = (
    asyncpg.PostgresConnectionError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.InternalClientError,
    asyncpg.CannotConnectNowError,
    asyncpg.IdleInTransactionSessionTimeoutError,
    asyncpg.TransactionTimeoutError,
    ConnectionError,
)
"""The connection was lost; whether its statement was executed is unknown."""

READ_ONLY = (
    "the server accepts no writes in this session; connect to the primary (with several hosts: "
    "target_session_attrs=primary), or reset default_transaction_read_only"
)
"""What to do about a ReadOnlySQLTransactionError."""

_TEMPORARY_REFUSALS = (
    asyncpg.InsufficientResourcesError,
    asyncpg.OperatorInterventionError,
    asyncpg.PostgresSystemError,
)
"""The server may accept the same login later: no connection left, shutting down, disk error."""
_REFUSED_SETTING = (
    asyncpg.UndefinedObjectError,
    asyncpg.InvalidParameterValueError,
    asyncpg.CantChangeRuntimeParamError,
    asyncpg.InsufficientPrivilegeError,
    asyncpg.FeatureNotSupportedError,
)
_ABSENT = (
    asyncpg.UndefinedTableError,
    asyncpg.UndefinedFunctionError,
    asyncpg.UndefinedColumnError,
    asyncpg.InvalidSchemaNameError,
)


async def connect(
    dsn: Dsn,
    *,
    schema: str,
    application_name: str = "outbox",
    server_settings: Mapping[str, str] | None = None,
    pooled: bool = False,
    send_timeout_s: float = SEND_TIMEOUT_S,
    transaction_timeout_s: float | None = TRANSACTION_TIMEOUT_S,
    connection_class: type[StoreConnection] | None = None,
) -> Connection[Any]:
    """Open a connection whose search path is the schema alone.

    Hosts are tried in order, each with the full connect time-out, as in libpq.  The schema need
    not exist: see `migrate.require_current`.

    Args:
        dsn: address of the database.
        schema: name of the outbox schema.
        application_name: shown in pg_stat_activity, unless the DSN sets one.
        server_settings: further session settings.
        pooled: the DSN leads to a transaction-pooling proxy.  No other setting is sent then,
            because it would leak into other clients' sessions: the role itself must have the
            search path.
        send_timeout_s: the server ends the session if the client does not read for this time;
            over TCP, if its system supports that.
        transaction_timeout_s: limit of a transaction, if the server has one; None: no limit.
        connection_class: class of the connection; None: the general one.

    Raises:
        DatabaseUnavailable: no server responds, the login was refused, or the database is unknown.
        CannotRun: the server is too old, the database has another encoding, or the proxy's role is
            not configured.
        UsageError: the server rejects a setting in the DSN.
    """
    probe_s = max(1, int(send_timeout_s / PROBES))
    settings = {
        "search_path": search_path(schema),
        # JIT compilation costs more than any of our statements.
        "jit": "off",
        # Otherwise NULL in an array literal of a message is the text "NULL".
        "array_nulls": "on",
        "application_name": application_name,
        # Well below the next limit, which applies to the probes, too: Linux ends a connection
        # when it has expired, whatever their number, so several of them must fit in it.
        "tcp_keepalives_idle": str(probe_s),
        "tcp_keepalives_interval": str(probe_s),
        "tcp_keepalives_count": str(PROBES),
        # A client that does not read would keep its backend, and whatever that holds, for ever:
        # its system responds to keepalives.
        "tcp_user_timeout": milliseconds(send_timeout_s),
        **dsn.server_settings,
        **(server_settings or {}),
        # A policy makes a statement fail, instead of hiding rows from it.
        "row_security": "off",
    }
    arguments = dsn.asyncpg_arguments()
    if pooled:
        # The next server session would not have the named prepared statements.
        arguments["statement_cache_size"] = 0
        # Every proxy knows this one, and sets it for the statements of each client.
        settings = {"application_name": settings["application_name"]}
    if connection_class is None:
        connection_class = PooledWorker if pooled else StoreConnection
    arguments["connection_class"] = connection_class
    connection = await _connect_first(dsn, arguments, settings)
    connection.reopen = partial(
        connect,
        dsn,
        schema=schema,
        application_name=application_name,
        server_settings=server_settings,
        pooled=pooled,
        send_timeout_s=send_timeout_s,
        transaction_timeout_s=transaction_timeout_s,
        connection_class=connection_class,
    )
    try:
        _keep_alive(connection, {**_KEEPALIVES, **dsn.keepalives})
        major = connection.get_server_version().major
        reported = connection.get_settings()
        if major < SERVER_VERSION_MIN or any(
            hasattr(reported, each) for each in FOREIGN_PARAMETERS
        ):
            version = await connection.fetchval(READ_VERSION, timeout=dsn.connect_timeout_s)
            raise CannotRun(
                explain_foreign_product(version)
                or f"{dsn} runs PostgreSQL {major}; {SERVER_VERSION_MIN} or later is needed"
            )
        encoding = getattr(reported, "server_encoding", ENCODING)
        if encoding != ENCODING:
            raise CannotRun(
                f"{dsn} has the encoding {encoding}; {ENCODING} is needed, because payloads and "
                "responses may contain any character"
            )
        async with asyncio.timeout(dsn.connect_timeout_s):
            await limit_times(connection)
            if pooled:
                await _check_role(connection, schema)
            else:
                await set_if_supported(
                    connection, transaction_settings(connection, transaction_timeout_s)
                )
    except TimeoutError as error:
        connection.terminate()
        raise DatabaseUnavailable(f"{dsn} does not respond after login") from error
    except BaseException:
        connection.terminate()
        raise
    return connection


def milliseconds(seconds: float) -> str:
    """A duration as the value of a setting without a unit; a positive one is never 0 (off)."""
    return str(max(round(seconds * 1000), 1)) if seconds else "0"


def transaction_settings(
    connection: Connection[Any], transaction_timeout_s: float | None
) -> dict[str, str]:
    """Settings of a transaction that this server has and older ones lack."""
    if connection.get_server_version().major < TRANSACTION_TIMEOUT_SINCE:
        return {}
    return {"transaction_timeout": milliseconds(transaction_timeout_s or 0)}


async def set_if_supported(connection: Connection[Any], settings: Mapping[str, str]) -> None:
    """Set what this server supports; a startup parameter that it lacks would refuse the login."""
    for name, value in settings.items():
        with suppress(*_REFUSED_SETTING):
            await connection.execute(f"SET {name} = {quote_literal(value)}")


async def _connect_first(
    dsn: Dsn, arguments: dict[str, Any], settings: dict[str, str]
) -> Connection[Any]:
    failures: list[OutboxError] = []
    for address in dsn.addresses:
        host, port = address
        try:
            return await asyncpg.connect(
                **{**arguments, "host": [host], "port": [port]},
                timeout=dsn.connect_timeout_s,
                server_settings=settings,
            )
        except (
            OSError,
            asyncpg.TargetServerAttributeNotMatched,
            asyncpg.CannotConnectNowError,
            asyncpg.ConnectionDoesNotExistError,
        ) as error:
            failures.append(_connect_failure(dsn, address, error))
        except (asyncpg.PostgresError, asyncpg.InterfaceError, ValueError) as error:
            # A rejected login is final: the other hosts would reject it, too.
            failure = _connect_failure(dsn, address, error)
            if isinstance(failure, DatabaseUnavailable):
                failure = DatabaseUnavailable(f"{failure} (from {dsn.source})")
            raise failure from error
    # Each host's failure; identical messages once.
    message = "; ".join(dict.fromkeys(str(failure) for failure in failures))
    raise DatabaseUnavailable(f"{message} (from {dsn.source})")


def _connect_failure(dsn: Dsn, address: tuple[str, int], error: Exception) -> OutboxError:
    """The failure in one line, with the next step."""
    host, port = address
    local = host.startswith("/")
    where = f"{host}/.s.PGSQL.{port}" if local else f"{host}:{port}"
    detail = _first_line(error)
    match error:
        case TimeoutError():
            text = f"no response from {where} within {dsn.connect_timeout_s:g} s; check the address"
        case socket.gaierror():
            text = f'the host name "{host}" is unknown; check the address'
        case ssl.SSLCertVerificationError():
            text = (
                f"the certificate of {where} was not accepted ({error.verify_message}); "
                "check sslmode and sslrootcert"
            )
        case ssl.SSLError():
            text = f"TLS with {where} failed ({error.reason or detail}); check sslmode"
        case FileNotFoundError() if not local:
            text = "a file named by sslrootcert, sslcert, sslkey or sslcrl is missing"
        case FileNotFoundError() | ConnectionRefusedError():
            text = f"no server listens at {where}; start it, or correct the address"
        case PermissionError():
            text = f"{where} may not be opened by this system user"
        case ConnectionError() if "SSL upgrade" in detail and not _wants_tls(dsn):
            # PostgreSQL without TLS declines, and the login continues.
            text = f"the server at {where} is not PostgreSQL; check the port"
        case ConnectionError() if "SSL upgrade" in detail:
            text = f"the server at {where} does not offer TLS, which sslmode requires"
        case ConnectionResetError() | asyncpg.ConnectionDoesNotExistError():
            text = f"{where} closed the connection at once"
        case ConnectionError() if "connection_lost" in detail:
            text = f"{where} closed the connection at once"
        case asyncpg.InvalidPasswordError():
            text = f'the password of role "{dsn.user}" was not accepted at {where}'
        case asyncpg.InvalidCatalogNameError():
            text = f'database "{dsn.database}" does not exist at {where}; create it first'
        case asyncpg.InvalidAuthorizationSpecificationError():
            text = f"{where} refused the login: {detail}"
        case asyncpg.TooManyConnectionsError():
            text = f"{where} has no connection left: {detail}"
        case asyncpg.TargetServerAttributeNotMatched():
            text = f"{where} is not a {dsn.target_session_attrs} server (target_session_attrs)"
        case asyncpg.ClientConfigurationError() | ValueError():
            return UsageError(f"{dsn.source}: {detail}")
        case asyncpg.PostgresError() if any(word in detail for word in _PROXY_REFUSALS):
            text = f"{where} is a proxy that takes no session settings; set OUTBOX_POOLED=true"
        case asyncpg.UndefinedObjectError() | asyncpg.InvalidParameterValueError():
            return UsageError(f"{dsn.source}: {where} does not take a setting: {detail}")
        case _:
            text = f"{where} cannot be used: {detail or type(error).__name__}"
    return DatabaseUnavailable(text)


def is_temporary(error: DatabaseUnavailable) -> bool:
    """Whether the same login may succeed later: no server responded, or it is overloaded."""
    cause = error.__cause__
    refused = isinstance(cause, asyncpg.PostgresError | asyncpg.InterfaceError | ValueError)
    return not refused or isinstance(cause, _TEMPORARY_REFUSALS)


def in_one_line(error: BaseException) -> str:
    """The error in one line, for the log."""
    message = _first_line(error)
    if isinstance(error, OutboxError) and message:
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _wants_tls(dsn: Dsn) -> bool:
    return dsn.sslmode not in (None, "allow", "prefer") or "sslrootcert" in dsn.tls


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


async def _check_role(connection: Connection[Any], schema: str) -> None:
    row = await connection.fetchrow(
        "SELECT current_schema() AS schema, current_user AS role, current_database() AS database"
    )
    if row["schema"] != schema:
        raise CannotRun(
            "behind a proxy the role itself must find the schema: "
            f'ALTER ROLE "{row["role"]}" IN DATABASE "{row["database"]}" '
            f"SET search_path = {search_path(schema)}"
        )
    await require_unprotected(connection)


def _keep_alive(connection: Connection[Any], options: Mapping[str, int]) -> None:
    """Set TCP keepalives, so that a dead peer is detected."""
    # asyncpg has no public API for the socket.  If it renames the attribute, the client waits for a
    # dead server without keepalives.
    transport = getattr(connection, "_transport", None)
    sock = transport.get_extra_info("socket") if transport is not None else None
    if sock is None or sock.family == getattr(socket, "AF_UNIX", None):
        return
    if options.get("keepalives", 1) == 0:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, option in (
        ("keepalives_idle", "TCP_KEEPIDLE"),
        ("keepalives_interval", "TCP_KEEPINTVL"),
        ("keepalives_count", "TCP_KEEPCNT"),
        ("tcp_user_timeout", "TCP_USER_TIMEOUT"),
    ):
        # Not every system has every option; zero means the system's default.
        if options.get(name, 0) > 0 and hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), options[name])


def not_granted(error: BaseException, purpose: str | None = None) -> str:
    """The missing privilege, and the command that grants it; None: one of several purposes.

    An error due to row security names its own command.
    """
    if isinstance(error, RowSecurityError):
        return _first_line(error)
    named = "--relay, --operator or --reader" if purpose is None else f"--{purpose}"
    return (
        f"{_first_line(error)}; grant the role its purpose (outbox migrate {named} ROLE), "
        "or connect as the role that ran outbox migrate"
    )


@contextmanager
def map_errors(schema: str, purpose: str | None = None) -> Iterator[None]:
    """Map database errors to outbox errors that a user can act on.

    Args:
        purpose: the purpose that a role needs for this operation; None: one of several.

    Raises:
        SchemaMissing: a table or function of the schema does not exist.
        DatabaseUnavailable: the connection was lost.
        CannotRun: the role lacks a privilege, or the server is read-only.
    """
    try:
        yield
    except _ABSENT as error:
        raise schema_missing(schema) from error
    except ResponseLost:
        raise
    except LOST_ERRORS as error:
        raise DatabaseUnavailable(
            f"the connection to the database was lost ({_first_line(error)}); run it again"
        ) from error
    except asyncpg.InsufficientPrivilegeError as error:
        raise CannotRun(not_granted(error, purpose)) from error
    except asyncpg.ReadOnlySQLTransactionError as error:
        raise CannotRun(READ_ONLY) from error
    except asyncpg.InterfaceError as error:
        # Raised by asyncpg when the connection was closed before the statement.
        if "closed" not in str(error):
            raise
        raise DatabaseUnavailable(
            "the connection to the database was lost; run it again"
        ) from error
