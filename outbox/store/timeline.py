"""A changed timeline: the server may have lost numbers that were given out.

After an asynchronous fail-over the new primary has what the old one had up to
some moment, and nothing after it: events, deliveries, counters and sequences are
all as of then.  It gives the same numbers out again, to other events.  Receivers
have seen the old ones, and would take the new ones for duplicates or
contradictions.  So nothing may be added to a lane that there was before: whoever
sequences first on the new timeline begins a new generation of every endpoint's
lanes, whose names nobody has seen.  What the old ones still owe was numbered
before that moment, and is what receivers know under these numbers.

A planned switch-over loses nothing and changes the timeline all the same; the
two cannot be told apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.store.channels import WAKE_ALL
from outbox.store.routing_change import RAISE_VERSION

if TYPE_CHECKING:
    from asyncpg import Connection

READ_TIMELINE = "SELECT server_timeline()"

NOTE_TIMELINE = "UPDATE cursor SET timeline = $1"

CHANGE_TIMELINE = "UPDATE cursor SET timeline = $1, timeline_at = clock_timestamp()"

# Whoever claims an endpoint waits for this, as with a change of its lanes; in the
# order of ids, as everybody does who locks several.
LOCK_EPOCHS = "SELECT FROM ownership ORDER BY endpoint_id FOR NO KEY UPDATE"

# Also for endpoints that are paused or disabled, which may go on some day.  One
# that is being removed gets nothing more.
BEGIN_GENERATIONS = """
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
    SELECT a.id, a.endpoint_id, $1, o.epoch
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
"""


async def read(connection: Connection[Any]) -> int | None:
    """The server's timeline; None if it does not say."""
    timeline: int | None = await connection.fetchval(READ_TIMELINE)
    return timeline


async def note(connection: Connection[Any], timeline: int) -> None:
    """Remember the first timeline that is known; holding the cursor row."""
    await connection.execute(NOTE_TIMELINE, timeline)


async def begin(
    connection: Connection[Any], from_batch: int, old: int, new: int, actor: str
) -> None:
    """Begin new lanes on a new timeline, journalled; holding the cursor row.

    Like every change of who gets what it raises the version, and wakes the owners.
    """
    await connection.execute(LOCK_EPOCHS)
    await connection.execute(BEGIN_GENERATIONS, from_batch, actor, old, new)
    await connection.execute(CHANGE_TIMELINE, new)
    await connection.execute(RAISE_VERSION)
    await connection.execute(WAKE_ALL)
