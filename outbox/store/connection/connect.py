"""Connections to the database, and its failures in words of ours."""

from __future__ import annotations

import socket
import ssl
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import asyncpg

from outbox.core.model.schema_name import schema_missing
from outbox.core.model.sql_names import search_path
from outbox.errors import CannotRun, DatabaseUnavailable, OutboxError, UsageError
from outbox.store.connection.type_cache import KnowingConnection

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from asyncpg import Connection

    from outbox.store.connection.dsn import Dsn

SERVER_VERSION_MIN = 14
"""Multiranges, which the cursor's state is written in."""

# A dead peer is noticed after some 25 s, on both sides.
_KEEPALIVES = {"keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3}

# A proxy's words for "I pass no settings on" (PgBouncer, Odyssey, pgcat).
_PROXY_REFUSALS = ("unsupported startup parameter", "startup parameter")

TROUBLE = (
    OSError,  # A TimeoutError is one.
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    # What asyncpg says when the server closed the connection while it was answering.
    asyncpg.InternalClientError,
)
"""Everything that a connection may raise: the server refused, or it was lost."""

_LOST = (
    asyncpg.PostgresConnectionError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.InternalClientError,
    asyncpg.CannotConnectNowError,
    asyncpg.IdleInTransactionSessionTimeoutError,
    ConnectionError,
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
    connection_class: type[Connection[Any]] = KnowingConnection,
) -> Connection[Any]:
    """Open a connection whose search path is the schema alone.

    Hosts are tried in order, each with the whole connect time-out, as libpq
    does it.  The schema need not exist: see `migrate.require_current`.

    Args:
        dsn: where to.
        schema: name of our schema.
        application_name: shown in pg_stat_activity, unless the DSN names one.
        server_settings: settings of the session on top of ours.
        pooled: the DSN leads to a proxy that pools transactions.  Nothing is
            set then, because it would leak into other clients' sessions: the
            role itself must have the search path.
        connection_class: what to make of it.

    Raises:
        DatabaseUnavailable: no server, no login, no such database.
        CannotRun: the server is too old, or the proxy's role is not set up.
        UsageError: a setting in the DSN that the server does not take.
    """
    settings = {
        "search_path": search_path(schema),
        # Compiling a plan costs more than any statement of ours.
        "jit": "off",
        "application_name": application_name,
        "tcp_keepalives_idle": str(_KEEPALIVES["keepalives_idle"]),
        "tcp_keepalives_interval": str(_KEEPALIVES["keepalives_interval"]),
        "tcp_keepalives_count": str(_KEEPALIVES["keepalives_count"]),
        **dsn.server_settings,
        **(server_settings or {}),
    }
    arguments = dsn.asyncpg_arguments()
    if pooled:
        # Names of prepared statements would be unknown to the next server.
        arguments["statement_cache_size"] = 0
        settings = {}
    arguments["connection_class"] = connection_class
    connection = await _connect_first(dsn, arguments, settings)
    try:
        _keep_alive(connection, {**_KEEPALIVES, **dsn.keepalives})
        major = connection.get_server_version().major
        if major < SERVER_VERSION_MIN:
            raise CannotRun(
                f"{dsn} runs PostgreSQL {major}; {SERVER_VERSION_MIN} or later is needed"
            )
        if pooled:
            await _check_role(connection, schema)
    except BaseException:
        connection.terminate()
        raise
    return connection


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
                server_settings=settings or None,
            )
        except (
            OSError,
            asyncpg.TargetServerAttributeNotMatched,
            asyncpg.CannotConnectNowError,
            asyncpg.ConnectionDoesNotExistError,
        ) as error:
            failures.append(_connect_failure(dsn, address, error))
        except (asyncpg.PostgresError, asyncpg.InterfaceError, ValueError) as error:
            # A server that refuses the login speaks for all of them.
            failure = _connect_failure(dsn, address, error)
            if isinstance(failure, DatabaseUnavailable):
                failure = DatabaseUnavailable(f"{failure} (from {dsn.source})")
            raise failure from error
    # Each host's failure, but not the same sentence twice.
    told = "; ".join(dict.fromkeys(str(failure) for failure in failures))
    raise DatabaseUnavailable(f"{told} (from {dsn.source})")


def _connect_failure(dsn: Dsn, address: tuple[str, int], error: Exception) -> OutboxError:
    """What went wrong, in one line that says what to do."""
    host, port = address
    local = host.startswith("/")
    where = f"{host}/.s.PGSQL.{port}" if local else f"{host}:{port}"
    said = _first_line(error)
    match error:
        case TimeoutError():
            text = f"no answer from {where} within {dsn.connect_timeout_s:g} s; check the address"
        case socket.gaierror():
            text = f'the host name "{host}" is unknown; check the address'
        case ssl.SSLCertVerificationError():
            text = (
                f"the certificate of {where} was not accepted ({error.verify_message}); "
                "check sslmode and sslrootcert"
            )
        case ssl.SSLError():
            text = f"TLS with {where} failed ({error.reason or said}); check sslmode"
        case FileNotFoundError() if not local:
            text = "a file named by sslrootcert, sslcert, sslkey or sslcrl is missing"
        case FileNotFoundError() | ConnectionRefusedError():
            text = f"no server listens at {where}; start it, or correct the address"
        case PermissionError():
            text = f"{where} may not be opened by this system user"
        case ConnectionError() if "SSL upgrade" in said and not _wants_tls(dsn):
            # PostgreSQL without TLS says so, and the login goes on.
            text = f"what answers at {where} is not PostgreSQL; check the port"
        case ConnectionError() if "SSL upgrade" in said:
            text = f"the server at {where} does not offer TLS; it is asked for by sslmode"
        case ConnectionResetError() | asyncpg.ConnectionDoesNotExistError():
            text = f"{where} closed the connection at once"
        case ConnectionError() if "connection_lost" in said:
            text = f"{where} closed the connection at once"
        case asyncpg.InvalidPasswordError():
            text = f'the password of role "{dsn.user}" was not accepted at {where}'
        case asyncpg.InvalidCatalogNameError():
            text = f'database "{dsn.database}" does not exist at {where}; create it first'
        case asyncpg.InvalidAuthorizationSpecificationError():
            text = f"{where} refused the login: {said}"
        case asyncpg.TooManyConnectionsError():
            text = f"{where} has no connection left: {said}"
        case asyncpg.TargetServerAttributeNotMatched():
            text = f"{where} is not a {dsn.target_session_attrs} server (target_session_attrs)"
        case asyncpg.ClientConfigurationError() | ValueError():
            return UsageError(f"{dsn.source}: {said}")
        case asyncpg.PostgresError() if any(word in said for word in _PROXY_REFUSALS):
            text = f"{where} is a proxy that takes no session settings; set OUTBOX_POOLED=true"
        case asyncpg.UndefinedObjectError() | asyncpg.InvalidParameterValueError():
            return UsageError(f"{dsn.source}: {where} does not take a setting: {said}")
        case _:
            text = f"{where} cannot be used: {said or type(error).__name__}"
    return DatabaseUnavailable(text)


def in_one_line(error: BaseException) -> str:
    """What was raised, in one line for the log."""
    said = _first_line(error)
    if isinstance(error, OutboxError) and said:
        return said
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


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


def _keep_alive(connection: Connection[Any], wanted: Mapping[str, int]) -> None:
    """Let the kernel notice a peer that is gone without a word."""
    transport = getattr(connection, "_transport", None)
    sock = transport.get_extra_info("socket") if transport is not None else None
    if sock is None or sock.family == getattr(socket, "AF_UNIX", None):
        return
    if wanted.get("keepalives", 1) == 0:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, option in (
        ("keepalives_idle", "TCP_KEEPIDLE"),
        ("keepalives_interval", "TCP_KEEPINTVL"),
        ("keepalives_count", "TCP_KEEPCNT"),
        ("tcp_user_timeout", "TCP_USER_TIMEOUT"),
    ):
        # Not every system has every option; zero stands for the system's default.
        if wanted.get(name, 0) > 0 and hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), wanted[name])


def not_granted(error: BaseException, purpose: str | None = None) -> str:
    """What a role may not do, and what gives it that; None: for one of several purposes."""
    named = "--relay, --operator or --reader" if purpose is None else f"--{purpose}"
    return (
        f"{_first_line(error)}; have it granted what it is for (outbox migrate {named} ROLE), "
        "or connect as the role that ran outbox migrate"
    )


@contextmanager
def map_errors(schema: str, purpose: str | None = None) -> Iterator[None]:
    """Turn the database's errors into ours where a user can do something.

    Args:
        purpose: what a role has to be for that does this; None: there are several.

    Raises:
        SchemaMissing: a table or function of ours is not there.
        DatabaseUnavailable: the connection was lost.
        CannotRun: the role may not do this, or the server takes no writes.
    """
    try:
        yield
    except _ABSENT as error:
        raise schema_missing(schema) from error
    except _LOST as error:
        raise DatabaseUnavailable(
            f"the connection to the database was lost ({_first_line(error)}); run it again"
        ) from error
    except asyncpg.InsufficientPrivilegeError as error:
        raise CannotRun(not_granted(error, purpose)) from error
    except asyncpg.ReadOnlySQLTransactionError as error:
        raise CannotRun("this server takes no writes; connect to the primary") from error
    except asyncpg.InterfaceError as error:
        # asyncpg says so when the connection was closed before the statement.
        if "closed" not in str(error):
            raise
        raise DatabaseUnavailable(
            "the connection to the database was lost; run it again"
        ) from error
