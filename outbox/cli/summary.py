"""Text of the status overview: name-value pairs, table rows, and notes on problems."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from outbox.cli.output import age
from outbox.core.delivery.circuit_breaker import PROBED_STATES, describe_probing
from outbox.core.delivery.operational_events import STUCK_EVERY
from outbox.core.model.compat import describe_end
from outbox.core.model.endpoint_condition import DEGRADED, HEALTHY, describe_condition
from outbox.core.model.stored_response import describe_attempts, describe_response
from outbox.core.model.text import count
from outbox.operations.dead_letters.skip import Standing, is_held, stuck_advice
from outbox.operations.events.future import COUNT_MAX
from outbox.operations.feeds.progress import describe_feed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

    from outbox.operations.endpoints.statuses import EndpointStatus
    from outbox.operations.status import Overview

RELAY_COLUMNS = ("relay", "state", "sequences", "endpoints", "version", "since")
ENDPOINT_COLUMNS = ("endpoint", "state", "pending", "oldest", "dead letters", "relay")
NO_ENDPOINTS = "no endpoints; add one with: outbox endpoint add NAME URL"


def pairs(overview: Overview) -> list[tuple[str, Any]]:
    """The installation-wide values."""
    alive = sum(replica.alive for replica in overview.replicas)
    open_gaps = count(overview.open_gaps, "open gap")
    return [
        ("schema", overview.schema),
        ("relays", f"{alive} alive" if alive else "none alive; start one: outbox relay"),
        ("sequenced", _sequenced(overview)),
        ("timeline", _timeline(overview)),
        ("gaps", open_gaps if overview.open_gaps else "none"),
        ("held", _held(overview)),
        ("dead letters", _dead_letters(overview)),
        ("endpoints", overview.endpoints_total),
        ("compat signatures", _compat(overview)),
    ]


def _compat(overview: Overview) -> str | None:
    compat = overview.compat
    if not (compat.endpoints or compat.ended):
        return None
    texts = [f"of {count(compat.endpoints, 'endpoint')}"]
    if compat.next_end is not None:
        left = describe_end(compat.next_end, overview.at)
        texts.append(f"the next end: {compat.next_endpoint}, {left}")
    if compat.ended:
        texts.append(f"{compat.ended} ended")
    return "; ".join(texts)


def _held(overview: Overview) -> str | None:
    held = overview.held
    if held.oldest_at is None:
        return None
    over = "more than " if held.events > COUNT_MAX else ""
    events = count(min(held.events, COUNT_MAX), "event")
    oldest = age((held.now - held.oldest_at).total_seconds())
    return (
        f"{over}{events} with {count(held.deliveries, 'delivery')}, for the shares of "
        f"{count(held.tenants, 'tenant')}, the oldest for {oldest}"
    )


def _dead_letters(overview: Overview) -> str:
    dead, replaying = (overview.dead_letters.get(state, 0) for state in ("dead", "replaying"))
    removed = overview.dead_letters_of_removed
    texts = [f"{dead - removed}; see: outbox dead list" if dead > removed else "0"]
    if removed:
        texts.append(f"{removed} of removed endpoints, which can only be discarded")
    if replaying:
        texts.append(f"{replaying} being replayed: outbox dead list --state replaying")
    return "; ".join(texts)


def _sequenced(overview: Overview) -> str:
    cursor = overview.cursor
    if cursor.waiting_s is None:
        # Higher ids were rolled back or are not committed yet, so there is no lag.
        return f"up to id {cursor.high}, no event waiting"
    return f"up to id {cursor.high} of {cursor.last_id}, oldest event waiting for " + str(
        age(cursor.waiting_s)
    )


def _timeline(overview: Overview) -> str | None:
    cursor = overview.cursor
    if cursor.timeline_at is None:
        return None
    since = age((overview.at - cursor.timeline_at).total_seconds())
    return f"{cursor.timeline} since {since}, with new lanes"


def relay_rows(overview: Overview) -> list[tuple[Any, ...]]:
    """Rows of the relay table; empty for a single live relay."""
    replicas = overview.replicas
    if len(replicas) == 1 and replicas[0].alive:
        return []
    return [
        (
            r.name,
            "alive" if r.alive else "lapsed",
            "yes" if r.leads else None,
            r.endpoints,
            r.version,
            r.started_at,
        )
        for r in replicas
    ]


def endpoint_row(endpoint: EndpointStatus) -> tuple[Any, ...]:
    """The row of an endpoint, in the order of `ENDPOINT_COLUMNS`."""
    return (
        endpoint.name,
        describe_condition(endpoint.condition, endpoint.failing_lanes, endpoint.lanes),
        endpoint.pending,
        age(endpoint.oldest_s),
        endpoint.dead_letters,
        endpoint.replica,
    )


def notes(overview: Overview) -> Iterator[str]:
    """Notes on problems, of sequencing and per endpoint, with the command that resolves each."""
    if (blocker := overview.blocker) is not None:
        yield (f"sequencing is blocked by {blocker.describe()}; to end it: {blocker.end_command}")
    if overview.stopped is not None:
        yield f"nothing is sequenced: {overview.stopped}; see: outbox doctor"
    if overview.unaccounted_events:
        yield (
            f"{count(overview.unaccounted_events, 'event')} missing or superfluous, by a "
            "comparison of all ids with the table; see: outbox doctor"
        )
    for each in overview.replicas:
        if each.alive and each.problem:
            yield (
                f"relay {each.name} lacks resources for connections: {each.problem}; see: outbox "
                "doctor"
            )
        if each.alive and each.api_problem:
            yield f"relay {each.name}: {each.api_problem}"
    for missed in overview.missed:
        at_least = "at least " if missed.more else ""
        yield (
            f"{missed.endpoint}: has missed {at_least}{count(missed.events, 'event')} while it was "
            f"disabled; to send what it has missed: {missed.replay_command}"
        )
    for feed in overview.feeds:
        left = "" if feed.left_s is None else str(age(feed.left_s))
        yield f"{feed.endpoint}: {describe_feed(feed, left)}"
    for endpoint in overview.endpoints:
        for note in _notes(endpoint, overview.at):
            yield f"{endpoint.name}: {note}"


def _notes(endpoint: EndpointStatus, now: datetime) -> Iterator[str]:
    name = shlex.quote(endpoint.name)

    def since(at: datetime) -> str:
        return f"since {age((now - at).total_seconds())}"

    if endpoint.state != "active":
        by = f" by {endpoint.state_by}" if endpoint.state_by else ""
        comment = f" ({endpoint.state_comment})" if endpoint.state_comment else ""
        undo = {"paused": "resume", "disabled": "enable"}.get(endpoint.state)
        next_step = f"; outbox endpoint {undo} {name}" if undo else ""
        yield f"{endpoint.state} {since(endpoint.state_at)}{by}{comment}{next_step}"
    health = endpoint.health
    is_open = health is not None and health.state in PROBED_STATES
    held_until = None if health is None else health.held_until
    if held_until is not None and held_until <= now:
        held_until = None
    if health is not None and health.state != HEALTHY:
        is_probed = (
            endpoint.state == "active" and endpoint.replica is not None and held_until is None
        )
        probing = f"; {describe_probing(probes=endpoint.probes)}" if is_probed and is_open else ""
        failing_since = endpoint.failing_since if is_open else None
        yield f"{health.state} {since(failing_since or health.since)}{probing}"
    if endpoint.failing_lanes and endpoint.failing_since is not None and not is_open:
        lanes = count(endpoint.failing_lanes, "lane")
        yield f"{lanes} failing {since(endpoint.failing_since)}"
    if held_until is not None:
        yield f"on hold until {_time(held_until)}, as requested by its receiver (Retry-After)"
    if (block := endpoint.block) is not None:
        letter = block.dead_letter
        act = f"outbox dead replay {letter}, outbox dead discard {letter} or " if letter else ""
        yield (
            f"{count(endpoint.blocked_lanes, 'lane')} blocked, one {since(block.since)} by "
            f"sequence {block.sequence}; {act}outbox endpoint resume {name}"
        )
    if (head := endpoint.failing) is not None:
        event = f" (event {head.event})" if head.event else ""
        tried = describe_attempts(head.attempts, head.probes)
        hint = f"; see: outbox trace {head.event}" if head.event else ""
        yield (
            f"lane {head.lane} fails at sequence {head.sequence}{event} after "
            f"{tried}{_next(endpoint)}: {describe_response(head.last_response)}{hint}"
        )
        if head.skip_requested:
            yield f"sequence {head.sequence} is skipped as soon as a relay delivers to the endpoint"
        elif head.attempts >= STUCK_EVERY or is_held(head.last_response):
            where = endpoint.name, head.lane, head.sequence
            state = HEALTHY if health is None else health.state
            standing = Standing(endpoint.state, state, endpoint.failing_lanes)
            advice = stuck_advice(*where, head.last_response, standing)
            if advice is not None:
                yield advice
    if endpoint.old_lanes:
        yield (
            f"{count(endpoint.old_lanes, 'lane')} of an older generation with "
            f"{count(endpoint.old_pending, 'pending delivery')}; the new lanes wait for them"
        )


def _next(endpoint: EndpointStatus) -> str:
    """The time of the next attempt, unless the endpoint's circuit breaker decides it."""
    head = endpoint.failing
    if head is None or head.next_attempt_at is None or endpoint.replica is None:
        return ""
    if endpoint.condition != DEGRADED:
        return ""
    return f", next at {_time(head.next_attempt_at)}"


def _time(at: datetime) -> str:
    return f"{at.astimezone():%H:%M:%S}"
