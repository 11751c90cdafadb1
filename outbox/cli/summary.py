"""How the overview reads: names and values, a table, and notes about what needs a look."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from outbox.cli.output import age, count
from outbox.core.delivery.circuit_breaker import PROBED, PROBING
from outbox.core.model.endpoint_status import HEALTHY
from outbox.core.model.response import in_words

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

    from outbox.operations.status import EndpointStatus, Overview

RELAY_COLUMNS = ("relay", "state", "sequences", "endpoints", "version", "since")
ENDPOINT_COLUMNS = ("endpoint", "state", "owed", "oldest", "failing", "dead letters", "relay")
NO_ENDPOINTS = "no endpoints; add one with: outbox endpoint add NAME URL"


def pairs(schema: str, overview: Overview) -> list[tuple[str, Any]]:
    """What there is one of."""
    alive = sum(replica.alive for replica in overview.replicas)
    open_gaps = count(overview.gaps, "open gap")
    rates = overview.rates
    return [
        ("schema", schema),
        ("relays", f"{alive} alive" if alive else "none alive; start one: outbox relay"),
        ("sequenced", _sequenced(overview)),
        ("timeline", _timeline(overview)),
        ("gaps", open_gaps if overview.gaps else "none"),
        ("dead letters", overview.dead_letters.get("dead", 0)),
        ("endpoints", overview.endpoints_total),
        (
            "per second",
            rates
            and f"{_rate(rates.events)} events sequenced, {_rate(rates.deliveries)} deliveries "
            f"made, {_rate(rates.ended)} ended",
        ),
    ]


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 10 else f"{per_s:.1f}"


def _sequenced(overview: Overview) -> str:
    cursor = overview.cursor
    if cursor.waiting_s is None:
        # Ids above that were rolled back or are not committed: no lag.
        return f"up to id {cursor.high}, nothing waits"
    return f"up to id {cursor.high} of {cursor.last_id}, the oldest waits for " + str(
        age(cursor.waiting_s)
    )


def _timeline(overview: Overview) -> str | None:
    cursor = overview.cursor
    if cursor.timeline_at is None:
        return None
    since = age((overview.at - cursor.timeline_at).total_seconds())
    return f"{cursor.timeline} since {since}, with new lanes"


def relay_rows(overview: Overview) -> list[tuple[Any, ...]]:
    """The relays, if the endpoints' table does not say it all."""
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
    """One endpoint under `ENDPOINT_COLUMNS`."""
    return (
        endpoint.name,
        endpoint.condition,
        endpoint.owed,
        age(endpoint.oldest_s),
        f"{endpoint.failing_lanes}/{endpoint.lanes}" if endpoint.failing_lanes else None,
        endpoint.dead_letters,
        endpoint.replica,
    )


def notes(overview: Overview) -> Iterator[str]:
    """What needs a look, each with the command that helps, endpoint by endpoint."""
    for endpoint in overview.endpoints:
        for note in _notes(endpoint, overview.at):
            yield f"{endpoint.name}: {note}"


def _notes(endpoint: EndpointStatus, now: datetime) -> Iterator[str]:
    name = shlex.quote(endpoint.name)

    def since(at: datetime) -> str:
        return f"since {age((now - at).total_seconds())}"

    if endpoint.state != "active":
        by = f" by {endpoint.state_by}" if endpoint.state_by else ""
        why = f" ({endpoint.state_why})" if endpoint.state_why else ""
        undo = {"paused": "resume", "disabled": "enable"}.get(endpoint.state)
        then = f"; outbox endpoint {undo} {name}" if undo else ""
        yield f"{endpoint.state} {since(endpoint.state_at)}{by}{why}{then}"
    health = endpoint.health
    held_until = None if health is None else health.held_until
    if held_until is not None and held_until <= now:
        held_until = None
    if health is not None and health.state != HEALTHY:
        goes_on = endpoint.state == "active" and endpoint.replica is not None and held_until is None
        tried = f"; {PROBING}" if goes_on and health.state in PROBED else ""
        yield f"{health.state} {since(health.since)}{tried}"
    if held_until is not None:
        yield f"nothing is sent until {_time(held_until)}, as its receiver asked"
    if (block := endpoint.block) is not None:
        letter = block.dead_letter
        act = f"outbox dead replay {letter}, outbox dead discard {letter} or " if letter else ""
        yield (
            f"{count(endpoint.blocked_lanes, 'lane')} blocked, one {since(block.since)} by number "
            f"{block.sequence}; {act}outbox endpoint resume {name}"
        )
    if (head := endpoint.failing) is not None:
        said = in_words(head.last_answer)
        tried = count(head.attempts, "attempt")
        if head.probes:
            tried += f" ({count(head.probes, 'free probe')} among them)"
        yield f"number {head.sequence}: {said}, {tried}{_next(endpoint)}"
    if endpoint.old_lanes:
        yield (
            f"{count(endpoint.old_lanes, 'lane')} of an older generation still owe "
            f"{endpoint.old_owed}; the new ones wait"
        )


def _next(endpoint: EndpointStatus) -> str:
    """When a delivery that failed is tried again, if its own time decides."""
    head, health = endpoint.failing, endpoint.health
    if head is None or head.next_attempt_at is None or endpoint.replica is None:
        return ""
    if endpoint.condition != HEALTHY or (health is not None and health.state != HEALTHY):
        return ""
    return f", next at {_time(head.next_attempt_at)}"


def _time(at: datetime) -> str:
    return f"{at.astimezone():%H:%M:%S}"
