"""Settings from flags, OUTBOX_* variables, outbox.toml and defaults, in this order.

    dsn                  --dsn, OUTBOX_DSN, outbox.toml, DATABASE_URL, PG*
    secrets              also OUTBOX_…_FILE: the path of a file that contains the value
    outbox.toml          ./outbox.toml, or the path in --config or OUTBOX_CONFIG

An unknown variable or key is refused, see `outbox.setting_sources`.

Importing this module reads no settings; `load` reads them once, and the result is
immutable.  A secret that has a file of its own is read again by `reread_secrets`, because it may
be rotated while the process runs.  Each field names the processes that read it.  Field names carry
their unit.  Importing pydantic takes 0.1 s,
so this module is imported only by code that needs settings.  pydantic-settings is not used,
because it does not record the source of a value, which error messages name.
"""

from __future__ import annotations

import ipaddress
import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator

from outbox.core.delivery.buffer_budget import BUFFER_BYTES_MAX
from outbox.core.model.encryption_keys import parse_keys
from outbox.core.model.sql_names import schema_name
from outbox.core.model.text import is_text, quoted, truncate
from outbox.core.sequencing.partition_window import Retention
from outbox.errors import UsageError
from outbox.setting_sources import (
    CONFIG_VARIABLE,
    ENV_PREFIX,
    FILE_SUFFIX,
    read_environment,
    read_file,
    read_secret,
)
from outbox.web.address import Address, parse_address
from outbox.web.proxy import Proxy, parse_proxy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pydantic.fields import FieldInfo

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# Fields whose environment variable differs from the field name.
_VARIABLES = {"schema_name": "OUTBOX_SCHEMA"}
# Fields whose command-line flag differs from the field name.
_FLAGS = {
    "schema_name": "--schema",
    "lease_s": "--lease",
    "drain_s": "--drain",
    "tenant_rate_per_s": "--tenant-rate",
}


class Process(StrEnum):
    """A process that reads settings."""

    RELAY = "relay"
    API = "API"
    COMMANDS = "commands"


_RELAY: Any = {"read_by": (Process.RELAY,)}
_API: Any = {"read_by": (Process.API,)}
_COMMANDS: Any = {"read_by": (Process.COMMANDS,)}
_SERVERS: Any = {"read_by": (Process.RELAY, Process.API)}
_ALL: Any = {"read_by": tuple(Process)}

REREAD_FIELDS = ("dsn", "key")
"""Secrets that each session uses anew."""
INTERNAL_FIELDS = ("dsn_source", "secret_files")
"""Fields that are no settings: `load` sets them."""
# libpq variables that select a database; with one of them set, --dsn is optional.
_LIBPQ = ("PGHOST", "PGHOSTADDR", "PGDATABASE", "PGSERVICE")


class Settings(BaseModel):
    """All settings, validated and immutable."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", hide_input_in_errors=True, allow_inf_nan=False
    )

    dsn: SecretStr = Field(
        default=SecretStr(""),
        description="Database DSN, as a URL or key=value. Empty: libpq's PG* variables.",
        json_schema_extra=_ALL,
    )
    dsn_source: str = Field(default="", description="Source of dsn, for messages. Set by load().")
    secret_files: dict[str, str] = Field(
        default_factory=dict, description="Files of secrets, by field. Set by load()."
    )
    api_dsn: SecretStr | None = Field(
        default=None,
        description="Database DSN of the API's process, with a role of the purpose `api`. Empty: "
        "that of the relay.",
        json_schema_extra=_SERVERS,
    )
    pooled: bool = Field(
        default=False,
        description="The database is behind a transaction pooler such as PgBouncer: no session "
        "settings, no prepared statements, no LISTEN (polling only).",
        json_schema_extra=_ALL,
    )
    schema_name: str = Field(
        default="relay",
        description="Schema of the outbox tables; at most 50 bytes.",
        json_schema_extra=_ALL,
    )
    secret: SecretStr | None = Field(
        default=None,
        description="Signing secret of a receiver, whsec_…, for `outbox listen`.",
        json_schema_extra=_COMMANDS,
    )
    key: SecretStr | None = Field(
        default=None,
        description="Encryption key for secrets in the database (signing secrets, header values, "
        "client certificates); generate one with `outbox rekey --generate`. With several keys, "
        "separated by spaces, all decrypt; the first encrypts, after `outbox rekey` if secrets are "
        "already encrypted with another one.",
        json_schema_extra=_ALL,
    )
    lease_s: float = Field(
        default=5.0,
        ge=1,
        le=300,
        description="Lease time-out in seconds after which another relay takes over.",
        json_schema_extra=_RELAY,
    )
    ack_group_ms: float = Field(
        default=20.0,
        ge=0,
        le=1000,
        description="How long acknowledgements are batched before commit (milliseconds).",
        json_schema_extra=_RELAY,
    )
    drain_s: float = Field(
        default=15.0,
        ge=0,
        le=600,
        description="Graceful-shutdown time-out after SIGTERM (seconds).",
        json_schema_extra=_RELAY,
    )
    poll_s: float = Field(
        default=1.0,
        gt=0,
        le=60,
        description="Polling interval of an idle relay, also with NOTIFY (seconds).",
        json_schema_extra=_RELAY,
    )
    notify: bool = Field(
        default=True,
        description="LISTEN for new events; false: polling only.",
        json_schema_extra=_ALL,
    )
    in_flight_max: int = Field(
        default=1024,
        ge=1,
        le=10_000,
        description="Maximum number of concurrent requests per relay, over all endpoints; half are "
        "reserved for fast endpoints, and some are kept free for new requests.",
        json_schema_extra=_RELAY,
    )
    buffer_bytes_max: int = Field(
        default=BUFFER_BYTES_MAX,
        ge=1 << 20,
        le=1 << 40,
        description="Maximum size in bytes of the events, deliveries and responses that a relay "
        "holds in memory, over all lanes and uncompressed; every lane that sends has at least one "
        "delivery. "
        "Idle connections to receivers take at most half as much besides.",
        json_schema_extra=_RELAY,
    )
    tenant_in_flight_max: int | None = Field(
        default=None,
        ge=1,
        le=10_000,
        description="Maximum number of concurrent requests to the endpoints of one tenant, per "
        "relay; empty: no limit.",
        json_schema_extra=_RELAY,
    )
    tenant_rate_per_s: float | None = Field(
        default=None,
        ge=0.001,
        le=100_000,
        description="Maximum number of requests per second to the endpoints of one tenant, per "
        "relay; empty: no limit.",
        json_schema_extra=_RELAY,
    )
    batch_events_max: int = Field(
        default=2_000,
        ge=1,
        le=100_000,
        description="Maximum number of events that the sequencer reads in one batch.",
        json_schema_extra=_RELAY,
    )
    batch_deliveries_max: int = Field(
        default=20_000,
        ge=1,
        le=1_000_000,
        description="Maximum number of deliveries that the sequencer creates in one batch.",
        json_schema_extra=_RELAY,
    )
    retention_events_days: float = Field(
        default=30,
        ge=0,
        le=36_500,
        description="Retention of events; 0: forever (days).",
        json_schema_extra=_ALL,
    )
    retention_log_days: float = Field(
        default=30,
        ge=0,
        le=36_500,
        description="Retention of deliveries and attempts; 0: forever (days).",
        json_schema_extra=_ALL,
    )
    retention_dead_letters_days: float = Field(
        default=30,
        ge=0,
        le=36_500,
        description="Retention of dead letters, at least that of deliveries; 0: forever (days).",
        json_schema_extra=_ALL,
    )
    allow_networks: tuple[Network, ...] = Field(
        default=(),
        description="Private networks that endpoints may be in, also with plain http and any port: "
        "comma-separated ranges.",
        json_schema_extra=_ALL,
    )
    proxy: SecretStr | None = Field(
        default=None,
        description="Forward proxy (CONNECT) for https deliveries, except to localhost and to "
        "literal addresses in allowed networks: http://[user:password@]host:port, or https://.",
        json_schema_extra=_ALL,
    )
    health: Address | None = Field(
        default=None,
        description="Address, HOST:PORT, that serves /healthz, /readyz and /metrics without "
        "authentication.",
        json_schema_extra=_SERVERS,
    )
    metrics_endpoints_max: int = Field(
        default=100,
        ge=0,
        le=1_000,
        description="Maximum number of endpoints per relay with their own metrics; the others are "
        "aggregated.",
        json_schema_extra=_RELAY,
    )
    admin: Address | None = Field(
        default=None,
        description="Address of the HTTP API, HOST:PORT. None: not served.",
        json_schema_extra=_SERVERS,
    )
    receivers: Address | None = Field(
        default=None,
        description="Address where receivers fetch missing events, HOST:PORT. None: not served.",
        json_schema_extra=_SERVERS,
    )
    egress_addresses: tuple[Network, ...] = Field(
        default=(),
        description="Addresses from which deliveries are sent, for the firewalls of their "
        "receivers: comma-separated addresses or ranges. OUTBOX_RECEIVERS serves them without "
        "authentication as /.well-known/outbox-egress.json.",
        json_schema_extra=_API,
    )
    api_rate_max: float = Field(
        default=100,
        ge=1,
        le=100_000,
        description="Rate limit of an API token or of all tokens of a tenant, and of the receivers "
        "of an endpoint or of a tenant (requests per second); bursts of twice as many.",
        json_schema_extra=_API,
    )
    log_format: Literal["auto", "json", "console"] = Field(
        default="auto",
        description="auto: console on a terminal, else json.",
        json_schema_extra=_SERVERS,
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info",
        description="Minimum level of log lines.",
        json_schema_extra=_SERVERS,
    )

    @property
    def keep(self) -> Retention:
        """The retention periods, in seconds."""
        return Retention(
            *(
                days * 86400 or None
                for days in (
                    self.retention_events_days,
                    self.retention_log_days,
                    self.retention_dead_letters_days,
                )
            )
        )

    @property
    def outbound_proxy(self) -> Proxy | None:
        """The forward proxy for https deliveries."""
        return None if self.proxy is None else parse_proxy(self.proxy.get_secret_value())

    @field_validator("schema_name")
    @classmethod
    def _schema_name(cls, value: str) -> str:
        return schema_name(value)

    @field_validator("key")
    @classmethod
    def _key(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            parse_keys(value.get_secret_value())
        return value

    @field_validator("log_level", "log_format", mode="before")
    @classmethod
    def _lower(cls, value: Any) -> Any:
        return value.lower() if isinstance(value, str) else value

    @field_validator("health", "admin", "receivers", mode="before")
    @classmethod
    def _address(cls, value: Any) -> Any:
        return parse_address(value) if isinstance(value, str) else value

    @field_validator("proxy")
    @classmethod
    def _proxy(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            parse_proxy(value.get_secret_value())
        return value

    @field_validator("allow_networks", "egress_addresses", mode="before")
    @classmethod
    def _networks(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = [part.strip() for part in value.split(",") if part.strip()]
        if not isinstance(value, list | tuple):
            raise ValueError("must be comma-separated ranges such as 10.0.0.0/8")
        return tuple(_network(part) for part in value)


def load(
    flags: Mapping[str, Any] | None = None,
    *,
    config: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    option_of: Callable[[str], str] | None = None,
) -> Settings:
    """Read and validate the settings.

    Args:
        flags: values by field name, from the command line or a call; None means not given.
        config: path of an outbox.toml; default: OUTBOX_CONFIG, then ./outbox.toml
            if it exists; that one must be this user's or root's, and not writable by others.
        env: environment variables; default: the process's environment.
        option_of: returns for a field how messages name its value in `flags`; default: as the
            flag of a command.

    Raises:
        UsageError: a value is invalid; the message names the setting and its source,
            and never contains a secret.
    """
    env = os.environ if env is None else env
    option_of = option_of or _flag
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}

    def add_missing(origin_of: Mapping[str, str], candidates: Mapping[str, Any]) -> None:
        for name, value in candidates.items():
            if name not in values:
                values[name] = value
                origins[name] = origin_of[name]

    given = {name: value for name, value in (flags or {}).items() if value is not None}
    if given.get("dsn") == "":
        # Probably an unset shell variable; ignoring it would select another database.
        raise UsageError(f"{option_of('dsn')} is empty")
    add_missing({name: option_of(name) for name in given}, given)
    keys = field_names()
    variables = {name: variable_of(name) for name in keys.values()}
    add_missing(*read_environment(env, variables, secret_fields()))
    add_missing(*read_file(config or env.get(CONFIG_VARIABLE), keys))
    _find_database(values, origins, env)
    files = {
        # Not resolved: Kubernetes replaces a link when it updates a file.
        name: str(Path(env[origin]).absolute())
        for name, origin in origins.items()
        if origin == variables.get(name, "") + FILE_SUFFIX
    }
    found = {"dsn_source": origins.get("dsn", ""), "secret_files": files}
    return _validate(values | found, origins)


def reread_secrets(settings: Settings) -> Settings:
    """The settings with those of `REREAD_FIELDS` read again that have a file of their own.

    Raises:
        UsageError: as in `load`.
    """
    files = {name: p for name, p in settings.secret_files.items() if name in REREAD_FIELDS}
    return read_files(dict(settings), files)


def read_files(values: Mapping[str, Any], files: Mapping[str, str]) -> Settings:
    """The settings with these values, and with secrets from files.

    Args:
        values: the value of each field.
        files: the path of each field.

    Raises:
        UsageError: as in `load`.
    """
    variables = {name: variable_of(name) + FILE_SUFFIX for name in files}
    variables["dsn"] = values["dsn_source"]  # That of the API may have another variable.
    fresh = {name: read_secret(variables[name], path) for name, path in files.items()}
    return _validate({**values, **fresh}, variables)


def readers_of(field: FieldInfo) -> tuple[Process, ...]:
    """The processes that read a setting."""
    extra: Any = field.json_schema_extra
    return tuple(extra["read_by"])


def _validate(values: Mapping[str, Any], origins: Mapping[str, str]) -> Settings:
    for name, value in values.items():
        if isinstance(value, str) and not is_text(value):
            raise UsageError(f"{origins[name]}: not UTF-8 text")
    try:
        return Settings(**values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = str(first["loc"][0])
        raise UsageError(f"{origins.get(name, name)}: {_reason(first)}") from None


def field_names() -> dict[str, str]:
    """The fields by the names of their settings, as in outbox.toml."""
    fields = (name for name in Settings.model_fields if name not in INTERNAL_FIELDS)
    return {"schema" if name == "schema_name" else name: name for name in fields}


def variable_of(name: str) -> str:
    """The environment variable that sets a field."""
    return _VARIABLES.get(name, ENV_PREFIX + name.upper())


def secret_fields() -> list[str]:
    """The fields that can also be read from a file, by OUTBOX_…_FILE."""
    return [
        name for name, field in Settings.model_fields.items() if "Secret" in str(field.annotation)
    ]


def _flag(name: str) -> str:
    return _FLAGS.get(name, "--" + name.replace("_", "-"))


def _find_database(values: dict[str, Any], origins: dict[str, str], env: Mapping[str, str]) -> None:
    if "dsn" in values:
        return
    if env.get("DATABASE_URL"):
        values["dsn"], origins["dsn"] = env["DATABASE_URL"], "DATABASE_URL"
        return
    present = [name for name in _LIBPQ if env.get(name)]
    if present:
        values["dsn"], origins["dsn"] = "", present[0]


def _network(text: Any) -> Network:
    if not isinstance(text, str | Network):
        # ipaddress would read a number as an address: 5 as 0.0.0.5.
        raise ValueError(f"{quoted(text)} is not a string such as 10.0.0.0/8")
    try:
        return ipaddress.ip_network(text)
    except ValueError:
        pass
    try:
        wide = ipaddress.ip_network(text, strict=False)
    except ValueError:
        raise ValueError(
            f'"{truncate(str(text))}" is not an address range such as 10.0.0.0/8'
        ) from None
    raise ValueError(f'"{text}" has host bits set; did you mean {wide}?')


def _reason(error: Any) -> str:
    """The reason of a pydantic error, in the wording of our messages."""
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    text, _, _ = str(error["msg"]).partition(", unable to")
    return (
        text.removeprefix("Input ")
        .replace("should be", "must be")
        .replace("a valid boolean", "true or false")
    )
