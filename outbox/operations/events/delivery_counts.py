"""Deliveries of listed events, counted by state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.operations.criteria import find_endpoint_ids
from outbox.operations.events.deliveries import FED_LANES
from outbox.operations.rows import from_row
from outbox.store.retention.erasure import PLAN_BY_INDEX
from outbox.store.sql.expressions import is_found_late

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncpg import Connection

SEARCHED_LANES_MAX = 1000
"""Lanes of a batch that are searched for the deliveries of an event."""

BATCH_OF_EVENT = f"""
     CROSS JOIN LATERAL (
           SELECT batch, {is_found_late("w.id")} AS late
             FROM batch WHERE high >= w.id ORDER BY high, batch LIMIT 1) passed
     CROSS JOIN LATERAL (
           SELECT batch, lanes FROM batch WHERE NOT passed.late AND batch = passed.batch
            UNION ALL
          (SELECT batch, lanes FROM batch
            WHERE passed.late AND batch > passed.batch
              AND NOT isempty(found) AND found @> w.id ORDER BY batch LIMIT 1)) b"""  # noqa: S608
"""The batch `b` that sequenced an event `w`, with its lanes."""
GIVEN_IN = f"""
given_in AS MATERIALIZED (
    SELECT id, batch, lanes FROM wanted
     UNION ALL
    SELECT w.id, f.batch, {FED_LANES}
      FROM wanted w CROSS JOIN LATERAL fed_in(w.batch, w.id) f)"""  # noqa: S608 (a constant only)
"""The batches that have deliveries of the events `wanted`, with the lanes: their own, and those in
which feeds gave them."""

# Like the trace of an event, with index lookups only: its batch by `high`, or the batch that found
# it late; its deliveries by the batch's lanes; and of each the nearest dead letter at or below its
# sequence number, and the last attempt.  OFFSET 0 forces one index scan per lane.
COUNT_DELIVERIES = f"""
WITH wanted AS MATERIALIZED (
    SELECT w.id, b.batch, b.lanes
      FROM unnest($1::bigint[]) AS w(id) {BATCH_OF_EVENT}
     WHERE cardinality(b.lanes) <= $2),{GIVEN_IN},
given AS MATERIALIZED (
    SELECT w.id AS outbox_id, d.*
      FROM given_in w CROSS JOIN LATERAL unnest(w.lanes) AS lane(id)
     CROSS JOIN LATERAL (
           SELECT lane_id, batch, seq FROM delivery
            WHERE lane_id = lane.id AND batch = w.batch AND outbox_id = w.id
              AND replay_id IS NULL AND backfill_id IS NULL OFFSET 0) d
     UNION ALL
    SELECT w.id, d.* FROM wanted w CROSS JOIN LATERAL (
           SELECT lane_id, batch, seq FROM delivery_run
            WHERE outbox_id = w.id AND (replay_id IS NOT NULL OR backfill_id IS NOT NULL)
           OFFSET 0) d),
stated AS MATERIALIZED (
    SELECT g.outbox_id, coalesce(a.attempt, 0) AS attempts,
           CASE WHEN d.to_seq >= g.seq THEN
                     CASE d.state WHEN 'replaying' THEN 'replayed' ELSE d.state END
                WHEN g.seq <= p.acked_seq OR a.outcome = 'delivered' THEN 'delivered'
                ELSE 'pending' END AS state
      FROM given g
      JOIN lane l ON l.id = g.lane_id AND ($3::uuid[] IS NULL OR l.endpoint_id = ANY ($3))
      JOIN lane_progress p ON p.lane_id = g.lane_id
      LEFT JOIN LATERAL (
           SELECT to_seq, state FROM dead_letter
            WHERE lane_id = g.lane_id AND seq <= g.seq ORDER BY seq DESC LIMIT 1) d ON true
      LEFT JOIN LATERAL (
           SELECT attempt, outcome FROM attempt
            WHERE lane_id = g.lane_id AND batch = g.batch AND seq = g.seq
            ORDER BY attempt DESC LIMIT 1) a ON true)
SELECT w.id,
       count(*) FILTER (WHERE state = 'delivered') AS delivered,
       count(*) FILTER (WHERE state = 'pending') AS pending,
       count(*) FILTER (WHERE state = 'dead') AS dead,
       count(*) FILTER (WHERE state = 'replayed') AS replayed,
       count(*) FILTER (WHERE state = 'discarded') AS discarded,
       coalesce(sum(s.attempts), 0)::bigint AS attempts
  FROM wanted w LEFT JOIN stated s ON s.outbox_id = w.id
 GROUP BY w.id
"""  # noqa: S608 (constants only)


@dataclass(frozen=True, slots=True)
class DeliveryCounts:
    """The deliveries of an event by state, replays included."""

    delivered: int
    pending: int
    dead: int
    """Dead letters."""
    replayed: int
    """Dead letters that were replayed; the new deliveries are counted by their own state."""
    discarded: int
    """Discarded dead letters."""
    attempts: int


async def count_deliveries(
    connection: Connection[Any], outbox_ids: Sequence[int], *, owner: str | None = None
) -> dict[int, DeliveryCounts]:
    """Count the deliveries of events by outbox id, in the caller's transaction.

    Events that are not sequenced, or whose batch is for more than `SEARCHED_LANES_MAX` lanes, are
    left out.

    Args:
        owner: deliveries to endpoints of this tenant only; None: to all.
    """
    endpoint_ids = await find_endpoint_ids(connection, None, owner)
    await connection.execute(PLAN_BY_INDEX)
    rows = await connection.fetch(COUNT_DELIVERIES, outbox_ids, SEARCHED_LANES_MAX, endpoint_ids)
    return {row["id"]: from_row(DeliveryCounts, row) for row in rows}
