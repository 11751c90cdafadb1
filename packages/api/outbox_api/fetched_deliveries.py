"""Deliveries of a lane, which its receiver fetches.

Fetching does not change pending deliveries.  A list ends with the last acknowledged sequence; a
single delivery may be pending.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.errors import NotFound
from outbox.operations.lane_history import READ_PREVIOUS
from outbox.operations.pages import PAGE_BYTES_MAX
from outbox.store.absence_proof import AbsenceProof
from outbox.store.connection.connect import map_errors
from outbox.store.connection.row_security import rows_hidden, stop_hidden
from outbox.store.delivery.delivery_reads import READ_DELIVERIES, build_delivery

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncpg import Connection

    from outbox.core.model.delivery import Delivery
    from outbox.operations.lane_history import LaneHistory

PAGE_MAX = 1000
SEQUENCE_MAX = 2**62

# The batch of a sequence number, or an earlier one.  Sequence numbers increase with batches, so
# this is a binary search: about forty steps, with an index lookup each.
FIND_BATCH = f"""
WITH RECURSIVE bounds AS (
    SELECT 0::bigint AS low, (SELECT max(batch) FROM batch) + 1 AS high
     UNION ALL
    SELECT CASE WHEN found.seq <= $2 THEN middle ELSE low END,
           CASE WHEN found.seq <= $2 THEN high ELSE middle END
      FROM bounds
     CROSS JOIN LATERAL (SELECT (low + high) / 2 AS middle OFFSET 0) half
      LEFT JOIN LATERAL (
           SELECT seq FROM delivery_run WHERE lane_id = $1 AND batch >= middle
            ORDER BY batch, seq LIMIT 1) found ON true
     WHERE high - low > 1)
SELECT min(low) AS batch, {rows_hidden("batch", "delivery_run", "dead_letter")} AS hidden
  FROM bounds WHERE high - low <= 1
"""  # noqa: S608 (constants only)

# Dead letters in a range of sequences, including a dead-letter range that starts before it.
READ_DEAD_LETTERED = """
SELECT seq, to_seq, reason FROM dead_letter
 WHERE lane_id = $1 AND seq <= $3 AND to_seq >= $2
   AND seq >= coalesce((SELECT max(seq) FROM dead_letter WHERE lane_id = $1 AND seq <= $2), 0)
 ORDER BY seq
"""


@dataclass(frozen=True, slots=True)
class FetchedDelivery:
    """One delivery of a lane."""

    sequence: int
    previous_sequence: int
    dead_lettered: str | None
    """Reason of the dead letter; None: it was delivered, or is pending."""
    delivery: Delivery | None
    """The delivery; None: the event was erased, or is missing."""
    is_missing: bool = False
    """The event is gone, and no record says that it was erased."""


async def get_delivery(
    connection: Connection[Any], schema: str, lane: LaneHistory, sequence: int
) -> FetchedDelivery:
    """Read one delivery of a lane, which may be pending.

    Raises:
        NotFound: there is none, or retention has dropped it.
    """
    found = await list_deliveries(connection, schema, lane, sequence - 1, 1, through=lane.last)
    if not found or found[0].sequence != sequence:
        raise NotFound(f"there is no delivery {sequence} in the lane, or it is no longer retained")
    return found[0]


async def list_deliveries(
    connection: Connection[Any],
    schema: str,
    lane: LaneHistory,
    after: int,
    limit: int,
    *,
    through: int | None = None,
) -> list[FetchedDelivery]:
    """List deliveries of a lane after the sequence `after`, at most `limit`.

    The first sequence is higher than `after + 1` when retention dropped those between.

    Args:
        through: the last sequence; None: that of the last completed delivery.

    Raises:
        CursorBroken: deliveries or events may be hidden.
    """
    through = lane.acknowledged if through is None else through
    with map_errors(schema):
        found = await connection.fetchrow(FIND_BATCH, lane.id, after + 1)
        if found["hidden"]:
            await stop_hidden(connection)
        arguments = [lane.id], [found["batch"]], [after], [limit], [PAGE_BYTES_MAX]
        rows = await _read_deliveries(connection, *arguments)
        rows = [row for row in rows if row["seq"] <= through]
        if not rows:
            return []
        first, last = rows[0]["seq"], rows[-1]["seq"]
        dead_lettered = await connection.fetch(READ_DEAD_LETTERED, lane.id, first, last)
        previous: int = await connection.fetchval(READ_PREVIOUS, lane.id, first)
    return _fetched(lane, rows, dead_lettered, previous)


async def _read_deliveries(connection: Connection[Any], *arguments: Any) -> list[Any]:
    """Read deliveries; an event that is not returned is gone, and not hidden.

    Raises:
        CursorBroken: events may be hidden.
    """
    rows: list[Any] = await connection.fetch(READ_DELIVERIES, *arguments)
    if missing := [row["outbox_id"] for row in rows if _is_missing(row)]:
        # What is returned between two checks of the conditions is all there is.
        proof = AbsenceProof(connection, of_events=True)
        await proof.require_visible(missing)
        rows = await connection.fetch(READ_DELIVERIES, *arguments)
        await proof.require_visible(missing)
    if any(row["hidden"] for row in rows):
        await stop_hidden(connection)
    return rows


def _is_missing(row: Any) -> bool:
    return row["payload"] is None and not row["is_recorded"]


def _fetched(
    lane: LaneHistory, rows: Sequence[Any], dead_lettered: Sequence[Any], previous: int
) -> list[FetchedDelivery]:
    deliveries: list[FetchedDelivery] = []
    reasons = iter(dead_lettered)
    covering = next(reasons, None)
    for row in rows:
        sequence = row["seq"]
        while covering is not None and covering["to_seq"] < sequence:
            covering = next(reasons, None)
        is_dead_lettered = covering is not None and covering["seq"] <= sequence
        deliveries.append(
            FetchedDelivery(
                sequence,
                previous,
                covering["reason"] if covering is not None and is_dead_lettered else None,
                None if row["payload"] is None else build_delivery(lane, row),
                _is_missing(row),
            )
        )
        if not is_dead_lettered:
            previous = sequence
    return deliveries
