"""SQL of the sequencer for routing: the hash of a key, subscriptions, and requested replays.

Read without a lock: every routing change raises the version, on which a batch depends.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

from outbox.core.sequencing.router import Replay, ReplayChunk, Route, count_fitting
from outbox.store.connection.row_security import rows_hidden, stop_hidden
from outbox.store.sql.expressions import key_hash

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncpg import Connection

    from outbox.core.sequencing.replay_throttle import Share


# Current subscriptions with their lanes.  Deliveries of a paused endpoint are sequenced, but
# not sent.  A filter that was stopped less than $1 seconds ago matches everything; not one that a
# wrong clock has stopped in the future.  A row without values if row security may have hidden some.
READ_ROUTES = f"""
SELECT s.endpoint_id, s.types, s.tenant, s.all_tenants,
       CASE WHEN s.filter_stopped_at BETWEEN clock_timestamp() - make_interval(secs => $1)
                                         AND clock_timestamp() THEN NULL
            ELSE s.filter END AS filter,
       array(SELECT l.id FROM lane l
              WHERE l.endpoint_id = e.id AND l.generation = e.generation
              ORDER BY l.slot) AS lane_ids
  FROM subscription s
  JOIN endpoint e ON e.id = s.endpoint_id AND e.state IN ('active', 'paused')
 WHERE s.to_batch IS NULL
 UNION ALL
SELECT NULL, NULL, NULL, NULL, NULL, NULL WHERE {rows_hidden("subscription", "endpoint", "lane")}
"""  # noqa: S608 (constants only)

# The next sequence numbers of pending replays: for each part of a job the oldest replays first,
# at most `numbers_max` numbers per part.  Each delivery is appended to the lane to which its key
# is assigned today.
#   requested: the replays of each part with their dead letters, and the sequence numbers before
#     each.  MATERIALIZED: evaluated once.  LIMIT 1 keeps x an index lookup per replay, as it
#     keeps l one per delivery, and OFFSET 0 keeps the inner query to pending replays, whatever
#     the planner estimates.
#   chunk: how many numbers each replay may take.  Sequence numbers have no gaps, so this is
#     known beforehand: no more of a range is read than is taken, from where the last batch
#     ended.
# A single dead letter has its own copy of the event, unless that was missing.  Of a range only the
# deliveries are left; their events give the key, or the dead letters that they were copied from.
# A sequence number whose delivery is gone is NULL, once per replay, and is skipped.
READ_REPLAYS = f"""
WITH requested AS MATERIALIZED (
    SELECT part.job_id, part.endpoint_id, part.numbers_max, r.*, x.*,
           sum(r.to_seq - r.next_seq + 1) OVER (
               PARTITION BY part.job_id, part.endpoint_id ORDER BY r.id
               ROWS UNBOUNDED PRECEDING) - (r.to_seq - r.next_seq + 1) AS before
      FROM unnest($1::bigint[], $2::uuid[], $3::bigint[]) AS part(job_id, endpoint_id, numbers_max)
     CROSS JOIN LATERAL (
           SELECT * FROM (
               SELECT id, dead_id, next_seq, next_batch, to_seq FROM replay
                WHERE job_id = part.job_id AND endpoint_id = part.endpoint_id
                  AND next_seq <= to_seq OFFSET 0) pending
            ORDER BY id LIMIT part.numbers_max) r
     CROSS JOIN LATERAL (
           SELECT d.lane_id, d.outbox_id, d.backfill_id, e.generation, e.lanes,
                  CASE WHEN d.event_id IS NULL THEN (SELECT key FROM outbox WHERE id = d.outbox_id)
                       ELSE d.key END AS key
             FROM dead_letter d
             JOIN endpoint e ON e.id = part.endpoint_id AND e.state IN ('active', 'paused')
            WHERE d.id = r.dead_id LIMIT 1) x),
chunk AS (
    SELECT *, least(to_seq - next_seq + 1, numbers_max - before)::bigint AS numbers
      FROM requested WHERE before < numbers_max)
SELECT t.job_id, t.endpoint_id, t.id, t.next_seq, t.next_batch, t.numbers, l.id AS lane_id,
       d.seq, d.batch, d.outbox_id, d.backfill_id, d.copy_id,
       {rows_hidden("delivery_run", "outbox", "dead_letter", "lane")} AS hidden
  FROM chunk t
  LEFT JOIN LATERAL (
       SELECT t.next_seq AS seq, t.next_batch AS batch, t.outbox_id, t.key, t.backfill_id,
              t.dead_id AS copy_id
        WHERE t.outbox_id IS NOT NULL
        UNION ALL
       SELECT n.seq, n.batch, n.outbox_id, coalesce(o.key, c.key), n.backfill_id, n.copy_id
         FROM (SELECT seq, batch, outbox_id, backfill_id, copy_id FROM delivery
                WHERE t.outbox_id IS NULL AND lane_id = t.lane_id
                  AND batch >= t.next_batch AND seq >= t.next_seq
                ORDER BY batch, seq LIMIT t.numbers) n
         LEFT JOIN LATERAL (
              SELECT key FROM outbox WHERE id = n.outbox_id LIMIT 1) o ON true
         LEFT JOIN LATERAL (
              SELECT key FROM dead_letter WHERE id = n.copy_id LIMIT 1) c ON true
        WHERE n.seq < t.next_seq + t.numbers) d ON true
  LEFT JOIN LATERAL (
       SELECT id FROM lane
        WHERE endpoint_id = t.endpoint_id AND generation = t.generation
          AND slot = ({key_hash("d.key", "d.outbox_id")}) % t.lanes
        LIMIT 1) l ON true
 ORDER BY t.job_id, t.endpoint_id, t.id, d.seq
"""  # noqa: S608 (constants only)


class RoutingStore:
    """Reads routes and replays, on the sequencer's connection."""

    def __init__(self, connection: Connection[Any]) -> None:
        self._db = connection

    async def routes(self, stopped_for_s: float) -> list[Route]:
        """Every current subscription with its lanes.

        Args:
            stopped_for_s: a stopped filter is not evaluated for this time.
        """
        rows = await self._db.fetch(READ_ROUTES, stopped_for_s)
        if any(r["endpoint_id"] is None for r in rows):
            await stop_hidden(self._db)
        return [
            Route(
                r["endpoint_id"],
                tuple(r["types"]),
                r["tenant"],
                r["all_tenants"],
                tuple(r["lane_ids"]),
                r["filter"],
            )
            for r in rows
        ]

    async def replays(self, shares: Sequence[Share]) -> list[ReplayChunk]:
        """The next chunk of each replay that a batch may include."""
        rows = await self._db.fetch(
            READ_REPLAYS,
            [share.part.job_id for share in shares],
            [share.part.endpoint_id for share in shares],
            [share.numbers for share in shares],
        )
        if any(r["hidden"] for r in rows):
            await stop_hidden(self._db)
        share_of = {(s.part.job_id, s.part.endpoint_id): s for s in shares}
        chunks: list[ReplayChunk] = []
        for part, of_part in groupby(rows, lambda r: (r["job_id"], r["endpoint_id"])):
            part_rows = list(of_part)
            lane_ids = [r["lane_id"] for r in part_rows if r["seq"] is not None]
            left = count_fitting(lane_ids, share_of[part].per_lane, share_of[part].numbers)
            for _, of_one in groupby(part_rows, lambda r: r["id"]):
                chunk, left = _take_chunk(list(of_one), left)
                if chunk is None:
                    break
                chunks.append(chunk)
        return chunks


def _take_chunk(rows: list[Any], left: int) -> tuple[ReplayChunk | None, int]:
    """The chunk of one replay when `left` numbers may be taken, and how many are left then."""
    first = rows[0]
    found = [r for r in rows if r["seq"] is not None]
    taken = found[:left]
    if found and not taken:
        return None, 0
    truncated = len(taken) < len(found)
    next_seq = found[left]["seq"] if truncated else first["next_seq"] + first["numbers"]
    chunk = ReplayChunk(
        first["id"],
        first["job_id"],
        first["endpoint_id"],
        tuple(
            Replay(r["lane_id"], r["outbox_id"], r["id"], r["seq"], r["backfill_id"], r["copy_id"])
            for r in taken
        ),
        next_seq=next_seq,
        next_batch=taken[-1]["batch"] if taken else first["next_batch"],
        missing=next_seq - first["next_seq"] - len(taken),
    )
    # A truncated chunk ends the part: the replays behind it must wait, to keep the order.
    return chunk, 0 if truncated else left - len(taken)
