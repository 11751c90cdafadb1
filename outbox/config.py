"""Settings: flags, then OUTBOX_* variables, then outbox.toml, then defaults.

    dsn                  --dsn, OUTBOX_DSN, outbox.toml, DATABASE_URL, PG*
    a secret             also OUTBOX_…_FILE: the name of a file that holds it
    outbox.toml          ./outbox.toml, or what --config or OUTBOX_CONFIG names

Importing this module reads nothing; `load` does, once, and its result does
not change.  Field names carry their unit.  This module imports pydantic,
which takes a tenth of a second, so it is imported where settings are needed
and nowhere else.  pydantic-settings is not used: it does not keep where a
value came from, which is what somebody with a bad value needs to know.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator

from outbox.core.model.encryption_keys import parse_keys
from outbox.core.model.sql_names import schema_name
from outbox.core.model.text import cut, is_text, quoted
from outbox.core.sequencing.partition_window import Keep
from outbox.errors import UsageError
from outbox.web.address import Address, parse_address
from outbox.web.proxy import Proxy, parse_proxy

if TYPE_CHECKING:
    from collections.abc import Mapping

ENV_PREFIX = "OUTBOX_"
FILE_SUFFIX = "_FILE"
CONFIG_FILE = "outbox.toml"

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# Where a field's variable is not its own name.
_VARIABLES = {"schema_name": "OUTBOX_SCHEMA"}
# Where a field's flag is not its own name.
_FLAGS = {
    "schema_name": "--schema",
    "lease_s": "--lease",
    "drain_s": "--drain",
    "tenant_rate_per_s": "--tenant-rate",
}
# What libpq would connect with although nobody named a database to us.
_LIBPQ = ("PGHOST", "PGHOSTADDR", "PGDATABASE", "PGSERVICE")


class Settings(BaseModel):
    """Everything that can be set, validated."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", hide_input_in_errors=True, allow_inf_nan=False
    )

    dsn: SecretStr = Field(
        default=SecretStr(""),
        description="The database: URL or key=value. Empty: libpq's PG* variables.",
    )
    dsn_source: str = Field(
        default="", description="Where dsn was found, for messages. Set by load()."
    )
    pooled: bool = Field(
        default=False,
        description="The database is reached through a proxy that pools transactions "
        "(PgBouncer): no session settings, no prepared statements, polling alone.",
    )
    schema_name: str = Field(
        default="relay", description="The schema that holds our tables; up to 50 bytes."
    )
    secret: SecretStr | None = Field(
        default=None, description="A receiver's signing secret, whsec_…, for `outbox listen`."
    )
    key: SecretStr | None = Field(
        default=None,
        description="Encrypts secrets in the database: signing secrets, values of endpoints' "
        "headers, client certificates. `outbox rekey --generate` makes one. Several with spaces "
        "between them: the first encrypts, all decrypt.",
    )
    lease_s: float = Field(
        default=5.0,
        ge=1,
        le=300,
        description="A replica that does not renew for so long loses its endpoints (seconds).",
    )
    ack_group_ms: float = Field(
        default=20.0,
        ge=0,
        le=1000,
        description="Acknowledgements wait so long for others to be written with (milliseconds).",
    )
    drain_s: float = Field(
        default=15.0,
        ge=0,
        le=600,
        description="SIGTERM ends the relay within so long, whatever is under way (seconds).",
    )
    poll_s: float = Field(
        default=1.0,
        gt=0,
        le=60,
        description="A sleeping relay looks at the database so often, NOTIFY or not (seconds).",
    )
    notify: bool = Field(default=True, description="LISTEN for producers; false: polling alone.")
    in_flight_max: int = Field(
        default=1024,
        ge=1,
        le=10_000,
        description="Requests open at once, over all endpoints: half of them quick ones, and some "
        "kept free for whoever comes next.",
    )
    transport: Literal["wire", "aiohttp"] = Field(
        default="wire",
        description="What sends requests that do not leave by the proxy: wire, or aiohttp, which "
        "takes several times as long for each.",
    )
    tenant_in_flight_max: int | None = Field(
        default=None,
        ge=1,
        le=10_000,
        description="Of these, open at once to the endpoints of one tenant, by each replica; "
        "empty: no limit.",
    )
    tenant_rate_per_s: float | None = Field(
        default=None,
        ge=0.001,
        le=100_000,
        description="Requests begun in a second to the endpoints of one tenant, by each replica; "
        "empty: no limit.",
    )
    batch_events_max: int = Field(
        default=2_000, ge=1, le=100_000, description="Events that one batch reads."
    )
    batch_deliveries_max: int = Field(
        default=20_000, ge=1, le=1_000_000, description="Deliveries that one batch makes."
    )
    retention_events_days: float = Field(
        default=30, ge=0, le=36_500, description="Events are kept so long; 0: for ever (days)."
    )
    retention_log_days: float = Field(
        default=30,
        ge=0,
        le=36_500,
        description="Deliveries and attempts are kept so long; 0: for ever (days).",
    )
    retention_dead_letters_days: float = Field(
        default=30,
        ge=0,
        le=36_500,
        description="Dead letters are kept so long, and as long as the log; 0: for ever (days).",
    )
    allow_networks: tuple[Network, ...] = Field(
        default=(),
        description="Private networks that may be delivered to, with plain http and any port: "
        "ranges with commas between them.",
    )
    proxy: SecretStr | None = Field(
        default=None,
        description="Deliveries by https leave through this proxy (CONNECT), but for those to "
        "open networks: http://[user:password@]host:port, or https://.",
    )
    health: Address | None = Field(
        default=None,
        description="HOST:PORT that serves /healthz, /readyz and /metrics, to everybody who can "
        "reach it.",
    )
    metrics_endpoints_max: int = Field(
        default=100,
        ge=0,
        le=1_000,
        description="So many endpoints of a replica have metrics of their own; all others are "
        "measured together.",
    )
    admin: Address | None = Field(
        default=None, description="Where the HTTP API listens, HOST:PORT. None: nowhere."
    )
    receivers: Address | None = Field(
        default=None,
        description="Where receivers fetch what they are missing, HOST:PORT. None: nowhere.",
    )
    api_rate_max: float = Field(
        default=100,
        ge=1,
        le=100_000,
        description="Requests a second of one token, of the API's as of a receiver's; "
        "twice as many at once.",
    )
    log_format: Literal["auto", "json", "console"] = Field(
        default="auto", description="auto: console on a terminal, else json."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="The least important log lines that are written."
    )

    @property
    def keep(self) -> Keep:
        """How long things are kept."""
        return Keep(
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
    def leaves_by(self) -> Proxy | None:
        """The proxy that deliveries leave by."""
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

    @field_validator("log_level", "log_format", "transport", mode="before")
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

    @field_validator("allow_networks", mode="before")
    @classmethod
    def _networks(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = [part.strip() for part in value.split(",") if part.strip()]
        if not isinstance(value, list | tuple):
            raise ValueError("must be ranges with commas between them, such as 10.0.0.0/8")
        return tuple(_network(part) for part in value)


def load(
    flags: Mapping[str, Any] | None = None,
    *,
    config: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
) -> Settings:
    """Read the settings.

    Args:
        flags: from the command line, by field name; None stands for not given.
        config: an outbox.toml; without it OUTBOX_CONFIG, then ./outbox.toml
            if there is one.
        env: instead of the process's environment.

    Raises:
        UsageError: one line that names the setting and where it came from,
            and never shows a secret.
    """
    env = os.environ if env is None else env
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}

    def take(origin_of: Mapping[str, str], found: Mapping[str, Any]) -> None:
        for name, value in found.items():
            if name not in values:
                values[name] = value
                origins[name] = origin_of[name]

    given = {name: value for name, value in (flags or {}).items() if value is not None}
    if given.get("dsn") == "":
        # A shell's unset variable; going on would use another database.
        raise UsageError("--dsn is empty")
    take({name: _flag(name) for name in given}, given)
    take(*_from_environment(env))
    path = config or env.get("OUTBOX_CONFIG")
    take(*_from_file(Path(path or CONFIG_FILE), required=bool(path)))
    _find_database(values, origins, env)
    for name, value in values.items():
        if isinstance(value, str) and not is_text(value):
            raise UsageError(f"{origins[name]}: it is not UTF-8 text")
    try:
        return Settings(**values, dsn_source=origins.get("dsn", ""))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = str(first["loc"][0])
        raise UsageError(f"{origins.get(name, name)}: {_reason(first)}") from None


def variable(name: str) -> str:
    """The environment variable of a field."""
    return _VARIABLES.get(name, ENV_PREFIX + name.upper())


def secrets() -> list[str]:
    """Fields that may also be given as the name of a file."""
    return [
        name for name, field in Settings.model_fields.items() if "Secret" in str(field.annotation)
    ]


def _flag(name: str) -> str:
    return _FLAGS.get(name, "--" + name.replace("_", "-"))


def _from_environment(env: Mapping[str, str]) -> tuple[dict[str, str], dict[str, Any]]:
    origins: dict[str, str] = {}
    values: dict[str, Any] = {}
    for name in Settings.model_fields:
        # An empty variable is how compose files and shells say "not set".
        if name != "dsn_source" and env.get(variable(name)):
            values[name], origins[name] = env[variable(name)], variable(name)
    for name in secrets():
        file_variable = variable(name) + FILE_SUFFIX
        if not env.get(file_variable):
            continue
        if name in values:
            raise UsageError(f"{origins[name]} and {file_variable} are both set; keep one")
        try:
            values[name] = Path(env[file_variable]).read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise UsageError(f"{file_variable}: {env[file_variable]}: {why}") from None
        if not values[name]:
            raise UsageError(f"{file_variable}: the file {env[file_variable]} is empty")
        origins[name] = file_variable
    return origins, values


def _from_file(path: Path, *, required: bool) -> tuple[dict[str, str], dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        if required:
            raise UsageError(f"{path}: there is no such settings file") from None
        return {}, {}
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"{path}: {why}") from None
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path}: {error}") from None
    names = {"schema" if name == "schema_name" else name: name for name in Settings.model_fields}
    del names["dsn_source"]
    values = {}
    for key, value in found.items():
        if key not in names:
            near = difflib.get_close_matches(key, names, 1)
            hint = f'; did you mean "{near[0]}"?' if near else ""
            raise UsageError(f'{path}: there is no setting "{cut(key)}"{hint}')
        values[names[key]] = value
    return {name: f"{path}, {key}" for key, name in names.items()}, values


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
        # A number would be read as an address: 5 as 0.0.0.5.
        raise ValueError(f"{quoted(text)} is not a text such as 10.0.0.0/8")
    try:
        return ipaddress.ip_network(text)
    except ValueError:
        pass
    try:
        wide = ipaddress.ip_network(text, strict=False)
    except ValueError:
        raise ValueError(
            f'"{cut(str(text))}" is not a range of addresses such as 10.0.0.0/8'
        ) from None
    raise ValueError(f'"{text}" is not a range; did you mean {wide}?')


def _reason(error: Any) -> str:
    """pydantic's reason without its ways."""
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    text, _, _ = str(error["msg"]).partition(", unable to")
    return (
        text.removeprefix("Input ")
        .replace("should be", "must be")
        .replace("a valid boolean", "true or false")
    )
