"""Lane history: the lanes of an endpoint with their progress, as its receiver sees them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.core.model.ids import lane_name
from outbox.errors import NotFound
from outbox.operations.rows import from_row
from outbox.store.connection.connect import map_errors

if TYPE_CHECKING:
    from uuid import UUID

    from asyncpg import Connection

# Lanes of an endpoint, with the acknowledgements after their checkpoint (about one second).
# OFFSET 0 forces an index scan per lane.
READ_LANES = """
SELECT l.id, l.endpoint_id, l.generation, l.slot, l.generation < e.generation AS ended,
       c.last_seq AS last, p.acked_seq, t.tail
  FROM endpoint e
  JOIN lane l ON l.endpoint_id = e.id
  JOIN lane_progress p ON p.lane_id = l.id
 CROSS JOIN LATERAL (
       SELECT last_seq FROM lane_counter
        WHERE lane_id = l.id ORDER BY last_seq DESC LIMIT 1) c
 CROSS JOIN LATERAL (
       SELECT array_agg(a.seq) AS tail
         FROM (SELECT seq FROM attempt
                WHERE lane_id = l.id AND batch >= p.floor_batch AND seq > p.acked_seq
                  AND outcome = 'delivered' OFFSET 0) a) t
 WHERE e.id = $1 AND e.state <> 'removed'
   AND ($2::bigint IS NULL OR (l.generation = $2 AND l.slot = $3))
   AND (l.generation, l.slot) > ($4::bigint, $5::int)
 ORDER BY l.generation, l.slot LIMIT $6
"""

# The last sequence before $2 that was not dead-lettered.
READ_PREVIOUS = """
WITH RECURSIVE back AS (
    SELECT $2::bigint - 1 AS seq
     UNION ALL
    SELECT d.seq - 1 FROM back CROSS JOIN LATERAL (
           SELECT seq, to_seq FROM dead_letter
            WHERE lane_id = $1 AND seq <= back.seq ORDER BY seq DESC LIMIT 1) d
     WHERE d.to_seq >= back.seq)
SELECT min(seq) FROM back
"""


@dataclass(frozen=True, slots=True)
class LaneHistory:
    """A lane with its progress, as its receiver sees it."""

    id: int
    endpoint_id: UUID
    generation: int
    slot: int
    acknowledged: int
    """All sequences up to this one were delivered or dead-lettered."""
    last: int
    """The last assigned sequence number."""
    ended: bool
    """Whether the lane is of an older generation, and receives no more deliveries."""

    @property
    def name(self) -> str:
        """The name of the lane, as in X-Lane."""
        return lane_name(self.endpoint_id, self.generation, self.slot)


async def list_lanes(
    connection: Connection[Any],
    schema: str,
    endpoint_id: UUID,
    *,
    after: tuple[int, int] = (0, -1),
    limit: int = 100,
) -> list[LaneHistory]:
    """List lanes of an endpoint by (generation, slot), starting after `after`."""
    with map_errors(schema):
        rows = await connection.fetch(READ_LANES, endpoint_id, None, None, *after, limit)
    return [_lane(row) for row in rows]


async def get_lane(
    connection: Connection[Any], schema: str, endpoint_id: UUID, name: str
) -> LaneHistory:
    """Read one lane by its name.

    Raises:
        NotFound: the endpoint has no such lane.
    """
    prefix, _, rest = name.partition("-")
    generation, _, slot = rest.partition("-")
    if prefix == endpoint_id.hex[:12] and _is_number(generation) and _is_number(slot):
        with map_errors(schema):
            row = await connection.fetchrow(
                READ_LANES, endpoint_id, int(generation), int(slot), 0, -1, 1
            )
        if row is not None:
            return _lane(row)
    raise NotFound(f'there is no lane "{name[:100]}" of this endpoint')


def _lane(row: Any) -> LaneHistory:
    acknowledged = row["acked_seq"]
    tail = set(row["tail"] or ())
    while acknowledged + 1 in tail:
        acknowledged += 1
    return from_row(LaneHistory, row, acknowledged=acknowledged)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 16
