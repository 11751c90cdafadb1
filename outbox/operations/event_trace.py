"""The life of one event, as far as the tables tell it, and why it is where it is.

A *story* is put together by `outbox.operations.trace`.  Here it is said what is in it,
and what it means: of each delivery what became of it, and of one that is still owed
what it waits for, in words, with the command that helps.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from outbox.core.delivery.circuit_breaker import PROBED, PROBING
from outbox.core.model.response import in_words

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime
    from uuid import UUID

VERSION = 1
"""Of the form in which stories are told to machines; raised when a field's meaning changes."""

Fate: TypeAlias = Literal[
    "delivered", "owed", "dead", "replaying", "replayed", "dead_again", "discarded"
]
"""What became of a delivery.  A dead letter that is sent again is `replaying` while any
of it is owed, then `replayed` or `dead_again`; its new delivery has a fate of its own."""


@dataclass(frozen=True, slots=True)
class Event:
    """What was published."""

    outbox_id: int
    event_id: UUID
    type: str
    tenant: str | None
    key: str | None
    published_at: datetime
    expires_at: datetime | None
    headers: dict[str, str] | None
    payload_bytes: int | None
    """None: it was erased; or the event is gone, and only what is kept of a dead letter
    is known of it."""
    erased_at: datetime | None
    payload: Any = None
    """Only if it was asked for."""


@dataclass(frozen=True, slots=True)
class Sequenced:
    """The batch in which an event was given its numbers."""

    batch: int | None
    """Here and below, None of what is the system's: it is not told to a tenant."""
    at: datetime
    late: bool
    """It was committed when later ones had been sequenced already."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One request."""

    attempt: int
    replica_id: int | None
    outcome: str
    """delivered, retry or refused."""
    status: int | None
    error: str | None
    started_at: datetime
    elapsed_ms: float
    answer: dict[str, Any] | None
    """What is kept of the answer."""


@dataclass(frozen=True, slots=True)
class Letter:
    """The dead letter that a delivery became, alone or in a range."""

    id: int
    reason: str
    state: Fate
    at: datetime
    attempts: int
    sequence: int
    to_sequence: int


@dataclass(frozen=True, slots=True)
class Head:
    """The delivery at the head of a lane: the only one that can be failing."""

    sequence: int
    event_id: UUID | None
    """None: that event is gone."""
    attempts: int
    probes: int
    """How many of them only found out how its receiver is: they count for no limit."""
    next_attempt_at: datetime | None
    """By its schedule; while its endpoint is not healthy that decides, and not this."""
    last_answer: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Standing:
    """How things stand with a lane, and its endpoint, that owes something."""

    state: str
    """The endpoint's: its operator's word."""
    state_at: datetime
    state_by: str | None
    state_why: str | None
    health: str
    health_since: datetime
    held_until: datetime | None
    """By the receiver's Retry-After."""
    relay: str | None
    """Who owns the endpoint, and is alive."""
    head: Head
    blocked_since: datetime | None
    blocked_by: int | None
    """The dead letter that the lane waits for."""
    older_owed: int
    """What lanes of older generations still owe; this one waits for them."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """An event in a lane."""

    endpoint: str
    endpoint_id: UUID
    lane: str
    sequence: int
    delivery_id: UUID
    """Its X-Delivery."""
    numbered_at: datetime
    replay_of: tuple[str, int] | None
    """The lane and number that it stands for."""
    backfill: int | None
    """The job that gives it an X-Delivery of its own, or gave one to what it stands for."""
    attempts: tuple[Attempt, ...]
    letter: Letter | None
    standing: Standing | None
    """Of one that is owed."""

    @property
    def fate(self) -> Fate:
        """What became of it."""
        if self.letter is not None:
            return self.letter.state
        return "owed" if self.standing is not None else "delivered"


@dataclass(frozen=True, slots=True)
class Missed:
    """Endpoints that did not get the event, for one and the same reason."""

    why: Literal["type", "tenant", "filter", "before", "after", "lost"]
    """`before`: it was published before they were added; `lost` must never be."""
    endpoints: int
    examples: tuple[str, ...]
    """Some of their names."""


@dataclass(frozen=True, slots=True)
class Sequencing:
    """Why an event may not be sequenced yet."""

    high: int | None
    in_gap: bool | None
    """It was committed late, and its place is still held open."""
    relays: int | None
    """Those that are alive."""
    leader: str | None


@dataclass(frozen=True, slots=True)
class Story:
    """Everything that is known of one event."""

    at: datetime
    """When it was read, by the server's clock."""
    event: Event
    sequenced: Sequenced | None
    sequencing: Sequencing | None
    """How things stand, if it is not sequenced."""
    log_dropped: bool
    """It was sequenced so long ago that the log of it is gone."""
    deliveries: tuple[Delivery, ...]
    deliveries_total: int
    """There may be more than are told of."""
    missed: tuple[Missed, ...]

    @property
    def diagnosis(self) -> tuple[str, ...]:
        """Why it is not delivered, one sentence each; nothing if it is."""
        return tuple(_diagnosis(self))


def _diagnosis(story: Story) -> Iterator[str]:
    if story.sequencing is not None:
        yield _why_not_sequenced(story.sequencing, story.event.outbox_id)
        return
    if story.log_dropped:
        yield (
            "its deliveries were dropped with the log of that time, when nothing of it was owed "
            "any more; the journal tells when (period_dropped)"
        )
        return
    lost = [missed for missed in story.missed if missed.why == "lost"]
    if not story.deliveries_total:
        yield "no endpoint subscribed to it: " + "; ".join(map(why_missed, story.missed))
    elif lost:
        yield "it never went to " + why_missed(lost[0])
    for delivery in story.deliveries:
        where = f"{delivery.endpoint}: number {delivery.sequence} of lane {delivery.lane}"
        if delivery.letter is not None:
            if delivery.letter.state not in ("replayed", "dead_again"):
                yield f"{where} {_why_given_up(delivery.letter)}"
        elif delivery.standing is not None:
            for why in _why_owed(delivery, delivery.standing, story.at):
                yield f"{where} {why}"


def _why_not_sequenced(sequencing: Sequencing, outbox_id: int) -> str:
    if sequencing.high is None:
        return "it is not sequenced yet"
    if not sequencing.relays:
        return "it is not sequenced: no relay is alive; start one: outbox relay"
    if sequencing.in_gap:
        return (
            "it is not sequenced: it was committed late, and is read as soon as the producers "
            "that were at work beside it have ended; outbox doctor names them"
        )
    behind = outbox_id - sequencing.high
    who = f"relay {sequencing.leader}" if sequencing.leader else "no relay"
    return f"it is not sequenced yet: {who} leads, and is {behind} ids behind; see outbox doctor"


_MISSED = {
    "type": "{n} not for its type",
    "tenant": "{n} not for its tenant",
    "filter": "{n} with a filter that its payload does not meet",
    "before": "{n} that were added after it",
    "after": "{n} that had been disabled or removed before it",
    "lost": "{n} that should have got it: run outbox verify",
}


def why_missed(missed: Missed) -> str:
    """How many endpoints did not get it, and why."""
    told = _MISSED[missed.why].format(n=missed.endpoints)
    return f"{told} ({', '.join(missed.examples)})" if missed.examples else told


_GIVEN_UP = {
    "refused": "its receiver refused it",
    "exhausted": "its retries ended",
    "expired": "it had expired",
    "erased": "its event was erased",
    "backlog": "its endpoint's backlog became too long or too old",
    "disabled": "its endpoint was disabled",
    "removed": "its endpoint was removed",
}


def _why_given_up(letter: Letter) -> str:
    why = _GIVEN_UP[letter.reason]
    match letter.state:
        case "discarded":
            return f"was given up because {why}, and discarded as dead letter {letter.id}"
        case "replaying":
            return f"was given up because {why}; it is being sent again"
    again = "" if letter.reason in ("removed", "erased") else f": outbox dead replay {letter.id}"
    return f"was given up because {why}; it is dead letter {letter.id}{again}"


def _why_owed(delivery: Delivery, standing: Standing, now: datetime) -> Iterator[str]:
    """Everything that stands in its way; the endpoint first, then the lane."""
    name = shlex.quote(delivery.endpoint)
    found = False

    def since(at: datetime) -> str:
        return f"since {_age((now - at).total_seconds())}"

    if standing.state != "active":
        found = True
        by = f" by {standing.state_by}" if standing.state_by else ""
        why = f" ({standing.state_why})" if standing.state_why else ""
        undo = {"paused": "resume", "disabled": "enable", "disabling": "enable"}
        then = f"; outbox endpoint {undo[standing.state]} {name}" if standing.state in undo else ""
        yield f"waits: its endpoint is {standing.state} {since(standing.state_at)}{by}{why}{then}"
    elif standing.relay is None:
        found = True
        yield "waits: no relay that is alive owns its endpoint; see outbox status"
    if standing.blocked_since is not None:
        found = True
        letter = standing.blocked_by
        act = f"outbox dead replay {letter}, outbox dead discard {letter} or " if letter else ""
        yield (
            f"waits: its lane is blocked {since(standing.blocked_since)} until somebody decides "
            f"about a dead letter: {act}outbox endpoint resume {name}"
        )
    if standing.older_owed:
        found = True
        yield (
            f"waits for {standing.older_owed} of the lanes that its endpoint had before their "
            "number was changed"
        )
    if standing.held_until is not None and standing.held_until > now:
        found = True
        left_s = (standing.held_until - now).total_seconds()
        yield f"waits for {_age(left_s)} more, as its receiver asked (Retry-After)"
    elif standing.health in PROBED:
        found = True
        tried = f"; {PROBING}" if standing.state == "active" and standing.relay else ""
        yield f"waits: its endpoint is {standing.health} {since(standing.health_since)}{tried}"
    head = standing.head
    if head.sequence < delivery.sequence:
        found = True
        ahead = delivery.sequence - head.sequence
        first = f" (event {head.event_id})" if head.event_id else ""
        yield f"waits behind {ahead} of its lane, the first is number {head.sequence}{first}" + (
            f", which {_failing(standing, now)}" if head.attempts else ""
        )
    elif head.attempts:
        found = True
        yield _failing(standing, now)
    if not found:
        yield "is about to be sent"


def _failing(standing: Standing, now: datetime) -> str:
    head = standing.head
    tried = "1 attempt" if head.attempts == 1 else f"{head.attempts} attempts"
    if head.probes:
        tried += f" ({head.probes} of them free probes)"
    text = f"failed in {tried}, the last: {in_words(head.last_answer)}"
    if head.next_attempt_at is None or not _by_schedule(standing):
        return text
    left_s = (head.next_attempt_at - now).total_seconds()
    return f"{text}; the next is {f'in {_age(left_s)}' if left_s > 0 else 'due'}"


def _by_schedule(standing: Standing) -> bool:
    """Whether a delivery that failed is tried again at its own time, and nothing else decides."""
    return (
        standing.state == "active"
        and standing.health == "healthy"
        and standing.relay is not None
        and standing.blocked_since is None
    )


_UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "m"), (1.0, "s"))


def _age(seconds: float) -> str:
    for size, unit in _UNITS:
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return "a moment"
