"""The sequencer's SQL about who gets what: subscriptions, and replays asked for.

Read under the cursor row, which everybody takes who changes one of them.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

from outbox.core.sequencing import Helping, Replay, Route

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncpg import Connection

# A paused endpoint's deliveries are numbered, though none is sent.
READ_ROUTES = """
SELECT s.endpoint_id, s.types, s.tenant, s.all_tenants, s.filter,
       array(SELECT l.id FROM lane l
              WHERE l.endpoint_id = e.id AND l.generation = e.generation
              ORDER BY l.slot) AS lane_ids
  FROM subscription s
  JOIN endpoint e ON e.id = s.endpoint_id AND e.state IN ('active', 'paused')
 WHERE s.to_batch IS NULL
"""

# The next numbers of the replays that are waiting, oldest request first, at
# most $1 in all; each goes to the end of the lane that its key has today.  How
# many each request may take is known beforehand, because numbers have no holes,
# so no more is read of a range than is taken, and it is read from where the last
# batch ended.  One letter has its own copy of the event; of a range only the
# deliveries are left, whose events tell the key.  A number whose delivery is
# gone is NULL here, once for its request, and passed over.  LIMIT 1 keeps it to a
# look for each request, whatever the planner knows.
READ_REPLAYS = """
WITH asked AS MATERIALIZED (
    SELECT r.id, r.next_seq, r.next_batch, r.to_seq, x.*,
           sum(r.to_seq - r.next_seq + 1) OVER (
               ORDER BY r.id ROWS UNBOUNDED PRECEDING) - (r.to_seq - r.next_seq + 1) AS before
      FROM replay r
     CROSS JOIN LATERAL (
           SELECT d.lane_id, d.outbox_id, d.key, e.id AS endpoint_id, e.generation, e.lanes
             FROM dead_letter d
             JOIN endpoint e ON e.id = d.endpoint_id AND e.state IN ('active', 'paused')
            WHERE d.id = r.dead_id LIMIT 1) x
     WHERE r.next_seq <= r.to_seq
     ORDER BY r.id LIMIT $1),
taking AS (
    SELECT *, least(to_seq - next_seq + 1, $1 - before)::bigint AS numbers
      FROM asked WHERE before < $1)
SELECT t.id, t.next_seq, t.next_batch, t.numbers, l.id AS lane_id, d.seq, d.batch, d.outbox_id
  FROM taking t
  LEFT JOIN LATERAL (
       SELECT t.next_seq AS seq, t.next_batch AS batch, t.outbox_id, t.key
        WHERE t.outbox_id IS NOT NULL
        UNION ALL
       SELECT n.seq, n.batch, n.outbox_id, o.key
         FROM (SELECT seq, batch, outbox_id FROM delivery
                WHERE t.outbox_id IS NULL AND lane_id = t.lane_id
                  AND batch >= t.next_batch AND seq >= t.next_seq
                ORDER BY batch, seq LIMIT t.numbers) n
         LEFT JOIN LATERAL (SELECT key FROM outbox WHERE id = n.outbox_id LIMIT 1) o ON true
        WHERE n.seq < t.next_seq + t.numbers) d ON true
  LEFT JOIN lane l ON l.endpoint_id = t.endpoint_id AND l.generation = t.generation
   AND l.slot = (CASE WHEN d.key IS NULL THEN d.outbox_id
                      ELSE hashtextextended(d.key, 0) & 9223372036854775807 END) % t.lanes
 ORDER BY t.id, d.seq
"""

WRITE_HELPINGS = """
UPDATE replay r SET next_seq = h.next_seq, next_batch = h.next_batch
  FROM unnest($1::bigint[], $2::bigint[], $3::bigint[]) AS h(id, next_seq, next_batch)
 WHERE r.id = h.id
"""


class RoutingStore:
    """Reads who gets what, on the sequencer's connection and in its transaction."""

    def __init__(self, connection: Connection[Any]) -> None:
        self._db = connection

    async def routes(self) -> list[Route]:
        """Every current subscription with its lanes."""
        return [
            Route(
                r["endpoint_id"],
                tuple(r["types"]),
                r["tenant"],
                r["all_tenants"],
                tuple(r["lane_ids"]),
                r["filter"],
            )
            for r in await self._db.fetch(READ_ROUTES)
        ]

    async def replays(self, limit: int) -> list[Helping]:
        """What a batch may take of the replays asked for, at most `limit` numbers."""
        rows = await self._db.fetch(READ_REPLAYS, limit)
        return [_helping(list(of_one)) for _, of_one in groupby(rows, lambda r: r["id"])]

    async def advance(self, helpings: Sequence[Helping]) -> None:
        """Remember what was taken of the replays."""
        await self._db.execute(
            WRITE_HELPINGS,
            [h.id for h in helpings],
            [h.next_seq for h in helpings],
            [h.next_batch for h in helpings],
        )


def _helping(rows: list[Any]) -> Helping:
    first = rows[0]
    found = [r for r in rows if r["seq"] is not None]
    return Helping(
        first["id"],
        tuple(Replay(r["id"], r["lane_id"], r["outbox_id"], r["seq"]) for r in found),
        next_seq=first["next_seq"] + first["numbers"],
        next_batch=found[-1]["batch"] if found else first["next_batch"],
        missing=first["numbers"] - len(found),
    )
