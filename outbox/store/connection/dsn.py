"""Database addresses (DSN), in the common forms.

    postgresql://user:secret@host:5432/db?sslmode=require     URL
    postgresql+asyncpg://…, postgresql+psycopg://…            SQLAlchemy's URLs
    postgresql://h1:5432,h2:5433/db                           several hosts
    postgresql:///db?host=/run/postgresql                     unix socket
    host=h1,h2 port=5432 dbname=db password='it\\'s'           key=value
    service=orders                                            pg_service.conf

All of them become parameters with libpq's names.  Missing parameters come from the service, then
from libpq's `PG*` variables.  asyncpg's own parser is not used: it accepts URLs only, sends unknown
parameters to the server as settings (which then refuses the login), and quotes text that it cannot
parse, which may be a password.

Grammar: PostgreSQL documentation, 34.1.1 Connection Strings.
"""

from __future__ import annotations

import getpass
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from outbox.errors import CannotRun
from outbox.store.connection import conninfo
from outbox.store.connection.conninfo import invalid_address

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outbox.config import Settings

DATABASE_CONNECT_TIMEOUT_S = 5.0
POSTGRESQL_PORT = 5432

# libpq's variables, PostgreSQL documentation 34.15.
ENVIRONMENT = {
    "PGHOST": "host",
    "PGHOSTADDR": "hostaddr",
    "PGPORT": "port",
    "PGDATABASE": "dbname",
    "PGUSER": "user",
    "PGPASSWORD": "password",
    "PGPASSFILE": "passfile",
    "PGOPTIONS": "options",
    "PGAPPNAME": "application_name",
    "PGSSLMODE": "sslmode",
    "PGSSLCERT": "sslcert",
    "PGSSLKEY": "sslkey",
    "PGSSLROOTCERT": "sslrootcert",
    "PGSSLCRL": "sslcrl",
    "PGSSLNEGOTIATION": "sslnegotiation",
    "PGSSLMINPROTOCOLVERSION": "ssl_min_protocol_version",
    "PGSSLMAXPROTOCOLVERSION": "ssl_max_protocol_version",
    "PGCONNECT_TIMEOUT": "connect_timeout",
    "PGTARGETSESSIONATTRS": "target_session_attrs",
    "PGKRBSRVNAME": "krbsrvname",
    "PGGSSLIB": "gsslib",
}

# Parameters that asyncpg accepts only in the query of a URL.
_TLS = frozenset(
    {"sslcert", "sslkey", "sslpassword", "sslrootcert", "sslcrl", "sslnegotiation"}
    | {"ssl_min_protocol_version", "ssl_max_protocol_version"}
)
_SSLMODES = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
_TARGETS = ("any", "primary", "standby", "prefer-standby", "read-write", "read-only")
_KEEPALIVES = frozenset(
    {"keepalives", "keepalives_idle", "keepalives_interval", "keepalives_count"}
    | {"tcp_user_timeout"}
)
_TAKEN = frozenset(
    {"host", "hostaddr", "port", "dbname", "user", "password", "passfile", "sslmode"}
    | {"options", "application_name", "fallback_application_name", "connect_timeout"}
    | {"target_session_attrs", "krbsrvname", "gsslib", "service", "servicefile"}
    | {"statement_cache_size"}
    | _TLS
    | _KEEPALIVES
)
# Other names for the same thing: SQLAlchemy's dialects, Django's, Prisma's.
_ALIASES = {
    "database": "dbname",
    "username": "user",
    "ssl": "sslmode",
    "prepared_statement_cache_size": "statement_cache_size",
    "pgbouncer": "statement_cache_size",
}
# Ignored without a warning, because they do not matter here.
_SILENT = frozenset({"client_encoding", "sslcompression", "gssencmode", "sslsni"})


@dataclass(frozen=True, slots=True)
class Dsn:
    """A complete database address: connecting reads no other source."""

    source: str
    """Source of the address, for error messages: `--dsn`, `OUTBOX_DSN` …"""
    addresses: tuple[tuple[str, int], ...]
    """Hosts (or directories of unix sockets) and ports, in order of preference."""
    database: str
    user: str
    password: str | None = field(default=None, repr=False)
    passfile: str | None = None
    sslmode: str | None = None
    tls: Mapping[str, str] = field(default_factory=dict, repr=False)
    connect_timeout_s: float = DATABASE_CONNECT_TIMEOUT_S
    target_session_attrs: str = "any"
    server_settings: Mapping[str, str] = field(default_factory=dict)
    keepalives: Mapping[str, int] = field(default_factory=dict)
    """libpq's names and units (seconds; tcp_user_timeout: milliseconds)."""
    statement_cache: bool = True
    """Whether statements are prepared; False behind a transaction-pooling proxy."""
    extra: Mapping[str, str] = field(default_factory=dict)
    names_host: bool = True
    """Whether a host was named; otherwise it is that of a local server, as it was found."""
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        """`database "app" at localhost:5432`, without any secret."""
        where = ",".join(
            f"{host}/.s.PGSQL.{port}" if host.startswith("/") else _hostport(host, port)
            for host, port in self.addresses
        )
        return f'database "{self.database}" at {where}'

    def asyncpg_arguments(self) -> dict[str, Any]:
        """Arguments of `asyncpg.connect`, without server settings and time-out."""
        tls = dict(self.tls)
        arguments: dict[str, Any] = {
            "host": [host for host, _ in self.addresses],
            "port": [port for _, port in self.addresses],
            "user": self.user,
            "database": self.database,
            "password": self.password,
            "passfile": self.passfile,
            "target_session_attrs": self.target_session_attrs,
            **self.extra,
        }
        if tls.get("sslrootcert") == "system":
            # In libpq "system" means the system's certificates, with verify-full.
            del tls["sslrootcert"]
            arguments["ssl"] = True
        elif self.sslmode is not None:
            arguments["ssl"] = self.sslmode
        if tls:
            arguments["dsn"] = "postgresql://?" + urlencode(tls, quote_via=quote)
        if not self.statement_cache:
            arguments["statement_cache_size"] = 0
        return arguments


def parse(text: str, *, source: str, env: Mapping[str, str]) -> Dsn:
    """Parse a database address.

    Args:
        text: URL or key=value; empty: everything comes from `env`.
        source: the DSN's source, for messages.
        env: environment with libpq's variables.

    Raises:
        UsageError: it is invalid.  The message contains no text that may belong to a password.
    """
    given, warnings = _known(conninfo.parameters(text, source), source)
    environment = {
        name: env[variable] for variable, name in ENVIRONMENT.items() if env.get(variable)
    }
    service = given.get("service") or env.get("PGSERVICE")
    from_service: dict[str, str] = {}
    if service:
        from_service, more = _known(
            conninfo.service_parameters(service, given.get("servicefile"), env, source), source
        )
        warnings += more
    # A host from a nearer source replaces both host and hostaddr of a farther one.
    for near, far in ((given, from_service), (given, environment), (from_service, environment)):
        if "host" in near or "hostaddr" in near:
            for name in ("host", "hostaddr"):
                far.pop(name, None)
    return _build({**environment, **from_service, **given}, source, warnings)


def login_in(text: str, *, source: str) -> tuple[str, str | None]:
    """The role that an address names, and its password, if it has one.

    Raises:
        UsageError: as in `parse`, or it names no role.
    """
    given, _ = _known(conninfo.parameters(text, source), source)
    if not given.get("user"):
        raise invalid_address(source, "it names no user")
    return given["user"], given.get("password")


def from_settings(settings: Settings, env: Mapping[str, str] | None = None) -> Dsn:
    """The database of the settings.

    Raises:
        CannotRun: the settings name no database.
        UsageError: as in `parse`.
    """
    if not settings.dsn_source:
        raise CannotRun("no database was named: use --dsn, or set OUTBOX_DSN or DATABASE_URL")
    return parse(
        settings.dsn.get_secret_value(),
        source=settings.dsn_source,
        env=os.environ if env is None else env,
    )


# ----------------------------------------------------------------- meaning


def _known(given: Mapping[str, str], source: str) -> tuple[dict[str, str], list[str]]:
    """Resolve aliases, and drop unsupported parameters with a warning."""
    known: dict[str, str] = {}
    warnings: list[str] = []
    password_seen = False
    for name, value in given.items():
        target = _ALIASES.get(name, name)
        if name == "ssl":
            value = {"true": "require", "1": "require", "false": "disable"}.get(value, value)
        elif name == "pgbouncer":
            value = "0" if value in ("true", "1") else "1"
        if target in _TAKEN:
            known[target] = value
        elif name not in _SILENT:
            # After a badly quoted password, the rest of it would be shown as a name.
            shown = "an unknown parameter" if password_seen else f'parameter "{name[:40]}"'
            warnings.append(f"{source}: ignored {shown}")
        password_seen |= target == "password"
    return known, warnings


def _build(given: dict[str, str], source: str, warnings: list[str]) -> Dsn:
    sslmode = given.get("sslmode")
    _one_of(source, "sslmode", sslmode, _SSLMODES)
    addresses = _addresses(given, source, warnings)
    # Every operation needs a server that accepts writes.
    target = given.get("target_session_attrs", "primary" if len(addresses) > 1 else "any")
    _one_of(source, "target_session_attrs", target, _TARGETS)
    timeout = _number(source, "connect_timeout", given.get("connect_timeout"))
    settings: dict[str, str] = {
        name: given[name] for name in ("options", "application_name") if name in given
    }
    if "fallback_application_name" in given:
        settings.setdefault("application_name", given["fallback_application_name"])
    user = given.get("user") or _os_user(source)
    return Dsn(
        source=source,
        addresses=addresses,
        database=given.get("dbname") or user,
        user=user,
        password=given.get("password"),
        passfile=given.get("passfile"),
        sslmode=sslmode,
        tls={name: given[name] for name in sorted(_TLS) if name in given},
        # In libpq 0 or less waits for ever, which no command should.
        connect_timeout_s=float(timeout) if timeout and timeout > 0 else DATABASE_CONNECT_TIMEOUT_S,
        target_session_attrs=target,
        server_settings=settings,
        keepalives={
            name: number
            for name in sorted(_KEEPALIVES)
            if (number := _number(source, name, given.get(name))) is not None
        },
        statement_cache=_number(source, "statement_cache_size", given.get("statement_cache_size"))
        != 0,
        extra={name: given[name] for name in ("krbsrvname", "gsslib") if name in given},
        names_host="host" in given or "hostaddr" in given,
        warnings=tuple(warnings),
    )


def _addresses(
    given: Mapping[str, str], source: str, warnings: list[str]
) -> tuple[tuple[str, int], ...]:
    hosts = given.get("host", "").split(",")
    if "hostaddr" in given:
        if given.get("sslmode") == "verify-full" and "host" in given:
            # The certificate contains the name, and asyncpg verifies the connected address.
            warnings.append(f"{source}: ignored hostaddr, because sslmode=verify-full needs host")
        else:
            hosts = given["hostaddr"].split(",")
    if any("@" in host[1:] for host in hosts):
        # It is probably part of a password; do not show it as a host.
        raise invalid_address(
            source, 'a host has "@" in it; a URL is given as a whole, not as the host'
        )
    hosts = [host or _local_host() for host in hosts]
    ports = given.get("port", "").split(",")
    if len(ports) == 1:
        ports *= len(hosts)
    if len(ports) != len(hosts):
        raise invalid_address(source, f"{len(ports)} ports for {len(hosts)} hosts")
    if not all(re.fullmatch(r"[0-9]{1,5}", p) and 0 < int(p) < 65536 for p in ports if p):
        raise invalid_address(source, "a port is not a number between 1 and 65535")
    return tuple(
        (host, int(port or POSTGRESQL_PORT)) for host, port in zip(hosts, ports, strict=True)
    )


def _local_host() -> str:
    """Default address of a local server: Debian's socket directory, libpq's, then TCP."""
    for directory in ("/run/postgresql", "/var/run/postgresql", "/tmp"):  # noqa: S108
        if any(Path(directory).glob(".s.PGSQL.*")):
            return directory
    return "localhost"


def _os_user(source: str) -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # An arbitrary user id in a container has no name.
        raise invalid_address(source, "it names no user, and the system user has no name") from None


def _hostport(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _number(source: str, name: str, value: str | None) -> int | None:
    if value is None:
        return None
    if not re.fullmatch(r"-?[0-9]{1,9}", value.strip()):
        raise invalid_address(source, f"{name} is not a whole number")
    return int(value)


def _one_of(source: str, name: str, value: str | None, allowed: tuple[str, ...]) -> None:
    if value is not None and value not in allowed:
        raise invalid_address(source, f"{name} must be one of {', '.join(allowed)}")
