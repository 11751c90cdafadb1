"""Endpoint settings: one table with everything that can be set for an endpoint.

Each field of `DeclaredSettings` declares everything about one setting: its type and limits, its
default, and how it is described.  Reading (`outbox.store.delivery.endpoints`), files
(`outbox.core.model.endpoint_config`), flags (`outbox.cli.endpoint.options`) and the HTTP API
(`outbox_api.endpoints`) are generated from it.
"""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast, get_args

from outbox.core.model import setting_types
from outbox.core.model.compat import PRESETS as COMPAT_PRESETS
from outbox.core.model.compat import Compat, CompatSetting
from outbox.core.model.destination import is_stream
from outbox.core.model.headers import DEFAULT_PREFIX, normalize_name, relay_headers, size_warning
from outbox.core.model.message_format import BATCH_MAX, DEFAULT_SOURCE, UNBATCHED, FormatName
from outbox.core.model.retry_policy import PRESETS, STANDARD, RetryPolicy
from outbox.core.model.setting import (
    FAILURES,
    REQUESTS,
    SUBSCRIPTION,
    Setting,
    declare,
    metadata_of,
)
from outbox.core.model.setting_types import EVERYTHING
from outbox.core.model.text import quoted
from outbox.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

Method = Literal["POST", "PUT", "PATCH"]
OnDeadLetter = Literal["continue", "block"]
OnMissing = Literal["dead_letter", "hold"]
OnForgotten = Literal["hold", "refill"]
KeepResponses = Literal["none", "failed", "all"]
HeadersT = TypeVar("HeadersT")
StatusesT = TypeVar("StatusesT")

ENDPOINT_LANES_MAX = 1024
IN_FLIGHT_MAX = 1024
TIMEOUT_S_MAX = 3600.0
AGE_S_MAX = 3650 * 86400.0
BACKLOG_DELIVERIES_MAX = 2**63 - 1

HTTP_ONLY = (
    "method",
    "header_prefix",
    "compat",
    "batch_max",
    "keep_alive",
    "keep_responses",
    "retryable",
)
"""Settings that a broker's endpoint cannot have."""
WARNED_OF = frozenset({"headers", "compat"})
"""Settings of which `EndpointSettings.warnings` may say something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredSettings(Generic[HeadersT, StatusesT]):
    """The fields of everything that has an endpoint's settings: these alone declare them.

    An endpoint that is ready to deliver has the headers and statuses in another form.
    """

    name: str = field(
        metadata=metadata_of(
            setting_types.Name(),
            SUBSCRIPTION,
            "Unique name of the endpoint; its id stays when the name changes.",
        )
    )
    url: str = field(
        metadata=metadata_of(
            setting_types.Url(),
            REQUESTS,
            "URL of the receiver, also for pending deliveries; or of the streams of a "
            "broker, whose plug-in is installed.",
        )
    )
    types: tuple[str, ...] = declare(
        setting_types.PatternList(setting_types.TYPES_MAX),
        SUBSCRIPTION,
        'Types of the events to receive.  "*" matches one segment, a last "**" the rest; "**" '
        "alone is every type except outbox.*.",
        default=(EVERYTHING,),
    )
    filter: str | None = declare(
        setting_types.Filter(),
        SUBSCRIPTION,
        "Condition on the payload, in SQL/JSON path: '@.total > 100 && @.currency == \"EUR\"'. "
        "Payloads that are not JSON never meet it.",
        default=None,
    )
    tenant: str | None = declare(
        setting_types.Tenant(),
        SUBSCRIPTION,
        "Receive the events of this tenant only.  Without one, those without a tenant.",
        default=None,
    )
    all_tenants: bool = declare(
        setting_types.Switch(),
        SUBSCRIPTION,
        "Receive the events of all tenants, and events without one.",
        default=False,
    )
    lanes: int = declare(
        setting_types.Count(ENDPOINT_LANES_MAX),
        SUBSCRIPTION,
        f"Number of lanes, 1 to {ENDPOINT_LANES_MAX}.  A lane sends one request at a time, and "
        "lanes send in parallel; events with the same key always use the same lane, in order.  "
        "An event that fails stops its lane only.  1: one order over all keys.",
        default=4,
    )

    method: Method = declare(
        setting_types.Choice(get_args(Method)),
        REQUESTS,
        "HTTP method: POST, PUT or PATCH.",
        default="POST",
    )
    headers: HeadersT = field(
        default_factory=cast("Any", dict),
        repr=False,
        metadata=metadata_of(
            setting_types.HeaderMap(),
            REQUESTS,
            "Headers to send, in place of an event's headers of the same names.",
        ),
    )
    header_prefix: str = declare(
        setting_types.HeaderPrefix(),
        REQUESTS,
        "Begins the names of the headers that describe a delivery: X-Acme-Sequence instead of "
        "X-Sequence.",
        default=DEFAULT_PREFIX,
    )
    compat: Compat | None = declare(
        CompatSetting(),
        REQUESTS,
        "Second signature, in the form of another sender, for receivers that check that one: "
        f"{', '.join(COMPAT_PRESETS)}.",
        default=None,
    )
    format: FormatName = declare(
        setting_types.Choice(get_args(FormatName)),
        REQUESTS,
        "Format of the body: envelope, thin (the envelope without the payload), raw (the "
        "payload), cloudevents or cloudevents-binary.",
        default="envelope",
    )
    source: str = declare(
        setting_types.UriReference(),
        REQUESTS,
        "source of CloudEvents: a URI.",
        default=DEFAULT_SOURCE,
    )
    connect_timeout_s: float = declare(
        setting_types.Time(TIMEOUT_S_MAX),
        REQUESTS,
        "Connect time-out, including DNS and TLS.",
        default=5.0,
    )
    timeout_s: float = declare(
        setting_types.Time(TIMEOUT_S_MAX), REQUESTS, "Time-out of the whole request.", default=15.0
    )
    in_flight_max: int | None = declare(
        setting_types.Count(IN_FLIGHT_MAX),
        REQUESTS,
        "Maximum concurrent requests, over all lanes.",
        none="one per lane",
        default=None,
    )
    rate_per_s: float | None = declare(
        setting_types.Rate(),
        REQUESTS,
        "Maximum requests per second of one relay; 0.5 is one every two seconds.",
        none="no limit",
        default=None,
    )
    batch_max: int | None = declare(
        setting_types.Count(BATCH_MAX),
        REQUESTS,
        f"Maximum deliveries of a lane in one request, sent as a JSON array, 1 to {BATCH_MAX}; "
        "for the formats envelope, thin and cloudevents.",
        none="one delivery per request, not in an array",
        default=None,
    )
    keep_alive: bool = declare(
        setting_types.Switch(),
        REQUESTS,
        "Reuse connections; otherwise each request has a connection of its own.",
        default=True,
    )
    allow_networks: tuple[str, ...] = declare(
        setting_types.NetworkList(setting_types.NETWORKS_MAX),
        REQUESTS,
        "Private networks that the endpoint may be in, also with plain http and any port, such "
        "as 10.1.2.0/24, besides OUTBOX_ALLOW_NETWORKS.",
        default=(),
    )
    ca: str | None = declare(
        setting_types.Certificates(),
        REQUESTS,
        "CA certificates (PEM) to trust instead of the system's.",
        none="the system's",
        default=None,
    )

    keep_responses: KeepResponses = declare(
        setting_types.Choice(get_args(KeepResponses)),
        REQUESTS,
        "Responses of which headers and the beginning of the body are kept in the log: all, those "
        "of failed attempts, or none.  Statuses are kept in any case.",
        default="all",
    )

    retry: RetryPolicy = declare(
        setting_types.Retry(),
        FAILURES,
        f"Retry policy: {', '.join(PRESETS)}, values such as base=5s,factor=2,cap=1h, or both: "
        "stepped,attempts=8.",
        default=STANDARD,
    )
    retryable: StatusesT = declare(
        setting_types.StatusList(setting_types.STATUSES_MAX),
        FAILURES,
        "Statuses to retry, such as 429, 5xx or 500-504, whatever the retry policy says of "
        "refusals.",
        none="408 421 425 429 5xx",
        default=cast("Any", None),
    )
    on_dead_letter: OnDeadLetter = declare(
        setting_types.Choice(get_args(OnDeadLetter)),
        FAILURES,
        "After a dead letter: continue with the next delivery, or block the lane until it is "
        "resumed.",
        default="continue",
    )
    on_missing: OnMissing = declare(
        setting_types.Choice(get_args(OnMissing)),
        FAILURES,
        "If the event of a delivery is gone, and no record says that it was erased: "
        "dead_letter the delivery, or hold its lane until the event exists again or the "
        "delivery is skipped.",
        default="dead_letter",
    )
    on_forgotten: OnForgotten = declare(
        setting_types.Choice(get_args(OnForgotten)),
        FAILURES,
        "If a broker has lost messages that it had acknowledged: hold the lane until a person "
        "acts, or refill the stream with what is missing, if all of it is still kept.",
        default="hold",
    )
    probes: bool = declare(
        setting_types.Switch(),
        FAILURES,
        "While the endpoint fails, send deliveries again also between their own attempts, to find "
        "out soon that it works again.  Otherwise their own attempts are all.",
        default=True,
    )
    backlog_max: int | None = declare(
        setting_types.Count(BACKLOG_DELIVERIES_MAX),
        FAILURES,
        "Maximum pending deliveries; older ones are dead-lettered.",
        none="no limit",
        default=None,
    )
    backlog_age_s: float | None = declare(
        setting_types.Time(AGE_S_MAX),
        FAILURES,
        "Maximum age of pending deliveries; older ones are dead-lettered.",
        none="no limit",
        default=None,
    )
    disable_after_s: float = declare(
        setting_types.Time(AGE_S_MAX),
        FAILURES,
        "Disable the endpoint after this time without a success.",
        default=3 * 86400.0,
    )
    contact: str | None = declare(
        setting_types.Contact(),
        FAILURES,
        "Whom to tell when the endpoint fails: an e-mail address or another text.  Operational "
        "events have it; no mail is sent.",
        default=None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointSettings(DeclaredSettings["Mapping[str, str]", "tuple[str, ...] | None"]):
    """The settings of one endpoint, as an operator gives them.

    Raises:
        UsageError: a setting is wrong; the message begins with its name.
    """

    def __post_init__(self) -> None:
        for each in SETTINGS.values():
            value = getattr(self, each.field)
            if value is not None or not each.is_nullable:
                object.__setattr__(self, each.field, each.type.validate(each.name, value))
        if self.all_tenants and self.tenant is not None:
            raise UsageError("tenant: an endpoint is for one tenant or for all, not both")
        if self.batch_max is not None and self.format in UNBATCHED:
            raise UsageError(f"batch_max: the format {self.format} has one delivery per request")
        if is_stream(self.url):
            for name in HTTP_ONLY:
                if (each := SETTINGS[name]).public(self) != each.public_default:
                    raise UsageError(f"{name}: is for HTTP receivers; a broker has no such setting")
        elif self.on_forgotten != "hold":
            raise UsageError("on_forgotten: is for brokers; an HTTP receiver has no stream")
        signed = frozenset() if self.compat is None else self.compat.form.names
        for name in self.headers:
            if normalize_name(name) in relay_headers(self.header_prefix):
                raise UsageError(f"headers: {quoted(name)} is set by the relay")
            if normalize_name(name) in signed:
                raise UsageError(f"headers: {quoted(name)} is set by the compat signature")
        if taken := signed & relay_headers(self.header_prefix):
            raise UsageError(f"compat: the header {min(taken)} is set by the relay")

    @property
    def subscription(self) -> tuple[tuple[str, ...], str | None, bool, str | None]:
        """The settings that select its events: types, tenant, all_tenants, filter."""
        return self.types, self.tenant, self.all_tenants, self.filter

    @property
    def warnings(self) -> tuple[str, ...]:
        """What receivers may refuse, although it is allowed."""
        computed = {} if self.compat is None else self.compat.form.longest_headers
        warning = None if is_stream(self.url) else size_warning({**self.headers, **computed})
        return () if warning is None else (f"headers: {warning}",)

    def to_dict(self) -> dict[str, Any]:
        """All settings by field name, as JSON values; `from_dict` reads them."""
        values = asdict(self)
        return values | {"compat": None if self.compat is None else self.compat.public()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EndpointSettings:
        """Settings from stored values; missing ones have their default.

        Name and tenant are kept as they are: those that an earlier version allowed can still be
        changed.

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
        compat = values.get("compat")
        if compat is not None:
            compat = SETTINGS["compat"].type.parse("compat", compat)
        stored = cls(**{**values, "name": "-", "tenant": None, "retry": retry, "compat": compat})
        for kept in ("name", "tenant"):
            object.__setattr__(stored, kept, values.get(kept))
        return stored


def _table() -> dict[str, Setting]:
    table = {}
    for each in fields(EndpointSettings):
        default = {} if each.default_factory is not MISSING else each.default
        setting = Setting(each.name, **each.metadata, default=default)
        table[setting.name] = setting
    return table


SETTINGS = _table()
"""All settings by public name, in display order."""
SETTING_FIELDS = tuple(each.field for each in SETTINGS.values())
"""The fields of all settings, which are their columns, too."""
