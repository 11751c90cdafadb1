"""Skipping a delivery: the one that a lane is stuck on becomes a dead letter, and the lane goes on.

Only the owner of an endpoint writes the progress of its lanes.  So a skip is a request to the
owner: the sequence number in the lane's row.  It names one delivery for ever, because a number
never changes its event, so the request cannot hit another one: if the lane has moved on, nothing
matches it.  Without a live relay, the next owner finds it.
"""

from __future__ import annotations

import asyncio
import shlex
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from outbox.core.brokers.results import BROKER_FAILURES
from outbox.core.delivery.circuit_breaker import BreakerState
from outbox.core.model.response import (
    HOLD_FAILURES,
    STREAM_HOLD_FAILURES,
    UNREACHABLE_FAILURES,
    Failure,
)
from outbox.core.model.response_policy import is_application_failure
from outbox.errors import Conflict
from outbox.operations.endpoints.found import find_endpoint
from outbox.operations.lane_history import get_lane
from outbox.operations.lanes import BLOCKED_BY, FAILING, LANE_STATE
from outbox.operations.rows import from_row
from outbox.store.change import make_change
from outbox.store.connection.connect import LOST_ERRORS, map_errors
from outbox.store.sql.expressions import lease_runs
from outbox.store.sql.message import WriteStatement

if TYPE_CHECKING:
    from collections.abc import Mapping
    from uuid import UUID

    from asyncpg import Connection

    from outbox.store.change import Change

OWNER_WAIT_S, OWNER_POLL_S = 3.0, 0.05
"""How long to wait for the owner, which reacts at once if it is not busy, and how often to look."""

# The lane $1, and the dead letter that has the sequence number $2.
_LANE = f"""
  FROM ({LANE_STATE} WHERE l.id = $1) l
  LEFT JOIN LATERAL (
       SELECT id, reason, to_seq FROM dead_letter
        WHERE lane_id = l.lane_id AND seq <= $2 ORDER BY seq DESC LIMIT 1) d ON d.to_seq >= $2
"""  # noqa: S608 (constants only)

# These with the lane's next delivery, and the relay that owns the endpoint.
READ_LANE = f"""
SELECT l.acked_seq, l.last_seq, d.id AS dead_letter, d.reason, b.seq AS blocked_seq,
       {BLOCKED_BY} AS blocked_by, r.name AS relay, n.event_id AS event,
       CASE WHEN {FAILING} THEN l.attempts ELSE 0 END AS attempts
{_LANE}  LEFT JOIN lane_block b ON b.lane_id = l.lane_id
  LEFT JOIN LATERAL (
       SELECT o.event_id
         FROM (SELECT d.seq, d.outbox_id FROM delivery d
                WHERE d.lane_id = l.lane_id AND d.batch >= l.floor_batch AND d.seq > l.acked_seq
                ORDER BY d.batch, d.seq LIMIT 1) head
         JOIN outbox o ON o.id = head.outbox_id
        WHERE head.seq = $2) n ON true
  LEFT JOIN ownership w ON w.endpoint_id = l.endpoint_id
  LEFT JOIN replica r ON r.id = w.replica_id AND {lease_runs("r")}
"""  # noqa: S608 (constants only)

# Whether the delivery has ended since, and how.
READ_OUTCOME = f"""
SELECT l.acked_seq, l.last_seq, d.id AS dead_letter, d.reason
{_LANE}"""

# Requests that the owner skips the delivery.
REQUEST_SKIP = WriteStatement("request_skip", "UPDATE lane SET skip_seq = $2 WHERE id = $1")


def skip_command(endpoint: str, lane: str, sequence: int) -> str:
    """The command that skips a delivery."""
    return f"outbox dead skip {shlex.quote(endpoint)} --lane {lane} --sequence {sequence}"


def is_held(last_response: Mapping[str, Any] | None) -> bool:
    """Whether a lane waits for a person, because of its stream, or because its event is gone."""
    return (last_response or {}).get("failure") in HOLD_FAILURES


class Standing(NamedTuple):
    """How the endpoint of a failing delivery stands."""

    state: str
    """Its operational state."""
    health: str
    """The state of its circuit breaker."""
    failing_lanes: int


def skip_helps(last_response: Mapping[str, Any] | None, endpoint: Standing) -> bool:
    """Whether a failing delivery may be at fault, and not its receiver: that responds to others,
    or its application fails, and as far as is known at this one alone.

    Args:
        last_response: the last response in its stored form.
    """
    last = last_response or {}
    if endpoint.health == BreakerState.HEALTHY:
        return last.get("failure") not in UNREACHABLE_FAILURES
    return (
        endpoint.health != BreakerState.REJECTING
        and endpoint.failing_lanes <= 1
        and is_application_failure(last.get("status"))
    )


def stuck_advice(
    endpoint: str,
    lane: str,
    sequence: int,
    last_response: Mapping[str, Any] | None,
    standing: Standing,
) -> str | None:
    """How to go on with a delivery that fails again and again; None: nothing can be done here,
    because its broker is at fault, or the endpoint is paused already.

    Args:
        last_response: the last response in its stored form.
    """
    failure = (last_response or {}).get("failure")
    name = shlex.quote(endpoint)
    if failure == Failure.FORGOT:
        return (
            f"to append it again: outbox endpoint refill {name}; to go on without it: "
            f"outbox endpoint adopt {name}"
        )
    if failure in STREAM_HOLD_FAILURES:
        return f"to go on with the stream as it is: outbox endpoint adopt {name} --dry-run"
    if failure in BROKER_FAILURES:
        return None
    if failure == Failure.MISSING:
        return (
            "restore the event with the same id; or, to go on without it: "
            f"{skip_command(endpoint, lane, sequence)}; or, for all: "
            f"outbox endpoint update {name} --on-missing dead_letter"
        )
    pause = f"outbox endpoint pause {name}" if standing.state == "active" else None
    if skip_helps(last_response, standing):
        skip = f"to skip it: {skip_command(endpoint, lane, sequence)}"
        if standing.health == BreakerState.HEALTHY or pause is None:
            return skip
        return f"{skip}; or, if its receiver fails at others as well, to hold them: {pause}"
    return pause and f"to hold its deliveries until its receiver works: {pause}"


class LaneMoved(Conflict):
    """The lane does not wait for this delivery; nothing was skipped."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class SkippedDelivery:
    """A delivery that was skipped, or will be as soon as a relay delivers to its endpoint."""

    endpoint: str
    lane: str
    sequence: int
    event: UUID | None
    """The event; None: it was erased, or it is a copy of a dead letter."""
    attempts: int
    """Requests that were made for it, probes included."""
    dead_letter: int | None
    """Id of the dead letter; None: the owner of the endpoint has not skipped it yet."""
    relay: str | None
    """The relay that owns the endpoint; None: no live one does."""
    pending: int
    """Number of deliveries that waited behind it."""


async def skip_delivery(
    connection: Connection[Any],
    schema: str,
    endpoint: str,
    lane: str,
    sequence: int,
    *,
    actor: str,
    comment: str | None = None,
    owner: str | None = None,
    wait_s: float = OWNER_WAIT_S,
) -> SkippedDelivery:
    """Turn the delivery that a lane waits for into a dead letter, and wait until that is done.

    A request in flight completes first; if it succeeds, the delivery is delivered.

    Args:
        lane: the lane's name, as in X-Lane.
        comment: recorded in the journal.
        owner: the tenant that the endpoint must belong to; None: any.
        wait_s: how long to wait; a busy owner skips the delivery later.

    Raises:
        NotFound: there is no such endpoint, or it has no such lane.
        LaneMoved: the lane waits for another delivery, or for none; also if this one was skipped.
        Conflict: the lane is blocked by a dead letter.
    """

    async def plan(change: Change) -> tuple[int, SkippedDelivery]:
        found = await find_endpoint(change, endpoint, owner)
        lane_id = (await get_lane(change.db, schema, found.id, lane)).id
        row = await change.db.fetchrow(READ_LANE, lane_id, sequence)
        pending = row["last_seq"] - max(row["acked_seq"], sequence)
        skipped = from_row(
            SkippedDelivery, row, endpoint=endpoint, lane=lane, sequence=sequence, pending=pending
        )
        _require_next(row, endpoint, lane, sequence)
        change.write(REQUEST_SKIP, lane_id, sequence)
        data = {"lane": lane, "sequence": sequence, "event": row["event"], "comment": comment}
        change.journal("skip_requested", found.id, data)
        return lane_id, skipped

    lane_id, skipped = await make_change(connection, schema, actor, plan)
    until = asyncio.get_running_loop().time() + wait_s
    # The request is written: a lost connection leaves only its outcome unknown.
    with map_errors(schema), suppress(*LOST_ERRORS):
        while True:
            row = await connection.fetchrow(READ_OUTCOME, lane_id, sequence)
            if row["reason"] == "skipped":
                return replace(skipped, dead_letter=row["dead_letter"])
            if row["reason"] is not None or row["acked_seq"] >= sequence:
                _raise_moved(row, endpoint, lane, sequence)
            if asyncio.get_running_loop().time() >= until:
                break
            await asyncio.sleep(OWNER_POLL_S)
    return skipped


def _require_next(row: Any, endpoint: str, lane: str, sequence: int) -> None:
    """Require that the lane waits for this delivery.

    Raises:
        Conflict: it does not.
    """
    is_next = sequence == row["acked_seq"] + 1 <= row["last_seq"]
    if row["dead_letter"] is not None or not is_next:
        _raise_moved(row, endpoint, lane, sequence)
    if row["blocked_seq"] is not None:
        letter = row["blocked_by"]
        raise Conflict(
            f'lane {lane} of endpoint "{endpoint}" is blocked by dead letter {letter}; first: '
            f"outbox dead replay {letter}, or outbox dead discard {letter}"
        )


def _raise_moved(row: Any, endpoint: str, lane: str, sequence: int) -> NoReturn:
    acked_seq, last_seq = row["acked_seq"], row["last_seq"]
    if row["reason"] == "skipped":
        state = f"was skipped before; it is dead letter {row['dead_letter']}"
    elif row["dead_letter"] is not None:
        state = f"is dead letter {row['dead_letter']} already ({row['reason']})"
    elif sequence <= acked_seq:
        state = "was delivered"
    elif sequence > last_seq:
        state = f"does not exist; the last one is {last_seq}"
    else:
        state = "waits behind others; only the first one of a lane can be skipped"
    at = "the lane is empty" if acked_seq == last_seq else f"the lane waits for {acked_seq + 1}"
    raise LaneMoved(
        f'sequence {sequence} of lane {lane} of endpoint "{endpoint}" {state}. Nothing was '
        f"skipped; {at}"
    )
