"""Deliveries of one event: the batch that sequenced it, and its place in each lane."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.store.sql.expressions import is_found_late

if TYPE_CHECKING:
    from asyncpg import Connection

# The first batch whose `high` reaches the event; or, if the event was an open gap then, the
# batch that found it, which follows the end of the producer's transaction closely.
READ_SEQUENCED = f"""
WITH passed AS MATERIALIZED (
    SELECT batch, at, {is_found_late("$1")} AS late
      FROM batch WHERE high >= $1 ORDER BY high, batch LIMIT 1)
SELECT b.batch, b.at, true AS late
  FROM passed CROSS JOIN LATERAL (
       SELECT batch, at FROM batch
        WHERE passed.late AND batch > passed.batch
          AND NOT isempty(found) AND found @> $1::bigint ORDER BY batch LIMIT 1) b
 UNION ALL
SELECT batch, at, late FROM passed WHERE NOT late
"""  # noqa: S608 (a constant only)

FED_LANES = """array(
               SELECT l.id FROM batch b, unnest(b.lanes) AS of(id)
                 JOIN lane l ON l.id = of.id AND l.endpoint_id = f.endpoint_id
                WHERE b.batch = f.batch)"""
"""The lanes of a row `f` of fed_in() that have deliveries of its batch."""

# Deliveries of the event from its batch, from feeds, replays and backfills.  OFFSET 0 forces one
# index scan per lane.
READ_DELIVERIES = f"""
WITH given AS MATERIALIZED (
    SELECT d.* FROM (
           SELECT batch, lanes FROM batch WHERE batch = $2
            UNION ALL
           SELECT f.batch, {FED_LANES} FROM fed_in($2, $1) f) b
     CROSS JOIN LATERAL unnest(b.lanes) AS lane(id)
     CROSS JOIN LATERAL (
           SELECT lane_id, batch, seq, replay_id, replay_seq, backfill_id
             FROM delivery
            WHERE lane_id = lane.id AND batch = b.batch AND outbox_id = $1
              AND replay_id IS NULL AND backfill_id IS NULL OFFSET 0) d
     UNION ALL
    SELECT lane_id, batch, seq, replay_id, replay_seq, backfill_id FROM delivery_run
     WHERE outbox_id = $1 AND (replay_id IS NOT NULL OR backfill_id IS NOT NULL))
SELECT g.lane_id, g.batch, g.seq AS sequence, g.replay_seq, g.backfill_id AS backfill,
       lane_name(l.endpoint_id, l.generation, l.slot) AS lane, l.endpoint_id, e.name AS endpoint,
       b.at AS sequenced_at, lane_name(was.endpoint_id, was.generation, was.slot) AS was_lane
  FROM given g
  JOIN lane l ON l.id = g.lane_id
  JOIN endpoint e ON e.id = l.endpoint_id AND ($3::uuid[] IS NULL OR e.id = ANY ($3))
  JOIN batch b ON b.batch = g.batch
  LEFT JOIN (replay r JOIN dead_letter x ON x.id = r.dead_id
             JOIN lane was ON was.id = x.lane_id)
    ON r.id = g.replay_id
 ORDER BY e.name COLLATE "C", g.batch, g.lane_id, g.seq
"""  # noqa: S608 (a constant only)

NO_BATCH = -1
"""The batch of an event without one, in the parameters of `READ_DELIVERIES`."""


async def find_batch(connection: Connection[Any], outbox_id: int) -> int:
    """The batch that sequenced an event, or `NO_BATCH`."""
    sequenced = await connection.fetchrow(READ_SEQUENCED, outbox_id)
    return NO_BATCH if sequenced is None else sequenced["batch"]
