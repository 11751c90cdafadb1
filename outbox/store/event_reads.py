"""What a sequencer reads: committed events, and who may still insert those that are missing.

`outbox.core.sequencing.gaps` says why the two belong together, and in which order they are
looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from outbox.core.sequencing.router import Sighting
from outbox.errors import CursorBroken

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from outbox.core.sequencing.gaps import Holders

AWAKE = 1
"""The wake-up flag's value while the relay reads without being asked."""

# Who may still insert an id that was already allocated.  The lock is taken
# before the allocation and belongs to the top transaction until its end.  Whoever
# asks for the sequence's last value takes it, too: not counted here, or each gap
# would be taken for our own for a while.  (A prepared transaction has no pid.)
HOLDERS = """
SELECT virtualtransaction FROM pg_locks
 WHERE locktype = 'relation' AND mode = 'RowExclusiveLock' AND relation = $1
   AND pid IS DISTINCT FROM pg_backend_pid()
   AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""

# Which of the holders are *running*: have a transaction that this statement's
# snapshot still takes for unfinished, so that a read before it saw none of its
# rows.  The lock on the sequence does not tell, because a transaction's rows
# are visible before its locks are let go.  Ids in pg_locks have 32 bits; what
# is "at or after xmax" among them is decided modulo 2^32.
READ_RUNNING = """
WITH here AS MATERIALIZED (
    SELECT pg_snapshot_xmax(s)::text::bigint & 4294967295 AS xmax,
           array(SELECT x::text::bigint & 4294967295 FROM pg_snapshot_xip(s) x) AS xip
      FROM pg_current_snapshot() s)
SELECT DISTINCT l.virtualtransaction
  FROM pg_locks l, here
 WHERE l.locktype = 'transactionid' AND l.mode = 'ExclusiveLock'
   AND (l.transactionid::text::bigint = ANY (here.xip)
        OR (l.transactionid::text::bigint - here.xmax) & 4294967295 < 2147483648)
"""

# Gaps and everything above the highest id, in id order.  Ranges as rows: an OR
# over a multirange would scan the whole table.
READ_EVENTS = """
SELECT id, tenant, type,
       CASE WHEN key IS NULL THEN id
            ELSE hashtextextended(key, 0) & 9223372036854775807 END AS spread
  FROM (SELECT o.id, o.tenant, o.type, o.key
          FROM unnest($2::bigint[], $3::bigint[]) AS gap(lo, hi)
         CROSS JOIN LATERAL (
               SELECT id, tenant, type, key FROM outbox
                WHERE id BETWEEN gap.lo AND gap.hi ORDER BY id LIMIT $4) o
         UNION ALL
        (SELECT id, tenant, type, key FROM outbox
          WHERE id > $1 ORDER BY id LIMIT $4)) event
 ORDER BY id LIMIT $4
"""

# Producers that wait for another one's notification: whoever notifies holds this
# lock from before its commit is written to after it is on disk.
WAITING = """
SELECT count(*) FROM pg_locks
 WHERE locktype = 'object' AND classid = 'pg_database'::regclass AND objid = 0 AND NOT granted
"""
IN_FLIGHT_MIN = 3
"""With fewer ids that were given out and are not there yet, nobody looks for them."""

# Beside the events, who may still insert one of the ids missing between them.
# All of it is read when the statement's snapshot is there already, so no event can
# be above the sequence, and no holder of an id that is missing escapes; who has
# ended since then is met by the next read.  The locks are not looked into while no
# id is missing: that costs as much as all the rest.  The one row without an id
# carries what is said once.
READ = f"""
WITH event AS MATERIALIZED ({READ_EVENTS})
SELECT id, tenant, type, spread, NULL::bigint AS last_id, NULL::bigint AS wakeup,
       NULL::bigint AS waiting, NULL::text[] AS holders, NULL::bigint AS leader,
       NULL::bigint AS version, NULL::bigint AS server_timeline, NULL::timestamptz AS began_at
  FROM event
 UNION ALL
SELECT NULL, NULL, NULL, NULL,
       coalesce(pg_sequence_last_value($5::oid::regclass), 0),
       pg_sequence_last_value('wakeup'::regclass),
       CASE WHEN pg_sequence_last_value('wakeup'::regclass) <> {AWAKE}
                 AND pg_sequence_last_value($5::oid::regclass) - {IN_FLIGHT_MIN}
                     >= (SELECT max(id) FROM event)
            THEN ({WAITING}) END,
       CASE WHEN cardinality($2) > 0 OR $6
                 OR (SELECT count(*) < max(id) - $1 FROM event WHERE id > $1)
            THEN array({HOLDERS.replace("$1", "$5")}) END,
       writer, version, server_timeline(), statement_timestamp()
  FROM cursor
"""  # noqa: S608 (constants only)


@dataclass(frozen=True, slots=True)
class Reading:
    """What one read finds."""

    events: list[Sighting]
    last_id: int
    """The last id that was given to anybody, committed or not."""
    wakeup: int
    """The flag."""
    waiting: int
    """Producers that wait for each other, because all of them notify."""
    holders: Holders | None
    """Who may still insert an id that is missing; None: none is."""
    leader: int | None
    version: int
    server_timeline: int | None = None
    """None: the server does not say."""
    began_at: datetime | None = None
    """By the database's clock, before it looked: what it did not see was committed later."""

    def check(self, high: int) -> None:
        """Hold it to what the sequence can have done since `high` was read.

        Raises:
            CursorBroken: the sequence cannot be trusted.
        """
        if self.last_id < high:
            raise CursorBroken(
                f"the sequence of outbox.id went back to {self.last_id}, below {high}, "
                "which was already read; set it to a higher value with setval"
            )
        if self.events and self.events[-1].id > self.last_id:
            raise CursorBroken(
                f"outbox holds id {self.events[-1].id}, above its sequence's last value "
                f"{self.last_id}: it was written with an explicit id (COPY?); remove the row "
                "or set the sequence to a higher value with setval"
            )


def reading_of(rows: Sequence[Any]) -> Reading:
    """A reading from the rows of `READ`."""
    events: list[Sighting] = []
    said: Any = None
    for row in rows:
        event_id = row["id"]
        if event_id is None:
            said = row
        else:
            events.append(Sighting(event_id, row["tenant"], row["type"], row["spread"]))
    events.sort(key=itemgetter(0))
    holders = said["holders"]
    return Reading(
        events,
        said["last_id"],
        said["wakeup"],
        said["waiting"] or 0,
        None if holders is None else frozenset(holders),
        said["leader"],
        said["version"],
        said["server_timeline"],
        said["began_at"],
    )
