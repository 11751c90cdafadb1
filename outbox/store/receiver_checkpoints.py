"""How far lanes are, for the checkpoints that their receivers want."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.core.delivery.receiver_checkpoint import GIVEN_UP_MAX, LANES_MAX, Mark
from outbox.core.model.ids import lane_name

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from asyncpg import Connection

# The newest lanes of each endpoint, ended ones as well: what was lost at their end is not
# shown by anything else.  Behind the last number written down are those that were
# acknowledged since then, one after the other.  And the numbers that were given up last.
READ_MARKS = f"""
SELECT l.endpoint_id, l.generation, l.slot,
       greatest(p.delivered_seq, (
           SELECT a.seq FROM attempt a
            WHERE a.lane_id = l.id AND a.batch >= p.floor_batch AND a.seq > p.acked_seq
              AND a.outcome = 'delivered'
            ORDER BY a.batch DESC, a.seq DESC LIMIT 1)) AS sequence,
       g.seqs, g.to_seqs
  FROM unnest($1::uuid[]) AS wanted(id)
 CROSS JOIN LATERAL (
       SELECT id, endpoint_id, generation, slot FROM lane WHERE endpoint_id = wanted.id
        ORDER BY generation DESC, slot LIMIT {LANES_MAX}) l
 CROSS JOIN LATERAL (
       SELECT acked_seq, delivered_seq, floor_batch FROM lane_progress
        WHERE lane_id = l.id LIMIT 1) p
 CROSS JOIN LATERAL (
       SELECT array_agg(seq) AS seqs, array_agg(to_seq) AS to_seqs
         FROM (SELECT seq, to_seq FROM dead_letter WHERE lane_id = l.id
                ORDER BY seq DESC LIMIT {GIVEN_UP_MAX}) x) g
"""  # noqa: S608 (a constant only)


class CheckpointStore:
    """Reads how far lanes are, on one connection; asyncpg's errors pass through."""

    def __init__(self, connection: Connection[Any]) -> None:
        self._db = connection

    async def marks(self, endpoint_ids: Sequence[UUID]) -> dict[UUID, list[Mark]]:
        """The lanes of each endpoint that were delivered anything."""
        found: dict[UUID, list[Mark]] = {endpoint_id: [] for endpoint_id in endpoint_ids}
        for row in await self._db.fetch(READ_MARKS, list(endpoint_ids)):
            if row["sequence"]:
                name = lane_name(row["endpoint_id"], row["generation"], row["slot"])
                last = row["sequence"]
                letters = zip(row["seqs"] or (), row["to_seqs"] or (), strict=True)
                given_up = tuple(sorted(each for each in letters if each[1] < last))
                mark = Mark(name, row["generation"], last, given_up)
                found[row["endpoint_id"]].append(mark)
        return found
