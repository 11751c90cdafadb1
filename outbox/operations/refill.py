"""Refilling a stream: what a broker lost after it had acknowledged it is appended again.

Only the owner of an endpoint appends to its streams.  So a refill is a request to the owner: the
last delivered sequence, in the lane's row.  The owner acts on it when it finds that the stream
stands below that; nothing is appended to a stream that has lost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from outbox.core.brokers.results import HOLD_FAILURES
from outbox.core.model.response import Failure
from outbox.errors import Conflict
from outbox.operations.endpoint_changes import find_endpoint
from outbox.operations.lanes import FAILING
from outbox.store.change import make_change
from outbox.store.connection.message import WriteStatement

if TYPE_CHECKING:
    from typing import Any

    from asyncpg import Connection

    from outbox.store.change import Change

# The lanes of an endpoint whose next delivery is failing, with the reason.
READ_FAILING = f"""
SELECT l.lane_id, lane_name(l.endpoint_id, n.generation, n.slot) AS lane, l.delivered_seq,
       l.last_response ->> 'failure' AS failure
  FROM lane_progress l JOIN lane n ON n.id = l.lane_id
 WHERE l.endpoint_id = $1 AND {FAILING}
 ORDER BY l.lane_id
"""  # noqa: S608 (constants only)

# Lets the owner fill the streams again, up to the last delivered sequences.
REQUEST_REFILL = WriteStatement(
    "request_refill",
    """
UPDATE lane l SET refill_seq = v.seq
  FROM unnest($1::bigint[], $2::bigint[]) AS v(id, seq) WHERE l.id = v.id
""",
)


@dataclass(frozen=True, slots=True)
class RefilledLane:
    """A lane whose stream is filled again."""

    lane: str
    to_sequence: int
    """The last delivered sequence."""


@dataclass(frozen=True, slots=True)
class RequestedRefill:
    """The lanes of an endpoint whose owner fills their streams again."""

    endpoint: str
    lanes: tuple[RefilledLane, ...]


async def request_refill(
    connection: Connection[Any],
    schema: str,
    endpoint: str,
    *,
    actor: str,
    comment: str | None = None,
    owner: str | None = None,
) -> RequestedRefill:
    """Let the owner append again what the streams of an endpoint have lost.

    Args:
        comment: recorded in the journal.
        owner: the tenant that the endpoint must belong to; None: any.

    Raises:
        NotFound: there is no such endpoint.
        Conflict: no stream of it has lost anything, as far as is known.
    """

    async def plan(change: Change) -> RequestedRefill:
        found = await find_endpoint(change, endpoint, owner)
        rows = await change.db.fetch(READ_FAILING, found.id)
        lost = [row for row in rows if row["failure"] == Failure.FORGOT]
        if not lost:
            others = sorted({row["failure"] for row in rows if row["failure"] in HOLD_FAILURES})
            reason = f"; it is held for another reason: {', '.join(others)}" if others else ""
            raise Conflict(f'no stream of endpoint "{endpoint}" has lost messages{reason}')
        change.write(
            REQUEST_REFILL,
            [row["lane_id"] for row in lost],
            [row["delivered_seq"] for row in lost],
        )
        lanes = tuple(RefilledLane(row["lane"], row["delivered_seq"]) for row in lost)
        data = {"name": endpoint, "lanes": [each.lane for each in lanes], "comment": comment}
        change.journal("refill_requested", found.id, data)
        return RequestedRefill(endpoint, lanes)

    return await make_change(connection, schema, actor, plan)
