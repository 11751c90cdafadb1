"""When periods begin and end, and what may be dropped.

Whatever is decided here is decided holding the cursor row, like everything that
a batch must not cross, and is written down before it is done.  Four steps, each
of which any replica may take, again and again, and after a crash:

1. *Begin.*  Numbers are moved on to the next period.  Outbox ids: by `setval`,
   far ahead and never back, because only who holds the cursor row does it, and
   looks there.  Batches: by a batch with that number, which holds nothing.
2. *Settle* (events).  Ids of a period that ended may be given to transactions
   that are still open.  When none of them can appear any more, and all that
   did are sequenced, the newest batch is the last one that can hold any.
3. *Decide* that the oldest period is dropped: it is old enough, no lane owes
   anything of it, no dead letter or replay needs it.
4. *Drop* its partitions (`outbox.store.partitions`).

A transaction that was there before a partition was attached may never notice it:
PostgreSQL looks for new partitions when a relation is locked for the first time.
Its next event would find no partition, and its INSERT would fail.  So a period of
events begins only after everybody has ended who wrote to the outbox when its
partition was known to be there.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from outbox.core.sequencing.partition_window import WIDTH, Keep, Period, due, length_s
from outbox.store.channels import WAKE_ALL
from outbox.store.cursor import SIGN_CURSOR
from outbox.store.erasure import sweep
from outbox.store.routing_change import LOCK_CURSOR, write_journal

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from asyncpg import Connection

    from outbox.core.sequencing.gaps import Holders
    from outbox.core.sequencing.partition_window import Kind

ACTOR = "retention"

PERIODS = """
SELECT kind, number, extract(epoch FROM clock_timestamp() - began_at)::float8 AS age_s,
       extract(epoch FROM clock_timestamp() - ended_at)::float8 AS ended_s, last_batch
  FROM period WHERE dropped_at IS NULL
"""

# Whether anything was written in a period; not the batch that begins it.
EVENTS_WRITTEN = "SELECT EXISTS (SELECT FROM outbox WHERE id >= $1)"
LOG_WRITTEN = "SELECT EXISTS (SELECT FROM batch WHERE batch > $1)"

# Who writes to the outbox now: these may know its partitions from some time ago.
# (A prepared transaction writes nothing more.)
WRITERS = """
SELECT virtualtransaction FROM pg_locks
 WHERE locktype = 'relation' AND mode = 'RowExclusiveLock' AND relation = 'outbox'::regclass
   AND pid IS NOT NULL
   AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""
HAS_PARTITION = """
SELECT EXISTS (
    SELECT FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
     WHERE i.inhparent = 'outbox'::regclass AND c.relname = 'outbox_' || $1::bigint
       AND NOT i.inhdetachpending)
"""

# What is decided of a period is written by functions that look for themselves whether it
# may be: a relay has no right to write it (schema/0007_roles.sql).

# Ends the newest period and moves the numbers on to the next one: ids by `setval`, which a
# rollback does not undo, batches by one that holds nothing.
END_PERIOD = "SELECT end_period($1, $2)"
# Whether all that ever will be in a period that ended is sequenced; the newest batch is
# the last one that can hold any of it, then.
SETTLE_PERIOD = "SELECT settle_period($1)"

# Lanes that may owe something of batches up to $1, by their checkpoints.  What they
# are given later is not of these, so who was not among them never will be.
OWING = """
SELECT EXISTS (
    SELECT FROM lane_progress p JOIN lane_counter c ON c.lane_id = p.lane_id
     WHERE c.last_seq > p.acked_seq AND p.floor_batch <= $1)
"""

# A dead letter `d` that somebody has asked to be sent again, and whose turn is to come.
_ASKED_FOR = """
    EXISTS (SELECT FROM replay_part p JOIN replay_job j ON j.id = p.job_id AND j.kind = 'dead'
             WHERE p.ended_at IS NULL AND p.endpoint_id = d.endpoint_id
               AND d.id BETWEEN p.next_id AND p.last_id)
"""

# A range `d` that may be sent again: by a person, for $1 seconds (NULL: for ever), or by
# a job that will come to it.
_OPEN_RANGE = f"""
    d.outbox_id IS NULL AND d.state = 'dead'
    AND d.endpoint_id NOT IN (SELECT id FROM endpoint WHERE state = 'removed')
    AND ($1::float8 IS NULL OR d.began_at > clock_timestamp() - make_interval(secs => $1)
         OR {_ASKED_FOR})
"""  # noqa: S608 (constants only)

# Ranges that may be sent again, and replays of ranges and lanes that are to come.
PINNED_BY_RANGES = f"""
SELECT EXISTS (SELECT FROM dead_letter d WHERE d.batch <= $2 AND {_OPEN_RANGE})
    OR EXISTS (
    SELECT FROM replay r LEFT JOIN dead_letter d ON d.id = r.dead_id
     WHERE r.next_seq <= r.to_seq AND d.outbox_id IS NULL AND r.next_batch <= $2)
"""  # noqa: S608

# Deliveries made by replays of events in [$2, $3), whose batch tells nothing about the
# event's age: those that are owed, and those in ranges that may be sent again, or are
# being sent, as those of a lane may be; unless a dead letter has a copy.
PINNED_BY_REPLAYS = f"""
WITH resent AS MATERIALIZED (
    SELECT j.lane_id, r.next_seq, r.to_seq
      FROM replay r JOIN replay_job j ON j.id = r.job_id
     WHERE r.next_seq <= r.to_seq AND r.dead_id IS NULL)
SELECT EXISTS (
    SELECT FROM delivery again JOIN lane_progress lane ON lane.lane_id = again.lane_id
     WHERE (again.replay_id IS NOT NULL OR again.backfill_id IS NOT NULL)
       AND again.copy_id IS NULL AND again.outbox_id >= $2 AND again.outbox_id < $3
       AND (again.seq > lane.acked_seq OR EXISTS (
             SELECT FROM resent r
              WHERE r.lane_id = again.lane_id AND again.seq BETWEEN r.next_seq AND r.to_seq)
            OR EXISTS (
             SELECT FROM dead_letter d
              WHERE d.lane_id = again.lane_id AND again.seq BETWEEN d.seq AND d.to_seq
                AND ({_OPEN_RANGE} OR d.outbox_id IS NULL AND EXISTS (
                     SELECT FROM replay r
                      WHERE r.dead_id = d.id AND again.seq BETWEEN r.next_seq AND r.to_seq)))))
"""  # noqa: S608
# The same as long as no batch takes anything of a replay, which makes new ones.
REPLAYS_STAND = """
SELECT concat_ws(' ', (SELECT max(id) FROM replay_job), count(*), sum(batch))
  FROM replay_part WHERE ended_at IS NULL
"""
PINNED_BY_JOBS = """
SELECT EXISTS (SELECT FROM replay_part WHERE ended_at IS NULL AND from_id < $1)
"""

# Asks anew what lanes owe; nothing comes back of what is not to go.
DROP_PERIOD = "SELECT began_at, ended_at FROM drop_period($1, $2)"

# Ranges that are too old to keep a period: they cannot be sent again any more.  Those of
# newer batches, too: what is in them may be sent again a second time, and of any age.
# Locked in the order of their ids, as everybody does who locks several.
DISCARD_RANGES = f"""
WITH old AS MATERIALIZED (
    SELECT d.id FROM dead_letter d
     WHERE d.outbox_id IS NULL AND d.state = 'dead' AND NOT ({_OPEN_RANGE})
     ORDER BY d.id FOR UPDATE OF d),
discarded AS (
    UPDATE dead_letter d SET state = 'discarded' FROM old WHERE d.id = old.id
    RETURNING 1)
SELECT count(*) FROM discarded
"""  # noqa: S608

ERASED_WITHIN_S = 3 * 3600.0
"""A request takes an hour at most, and this is looked at each hour."""

STEP = 1000
"""Rows that are deleted at once."""

# Dead letters that are old enough, and whose numbers are not in the log any more,
# which `verify` goes through.  One that was sent again has the copy of the event
# that its new delivery needs, and those that came of that one; and one that a lane
# waits for is a person's to decide.
DELETE_DEAD = f"""
WITH old AS MATERIALIZED (
    SELECT d.id FROM dead_letter d
     WHERE d.at < clock_timestamp() - make_interval(secs => $1)
       AND d.batch < (SELECT min(number) * {WIDTH} FROM period
                       WHERE kind = 'log' AND dropped_at IS NULL)
       AND NOT EXISTS (SELECT FROM lane_block b WHERE b.lane_id = d.lane_id AND b.seq = d.seq)
       AND NOT {_ASKED_FOR}
       AND (d.outbox_id IS NOT NULL OR NOT EXISTS (
             SELECT FROM delivery n
              WHERE n.lane_id = d.lane_id AND n.seq BETWEEN d.seq AND d.to_seq
                AND n.batch >= (SELECT min(number) * {WIDTH} FROM period
                                 WHERE kind = 'log' AND dropped_at IS NULL)))
       AND NOT EXISTS (
             SELECT FROM replay r
              WHERE r.dead_id = d.id
                AND (r.next_seq <= r.to_seq
                     OR EXISTS (SELECT FROM delivery WHERE replay_id = r.id)))
       AND NOT EXISTS (SELECT FROM delivery WHERE copy_id = d.id)
     ORDER BY d.id LIMIT {STEP} FOR UPDATE OF d SKIP LOCKED),
replays AS (
    DELETE FROM replay WHERE dead_id = ANY(ARRAY(SELECT id FROM old))),
deleted AS (
    DELETE FROM dead_letter WHERE id = ANY(ARRAY(SELECT id FROM old)) RETURNING id)
SELECT count(*) FROM deleted
"""  # noqa: S608 (constants only)

# What receivers asked for again, when the log has nothing of it any more: they may ask as
# often as they like.
DELETE_RESENT = f"""
WITH old AS MATERIALIZED (
    SELECT p.job_id FROM replay_part p JOIN replay_job j ON j.id = p.job_id AND j.kind = 'lane'
     WHERE p.ended_at < clock_timestamp() - make_interval(secs => $1)
       AND coalesce(p.batch, 0) < (SELECT min(number) * {WIDTH} FROM period
                                    WHERE kind = 'log' AND dropped_at IS NULL)
       AND NOT EXISTS (SELECT FROM dead_letter d WHERE d.backfill_id = p.job_id)
     LIMIT {STEP} FOR UPDATE OF j SKIP LOCKED),
numbers AS (DELETE FROM replay WHERE job_id = ANY(ARRAY(SELECT job_id FROM old))),
parts AS (DELETE FROM replay_part WHERE job_id = ANY(ARRAY(SELECT job_id FROM old))),
deleted AS (
    DELETE FROM replay_job WHERE id = ANY(ARRAY(SELECT job_id FROM old)) RETURNING id)
SELECT count(*) FROM deleted
"""  # noqa: S608 (constants only)

# Once keys that anybody may claim anew, kept for a while to be looked up.
DELETE_ONCE = f"""
WITH deleted AS (
    DELETE FROM once WHERE key = ANY(ARRAY(
        SELECT key FROM once WHERE expires_at < clock_timestamp() - make_interval(secs => $1)
         LIMIT {STEP} FOR UPDATE SKIP LOCKED))
    RETURNING key)
SELECT count(*) FROM deleted
"""  # noqa: S608


class RetentionStore:
    """What is kept, on the connection for maintenance.

    Args:
        period_s: how long a period of each kind lasts; without it, what is left to
            `outbox.core.sequencing.partition_window`.
    """

    def __init__(
        self, connection: Connection[Any], keep: Keep, *, period_s: float | None = None
    ) -> None:
        self._db = connection
        self._keep = keep
        self._period_s = period_s
        # By the period that is to begin, who wrote when its partition was there.
        self._writers: tuple[int, Holders] | None = None

    async def tend(self) -> list[Period]:
        """Begin, settle and decide what is due; returns the periods that go."""
        dropped = []
        periods = [Period(**dict(row)) for row in await self._db.fetch(PERIODS)]
        kinds: tuple[Kind, ...] = ("events", "log")
        for kind in kinds:
            found = due(kind, periods, self._keep.of(kind), self._length_s(kind))
            if found.ends is not None:
                await self._begin(found.ends)
            for period in found.unsettled:
                await self._settle(period)
            if found.oldest is not None and await self._drop(found.oldest):
                dropped.append(found.oldest)
        return dropped

    async def clean(self) -> int:
        """Delete old dead letters and once keys, and what erasures left; returns how many."""
        gone = await sweep(self._db, ERASED_WITHIN_S)
        for delete, keep_s in (
            (DELETE_DEAD, self._keep.dead_letters_s),
            (DELETE_RESENT, self._keep.log_s),
            (DELETE_ONCE, self._keep.events_s),
        ):
            deleted = STEP
            while keep_s is not None and deleted == STEP:
                deleted = await self._db.fetchval(delete, keep_s)
                gone += deleted
        return gone

    def _length_s(self, kind: Kind) -> float:
        return length_s(self._keep.of(kind)) if self._period_s is None else self._period_s

    @asynccontextmanager
    async def _holding(self) -> AsyncIterator[None]:
        """A transaction that holds the cursor row; each statement sees what is new."""
        async with self._db.transaction(isolation="read_committed"):
            await self._db.execute(LOCK_CURSOR)
            yield

    # ----------------------------------------------------------------- begin

    async def _begin(self, period: Period) -> None:
        written = EVENTS_WRITTEN if period.kind == "events" else LOG_WRITTEN
        if not await self._db.fetchval(written, period.first):
            return
        if period.kind == "events" and not await self._known_to_all(period.number + 1):
            return
        async with self._holding():
            if not await self._db.fetchval(END_PERIOD, period.kind, period.number):
                return
            if period.kind == "log":
                # Whoever leads must not write the batch after the one it knows.  Its name
                # tells, and not the newest batch: a statement that waits for the row sees
                # what is new of it, and all else as it was before.
                await self._db.execute(SIGN_CURSOR, None)
                await self._db.execute(WAKE_ALL)

    async def _known_to_all(self, number: int) -> bool:
        """Whether everybody who writes to the outbox sees that period's partition."""
        if not await self._db.fetchval(HAS_PARTITION, number):
            return False
        now = frozenset(r["virtualtransaction"] for r in await self._db.fetch(WRITERS))
        if self._writers is None or self._writers[0] != number:
            self._writers = (number, now)
        left = self._writers[1] & now
        self._writers = (number, left)
        return not left

    # ---------------------------------------------------------------- settle

    async def _settle(self, period: Period) -> None:
        async with self._holding():
            await self._db.execute(SETTLE_PERIOD, period.number)

    # ---------------------------------------------------------------- decide

    async def _drop(self, period: Period) -> bool:
        last_batch = period.last_batch if period.kind == "events" else period.end - 1
        keep_s = self._keep.dead_letters_s
        # What takes long is asked before.  Lanes can only come to owe less, and so it is
        # with replays, unless one goes on meanwhile.
        stand = await self._db.fetchval(REPLAYS_STAND)
        if await self._db.fetchval(OWING, last_batch):
            return False
        events = period.kind == "events"
        if events and await self._db.fetchval(PINNED_BY_REPLAYS, keep_s, period.first, period.end):
            return False
        async with self._holding():
            if await self._db.fetchval(PINNED_BY_RANGES, keep_s, last_batch):
                return False
            if events and await self._db.fetchval(REPLAYS_STAND) != stand:
                return False
            if events and await self._db.fetchval(PINNED_BY_JOBS, period.end):
                return False
            row = await self._db.fetchrow(DROP_PERIOD, period.kind, period.number)
            if row is None:
                return False
            data = {
                "kind": period.kind,
                "number": period.number,
                "began_at": row["began_at"].isoformat(),
                "ended_at": row["ended_at"].isoformat(),
                "ranges_discarded": await self._db.fetchval(DISCARD_RANGES, keep_s),
            }
            await write_journal(self._db, "period_dropped", ACTOR, None, data)
        return True
