"""Reads of the sequencer: committed events, and the transactions that may still insert the
missing ids.

`outbox.core.sequencing.gaps` explains why the two belong together and in which order they are
read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from outbox.core.sequencing.router import RoutableEvent
from outbox.errors import CursorBroken
from outbox.store.cluster.leadership import AWAKE
from outbox.store.connection.row_security import rows_hidden
from outbox.store.delivery.delivery_reads import event_content
from outbox.store.sql.expressions import PAYLOAD_BYTES, SERVER_FENCE, epoch_s, key_hash

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from outbox.core.model.delivery import EventContent
    from outbox.core.sequencing.gaps import LockHolders

# The transactions that may still insert an id that was already allocated.  The lock on the
# sequence is taken before the allocation and held by the top-level transaction until its end.
# Reading the sequence's last value takes the lock, too: this backend is excluded, or each gap
# would be attributed to it for a while.  (A prepared transaction has no pid.)
_LOCK_HOLDERS = """
SELECT virtualtransaction FROM pg_locks
 WHERE locktype = 'relation' AND mode = 'RowExclusiveLock'
   AND pid IS DISTINCT FROM pg_backend_pid()
   AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
   AND relation = """
READ_LOCK_HOLDERS = f"{_LOCK_HOLDERS}$1"

# Which of the lock holders are *running*: their transaction is still in progress in this
# statement's snapshot, so an earlier read saw none of their rows.  The lock on the sequence
# does not show it, because a transaction's rows are visible before its locks are released.
#   snapshot: MATERIALIZED, so that it is taken once.  Transaction ids in pg_locks have 32 bits;
#     "at or after xmax" is decided modulo 2^32.
READ_RUNNING = """
WITH snapshot AS MATERIALIZED (
    SELECT pg_snapshot_xmax(s)::text::bigint & 4294967295 AS xmax,
           array(SELECT x::text::bigint & 4294967295 FROM pg_snapshot_xip(s) x) AS xip
      FROM pg_current_snapshot() s)
SELECT DISTINCT l.virtualtransaction
  FROM pg_locks l, snapshot
 WHERE l.locktype = 'transactionid' AND l.mode = 'ExclusiveLock'
   AND (l.transactionid::text::bigint = ANY (snapshot.xip)
        OR (l.transactionid::text::bigint - snapshot.xmax) & 4294967295 < 2147483648)
"""


# Events in the gaps and above the highest id, in id order.  Ranges as rows: an OR over a
# multirange would scan the whole table.
_EVENTS = f"""
SELECT id, tenant, type, {key_hash("key", "id")} AS key_hash{{content}}
  FROM (SELECT o.id, o.tenant, o.type, o.key{{columns}}
          FROM unnest($3::bigint[], $4::bigint[]) AS gap(lo, hi)
         CROSS JOIN LATERAL (
               SELECT id, tenant, type, key{{columns}} FROM outbox
                WHERE id BETWEEN gap.lo AND gap.hi ORDER BY id LIMIT $2) o
         UNION ALL
        (SELECT id, tenant, type, key{{columns}} FROM outbox
          WHERE id > $1 ORDER BY id LIMIT $2)) event
 ORDER BY id LIMIT $2
"""  # noqa: S608 (constants only)
READ_EVENTS = _EVENTS.format(content="", columns="")

CONTENT_EVENTS_MAX, CONTENT_STORED_MAX_BYTES = 64, 2000
"""Events whose content is read along, and the stored size of payload and headers of one.  Up to
that size they are stored in the row itself, so reading them costs hardly anything."""

# The same with the content of the first events, for lanes that have no other pending deliveries.
_HAS_CONTENT = f"""id > $1 AND id <= $1 + {CONTENT_EVENTS_MAX}
            AND coalesce(pg_column_size(payload), pg_column_size(body))
                + coalesce(pg_column_size(headers), 0) <= {CONTENT_STORED_MAX_BYTES}"""
_BODY = f"""{epoch_s("created_at")} AS published_at,
       {epoch_s("expires_at")} AS expires_at,
       CASE WHEN {_HAS_CONTENT} THEN {PAYLOAD_BYTES} END AS payload,
       CASE WHEN {_HAS_CONTENT} THEN headers::text END AS headers, content_type"""
READ_EVENTS_WITH_CONTENT = _EVENTS.format(
    content=f",\n       event_id, key, {_BODY}",
    columns=", event_id, created_at, expires_at, payload, body, headers, content_type",
)
_NEXT_EVENTS = f"""
SELECT id, tenant, type, {key_hash("key", "id")} AS key_hash,
       event_id, key, {_BODY}
  FROM outbox WHERE id > $1 ORDER BY id LIMIT $2
"""  # noqa: S608 (constants only)

# The number of producers that wait for another one's NOTIFY: a transaction that notifies holds
# this lock from before its commit is written until it is flushed to disk.
COUNT_WAITING_PRODUCERS = """
SELECT count(*) FROM pg_locks
 WHERE locktype = 'object' AND classid = 'pg_database'::regclass AND objid = 0 AND NOT granted
"""
IN_FLIGHT_MIN = 3
"""Minimum number of allocated but uncommitted ids at which waiting producers are counted."""


# Reads events and, in the same statement, the transactions that may still insert one of the
# missing ids.
#   event: MATERIALIZED, so that the locks are read after the events, when the snapshot exists:
#     no event can be above the sequence, and no holder of a missing id escapes.  A transaction
#     that ended in between is seen by the next read.
# The row without an id carries the values that occur once.
def _with_state(events: str, sequence: str, waiting: str, holders: str, content: str = "") -> str:
    no_content = re.sub(", [a-z_]+", ", NULL", content)
    return f"""
WITH event AS MATERIALIZED ({events})
SELECT id, tenant, type, key_hash, NULL::bigint AS last_id, NULL::bigint AS wakeup,
       NULL::bigint AS waiting, NULL::text[] AS holders, NULL::bigint AS leader,
       NULL::bigint AS version, NULL::bigint AS erasures, NULL::bigint AS server_fence,
       NULL::timestamptz AS began_at, NULL::boolean AS hidden{content}
  FROM event
 UNION ALL
SELECT NULL, NULL, NULL, NULL, coalesce(pg_sequence_last_value({sequence}::oid::regclass), 0),
       pg_sequence_last_value('wakeup'::regclass), {waiting}, {holders},
       writer, version, erasures, {SERVER_FENCE}, statement_timestamp(),
       {rows_hidden("outbox")}{no_content}
  FROM cursor
"""  # noqa: S608 (constants only)


_WAITING = f"""
       CASE WHEN pg_sequence_last_value('wakeup'::regclass) <> {AWAKE}
                 AND pg_sequence_last_value($5::oid::regclass) - {IN_FLIGHT_MIN}
                     >= (SELECT max(id) FROM event)
            THEN ({COUNT_WAITING_PRODUCERS}) END"""  # noqa: S608 (constants only)
# Only if an id above $1 is missing, or if $6: that costs as much as everything else.
_HOLDERS = f"""
       CASE WHEN $6
                 OR (SELECT count(*) < max(id) - $1 FROM event WHERE id > $1)
            THEN array({_LOCK_HOLDERS}$5) END"""  # noqa: S608 (constants only)
_CONTENT = ", event_id, type, tenant, key, published_at, expires_at, payload, headers, content_type"
_COLUMNS = _CONTENT.count(",")

READ_EVENTS_AND_STATE = _with_state(READ_EVENTS, "$5", _WAITING, _HOLDERS)
READ_CONTENT_AND_STATE = _with_state(READ_EVENTS_WITH_CONTENT, "$5", _WAITING, _HOLDERS, _CONTENT)
# The same while no gap is known.  Most batches of a low rate need no more, and it is two thirds of
# the work; if it misses an id, `READ_CONTENT_AND_STATE` reads all of it again.
READ_NEXT = _with_state(_NEXT_EVENTS, "$3", "NULL", "NULL", _CONTENT)


@dataclass(frozen=True, slots=True)
class Reading:
    """The result of one read."""

    events: list[RoutableEvent]
    last_id: int
    """The last allocated id, committed or not."""
    wakeup: int
    """The wake-up flag."""
    waiting: int
    """Number of producers that wait for each other's NOTIFY."""
    holders: LockHolders | None
    """The transactions that may still insert a missing id; None: they were not read."""
    leader: int | None
    version: int
    erasures: int = 0
    """A number that increases when payloads are erased."""
    server_fence: int | None = None
    """The server's timeline and the incarnation, as one number."""
    began_at: datetime | None = None
    """The database's time before the read: what it did not see was committed later."""
    contents: Mapping[int, EventContent] = field(default_factory=dict)
    """The content of events that was read along, by id."""
    hidden: bool = False
    """Row security may have hidden events."""

    def is_incomplete(self, high: int) -> bool:
        """Whether a gap, or producers that wait for each other, must be looked into."""
        if not self.events:
            return False
        last = self.events[-1].id
        return last - high > len(self.events) or (
            self.wakeup != AWAKE and self.last_id - IN_FLIGHT_MIN >= last
        )

    def check(self, high: int) -> None:
        """Check the result against the sequence.

        Args:
            high: the highest id read before.

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


def parse_reading(rows: Sequence[Any], *, with_content: bool = False) -> Reading | None:
    """Parse the rows of `READ_EVENTS_AND_STATE`, or of the others with content.

    Returns:
        None if there was no cursor row.
    """
    events: list[RoutableEvent] = []
    status: Any = None
    for row in rows:
        event_id = row["id"]
        if event_id is None:
            status = row
        else:
            events.append(RoutableEvent(event_id, row["tenant"], row["type"], row["key_hash"]))
    if status is None:
        return None
    events.sort(key=itemgetter(0))
    holders = status["holders"]
    contents = {
        row["id"]: event_content(tuple(row.values())[-_COLUMNS:])
        for row in (rows if with_content else ())
        if row["payload"] is not None
    }
    return Reading(
        events, status["last_id"], status["wakeup"], status["waiting"] or 0,
        None if holders is None else frozenset(holders), status["leader"], status["version"],
        status["erasures"], status["server_fence"], status["began_at"], contents, status["hidden"],
    )  # fmt: skip
