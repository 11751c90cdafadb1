"""Catalogue of all metrics: name, unit, attributes and description.

Names, units and attributes follow OpenTelemetry's semantic conventions for metrics; units are
UCUM's.  In Prometheus the names follow OpenTelemetry's compatibility rules:
`outbox.attempt.duration` in `s` becomes `outbox_attempt_duration_seconds`.

**Cardinality is bounded.**  `endpoint` has the names of at most `metrics_endpoints_max`
endpoints of a replica; the others are aggregated as `(other)`.  Every other attribute has few
values.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import get_args

from outbox.core.model.dead_letter_reason import DeadLetterReason

DELIVERY_OUTCOMES: tuple[str, ...] = ("delivered", *get_args(DeadLetterReason))
"""Results of a delivery: delivered, or the reason of its dead letter."""
ATTEMPT_OUTCOMES = ("delivered", "retry", "probe", "refused")
"""Results of an attempt."""

DURATION_BOUNDS_S = (
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    300.0,
)
RETRY_SECONDS = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 10800.0, 21600.0, 86400.0)
ATTEMPTS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0)


class MetricKind(StrEnum):
    """The instrument of a metric."""

    COUNTER = "counter"
    """Monotonic since the start of the process."""
    GAUGE = "gauge"
    """The value at the time of the snapshot."""
    HISTOGRAM = "histogram"


_PROMETHEUS_UNITS = {"s": "_seconds", "By": "_bytes"}


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    kind: MetricKind
    unit: str
    """UCUM; a unit in braces is a count."""
    description: str
    attributes: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()
    """Upper bounds of the buckets of a histogram."""

    @property
    def prometheus(self) -> str:
        """The name in Prometheus, by OpenTelemetry's compatibility rules."""
        name = self.name.replace(".", "_") + _PROMETHEUS_UNITS.get(self.unit, "")
        return name + "_total" if self.kind is MetricKind.COUNTER else name


DELIVERIES = Metric(
    "outbox.deliveries",
    MetricKind.COUNTER,
    "{delivery}",
    "Deliveries that completed. outcome: delivered, or the reason of the dead letter: refused, "
    "exhausted, expired, erased, missing, skipped, backlog, adopted, disabled, removed.",
    ("endpoint", "outcome"),
)
ATTEMPTS_MADE = Metric(
    "outbox.attempts",
    MetricKind.COUNTER,
    "{attempt}",
    "Completed requests. outcome: delivered, retry, probe or refused. error.type, unless "
    "delivered: the class of the status (4xx), or why there was no response.",
    ("endpoint", "outcome", "error.type"),
)
ATTEMPT_DURATION = Metric(
    "outbox.attempt.duration",
    MetricKind.HISTOGRAM,
    "s",
    "Duration of a request, from the DNS lookup to the response.",
    ("endpoint",),
    DURATION_BOUNDS_S,
)
DELIVERY_LATENCY = Metric(
    "outbox.delivery.latency",
    MetricKind.HISTOGRAM,
    "s",
    "Time from the commit of an event to its acknowledgement by the receiver. Excludes replays "
    "and backfills.",
    ("endpoint",),
    DURATION_BOUNDS_S,
)
DELIVERY_ATTEMPTS = Metric(
    "outbox.delivery.attempts",
    MetricKind.HISTOGRAM,
    "{attempt}",
    "Requests per delivery until it was acknowledged or dead-lettered.",
    (),
    ATTEMPTS,
)
RETRIES = Metric(
    "outbox.retries",
    MetricKind.COUNTER,
    "{attempt}",
    "Second and further requests of a delivery. outcome: delivered, retry, probe or refused.",
    ("outcome",),
)
RETRY_DELAY = Metric(
    "outbox.retry.delay",
    MetricKind.HISTOGRAM,
    "s",
    "Delay before the next attempt of a delivery after a failed one.",
    (),
    RETRY_SECONDS,
)
RUN_DELIVERIES = Metric(
    "outbox.run.deliveries",
    MetricKind.COUNTER,
    "{delivery}",
    "Deliveries that were followed at once by the next one of their lane, in a request run. "
    "Their share of outbox.deliveries is high while a backlog drains and receivers respond fast.",
)
EVENTS = Metric(
    "outbox.events",
    MetricKind.COUNTER,
    "{event}",
    "Events that this replica assigned sequence numbers to.",
)
LOSSES = Metric(
    "outbox.replica.losses",
    MetricKind.COUNTER,
    "{replica}",
    "Replicas that this one expired after their lease ended.",
)
SESSION_LOSSES = Metric(
    "outbox.session.losses",
    MetricKind.COUNTER,
    "{session}",
    "Sessions that ended because this replica lost its lease or its database.",
)
PROOF_ABORTS = Metric(
    "outbox.proof.aborts",
    MetricKind.COUNTER,
    "{message}",
    "Messages that concluded nothing, because committed events existed which an earlier read had "
    "not returned.  Always 0, unless rows were hidden.",
)
BACKLOG = Metric(
    "outbox.backlog",
    MetricKind.GAUGE,
    "{delivery}",
    "Pending deliveries of the endpoints that this replica owns.",
    ("endpoint",),
)
LANE_DEPTH = Metric(
    "outbox.lane.depth",
    MetricKind.GAUGE,
    "{delivery}",
    "Pending deliveries of the endpoint's deepest lane.",
    ("endpoint",),
)
HEAD_AGE = Metric(
    "outbox.lane.head.age",
    MetricKind.GAUGE,
    "s",
    "Age of the oldest next delivery of the endpoint's lanes; 0: no delivery is pending.",
    ("endpoint",),
)
LANES = Metric(
    "outbox.lanes",
    MetricKind.GAUGE,
    "{lane}",
    "Lanes that this replica owns. state: idle, pending, failing (the next delivery was "
    "attempted), blocked (until an operator unblocks it).",
    ("state",),
)
ENDPOINTS = Metric(
    "outbox.endpoints",
    MetricKind.GAUGE,
    "{endpoint}",
    "Endpoints that this replica owns. state, of the circuit breaker: healthy, failing, rejecting, "
    "recovering, paused, disabled.",
    ("state",),
)
ENDPOINT_TROUBLE = Metric(
    "outbox.endpoint.trouble.age",
    MetricKind.GAUGE,
    "s",
    "Time since an endpoint was last healthy, while it is failing, rejecting or recovering. Only "
    "the endpoints with the longest times, at most OUTBOX_METRICS_ENDPOINTS_MAX.",
    ("endpoint", "state"),
)
IN_FLIGHT = Metric(
    "outbox.requests.in_flight",
    MetricKind.GAUGE,
    "{request}",
    "Requests in flight.",
)
BUFFERED = Metric(
    "outbox.buffer.usage",
    MetricKind.GAUGE,
    "By",
    "Memory of deliveries and unwritten responses, of OUTBOX_BUFFER_BYTES_MAX less an eighth.",
)
WAITING = Metric(
    "outbox.requests.waiting",
    MetricKind.GAUGE,
    "{request}",
    "Requests that wait for admission. reason: a limit of the endpoint (endpoint_in_flight, "
    "endpoint_rate) or of its tenant (tenant_in_flight, tenant_rate), or a slot in the capacity "
    "class of fast endpoints (fast), of new ones (probation), or of slow ones (slow).",
    ("reason",),
)
LEADS = Metric(
    "outbox.replica.leads",
    MetricKind.GAUGE,
    "{replica}",
    "1 while this replica is the leader, which assigns sequence numbers; otherwise 0.",
)
RELAY_LAG = Metric(
    "outbox.relay.lag",
    MetricKind.GAUGE,
    "s",
    "Time since the sequencer last read all committed events; reported by the leader. Up to "
    "OUTBOX_POLL_S while no events are published.",
)
STALLED = Metric(
    "outbox.sequencing.stall",
    MetricKind.GAUGE,
    "s",
    "How long this replica could not sequence, and saw no other replica do it, although events "
    "may wait; 0: there is no stall.",
)
DEAD_LETTERS = Metric(
    "outbox.dead_letters",
    MetricKind.GAUGE,
    "{dead_letter}",
    "Open dead letters, counted up to 100,000; reported by the leader.",
)
GAP_AGE = Metric(
    "outbox.gap.age",
    MetricKind.GAUGE,
    "s",
    "Age of the oldest open gap: an event id whose transaction has neither committed nor rolled "
    "back; 0: there is none. Reported by the leader.",
)
HORIZON_AGE = Metric(
    "outbox.horizon.age",
    MetricKind.GAUGE,
    "s",
    "Age of the oldest transaction that prevents vacuum from removing dead rows; reported by the "
    "leader.",
)
UNACCOUNTED_EVENTS = Metric(
    "outbox.unaccounted.events",
    MetricKind.GAUGE,
    "{event}",
    "Events that are missing or superfluous, by a comparison of all ids with the rows of the "
    "outbox, a part each hour; 0: there are none. Reported by the leader.",
)
FEED_REMAINING = Metric(
    "outbox.feed.remaining",
    MetricKind.GAUGE,
    "{event}",
    "Upper bound of the events, of all types, that the feed of an endpoint has not passed, unless "
    "it waits for a replay. Only the feeds with the highest lag, at most "
    "OUTBOX_METRICS_ENDPOINTS_MAX; reported by the leader.",
    ("endpoint",),
)
FEED_LAG = Metric(
    "outbox.feed.lag",
    MetricKind.GAUGE,
    "s",
    "Age of the newest batch that the feed of an endpoint has passed, unless it waits for a "
    "replay. Only the highest ones, at most OUTBOX_METRICS_ENDPOINTS_MAX; reported by the leader.",
    ("endpoint",),
)
FED_DELIVERIES = Metric(
    "outbox.feed.deliveries",
    MetricKind.COUNTER,
    "{delivery}",
    "Deliveries of earlier events that this replica, as the leader, added for feeds.",
)
REPLICAS = Metric(
    "outbox.replicas",
    MetricKind.GAUGE,
    "{replica}",
    "Registered replicas. state: alive, or lapsed (the lease expired). Reported by the leader.",
    ("state",),
)

API_UP = Metric(
    "outbox.api.up",
    MetricKind.GAUGE,
    "{api}",
    "1 while the API that this relay has started sends heartbeats, 0 while it does not.",
)
API_RESTARTS = Metric(
    "outbox.api.restarts",
    MetricKind.COUNTER,
    "{restart}",
    "How often the API had ended by itself, or was stuck, and was started again.",
)
API_REQUEST_DURATION = Metric(
    "outbox.api.request.duration",
    MetricKind.HISTOGRAM,
    "s",
    "Duration of a request to the API, until its response is written. listener: api or "
    "receivers. status: the class of the status (2xx), or closed if the client closed the "
    "connection first.",
    ("listener", "status"),
    DURATION_BOUNDS_S,
)
API_REQUESTS_IN_PROGRESS = Metric(
    "outbox.api.requests.in_progress",
    MetricKind.GAUGE,
    "{request}",
    "Requests to the API that it works on.",
    ("listener",),
)
API_REFUSALS = Metric(
    "outbox.api.refusals",
    MetricKind.COUNTER,
    "{request}",
    "Requests that the API refused. reason: a limit (rate, of a token; share, too much held of a "
    "tenant; concurrency, of a token or address; logins, the failed ones of an address; body_size; "
    "body_time), the token (token, not a valid one; scope, not enough), the header Host (host), or "
    "the database (unavailable).",
    ("listener", "reason"),
)
API_HELD = Metric(
    "outbox.api.held",
    MetricKind.COUNTER,
    "{request}",
    "Requests of tenants' tokens whose events were held, because they exceed the tenant's share.",
)

CATALOGUE: tuple[Metric, ...] = (
    DELIVERIES,
    ATTEMPTS_MADE,
    ATTEMPT_DURATION,
    DELIVERY_LATENCY,
    DELIVERY_ATTEMPTS,
    RETRIES,
    RETRY_DELAY,
    RUN_DELIVERIES,
    BACKLOG,
    LANE_DEPTH,
    HEAD_AGE,
    LANES,
    ENDPOINTS,
    ENDPOINT_TROUBLE,
    DEAD_LETTERS,
    IN_FLIGHT,
    BUFFERED,
    WAITING,
    EVENTS,
    LEADS,
    RELAY_LAG,
    STALLED,
    GAP_AGE,
    HORIZON_AGE,
    UNACCOUNTED_EVENTS,
    FEED_REMAINING,
    FEED_LAG,
    FED_DELIVERIES,
    REPLICAS,
    LOSSES,
    SESSION_LOSSES,
    PROOF_ABORTS,
    API_UP,
    API_RESTARTS,
    API_REQUEST_DURATION,
    API_REQUESTS_IN_PROGRESS,
    API_REFUSALS,
    API_HELD,
)
"""All metrics, in display order."""
