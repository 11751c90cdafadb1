"""Every metric: its name, unit and attributes, and what it says.

Names, units and attributes follow OpenTelemetry's semantic conventions for metrics;
units are UCUM's.  Prometheus sees the same under the names that OpenTelemetry's
compatibility rules make of them: `outbox.attempt.duration` in `s` is there
`outbox_attempt_duration_seconds`.

**Cardinality is bounded.**  `endpoint` takes the names of at most
`metrics_endpoints_max` endpoints of a replica; all others are counted together, as
`(other)`.  Every other attribute takes a handful of values.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import get_args

from outbox.core.delivery.commands import DeadLetterReason

OUTCOMES: tuple[str, ...] = ("delivered", *get_args(DeadLetterReason))
"""How a delivery ends: it was acknowledged, or given up for one of these reasons."""
ANSWERS = ("delivered", "retry", "refused")
"""How a request ends."""

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
RETRY_SECONDS = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 10800.0, 21600.0, 86400.0)
ATTEMPTS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0)


class Kind(StrEnum):
    """What becomes of its values."""

    COUNTER = "counter"
    """They only rise, from the start of the process."""
    GAUGE = "gauge"
    """As they were when it was looked."""
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric."""

    name: str
    kind: Kind
    unit: str
    """UCUM; what is in braces is only counted."""
    description: str
    attributes: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()
    """Of a histogram: the upper ends of its buckets."""

    @property
    def prometheus(self) -> str:
        """Its name in Prometheus, by OpenTelemetry's rules."""
        name = self.name.replace(".", "_")
        if self.unit == "s":
            name += "_seconds"
        return name + "_total" if self.kind is Kind.COUNTER else name


DELIVERIES = Metric(
    "outbox.deliveries",
    Kind.COUNTER,
    "{delivery}",
    "Deliveries that ended. outcome: delivered, or the reason why it was given up: refused, "
    "exhausted, expired, erased, backlog, disabled, removed.",
    ("endpoint", "outcome"),
)
ATTEMPTS_MADE = Metric(
    "outbox.attempts",
    Kind.COUNTER,
    "{attempt}",
    "Requests that were made and answered, or not. outcome: delivered, retry or refused. "
    "error.type, unless delivered: the class of the status (4xx), or why there was no answer.",
    ("endpoint", "outcome", "error.type"),
)
ATTEMPT_DURATION = Metric(
    "outbox.attempt.duration",
    Kind.HISTOGRAM,
    "s",
    "How long a request took, from its first look-up to its answer.",
    ("endpoint",),
    SECONDS,
)
DELIVERY_LATENCY = Metric(
    "outbox.delivery.latency",
    Kind.HISTOGRAM,
    "s",
    "From the commit of an event to its acknowledgement by the receiver. What is sent again, "
    "replays and backfills, is left out.",
    ("endpoint",),
    SECONDS,
)
DELIVERY_ATTEMPTS = Metric(
    "outbox.delivery.attempts",
    Kind.HISTOGRAM,
    "{attempt}",
    "How many requests a delivery took until it was acknowledged or given up.",
    (),
    ATTEMPTS,
)
RETRIES = Metric(
    "outbox.retries",
    Kind.COUNTER,
    "{attempt}",
    "Second and further requests for a delivery. outcome: delivered, retry or refused.",
    ("outcome",),
)
RETRY_DELAY = Metric(
    "outbox.retry.delay",
    Kind.HISTOGRAM,
    "s",
    "How long a delivery waits for its next try after a failed one.",
    (),
    RETRY_SECONDS,
)
EVENTS = Metric(
    "outbox.events",
    Kind.COUNTER,
    "{event}",
    "Events that this replica sequenced.",
)
LOSSES = Metric(
    "outbox.replica.losses",
    Kind.COUNTER,
    "{replica}",
    "Replicas that this one found dead, and took over from.",
)
SESSION_LOSSES = Metric(
    "outbox.session.losses",
    Kind.COUNTER,
    "{session}",
    "How often this replica lost its lease or its database, and began anew.",
)
BACKLOG = Metric(
    "outbox.backlog",
    Kind.GAUGE,
    "{delivery}",
    "Deliveries that are owed to the endpoints that this replica owns.",
    ("endpoint",),
)
LANE_DEPTH = Metric(
    "outbox.lane.depth",
    Kind.GAUGE,
    "{delivery}",
    "Deliveries that the endpoint's deepest lane owes.",
    ("endpoint",),
)
HEAD_AGE = Metric(
    "outbox.lane.head.age",
    Kind.GAUGE,
    "s",
    "Age of the oldest event at the head of one of the endpoint's lanes; 0: nothing is owed.",
    ("endpoint",),
)
LANES = Metric(
    "outbox.lanes",
    Kind.GAUGE,
    "{lane}",
    "Lanes that this replica owns. state: idle, owing, failing (its head was tried), blocked "
    "(an operator has to let it go on).",
    ("state",),
)
ENDPOINTS = Metric(
    "outbox.endpoints",
    Kind.GAUGE,
    "{endpoint}",
    "Endpoints that this replica owns. state, of the breaker: healthy, failing, refusing, "
    "recovering, paused, disabled.",
    ("state",),
)
ENDPOINT_TROUBLE = Metric(
    "outbox.endpoint.trouble.age",
    Kind.GAUGE,
    "s",
    "Since when an endpoint has been failing, refusing or recovering; those that have been it for "
    "the longest, as many as have series of their own.",
    ("endpoint", "state"),
)
IN_FLIGHT = Metric(
    "outbox.requests.in_flight",
    Kind.GAUGE,
    "{request}",
    "Requests that are out.",
)
WAITING = Metric(
    "outbox.requests.waiting",
    Kind.GAUGE,
    "{request}",
    "Requests that wait for their turn. reason: a limit of the endpoint (endpoint_in_flight, "
    "endpoint_rate) or of its tenant (tenant_in_flight, tenant_rate), or room among the requests "
    "of quick endpoints (quick), of new ones (new), or of slow ones (slow).",
    ("reason",),
)
LEADS = Metric(
    "outbox.replica.leads",
    Kind.GAUGE,
    "{replica}",
    "1 while this replica sequences, 0 while it stands by.",
)
RELAY_LAG = Metric(
    "outbox.relay.lag",
    Kind.GAUGE,
    "s",
    "How long ago the sequencer had last read everything that was committed; by the replica that "
    "leads. Up to OUTBOX_POLL_S while nothing is published.",
)
DEAD_LETTERS = Metric(
    "outbox.dead_letters",
    Kind.GAUGE,
    "{dead_letter}",
    "Dead letters that wait for an operator; more than 100,000 are not counted. By the replica "
    "that leads.",
)
GAP_AGE = Metric(
    "outbox.gap.age",
    Kind.GAUGE,
    "s",
    "Since when the oldest open gap has been there: an id that a transaction was given and has "
    "neither committed nor let go; 0: there is none. By the replica that leads.",
)
HORIZON_AGE = Metric(
    "outbox.horizon.age",
    Kind.GAUGE,
    "s",
    "Age of the oldest transaction that keeps dead rows from being cleaned away. By the replica "
    "that leads.",
)
REPLICAS = Metric(
    "outbox.replicas",
    Kind.GAUGE,
    "{replica}",
    "Registered replicas. state: alive, or lapsed (its lease ran out). By the replica that leads.",
    ("state",),
)

CATALOGUE: tuple[Metric, ...] = (
    DELIVERIES,
    ATTEMPTS_MADE,
    ATTEMPT_DURATION,
    DELIVERY_LATENCY,
    DELIVERY_ATTEMPTS,
    RETRIES,
    RETRY_DELAY,
    BACKLOG,
    LANE_DEPTH,
    HEAD_AGE,
    LANES,
    ENDPOINTS,
    ENDPOINT_TROUBLE,
    DEAD_LETTERS,
    IN_FLIGHT,
    WAITING,
    EVENTS,
    LEADS,
    RELAY_LAG,
    GAP_AGE,
    HORIZON_AGE,
    REPLICAS,
    LOSSES,
    SESSION_LOSSES,
)
"""In the order in which they are shown."""
