"""Timeline changes: after a failover, assigned sequence numbers may have been lost.

After an asynchronous failover the new primary has the state of the old one at some moment:
events, deliveries, counters and sequences are all as of then.  It assigns the same sequence
numbers again, to other events.  Receivers have seen the old ones, and would take the new ones
for duplicates or contradictions.  So no delivery may be added to an existing lane: the first
leader on the new timeline begins a new generation of every endpoint's lanes, with names that
no receiver has seen.  Pending deliveries of the old lanes were numbered before that moment;
receivers know them by these numbers.

A planned switchover loses nothing but changes the timeline as well; the two cannot be
distinguished.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.store.channels import NOTIFY_ALL
from outbox.store.connection.message import WriteCall, WriteStatement

if TYPE_CHECKING:
    from asyncpg import Connection

READ_TIMELINE = "SELECT server_timeline()"

SET_FIRST_TIMELINE = WriteStatement(
    "set_first_timeline",
    "UPDATE cursor SET timeline = $1 WHERE writer = $2 AND version = $3 AND timeline IS NULL",
)

# Like every routing change it raises the version, and it locks the cursor row.
CHANGE_TIMELINE = WriteStatement(
    "change_timeline",
    """
WITH changed AS (
    UPDATE cursor SET timeline = $1, timeline_at = clock_timestamp(), version = version + 1
     WHERE writer = $2 AND version = $3 AND timeline = $4 AND server_timeline() = $1
    RETURNING 1)
SELECT abort_unless(EXISTS (SELECT FROM changed))
""",
)

# Locks all ownership rows: claims wait for the change, as for a change of lanes.  In endpoint
# order, as every statement that locks several, to avoid deadlocks.
LOCK_EPOCHS = WriteStatement(
    "lock_epochs", "SELECT FROM ownership ORDER BY endpoint_id FOR NO KEY UPDATE"
)

# Begins a new generation of lanes for every endpoint, including paused and disabled ones, which
# may be resumed.  An endpoint that is being removed gets no new lanes.
#   renewed, added, counted, begun: the generation, its lanes, their counters and progress.
#   changed, and the final INSERT: journal entries.
BEGIN_GENERATIONS = WriteStatement(
    "begin_generations",
    """
WITH renewed AS (
    UPDATE endpoint SET generation = next_generation(generation)
     WHERE state NOT IN ('removing', 'removed')
    RETURNING id, generation, lanes),
added AS (
    INSERT INTO lane (endpoint_id, generation, slot)
    SELECT id, generation, slot FROM renewed CROSS JOIN generate_series(0, lanes - 1) AS slot
    RETURNING id, endpoint_id),
counted AS (
    INSERT INTO lane_counter (lane_id) SELECT id FROM added),
begun AS (
    INSERT INTO lane_progress (lane_id, endpoint_id, floor_batch, epoch)
    SELECT a.id, a.endpoint_id, $1::bigint, o.epoch
      FROM added a JOIN ownership o ON o.endpoint_id = a.endpoint_id),
changed AS (
    INSERT INTO journal (kind, actor, data)
    SELECT 'timeline_changed', $2,
           jsonb_build_object('old', $3::bigint, 'new', $4::bigint, 'from_batch', $1::bigint,
                              'endpoints', (SELECT count(*) FROM renewed)))
INSERT INTO journal (kind, actor, endpoint_id, data)
SELECT 'endpoint_lanes_renewed', $2, id,
       jsonb_build_object('generation', generation, 'lanes', lanes, 'from_batch', $1::bigint,
                          'timeline', $4::bigint)
  FROM renewed
""",
)


async def read_timeline(connection: Connection[Any]) -> int | None:
    """The server's timeline; None if the server does not report it."""
    timeline: int | None = await connection.fetchval(READ_TIMELINE)
    return timeline


def begin_timeline(
    replica_id: int, from_batch: int, version: int, old: int | None, new: int, actor: str
) -> list[WriteCall]:
    """The message by which the leader begins new lanes on a new timeline, journalled.

    It does nothing if the leader or the routing version has changed.  The first timeline that
    becomes known begins no lanes.

    Args:
        old: the timeline of the last batch; None: not known.
    """
    if old is None:
        return [(SET_FIRST_TIMELINE, new, replica_id, version)]
    return [
        (CHANGE_TIMELINE, new, replica_id, version, old),
        (LOCK_EPOCHS,),
        (BEGIN_GENERATIONS, from_batch, actor, old, new),
        (NOTIFY_ALL,),
    ]
