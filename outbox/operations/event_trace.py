"""Event trace: the data model of one event's history, and its diagnosis.

`outbox.operations.trace` reads a trace from the database.  The diagnosis explains, in one
sentence per cause, why a delivery is pending or dead-lettered, with the command that
resolves it.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from outbox.core.delivery.circuit_breaker import PROBED_STATES, PROBING_TEXT
from outbox.core.delivery.operational_events import STUCK_EVERY
from outbox.core.model.duration import rounded
from outbox.core.model.stored_response import describe_attempts, describe_response
from outbox.core.model.text import count
from outbox.operations.skip import is_held, stuck_advice

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime
    from uuid import UUID

VERSION = 1
"""Version of the JSON form; raised when the meaning of a field changes."""

DeliveryState: TypeAlias = Literal[
    "delivered", "pending", "dead", "replaying", "replayed", "dead_again", "discarded"
]
"""State of a delivery.  A replayed dead letter is `replaying` while any of its new
deliveries is pending, then `replayed` or `dead_again`; each new delivery has its own state."""


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
    """None: the payload was erased."""
    content_type: str | None
    """Of a payload that is not JSON; None: it is JSON, or was erased."""
    erased_at: datetime | None
    payload: Any = None
    """Only when requested, and only JSON."""


@dataclass(frozen=True, slots=True)
class SequencedBatch:
    """The batch that sequenced the event."""

    batch: int | None
    """None, here and in `TracedAttempt.replica_id`: not shown to a tenant's token."""
    at: datetime
    late: bool
    """The event committed after events with higher ids had been sequenced."""


@dataclass(frozen=True, slots=True)
class TracedAttempt:
    """One HTTP request of a delivery."""

    attempt: int
    replica_id: int | None
    outcome: str
    """delivered, retry or refused."""
    status: int | None
    error: str | None
    started_at: datetime
    elapsed_ms: float
    response: dict[str, Any] | None
    """The stored response."""


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
    """None: the event was dropped by retention."""
    attempts: int
    probes: int
    """Attempts that only probed the receiver; they do not count against the retry limit."""
    next_attempt_at: datetime | None
    """By the retry policy; while the circuit breaker is open, its probes decide instead."""
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
    held_until: datetime | None
    """Hold-off from the receiver's Retry-After."""
    relay: str | None
    """The live relay that owns the endpoint."""
    head: LaneHead
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
    """Only for a pending delivery."""
    # With a default, or pydantic leaves it out of the schema.
    state: DeliveryState = field(init=False, default="pending")

    def __post_init__(self) -> None:
        if self.dead_letter is not None:
            state = self.dead_letter.state
        else:
            state = "pending" if self.lane_state is not None else "delivered"
        object.__setattr__(self, "state", state)


@dataclass(frozen=True, slots=True)
class UnsentGroup:
    """Endpoints that the event was not sent to, for one reason."""

    reason: Literal["type", "tenant", "filter", "before", "after", "lost"]
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
class EventTrace:
    """The history of one event."""

    at: datetime
    """Time of the snapshot, by the server's clock."""
    event: TracedEvent
    sequenced: SequencedBatch | None
    sequencing: SequencingProgress | None
    """Only for an event that is not sequenced yet."""
    log_dropped: bool
    """The log partition with the event's deliveries was dropped by retention."""
    deliveries: tuple[TracedDelivery, ...]
    deliveries_total: int
    """All deliveries, including those beyond the limit."""
    missed: tuple[UnsentGroup, ...]
    diagnosis: tuple[str, ...] = field(init=False, default=())
    """Causes why the event is not delivered, one sentence each; empty when it is."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "diagnosis", tuple(_diagnose(self)))


@dataclass(frozen=True, slots=True)
class TraceReport:
    """Traces of the events that match an id or key."""

    version: int = field(default=VERSION, init=False)
    found_by: str
    more: bool
    """Whether there are older events."""
    events: list[EventTrace]


def _diagnose(trace: EventTrace) -> Iterator[str]:
    if trace.sequencing is not None:
        yield _explain_unsequenced(trace.sequencing, trace.event.outbox_id)
        return
    if trace.log_dropped:
        yield (
            "retention dropped the log of its deliveries, none of which was pending; the journal "
            "entry period_dropped has the time"
        )
        return
    lost = [missed for missed in trace.missed if missed.reason == "lost"]
    if not trace.deliveries_total:
        unsent = "; ".join(map(describe_unsent, trace.missed)) or "there is none"
        yield f"no endpoint received it: {unsent}"
    elif lost:
        yield "it was not sent to " + describe_unsent(lost[0])
    for delivery in trace.deliveries:
        where = f"{delivery.endpoint}: sequence {delivery.sequence} of lane {delivery.lane}"
        if delivery.dead_letter is not None:
            if delivery.dead_letter.state not in ("replayed", "dead_again"):
                yield f"{where} {_describe_dead_letter(delivery.dead_letter)}"
        elif delivery.lane_state is not None:
            obstacles = list(_find_obstacles(delivery, delivery.lane_state, trace.at))
            for obstacle in obstacles or ["is about to be sent"]:
                yield f"{where} {obstacle}"


def _explain_unsequenced(sequencing: SequencingProgress, outbox_id: int) -> str:
    if sequencing.high is None:
        return "it is not sequenced yet"
    if not sequencing.relays:
        return "it is not sequenced because no relay is running; start one: outbox relay"
    if sequencing.in_gap:
        return (
            "it is not sequenced yet because it committed late; it is read when the concurrent "
            "producer transactions have ended; outbox doctor lists them"
        )
    behind = outbox_id - sequencing.high
    who = f"leader {sequencing.leader}" if sequencing.leader else "no relay leads; sequencing"
    return f"it is not sequenced yet: {who} is {count(behind, 'id')} behind; see outbox doctor"


_UNSENT_REASONS = {
    "type": "{n} not subscribed to its type",
    "tenant": "{n} of another tenant",
    "filter": "{n} with a filter that excludes its payload",
    "before": "{n} added after it was published",
    "after": "{n} disabled or removed before it was sequenced",
    "lost": "{n} that should have received it: run outbox verify",
}


def describe_unsent(missed: UnsentGroup) -> str:
    """Describe how many endpoints the event was not sent to, and why."""
    text = _UNSENT_REASONS[missed.reason].format(n=missed.endpoints)
    return f"{text} ({', '.join(missed.examples)})" if missed.examples else text


_DEAD_LETTER_REASONS = {
    "refused": "its receiver rejected it",
    "exhausted": "its retries were exhausted",
    "expired": "it had expired",
    "erased": "its event was erased",
    "skipped": "an operator skipped it",
    "backlog": "its endpoint exceeded a backlog limit",
    "adopted": "an operator adopted a stream into which it does not fit",
    "disabled": "its endpoint was disabled",
    "removed": "its endpoint was removed",
}


def _describe_dead_letter(letter: TracedDeadLetter) -> str:
    reason = _DEAD_LETTER_REASONS[letter.reason]
    match letter.state:
        case "discarded":
            return f"was dead-lettered because {reason}; dead letter {letter.id} was discarded"
        case "replaying":
            return f"was dead-lettered because {reason}; it is being replayed"
    again = "" if letter.reason in ("removed", "erased") else f": outbox dead replay {letter.id}"
    return f"was dead-lettered because {reason}; it is dead letter {letter.id}{again}"


def _find_obstacles(
    delivery: TracedDelivery, lane: PendingLaneState, now: datetime
) -> Iterator[str]:
    """Everything that blocks a pending delivery: the endpoint first, then the lane."""
    name = shlex.quote(delivery.endpoint)

    def lasted(at: datetime) -> str:
        return f"for {rounded((now - at).total_seconds())}"

    if lane.state != "active":
        by = f" by {lane.state_by}" if lane.state_by else ""
        reason = f" ({lane.state_comment})" if lane.state_comment else ""
        undo = {"paused": "resume", "disabled": "enable", "disabling": "enable"}
        then = f"; outbox endpoint {undo[lane.state]} {name}" if lane.state in undo else ""
        yield f"waits: its endpoint has been {lane.state}{by} {lasted(lane.state_at)}{reason}{then}"
    elif lane.relay is None:
        yield "waits: no live relay owns its endpoint; see outbox status"
    if lane.blocked_since is not None:
        letter = lane.blocked_by
        by = f"dead letter {letter}" if letter else "a dead letter"
        act = f"outbox dead replay {letter}, outbox dead discard {letter} or " if letter else ""
        yield (
            f"waits: its lane has been blocked by {by} {lasted(lane.blocked_since)}; unblock it: "
            f"{act}outbox endpoint resume {name}"
        )
    if lane.older_pending:
        yield (
            f"waits for {lane.older_pending} pending in lanes of an older generation, which are "
            "delivered first"
        )
    elif lane.older_unended:
        lanes = count(lane.older_unended, "lane")
        yield f"waits until {lanes} of an older generation got the end entry; see outbox status"
    if lane.held_until is not None and lane.held_until > now:
        left_s = (lane.held_until - now).total_seconds()
        yield f"waits {rounded(left_s)} more: its receiver sent Retry-After"
    elif lane.health in PROBED_STATES:
        tried = f"; {PROBING_TEXT}" if lane.state == "active" and lane.relay else ""
        yield f"waits: its endpoint has been {lane.health} {lasted(lane.health_since)}{tried}"
    head = lane.head
    if head.sequence < delivery.sequence:
        ahead = delivery.sequence - head.sequence
        first = f" (event {head.event_id})" if head.event_id else ""
        yield f"waits behind {ahead} of its lane, the first is sequence {head.sequence}{first}" + (
            f", which {_describe_failure(delivery, lane, now)}" if head.attempts else ""
        )
    elif head.attempts:
        yield _describe_failure(delivery, lane, now)


def _describe_failure(delivery: TracedDelivery, lane: PendingLaneState, now: datetime) -> str:
    """Describe the attempts of the lane's next delivery, and the command that skips it."""
    head = lane.head
    tried = describe_attempts(head.attempts, head.probes)
    text = f"failed after {tried}, the last: {describe_response(head.last_response)}"
    if head.next_attempt_at is not None and _retries_on_schedule(lane):
        left_s = (head.next_attempt_at - now).total_seconds()
        text += f"; the next is {f'in {rounded(left_s)}' if left_s > 0 else 'due now'}"
    # The event is probably to blame if its receiver responds to others.
    responded = "status" in (head.last_response or {})
    held = is_held(head.last_response)
    if (lane.health == "healthy" and responded) or head.attempts >= STUCK_EVERY or held:
        where = delivery.endpoint, delivery.lane, head.sequence
        if (advice := stuck_advice(*where, head.last_response)) is not None:
            text += f"; {advice}"
    return text


def _retries_on_schedule(lane: PendingLaneState) -> bool:
    """Whether only the retry policy decides when a failed delivery is attempted again."""
    return (
        lane.state == "active"
        and lane.health == "healthy"
        and lane.relay is not None
        and lane.blocked_since is None
    )
