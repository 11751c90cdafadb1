"""Endpoint settings: one validated type with all defaults and limits.

The same type is used for input (flags, files, API), for storage and for output.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from ipaddress import ip_network
from typing import TYPE_CHECKING, Any, Literal, get_args

from outbox.core.model import duration, pattern, retryable_statuses
from outbox.core.model.event import TENANT_BYTES_MAX, check_text, encode_headers
from outbox.core.model.filter import validate_filter
from outbox.core.model.headers import header_problem
from outbox.core.model.response import RETRYABLE
from outbox.core.model.retry_policy import STANDARD, RetryPolicy
from outbox.core.model.text import quoted
from outbox.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

Method = Literal["POST", "PUT", "PATCH"]
OnDeadLetter = Literal["continue", "block"]

NAME_BYTES_MAX = 200
LANES_MAX = 1024
NETWORKS_MAX = 20
CA_BYTES_MAX = 64 * 1024
IN_FLIGHT_MAX = 1024
RATE_PER_S_MIN, RATE_PER_S_MAX = 0.001, 100_000.0
TYPES_MAX = 100
TIMEOUT_S_MAX = 3600.0
AGE_S_MAX = 3650 * 86400.0
COUNT_MAX = 2**63 - 1
BATCH_MAX = 1000
"""Deliveries per request."""
CHECKPOINT_EVERY_MIN_S = 1.0
EVERYTHING = "**"
OTHERS = "(other)"
"""The `endpoint` attribute of endpoints without their own series in metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointSettings:
    """The settings of one endpoint.

    Raises:
        UsageError: a setting is wrong; the message begins with its name.
    """

    name: str
    url: str
    """Validated by the destination, which knows the allowed networks."""
    types: tuple[str, ...] = (EVERYTHING,)
    """Patterns; empty: all types except operational events."""
    tenant: str | None = None
    """None: events without a tenant, unless `all_tenants`."""
    all_tenants: bool = False
    filter: str | None = None
    """A condition in SQL/JSON path, the inside of `$ ? (…)`; None: all payloads."""

    method: Method = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)
    connect_timeout_s: float = 5.0
    total_timeout_s: float = 15.0
    in_flight_max: int | None = None
    """Concurrent requests over all lanes; None: one for each lane."""
    rate_per_s: float | None = None
    """Requests per second of one relay; None: no limit."""
    batch_max: int | None = None
    """Deliveries per request, sent as a JSON array; None: requests are not batches."""
    keep_alive: bool = True
    """Whether a connection carries several requests, one after the other."""
    allow_networks: tuple[str, ...] = ()
    """Private networks that are allowed for this endpoint, besides those of the relay."""
    ca: str | None = None
    """Certificates (PEM) to trust instead of the system's authorities."""

    retry: RetryPolicy = STANDARD
    retryable: tuple[str, ...] | None = None
    """Statuses, classes and ranges to retry; None: the default ones."""
    on_dead_letter: OnDeadLetter = "continue"
    backlog_count_max: int | None = None
    """Maximum pending deliveries; older ones are dead-lettered; None: no limit."""
    backlog_age_max_s: float | None = None
    """Maximum age of pending deliveries; None: no limit."""
    disable_after_s: float = 3 * 86400.0
    """Seconds without a success after which the endpoint is disabled."""

    checkpoint_every_s: float | None = None
    """Seconds between two receiver checkpoints; None: none are sent."""

    lanes: int = 1

    def __post_init__(self) -> None:
        _name(self.name)
        if not isinstance(self.url, str) or not self.url:
            raise UsageError("url: must be a text such as https://example.com/hooks")
        self._set("types", tuple(dict.fromkeys(_texts("types", self.types))) or (EVERYTHING,))
        if len(self.types) > TYPES_MAX:
            raise UsageError(f"types: {len(self.types)} patterns, the limit is {TYPES_MAX}")
        for each in self.types:
            _pattern(each)
        check_text("tenant", self.tenant, TENANT_BYTES_MAX)
        if type(self.all_tenants) is not bool:
            raise UsageError("all_tenants: must be true or false")
        if self.all_tenants and self.tenant is not None:
            raise UsageError("tenant: an endpoint is for one tenant or for all, not both")
        if self.filter is not None:
            validate_filter(_text("filter", self.filter))
        _choice("method", self.method, get_args(Method))
        if not isinstance(self.headers, dict):
            raise UsageError("headers: must be a mapping of names to values")
        encode_headers(self.headers, header_problem)
        _number("connect_timeout", self.connect_timeout_s, TIMEOUT_S_MAX)
        _number("timeout", self.total_timeout_s, TIMEOUT_S_MAX)
        if self.in_flight_max is not None:
            _integer("in_flight_max", self.in_flight_max, IN_FLIGHT_MAX)
        if self.rate_per_s is not None:
            _rate(self.rate_per_s)
        if self.batch_max is not None:
            _integer("batch_max", self.batch_max, BATCH_MAX)
        if type(self.keep_alive) is not bool:
            raise UsageError("keep_alive: must be true (on) or false (off)")
        self._set("allow_networks", _networks(self.allow_networks))
        if self.ca is not None:
            _pem(self.ca)
        if self.retryable is not None:
            self._set("retryable", tuple(t.lower() for t in _texts("retryable", self.retryable)))
            retryable_statuses.parse(self.retryable or ())
        _choice("on_dead_letter", self.on_dead_letter, get_args(OnDeadLetter))
        if self.backlog_count_max is not None:
            _integer("backlog_max", self.backlog_count_max, COUNT_MAX)
        if self.backlog_age_max_s is not None:
            _number("backlog_age", self.backlog_age_max_s, AGE_S_MAX)
        _number("disable_after", self.disable_after_s, AGE_S_MAX)
        if self.checkpoint_every_s is not None:
            _number("checkpoint_every", self.checkpoint_every_s, AGE_S_MAX)
            if self.checkpoint_every_s < CHECKPOINT_EVERY_MIN_S:
                raise UsageError(f"checkpoint_every: at least {CHECKPOINT_EVERY_MIN_S:g} s")
        _integer("lanes", self.lanes, LANES_MAX)

    @property
    def retryable_statuses(self) -> frozenset[int]:
        """The statuses that are retried."""
        return RETRYABLE if self.retryable is None else retryable_statuses.parse(self.retryable)

    @property
    def subscription(self) -> tuple[tuple[str, ...], str | None, bool, str | None]:
        """The settings that select its events: types, tenant, all_tenants, filter."""
        return self.types, self.tenant, self.all_tenants, self.filter

    def to_dict(self) -> dict[str, Any]:
        """All settings by field name, as JSON values; `from_dict` reads them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EndpointSettings:
        """Settings from stored values; missing ones have their default.

        Raises:
            UsageError: a name is unknown, or a value is invalid.
        """
        known = {each.name for each in fields(cls)}
        for name in values:
            if name not in known:
                raise UsageError(f"{name}: an endpoint has no such setting")
        retry = values.get("retry", {})
        if not isinstance(retry, RetryPolicy):
            retry = RetryPolicy.from_dict(retry)
        return cls(**{**values, "retry": retry})

    def _set(self, name: str, value: Any) -> None:
        """Store a normalized value in the frozen instance."""
        object.__setattr__(self, name, value)


def _name(value: object) -> None:
    text = _text("name", value)
    if not text or text != text.strip() or not text.isprintable():
        raise UsageError("name: must be printable text without spaces around it")
    if len(text.encode()) > NAME_BYTES_MAX:
        raise UsageError(f"name: longer than {NAME_BYTES_MAX} bytes")
    if text == OTHERS:
        raise UsageError(f'name: "{OTHERS}" is reserved for the other endpoints in metrics')


def _pattern(text: str) -> None:
    try:
        pattern.parse(text)
    except UsageError as error:
        raise UsageError(f"types: {str(error).removeprefix('type pattern: ')}") from None


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{name}: must be a text, not {quoted(value)}")
    return value


def _texts(name: str, value: object) -> list[str]:
    if not isinstance(value, list | tuple):
        raise UsageError(f"{name}: must be a list of texts")
    return [_text(name, each) for each in value]


def _choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UsageError(f"{name}: must be one of {', '.join(choices)}, not {quoted(value)}")


def _number(name: str, value: object, maximum: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # NaN fails the comparison.
    if not (is_number and 0 < value <= maximum):  # type: ignore[operator]
        raise UsageError(
            f"{name}: must be longer than 0 s and at most {duration.exact(maximum)}, "
            f"not {quoted(value)}"
        )


def _rate(value: object) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and RATE_PER_S_MIN <= value <= RATE_PER_S_MAX):  # type: ignore[operator]
        raise UsageError(
            f"rate: must be a number of requests per second, from {RATE_PER_S_MIN:g} to "
            f"{RATE_PER_S_MAX:,.0f}, not {value!r}"
        )


def _networks(value: object) -> tuple[str, ...]:
    networks: dict[str, None] = {}
    for text in _texts("allow_networks", value):
        try:
            networks[str(ip_network(text))] = None
        except ValueError:
            raise UsageError(
                f'allow_networks: "{text[:80]}" is not a network such as 10.0.0.0/8'
            ) from None
    if len(networks) > NETWORKS_MAX:
        raise UsageError(f"allow_networks: {len(networks)} networks, the limit is {NETWORKS_MAX}")
    return tuple(networks)


def _pem(value: object) -> None:
    text = _text("ca", value)
    if "-----BEGIN CERTIFICATE-----" not in text or "PRIVATE KEY" in text:
        raise UsageError("ca: must be one or more certificates in PEM, and no private key")
    if len(text.encode()) > CA_BYTES_MAX:
        raise UsageError(f"ca: longer than {CA_BYTES_MAX} bytes")


def _integer(name: str, value: object, maximum: int) -> None:
    if type(value) is not int or not 1 <= value <= maximum:
        raise UsageError(f"{name}: must be between 1 and {maximum}, not {quoted(value)}")
