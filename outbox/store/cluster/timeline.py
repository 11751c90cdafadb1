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

A dump that is restored into the same database has the same identity.  It is detected by the
*incarnation*, a row that says which transaction wrote it (schema/0018_incarnation.sql), and by each
lane's counter, which says the same: a dump of an older version has no incarnation, and a single
table may be restored.  The leader that finds such a counter withdraws the incarnation, which ends
all sessions, and the next one begins new lanes.

Fences of writes compare the timeline and the incarnation, not the identity.  A fence protects
from a session that a proxy moves to another server while a lease runs, and from one that goes on
while the state under it is restored: both have the replica's row with its lease.  Another database
is reached only if an operator directs a proxy to it, and the guide has them stop the relays before.

Feeds go on with what their positions have seen.  A feed is committed after these events, so a state
that has the feed has the events, too, under the same ids.

A restore is seen before it is complete.  Lanes that are begun in the middle of it lack what is
restored later, and nothing would repair that, so the message proves that the state is whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.store.channels import NOTIFY_ALL
from outbox.store.cluster.replicas import ADVANCE_SEQUENCES
from outbox.store.sql.expressions import CURRENT_XID, proves_itself
from outbox.store.sql.message import WriteCall, WriteStatement

if TYPE_CHECKING:
    from asyncpg import Connection

READ_SERVER_FENCE = "SELECT server_fence()"

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

COUNTER_RESTORED = "OB002"
"""The error code of `advance_lane_counter` for a counter that does not prove itself."""

REQUESTED_TIMELINE = 0
"""The stored timeline that requests new lanes, for servers that report no identity."""

INCOMPLETE = "this state was restored, and is not complete: {}; finish the restore"
"""Why no new lanes are begun."""
NOT_BEGUN = "this state was restored, and new lanes have not begun"

# Whether the row of the incarnation was written here; NULL: there is no row.
INCARNATION = f"(SELECT {proves_itself('i')} FROM incarnation i)"  # noqa: S608 (constants only)
# Whether the state is that of a dump or a copy, of the columns of `cursor`.
IS_RESTORED = f"(coalesce(identity <> server_identity(), false) OR {INCARNATION} IS NOT TRUE)"

READ_CURSOR = f"""
SELECT writer, version, timeline, identity, server_timeline() AS server_timeline,
       server_identity() AS server_identity, server_fence() AS server_fence,
       {INCARNATION} AS incarnation, (SELECT max(batch) FROM batch) AS batch
  FROM cursor
"""  # noqa: S608 (a constant only)

# Rows without which an endpoint or one of its lanes is skipped silently.  A subscription that has
# ended suffices: an endpoint that is drained keeps its state; and one that is fed has none.
MISSING_ROWS = """
SELECT format('lane %s of endpoint %s has no counter or no checkpoint', l.id, e.name) AS what
  FROM lane l JOIN endpoint e ON e.id = l.endpoint_id
 WHERE NOT EXISTS (SELECT FROM lane_counter WHERE lane_id = l.id)
    OR NOT EXISTS (SELECT FROM lane_progress WHERE lane_id = l.id)
 UNION ALL
SELECT format('lane %s has no endpoint', id) FROM lane l
 WHERE NOT EXISTS (SELECT FROM endpoint WHERE id = l.endpoint_id)
 UNION ALL
SELECT format('endpoint %s has %s of its %s lanes', e.name, there.lanes, e.lanes)
  FROM endpoint e
 CROSS JOIN LATERAL (
       SELECT count(*) AS lanes FROM lane l
        WHERE l.endpoint_id = e.id AND l.generation = e.generation) there
 WHERE e.state <> 'removed' AND there.lanes < e.lanes
 UNION ALL
SELECT format('endpoint %s has no row in %s', e.name, part.name)
  FROM endpoint e
 CROSS JOIN LATERAL (
       SELECT 'ownership' WHERE NOT EXISTS (SELECT FROM ownership WHERE endpoint_id = e.id)
        UNION ALL
       SELECT 'endpoint_health'
        WHERE NOT EXISTS (SELECT FROM endpoint_health WHERE endpoint_id = e.id)
        UNION ALL
       SELECT 'subscription'
        WHERE NOT EXISTS (SELECT FROM subscription WHERE endpoint_id = e.id)
          AND NOT EXISTS (SELECT FROM feed WHERE endpoint_id = e.id)) part(name)
 WHERE e.state <> 'removed'
 UNION ALL
SELECT format('no period of %s is left', kind) FROM unnest('{events,log}'::text[]) AS k(kind)
 WHERE NOT EXISTS (SELECT FROM period p WHERE p.kind = k.kind AND dropped_at IS NULL)
"""

# Why a restored state may still change.  The name of a session is a hint; the rows are the proof.
RESTORE_PROBLEM = f"""
SELECT coalesce((SELECT 'pg_restore is running'
                   FROM pg_stat_activity
                  WHERE datname = current_database() AND application_name = 'pg_restore' LIMIT 1),
                (SELECT what FROM ({MISSING_ROWS}) missing LIMIT 1))
"""  # noqa: S608 (constants only)
# The same, if the state is restored, and '' if it is whole; NULL: it is not restored.
READ_RESTORED = f"""
SELECT CASE WHEN {IS_RESTORED} THEN coalesce(({RESTORE_PROBLEM}), '') END FROM cursor
"""  # noqa: S608 (constants only)

REQUIRE_WHOLE = WriteStatement(
    "require_whole",
    f"SELECT abort_unless(({RESTORE_PROBLEM}) IS NULL)",
)

# Also if it holds, as in a snapshot of the disks: a position that was taken after that snapshot has
# seen ids which other events get now.  A new incarnation ends all sessions, the leader's, too.
BEGIN_INCARNATION = WriteStatement(
    "begin_incarnation",
    f"""
INSERT INTO incarnation (by_xid) VALUES ({CURRENT_XID})
    ON CONFLICT (one) DO UPDATE SET id = excluded.id, by_xid = excluded.by_xid
""",  # noqa: S608 (a constant only)
)

# Retention counts from the restore: what a dump or a backup of the disks brings back was not there
# to be seen before.  A dump of an older version has no odometer, and none would count any more.
# After a promotion, which cannot be told from a restore to a point in time, it counts anew, too.
BEGIN_ODOMETER = WriteStatement(
    "begin_odometer",
    """
INSERT INTO odometer AS o (seconds, began_s)
SELECT seconds, seconds FROM (SELECT coalesce(max(seconds), 0) AS seconds FROM odometer_mark) m
    ON CONFLICT (one) DO UPDATE SET began_s = o.seconds
""",
)

# Says that the state was restored; the sessions of all relays end, because their fence changes.
WITHDRAW_INCARNATION = WriteStatement(
    "withdraw_incarnation", "UPDATE incarnation SET by_xid = NULL"
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
    f"""
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
    INSERT INTO lane_counter (lane_id, by_xid) SELECT id, {CURRENT_XID} FROM added),
begun AS (
    INSERT INTO lane_progress (lane_id, endpoint_id, floor_batch, epoch)
    SELECT a.id, a.endpoint_id, $1::bigint, o.epoch
      FROM added a JOIN ownership o ON o.endpoint_id = a.endpoint_id),
changed AS (
    INSERT INTO journal (kind, actor, data)
    SELECT 'timeline_changed', $2,
           jsonb_build_object('old', $3::bigint, 'new', $4::bigint, 'from_batch', $1::bigint,
                              'endpoints', (SELECT count(*) FROM renewed))
               || CASE WHEN $5 THEN '{{"restored": true}}'::jsonb ELSE '{{}}' END)
INSERT INTO journal (kind, actor, endpoint_id, data)
SELECT 'endpoint_lanes_renewed', $2, id,
       jsonb_build_object('generation', generation, 'lanes', lanes, 'from_batch', $1::bigint,
                          'timeline', $4::bigint)
  FROM renewed
""",  # noqa: S608 (a constant only)
)


async def read_server_fence(connection: Connection[Any]) -> int | None:
    """The server's timeline and the incarnation, as one number."""
    server_fence: int = await connection.fetchval(READ_SERVER_FENCE)
    return server_fence


async def read_stopped(connection: Connection[Any]) -> str | None:
    """Why no leader sequences in a restored state; None: it is not restored, or goes on already."""
    problem = await connection.fetchval(READ_RESTORED)
    return INCOMPLETE.format(problem) if problem else None if problem is None else NOT_BEGUN


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


@dataclass(frozen=True, slots=True)
class CursorRow:
    """The cursor row, and the newest batch."""

    leader: int | None
    version: int
    history: History
    """The history of the last batch."""
    server: History
    """The history of the server."""
    batch: int
    incarnation: bool | None = True
    """Whether this state was written here; False: it was restored; None: that is not known, because
    the row is missing."""

    @property
    def begins_history(self) -> bool:
        """Whether the server was promoted, or the state restored, since the last batch."""
        return not (self.incarnation and self.history.continues_as(self.server))

    @property
    def is_current(self) -> bool:
        """Whether all that the server reports is stored."""
        return self.incarnation is True and (self.history.updated_from(self.server) == self.history)


def begin_timeline(replica_id: int, row: CursorRow, actor: str) -> list[WriteCall]:
    """The message by which the leader begins new lanes in a new history, journalled.

    It does nothing if the leader or the routing version has changed, or a restore is not complete.
    The first timeline and the first identity that become known begin no lanes.
    """
    known, server, version = row.history, row.server, row.version
    new = known.updated_from(server)
    if not row.begins_history:
        return [(SET_FIRST_TIMELINE, new.timeline, new.identity, replica_id, version)]
    restored = known.timeline == REQUESTED_TIMELINE or not (
        row.incarnation and History(None, known.identity).continues_as(server)
    )
    whole: list[WriteCall] = [
        (REQUIRE_WHOLE,),
        (ADVANCE_SEQUENCES,),
        (BEGIN_INCARNATION,),
    ]
    return [
        (CHANGE_TIMELINE, new.timeline, new.identity, replica_id, version),
        (LOCK_EPOCHS,),
        *(whole if restored else ()),
        (BEGIN_ODOMETER,),
        (BEGIN_GENERATIONS, row.batch + 1, actor, known.timeline, new.timeline, restored),
        (NOTIFY_ALL,),
    ]
