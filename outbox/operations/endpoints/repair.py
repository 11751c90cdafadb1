"""Repairing a held lane of a broker: filling its stream again, or going on with it as it is.

Only the owner of an endpoint opens and appends to its streams.  So a repair is a request to the
owner, in the lane's row, valid until the lane delivers again; see `outbox.core.brokers.repair`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from outbox.core.brokers.repair import RepairKind
from outbox.core.model.response import Failure
from outbox.errors import Conflict
from outbox.operations.endpoints.found import find_endpoint
from outbox.operations.endpoints.writes import begin_generations
from outbox.operations.lanes import FAILING
from outbox.store.change import make_change
from outbox.store.sql.expressions import is_stream_held
from outbox.store.sql.message import WriteStatement

if TYPE_CHECKING:
    from typing import Any

    from asyncpg import Connection

    from outbox.operations.endpoints.found import FoundEndpoint
    from outbox.store.change import Change

RepairAction: TypeAlias = Literal["refill", "continue", "take_over", "dead_letter"]
"""What the owner does with a lane:

refill       it appends again what the stream has lost
continue     it goes on where the stream stands, without what that has lost
take_over    it takes the stream, and goes on where the sequences fit; otherwise as dead_letter
dead_letter  it dead-letters the pending deliveries, and newer lanes go on
"""
_ADOPTION: dict[str, RepairAction] = {
    Failure.FORGOT: "continue",
    Failure.AHEAD: "dead_letter",
    Failure.FOREIGN: "take_over",
    Failure.FENCED: "take_over",
}
# The lanes of an endpoint that are held.
READ_HELD = f"""
SELECT l.lane_id, lane_name(l.endpoint_id, n.generation, n.slot) AS lane,
       n.generation < e.generation AS ended, l.delivered_seq, c.last_seq - l.acked_seq AS pending,
       l.last_response ->> 'failure' AS failure
  FROM lane_progress l
  JOIN lane n ON n.id = l.lane_id
  JOIN lane_counter c ON c.lane_id = l.lane_id
  JOIN endpoint e ON e.id = l.endpoint_id
 WHERE l.endpoint_id = $1 AND {FAILING} AND {is_stream_held("l.last_response")}
 ORDER BY l.lane_id
"""  # noqa: S608 (constants only)

# Requests that the owner repairs the lanes, which have these last delivered sequences.
REQUEST_REPAIR = WriteStatement(
    "request_repair",
    """
UPDATE lane l SET repair = $3, repair_seq = v.seq
  FROM unnest($1::bigint[], $2::bigint[]) AS v(id, seq) WHERE l.id = v.id
""",
)


@dataclass(frozen=True, slots=True)
class RepairedLane:
    """A held lane that is repaired."""

    lane: str
    held: str
    """Why it is held: `forgot`, `ahead`, `foreign` or `fenced`."""
    action: RepairAction
    """What the owner does."""
    to_sequence: int
    """The last delivered sequence."""
    pending: int
    """Pending deliveries."""
    dead_letters_max: int
    """How many of them become dead letters, at most."""


@dataclass(frozen=True, slots=True)
class RequestedRepair:
    """The held lanes of an endpoint that its owner repairs."""

    endpoint: str
    repair: RepairKind
    dry_run: bool
    """Nothing was requested."""
    new_lanes: bool
    """A new generation of lanes begins: it goes on when the adopted lanes are drained."""
    lanes: tuple[RepairedLane, ...]


async def request_refill(
    connection: Connection[Any],
    schema: str,
    endpoint: str,
    *,
    actor: str,
    comment: str | None = None,
    owner: str | None = None,
) -> RequestedRepair:
    """Let the owner append again what the streams of an endpoint have lost.

    Args:
        comment: recorded in the journal.
        owner: the tenant that the endpoint must belong to; None: any.

    Raises:
        NotFound: there is no such endpoint.
        Conflict: no stream of it has lost anything, as far as is known.
    """

    async def plan(change: Change) -> RequestedRepair:
        found = await find_endpoint(change, endpoint, owner)
        held = await _read_held(change, found)
        lost = [row for row in held if row["failure"] == Failure.FORGOT]
        if not lost:
            others = sorted({row["failure"] for row in held})
            reason = f"; it is held for another reason: {', '.join(others)}" if others else ""
            raise Conflict(f'no stream of endpoint "{endpoint}" has lost messages{reason}')
        lanes = tuple(_repaired(row, "refill", dead_letters_max=0) for row in lost)
        done = RequestedRepair(endpoint, RepairKind.REFILL, False, False, lanes)
        _request(change, found, lost, done, comment)
        return done

    return await make_change(connection, schema, actor, plan)


async def request_adoption(
    connection: Connection[Any],
    schema: str,
    endpoint: str,
    *,
    actor: str,
    comment: str | None = None,
    owner: str | None = None,
    dry_run: bool = False,
) -> RequestedRepair:
    """Let the owner go on with the streams of all held lanes of an endpoint as they are.

    A lane whose sequences may not fit into its stream gets no more deliveries: a new generation of
    lanes begins, unless one has already.

    Args:
        comment: recorded in the journal.
        owner: the tenant that the endpoint must belong to; None: any.
        dry_run: only show what would happen.

    Raises:
        NotFound: there is no such endpoint.
        Conflict: no lane of it is held, as far as is known.
    """

    async def plan(change: Change) -> RequestedRepair:
        found = await find_endpoint(change, endpoint, owner)
        held = await _read_held(change, found)
        if not held:
            raise Conflict(f'no lane of endpoint "{endpoint}" is held; see: outbox status')
        lanes = []
        for row in held:
            action = _ADOPTION[row["failure"]]
            letters = 0 if action == "continue" else row["pending"]
            lanes.append(_repaired(row, action, dead_letters_max=letters))
        new_lanes = any(row["failure"] != Failure.FORGOT and not row["ended"] for row in held)
        done = RequestedRepair(endpoint, RepairKind.ADOPT, dry_run, new_lanes, tuple(lanes))
        if not dry_run:
            if new_lanes:
                begin_generations(change, [found.id])
            _request(change, found, held, done, comment)
        return done

    return await make_change(connection, schema, actor, plan)


async def _read_held(change: Change, found: FoundEndpoint) -> list[Any]:
    rows: list[Any] = await change.db.fetch(READ_HELD, found.id)
    return rows


def _repaired(row: Any, action: RepairAction, *, dead_letters_max: int) -> RepairedLane:
    return RepairedLane(
        row["lane"], row["failure"], action, row["delivered_seq"], row["pending"], dead_letters_max
    )


def _request(
    change: Change,
    found: FoundEndpoint,
    rows: list[Any],
    done: RequestedRepair,
    comment: str | None,
) -> None:
    change.write(
        REQUEST_REPAIR,
        [row["lane_id"] for row in rows],
        [row["delivered_seq"] for row in rows],
        done.repair.value,
    )
    data = {
        "name": done.endpoint,
        "lanes": [each.lane for each in done.lanes],
        "held": sorted({each.held for each in done.lanes}),
        "new_lanes": done.new_lanes,
        "comment": comment,
    }
    change.journal(
        f"{done.repair.value}_requested",
        found.id,
        data,
        batch_as="from_batch" if done.new_lanes else None,
    )
