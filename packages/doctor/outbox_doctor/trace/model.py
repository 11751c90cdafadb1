"""Event trace: the data model of one event's history.

`outbox_doctor.trace.queries` reads a trace from the database, and
`outbox_doctor.trace.diagnosis` explains it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from outbox.operations.deliveries.model import DeliveryState
    from outbox.operations.events.future import FutureEvent

VERSION = 1
"""Version of the JSON form; raised when the meaning of a field changes."""


@dataclass(frozen=True, slots=True)
class TracedEvent:
    """The event as it was published."""

    outbox_id: int
    event_id: UUID
    type: str
    tenant: str | None
    key: str | None
    published_at: datetime
    expires_at: datetime | None
    headers: dict[str, str] | None
    payload_bytes: int | None
    """The payload's size; None: the payload was erased."""
    content_type: str | None
    """The content type of a payload that is not JSON; None: it is JSON, or was erased."""
    erased_at: datetime | None
    payload: Any = None
    """The payload, only when requested, and only JSON."""


@dataclass(frozen=True, slots=True)
class SequencedBatch:
    """The batch that sequenced the event."""

    batch: int | None
    """The batch.  It is None, like `TracedAttempt.replica_id`, for a tenant's token."""
    at: datetime
    late: bool
    """The event committed after events with higher ids had been sequenced."""


@dataclass(frozen=True, slots=True)
class TracedAttempt:
    """One HTTP request of a delivery."""

    attempt: int
    replica_id: int | None
    outcome: str
    """delivered, retry, probe (which failed, and costs no retry) or refused."""
    status: int | None
    error: str | None
    started_at: datetime
    elapsed_ms: float
    response: dict[str, Any] | None
    """The stored response."""


@dataclass(frozen=True, slots=True)
class RebuiltRequest:
    """A request as it was sent: not stored, but built again from the event and from the settings
    of its endpoint at that time."""

    attempt: int
    method: str
    url: str
    headers: tuple[tuple[str, str], ...]
    """The headers in their order, without signatures.  The values of the endpoint's own are
    masked."""
    body: str | None = None
    """The body; an endpoint with batches may have sent it together with others.  None: it is a
    payload that is not JSON, in `body_base64`."""
    body_base64: str | None = None
    rebuilt: bool = True


@dataclass(frozen=True, slots=True)
class TracedDeadLetter:
    """The dead letter that holds a delivery, alone or as part of a range."""

    id: int
    reason: str
    state: DeliveryState
    at: datetime
    attempts: int
    sequence: int
    to_sequence: int


@dataclass(frozen=True, slots=True)
class LaneHead:
    """The first pending delivery of a lane, the only one that can be failing."""

    sequence: int
    event_id: UUID | None
    """The event's id; None: the event was dropped by retention."""
    attempts: int
    probes: int
    """Attempts that only probed the receiver; they do not count against the retry limit."""
    next_attempt_at: datetime | None
    """The time of the next attempt by the retry policy; while the circuit breaker is open, its
    probes decide instead."""
    last_response: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class PendingLaneState:
    """State of a lane with pending deliveries, and of its endpoint."""

    state: str
    """The endpoint's operational state."""
    state_at: datetime
    state_by: str | None
    state_comment: str | None
    health: str
    health_since: datetime
    """When the circuit breaker entered this state; while it is open: when the endpoint began to
    fail."""
    held_until: datetime | None
    """Hold-off from the receiver's Retry-After."""
    relay: str | None
    """The live relay that owns the endpoint."""
    head: LaneHead
    failing_lanes: int
    """Failing lanes of the endpoint."""
    probes: bool
    """Whether the endpoint's deliveries are probed while it fails."""
    blocked_since: datetime | None
    blocked_by: int | None
    """The dead letter that blocks the lane."""
    older_pending: int
    """Pending deliveries in lanes of older generations, which are delivered first."""
    older_unended: int
    """Lanes of older generations whose end entry is missing in a broker's stream."""


@dataclass(frozen=True, slots=True)
class TracedDelivery:
    """A delivery of the event: its place in one lane."""

    endpoint: str
    endpoint_id: UUID
    lane: str
    sequence: int
    delivery_id: UUID
    """The X-Delivery header."""
    sequenced_at: datetime
    replay_of: tuple[str, int] | None
    """Lane and sequence number of the original delivery."""
    backfill: int | None
    """The backfill job that created this delivery or its original, with its own X-Delivery."""
    attempts: tuple[TracedAttempt, ...]
    """The newest ones; a trace has at most 1,000, of all deliveries."""
    dead_letter: TracedDeadLetter | None
    lane_state: PendingLaneState | None
    """The lane's state, only for a pending delivery."""
    # With a default, or pydantic leaves it out of the schema.
    state: DeliveryState = field(init=False, default="pending")
    request: RebuiltRequest | None = None
    """The last request, where requests are asked for.  None: there was none, or what it is built
    from is gone."""

    def __post_init__(self) -> None:
        if self.dead_letter is not None:
            state = self.dead_letter.state
        else:
            state = "pending" if self.lane_state is not None else "delivered"
        object.__setattr__(self, "state", state)


@dataclass(frozen=True, slots=True)
class UnsentGroup:
    """Endpoints that the event was not sent to, for one reason."""

    reason: Literal[
        "type", "tenant", "filter", "before", "after", "feed", "seen", "skipped", "lost"
    ]
    """`before`: published before the endpoints were added; `lost`: an invariant is violated."""
    endpoints: int
    examples: tuple[str, ...]
    """Names of some of the endpoints."""


@dataclass(frozen=True, slots=True)
class SequencingProgress:
    """State of sequencing, for an event that is not sequenced yet."""

    high: int | None
    in_gap: bool | None
    """The event committed late, and its id is still an open gap."""
    relays: int | None
    """Number of live relays."""
    leader: str | None


@dataclass(frozen=True, slots=True)
class TraceAction:
    """An action that resolves a cause."""

    kind: Literal["skip", "pause", "refill", "adopt", "replay", "discard", "resume", "enable"]
    """An operation on a delivery, a dead letter or an endpoint."""
    endpoint: str
    lane: str | None = None
    """The lane of the delivery to skip, like `sequence`."""
    sequence: int | None = None
    dead_letter: int | None = None
    """The one to replay or to discard."""


@dataclass(frozen=True, slots=True)
class TraceCause:
    """One cause why an event is not delivered."""

    text: str
    endpoint: str | None = None
    """The delivery's endpoint, like `lane` and `sequence`; null: the cause concerns the whole
    event."""
    lane: str | None = None
    sequence: int | None = None
    actions: tuple[TraceAction, ...] = ()


@dataclass(frozen=True, slots=True)
class EventTrace:
    """The history of one event."""

    at: datetime
    """Time of the snapshot, by the server's clock."""
    event: TracedEvent
    sequenced: SequencedBatch | None
    sequencing: SequencingProgress | None
    """The state of sequencing, only for an event that is not sequenced yet."""
    log_dropped: bool
    """The log partition with the event's deliveries was dropped by retention."""
    deliveries: tuple[TracedDelivery, ...]
    deliveries_total: int
    """All deliveries, including those beyond the limit."""
    missed: tuple[UnsentGroup, ...]
    diagnosis: tuple[str, ...] = ()
    """Causes why the event is not delivered, one sentence each, with its command."""
    causes: tuple[TraceCause, ...] = ()
    """The diagnosis as data, with actions instead of commands."""


@dataclass(frozen=True, slots=True)
class TraceReport:
    """Traces of the events that match an id or key."""

    version: int = field(default=VERSION, init=False)
    found_by: str
    more: bool
    """Whether there are older events."""
    events: list[EventTrace]
    future: FutureEvent | None = None
    """The event, if it is not published yet: it has no trace."""
