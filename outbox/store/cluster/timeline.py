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

A dump that is restored into another cluster or another database is also the state at some
moment, and receivers may have seen what came after it, on the same timeline.  It is detected by
the *identity* of the database, and treated alike.

Fences of writes compare the timeline only, not the identity.  A fence protects from a session
that a proxy moves to another server while a lease runs.  A promotion happens without an
operator, and the standby has the replica's row with its lease.  A restored database is new: a
session reaches it only if an operator directs a proxy to it, and the guide has them stop the relays
before.  That is needed: replica ids continue from the dump there, so another relay may have the
id of the session with a running lease, and the fence would let the session write.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.store.channels import NOTIFY_ALL
from outbox.store.connection.message import WriteCall, WriteStatement

if TYPE_CHECKING:
    from asyncpg import Connection

READ_TIMELINE = "SELECT server_timeline()"

SET_FIRST_TIMELINE = WriteStatement(
    "set_first_timeline",
    """
UPDATE cursor SET timeline = coalesce(timeline, $1), identity = coalesce(identity, $2)
 WHERE writer = $3 AND version = $4
""",
)

# Like every routing change it raises the version, and it locks the cursor row.  The server must
# still be the one that was read.
CHANGE_TIMELINE = WriteStatement(
    "change_timeline",
    """
WITH changed AS (
    UPDATE cursor SET timeline = $1, identity = $2, timeline_at = clock_timestamp(),
                      version = version + 1
     WHERE writer = $3 AND version = $4 AND history_changed()
       AND coalesce(server_timeline(), timeline) IS NOT DISTINCT FROM $1
       AND coalesce(server_identity(), identity) IS NOT DISTINCT FROM $2
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
    UPDATE endpoint SET generation = first_generation(generation)
     WHERE state NOT IN ('removing', 'removed')
    RETURNING id, generation, lanes),
added AS (
    INSERT INTO lane (endpoint_id, generation, slot)
    SELECT id, generation, slot FROM renewed CROSS JOIN generate_series(0, lanes - 1) AS slot
     ORDER BY id, slot
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
                              'endpoints', (SELECT count(*) FROM renewed))
               || CASE WHEN $5 THEN '{"restored": true}'::jsonb ELSE '{}' END)
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


@dataclass(frozen=True, slots=True)
class History:
    """What identifies the history of a database; None: not known, or not reported."""

    timeline: int | None
    identity: str | None

    def continues_as(self, server: History) -> bool:
        """Whether the server's history may be this one."""
        pairs = ((self.timeline, server.timeline), (self.identity, server.identity))
        return all(ours in (None, theirs) or theirs is None for ours, theirs in pairs)

    def updated_from(self, server: History) -> History:
        """This history with all that the server reports."""
        return History(
            self.timeline if server.timeline is None else server.timeline,
            self.identity if server.identity is None else server.identity,
        )


def begin_timeline(
    replica_id: int, from_batch: int, version: int, known: History, server: History, actor: str
) -> list[WriteCall]:
    """The message by which the leader begins new lanes in a new history, journalled.

    It does nothing if the leader or the routing version has changed.  The first timeline and
    the first identity that become known begin no lanes.

    Args:
        known: the history of the last batch.
        server: that of the server.
    """
    new = known.updated_from(server)
    if known.continues_as(server):
        return [(SET_FIRST_TIMELINE, new.timeline, new.identity, replica_id, version)]
    restored = not History(None, known.identity).continues_as(server)
    return [
        (CHANGE_TIMELINE, new.timeline, new.identity, replica_id, version),
        (LOCK_EPOCHS,),
        (BEGIN_GENERATIONS, from_batch, actor, known.timeline, new.timeline, restored),
        (NOTIFY_ALL,),
    ]
