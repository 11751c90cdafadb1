"""Positions of lanes, for the checkpoints that are sent to receivers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.core.delivery.receiver_checkpoint import DEAD_RANGES_MAX, LANES_MAX, LaneMark
from outbox.core.model.ids import lane_name

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from asyncpg import Connection

# The position of the newest lanes of each endpoint, including ended ones: a delivery lost at
# the end of a lane shows in no later one.  The position is the checkpoint, or the last
# acknowledgement after it.  And the last dead-lettered sequence numbers.  LIMIT in the
# LATERAL subqueries keeps each to an index lookup.
READ_MARKS = f"""
SELECT l.endpoint_id, l.generation, l.slot,
       greatest(p.delivered_seq, (
           SELECT a.seq FROM attempt a
            WHERE a.lane_id = l.id AND a.batch >= p.floor_batch AND a.seq > p.acked_seq
              AND a.outcome = 'delivered'
            ORDER BY a.batch DESC, a.seq DESC LIMIT 1)) AS sequence,
       g.seqs, g.to_seqs
  FROM unnest($1::uuid[]) AS requested(id)
 CROSS JOIN LATERAL (
       SELECT id, endpoint_id, generation, slot FROM lane WHERE endpoint_id = requested.id
        ORDER BY generation DESC, slot LIMIT {LANES_MAX}) l
 CROSS JOIN LATERAL (
       SELECT acked_seq, delivered_seq, floor_batch FROM lane_progress
        WHERE lane_id = l.id LIMIT 1) p
 CROSS JOIN LATERAL (
       SELECT array_agg(seq) AS seqs, array_agg(to_seq) AS to_seqs
         FROM (SELECT seq, to_seq FROM dead_letter WHERE lane_id = l.id
                ORDER BY seq DESC LIMIT {DEAD_RANGES_MAX}) x) g
"""  # noqa: S608 (a constant only)


class CheckpointStore:
    """Reads positions of lanes, on one connection; asyncpg's errors propagate."""

    def __init__(self, connection: Connection[Any]) -> None:
        self._db = connection

    async def marks(self, endpoint_ids: Sequence[UUID]) -> dict[UUID, list[LaneMark]]:
        """The lanes of each endpoint that have delivered anything."""
        found: dict[UUID, list[LaneMark]] = {endpoint_id: [] for endpoint_id in endpoint_ids}
        for row in await self._db.fetch(READ_MARKS, list(endpoint_ids)):
            if row["sequence"]:
                name = lane_name(row["endpoint_id"], row["generation"], row["slot"])
                last = row["sequence"]
                letters = zip(row["seqs"] or (), row["to_seqs"] or (), strict=True)
                dead_lettered = tuple(sorted(each for each in letters if each[1] < last))
                mark = LaneMark(name, row["generation"], last, dead_lettered)
                found[row["endpoint_id"]].append(mark)
        return found
