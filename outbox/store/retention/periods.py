"""Retention: when periods begin and end, and what may be dropped.

Every decision is made while holding the cursor row, like everything that a batch must not
cross, and is recorded before it is carried out.  There are four steps; any replica may run
each of them, repeatedly and after a crash:

1. *Begin.*  The numbers advance to the next period.  Outbox ids: by `setval`, far ahead and
   never back, because only the holder of the cursor row does it and checks the sequence there.
   Batches: by an empty batch with the first number of the period.
2. *Settle* (events).  Ids of an ended period may have been allocated to transactions that are
   still open.  When none of them can appear any more, and all that did are sequenced, the
   newest batch is the last one that can contain any.
3. *Decide* that the oldest period is dropped: it is old enough and was observed for a day, no lane
   has pending deliveries in it, and no dead letter or replay needs it.
4. *Drop* its partitions (`outbox.store.retention.partitions`).

A transaction that was open before a partition was attached may never see it: PostgreSQL looks
up partitions when a relation is locked for the first time.  Its next event would find no
partition, and its INSERT would fail.  So a period of events begins only after every transaction
has ended that had written to the outbox when its partition was known to exist.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.core.sequencing.partition_window import (
    WIDTH,
    PartitionWindow,
    Retention,
    due_windows,
    window_length_s,
)
from outbox.store.absence_proof import AbsenceProof
from outbox.store.channels import NOTIFY_ALL
from outbox.store.cluster.leadership import CLEAR_LEADER
from outbox.store.connection.row_security import rows_hidden, stop_empty
from outbox.store.retention.erasure import erase_leftovers
from outbox.store.retention.feed_pins import DELETE_FEED_STEPS, pinned_by_feeds
from outbox.store.routing_change import LOCK_CURSOR
from outbox.store.sequencing.accounting import ACCOUNT_BATCHES, BATCHES_PER_STEP
from outbox.store.sql.expressions import RUN_LENGTH
from outbox.store.sql.message import WriteCall, WriteStatement

if TYPE_CHECKING:
    from outbox.core.sequencing.gaps import LockHolders
    from outbox.core.sequencing.partition_window import WindowKind
    from outbox.store.connection.store_connection import StoreConnection

ACTOR = "retention"

OBSERVED_S_MIN = 86400
"""Observed seconds for which everything is kept, if its retention is not shorter.  Otherwise a
clock that is a month ahead, or a dump of last month, would drop what nobody could have seen."""


def _observed_before(keep_s: str) -> str:
    """The time before which everything was observed for long enough.

    A dump or a backup brings back what was observed before it, so the time counts from the restore.

    Args:
        keep_s: the parameter with the retention in seconds.
    """
    observed_s = f"least({keep_s}, {OBSERVED_S_MIN})"
    return f"""coalesce((
        SELECT observed_before({observed_s}) FROM odometer
         WHERE seconds - began_s >= {observed_s} AND NOT history_changed()), '-infinity')"""  # noqa: S608


def _kept_since(keep_s: str) -> str:
    """The time before which nothing is kept any more.

    Args:
        keep_s: the parameter with the retention in seconds.
    """
    return f"""(SELECT least(clock_timestamp() - make_interval(secs => {keep_s}),
                        {_observed_before(keep_s)}))"""


# Periods that are not dropped.
READ_PERIODS = """
SELECT kind, number, extract(epoch FROM clock_timestamp() - began_at)::float8 AS age_s,
       extract(epoch FROM clock_timestamp() - ended_at)::float8 AS ended_s, last_batch
  FROM period WHERE dropped_at IS NULL
"""

# Whether anything was written in a period, apart from the batch that begins it.
EVENTS_WRITTEN = "SELECT EXISTS (SELECT FROM outbox WHERE id >= $1)"
LOG_WRITTEN = "SELECT EXISTS (SELECT FROM batch WHERE batch > $1)"

# The transactions that write to the outbox now: they may have a cached list of its partitions.
# (A prepared transaction writes nothing more.)
READ_WRITERS = """
SELECT virtualtransaction FROM pg_locks
 WHERE locktype = 'relation' AND mode = 'RowExclusiveLock' AND relation = 'outbox'::regclass
   AND pid IS NOT NULL
   AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""
# Whether the outbox has the partition of a period.
HAS_PARTITION = """
SELECT EXISTS (
    SELECT FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
     WHERE i.inhparent = 'outbox'::regclass AND c.relname = 'outbox_' || $1::bigint
       AND NOT i.inhdetachpending)
"""

# Periods are written by functions that check whether the change is allowed: a relay has no
# privilege on the table (schema/0007_roles.sql).

# Ends the newest period and advances the numbers to the next one: ids by `setval`, which is not
# undone by a rollback, batches by an empty one.
END_PERIOD = WriteStatement("end_period", "SELECT abort_unless(end_period($1, $2))")
# Settles an ended period, once everything in it is sequenced: the newest batch is the last one
# that can contain any of it.
SETTLE_PERIOD = WriteStatement("settle_period", "SELECT settle_period($1)")

# Everything that a batch must not cross holds the cursor row, and reads in later statements.
HOLD_CURSOR = WriteStatement("hold_cursor", LOCK_CURSOR)

# The leader must not write the batch after the one it knows.  Clearing its name ensures that.  A
# check of the newest batch would not: a statement that waits for the row lock sees the row's new
# version, and everything else in its old snapshot.
END_LEADERSHIP = WriteStatement("end_leadership", CLEAR_LEADER)

# Whether a lane may have pending deliveries in batches up to $1, by its checkpoint.  New
# deliveries are in later batches, so the result never changes from false to true.
HAS_PENDING_LANES = f"""
SELECT {rows_hidden("lane_progress", "lane_counter")} OR EXISTS (
    SELECT FROM lane_progress p JOIN lane_counter c ON c.lane_id = p.lane_id
     WHERE c.last_seq > p.acked_seq AND p.floor_batch <= $1)
"""  # noqa: S608 (constants only)

# Whether a period whose retention is $3 seconds was observed for long enough after its end.
IS_OBSERVED = f"""
SELECT ended_at < {_observed_before("$3::float8")}
  FROM period WHERE kind = $1 AND number = $2
"""  # noqa: S608 (constants only)

# Whether a replay was requested for a dead letter `d` and has not reached it.
_REPLAY_REQUESTED = """
    EXISTS (SELECT FROM replay_job_endpoint p
              JOIN replay_job j ON j.id = p.job_id AND j.kind = 'dead'
             WHERE p.ended_at IS NULL AND p.endpoint_id = d.endpoint_id
               AND d.id BETWEEN p.next_id AND p.last_id)
"""


def _open_range(keep_s: str) -> str:
    """Whether a range `d` may be replayed, by an operator or by a job that will reach it.

    Args:
        keep_s: the parameter with the seconds for which an operator may (NULL: for ever).
    """
    return f"""
    d.outbox_id IS NULL AND d.state = 'dead'
    AND d.endpoint_id NOT IN (SELECT id FROM endpoint WHERE state = 'removed')
    AND ({keep_s}::float8 IS NULL
         OR d.began_at > {_kept_since(keep_s + "::float8")}
         OR {_REPLAY_REQUESTED})
"""  # noqa: S608 (constants only)


# Whether ranges that may be replayed, or running replays of ranges, need batches up to $2.
PINNED_BY_RANGES = f"""
SELECT EXISTS (SELECT FROM dead_letter d WHERE d.batch <= $2 AND {_open_range("$1")})
    OR EXISTS (
    SELECT FROM replay r JOIN dead_letter d ON d.id = r.dead_id
     WHERE r.next_seq <= r.to_seq AND d.outbox_id IS NULL AND r.next_batch <= $2)
"""  # noqa: S608
REQUIRE_NO_RANGES = WriteStatement(
    "require_no_ranges",
    f"SELECT abort_unless(NOT ({PINNED_BY_RANGES}))",
)

# Whether deliveries created by replays need events in [$2, $3); their batch does not show the
# event's age.  They do if they are pending, or in a range that may be replayed or is being
# replayed; unless a dead letter holds a copy.
PINNED_BY_REPLAYS = f"""
SELECT {rows_hidden("delivery_run", "lane_progress", "dead_letter", "replay")} OR EXISTS (
    SELECT FROM delivery_run n JOIN lane_progress lane ON lane.lane_id = n.lane_id
     WHERE (n.replay_id IS NOT NULL OR n.backfill_id IS NOT NULL)
       AND n.copy_id IS NULL AND n.outbox_id >= $2 AND n.outbox_id < $3
       AND (n.seq > lane.acked_seq OR EXISTS (
             SELECT FROM dead_letter d
              WHERE d.lane_id = n.lane_id AND n.seq BETWEEN d.seq AND d.to_seq
                AND ({_open_range("$1")} OR d.outbox_id IS NULL AND EXISTS (
                     SELECT FROM replay r
                      WHERE r.dead_id = d.id AND n.seq BETWEEN r.next_seq AND r.to_seq)))))
"""  # noqa: S608
# A fingerprint of the replays' progress: unchanged as long as no batch takes anything of a
# replay, which creates new deliveries.  A batch that is planned, and is written after the drop,
# needs nothing that was dropped: the jobs and replays from which it was planned pin that until it
# is written.  Nor does a claim of dead letters change what is pinned: an open range that a job
# will reach becomes a range with a pending replay.
READ_REPLAY_PROGRESS = """
SELECT concat_ws(' ', (SELECT max(id) FROM replay_job), count(*), sum(batch), sum(job_id))
  FROM replay_job_endpoint WHERE ended_at IS NULL
"""
REQUIRE_REPLAY_PROGRESS = WriteStatement(
    "require_replay_progress",
    f"SELECT abort_unless(({READ_REPLAY_PROGRESS}) = $1)",
)

# No running backfill may still read events below $1.
REQUIRE_NO_JOBS = WriteStatement(
    "require_no_jobs",
    """
SELECT abort_unless(NOT EXISTS (
    SELECT FROM replay_job_endpoint WHERE ended_at IS NULL AND from_id < $1))
""",
)

# Whether a feed needs batches up to $1, or their events; $2: the retention of dead letters.
PINNED_BY_FEEDS = pinned_by_feeds(_open_range("$2"))
# Part of the message that drops a period, and not read before: a feed may pass the period
# meanwhile, with deliveries that are pending then.
REQUIRE_NO_FEEDS = WriteStatement(
    "require_no_feeds", f"SELECT abort_unless(NOT ({PINNED_BY_FEEDS}))"
)

# Decides to drop a period, and journals it; aborts if pending deliveries prevent it.
#   old, discarded: discards ranges that are too old to pin a period, because they can no longer be
#     replayed.  This includes those of newer batches, which may contain replays of events of any
#     age.  Locked in id order, as in every statement that locks several, to avoid deadlocks.
DROP_PERIOD = WriteStatement(
    "drop_period",
    f"""
WITH decided AS MATERIALIZED (SELECT began_at, ended_at FROM drop_period($1, $2)),
old AS MATERIALIZED (
    SELECT d.id FROM decided, dead_letter d
     WHERE d.outbox_id IS NULL AND d.state = 'dead' AND NOT ({_open_range("$4")})
     ORDER BY d.id FOR UPDATE OF d),
discarded AS (
    UPDATE dead_letter d SET state = 'discarded' FROM old WHERE d.id = old.id
    RETURNING 1),
journalled AS (
    INSERT INTO journal (kind, actor, data)
    SELECT 'period_dropped', $3,
           jsonb_build_object('kind', $1::text, 'number', $2::bigint, 'began_at', began_at,
                              'ended_at', ended_at,
                              'ranges_discarded', (SELECT count(*) FROM discarded))
      FROM decided
    RETURNING 1)
SELECT abort_unless(EXISTS (SELECT FROM journalled))
""",  # noqa: S608
)

ERASED_WITHIN_S = 3 * 3600.0
"""A request takes an hour at most, and this runs hourly."""

STEP = 1000
"""Maximum number of rows per DELETE."""

# Deletes dead letters that are old enough and whose deliveries are no longer in the log, which
# `verify` reads.  Kept are: one that blocks a lane, which is for an operator to decide; one
# with a requested or running replay; and one whose copy of the event a replay's delivery needs,
# also after replays of replays.
#   old: SKIP LOCKED, so that it does not wait for an operator's change.
#   replays, deleted: deletes the replays first, which reference dead letters.
DELETE_DEAD_LETTERS = WriteStatement(
    "delete_dead_letters",
    f"""
WITH old AS MATERIALIZED (
    SELECT d.id FROM dead_letter d
     WHERE d.at < {_kept_since("$1::float8")}
       AND d.batch < (SELECT min(number) * {WIDTH} FROM period
                       WHERE kind = 'log' AND dropped_at IS NULL)
       AND NOT EXISTS (SELECT FROM lane_block b WHERE b.lane_id = d.lane_id AND b.seq = d.seq)
       AND NOT {_REPLAY_REQUESTED}
       AND (d.outbox_id IS NOT NULL OR NOT EXISTS (
             SELECT FROM delivery_run n
              WHERE n.lane_id = d.lane_id AND n.seq <= d.to_seq AND n.seq + {RUN_LENGTH} > d.seq
                AND n.batch >= (SELECT min(number) * {WIDTH} FROM period
                                 WHERE kind = 'log' AND dropped_at IS NULL)))
       AND NOT EXISTS (
             SELECT FROM replay r
              WHERE r.dead_id = d.id
                AND (r.next_seq <= r.to_seq
                     OR EXISTS (SELECT FROM delivery_run WHERE replay_id = r.id)))
       AND NOT EXISTS (SELECT FROM delivery_run WHERE copy_id = d.id)
     ORDER BY d.id LIMIT {STEP} FOR UPDATE OF d SKIP LOCKED),
replays AS (
    DELETE FROM replay WHERE dead_id = ANY(ARRAY(SELECT id FROM old))),
deleted AS (
    DELETE FROM dead_letter WHERE id = ANY(ARRAY(SELECT id FROM old)) RETURNING id)
SELECT FROM deleted
""",  # noqa: S608 (constants only)
)

ALL_IDS = [(1, 2**62)]

# Dead letters of older versions, in which every event that a read did not return counted as erased.
READ_UNCLASSIFIED = f"""
SELECT id FROM dead_letter
 WHERE reason = 'erased' AND erased_at IS NULL AND outbox_id IS NOT NULL AND id > $1
 ORDER BY id LIMIT {STEP}
"""  # noqa: S608 (a constant only)

# Classifies some of them: they were erased, if the event or its period has a record of it, and are
# missing otherwise, which the message proves.
CLASSIFY_ERASED = WriteStatement(
    "classify_erased",
    f"""
WITH unclassified AS MATERIALIZED (
    SELECT id, outbox_id FROM dead_letter
     WHERE reason = 'erased' AND erased_at IS NULL AND outbox_id IS NOT NULL AND id = ANY ($1)
       FOR NO KEY UPDATE SKIP LOCKED),
recorded AS (
    SELECT u.id, coalesce(o.erased_at, p.dropped_at) AS erased_at
      FROM unclassified u
      LEFT JOIN LATERAL (SELECT erased_at FROM outbox WHERE id = u.outbox_id LIMIT 1) o ON true
      LEFT JOIN period p ON p.kind = 'events' AND p.number = u.outbox_id / {WIDTH}),
classified AS (
    UPDATE dead_letter d
       SET erased_at = r.erased_at,
           reason = CASE WHEN r.erased_at IS NULL THEN 'missing' ELSE 'erased' END
      FROM recorded r WHERE d.id = r.id
    RETURNING 1)
SELECT FROM classified
""",  # noqa: S608 (constants only)
)

# Deletes expired idempotency keys, which are kept for a while for lookups.
DELETE_IDEMPOTENCY_KEYS = WriteStatement(
    "delete_idempotency_keys",
    f"""
DELETE FROM idempotency_key WHERE key = ANY(ARRAY(
    SELECT key FROM idempotency_key
     WHERE expires_at < clock_timestamp() - make_interval(secs => $1)
     LIMIT {STEP} FOR UPDATE SKIP LOCKED))
""",  # noqa: S608
)

# Deletes the delivery history of removed endpoints.
#   SKIP LOCKED: a relay may still be adding counts, and locks rows in another order; those are
#     deleted the next time.
DELETE_HISTORY = WriteStatement(
    "delete_history",
    f"""
DELETE FROM delivery_history WHERE ctid = ANY(ARRAY(
    SELECT h.ctid FROM endpoint e JOIN delivery_history h ON h.endpoint_id = e.id
     WHERE e.state = 'removed' LIMIT {STEP} FOR UPDATE OF h SKIP LOCKED))
""",  # noqa: S608
)

# Thins the marks of the odometer: one a minute of the last observed day, one in 30 minutes of two
# months, and one a day before.  Stored times between two marks count less, at most by that.  A mark
# after the clock was set back is kept: without it, earlier times would count more.
THIN_MARKS = WriteStatement(
    "thin_marks",
    """
DELETE FROM odometer_mark WHERE seconds = ANY (ARRAY(
    SELECT seconds
      FROM (SELECT m.seconds, m.at, lag(m.seconds) OVER earlier AS earlier_s,
                   lag(m.at) OVER earlier AS earlier_at,
                   CASE WHEN m.seconds > o.seconds - 86400 THEN 60
                        WHEN m.seconds > o.seconds - 60 * 86400 THEN 1800
                        ELSE 86400 END AS every_s
              FROM odometer o, odometer_mark m
            WINDOW earlier AS (ORDER BY m.seconds)) mark
     WHERE floor(seconds / every_s) = floor(earlier_s / every_s)
       AND at - earlier_at > make_interval(secs => seconds - earlier_s - 1)))
""",
)


class RetentionStore:
    """Retention, on the maintenance connection.

    Args:
        period_s: length of each period in seconds; by default
            `outbox.core.sequencing.partition_window` decides.
    """

    def __init__(
        self, connection: StoreConnection, keep: Retention, *, period_s: float | None = None
    ) -> None:
        self._db = connection
        self._keep = keep
        self._period_s = period_s
        self.proof = AbsenceProof(connection)
        # The next period, and the transactions that wrote when its partition was first seen.
        self._writers: tuple[int, LockHolders] | None = None

    async def advance_periods(self) -> list[PartitionWindow]:
        """Begin, settle and decide what is due; returns the periods to drop.

        Raises:
            CursorBroken: the table `period` was emptied.
        """
        dropped = []
        periods = [PartitionWindow(**dict(row)) for row in await self._db.fetch(READ_PERIODS)]
        kinds: tuple[WindowKind, ...] = ("events", "log")
        if not {period.kind for period in periods}.issuperset(kinds):
            await stop_empty(self._db, "period")
        for kind in kinds:
            found = due_windows(kind, periods, self._keep.retention_s(kind), self._length_s(kind))
            if found.ends is not None:
                await self._begin(found.ends)
            for period in found.unsettled:
                await self._settle(period)
            if found.oldest is not None and await self._drop(found.oldest):
                dropped.append(found.oldest)
        return dropped

    async def delete_expired(self) -> int:
        """Delete expired rows and leftovers of erasures; returns the number of rows.

        It also classifies the dead letters of older versions.

        Raises:
            CursorBroken: events may be hidden, so dead letters cannot be classified.
        """
        deleted_rows = await erase_leftovers(self._db, ERASED_WITHIN_S)
        for delete, keep_s in (
            (DELETE_DEAD_LETTERS, self._keep.dead_letters_s),
            (DELETE_IDEMPOTENCY_KEYS, self._keep.events_s),
        ):
            deleted = STEP
            while keep_s is not None and deleted == STEP:
                deleted = await self._db.write(delete, keep_s)
                deleted_rows += deleted
        deleted = STEP
        while deleted == STEP:
            deleted = await self._db.write(DELETE_HISTORY)
            deleted_rows += deleted
        await self._db.write(DELETE_FEED_STEPS)
        await self._db.write(THIN_MARKS)
        await self._classify()
        return deleted_rows

    async def _classify(self) -> None:
        last_id = 0
        while rows := await self._db.fetch(READ_UNCLASSIFIED, last_id):
            last_id = rows[-1]["id"]
            proof = await self.proof.prove(ALL_IDS, (CLASSIFY_ERASED, [row["id"] for row in rows]))
            await self.proof.write(ALL_IDS, *proof, was_read=False)

    def _length_s(self, kind: WindowKind) -> float:
        if self._period_s is not None:
            return self._period_s
        return window_length_s(self._keep.retention_s(kind))

    # ----------------------------------------------------------------- begin

    async def _begin(self, period: PartitionWindow) -> None:
        written = EVENTS_WRITTEN if period.kind == "events" else LOG_WRITTEN
        if not await self._db.fetchval(written, period.first):
            return
        if period.kind == "events" and not await self._known_to_all(period.number + 1):
            return
        calls: list[WriteCall] = [(HOLD_CURSOR,), (END_PERIOD, period.kind, period.number)]
        if period.kind == "log":
            calls += [(END_LEADERSHIP,), (NOTIFY_ALL,)]
        await self._db.write_unless_aborted(*calls)

    async def _known_to_all(self, number: int) -> bool:
        """Whether every transaction that writes to the outbox sees that period's partition."""
        if not await self._db.fetchval(HAS_PARTITION, number):
            return False
        now = frozenset(r["virtualtransaction"] for r in await self._db.fetch(READ_WRITERS))
        if self._writers is None or self._writers[0] != number:
            self._writers = (number, now)
        left = self._writers[1] & now
        self._writers = (number, left)
        return not left

    # ---------------------------------------------------------------- settle

    async def _settle(self, period: PartitionWindow) -> None:
        # The function reads what is left of the period: the rest above the cursor's position.
        rest = [(period.first, period.end - 1)]
        proof = await self.proof.prove(rest, (SETTLE_PERIOD, period.number))
        await self.proof.write(rest, (HOLD_CURSOR,), *proof, was_read=False)

    # ---------------------------------------------------------------- decide

    async def _drop(self, period: PartitionWindow) -> bool:
        last_batch = period.last_batch if period.kind == "events" else period.end - 1
        retention_s = self._keep.retention_s(period.kind)
        if not await self._db.fetchval(IS_OBSERVED, period.kind, period.number, retention_s):
            return False
        keep_s = self._keep.dead_letters_s
        # Expensive checks run before the lock is taken.  They remain valid: pending deliveries
        # and replays in old batches only decrease, unless a replay advances meanwhile.
        progress = await self._db.fetchval(READ_REPLAY_PROGRESS)
        if await self._db.fetchval(HAS_PENDING_LANES, last_batch):
            return False
        events = period.kind == "events"
        if events and await self._db.fetchval(PINNED_BY_REPLAYS, keep_s, period.first, period.end):
            return False
        if not events:
            # The dead ids of its batches are counted before they are dropped.
            await self._db.write(ACCOUNT_BATCHES, BATCHES_PER_STEP)
        calls: list[WriteCall] = [(HOLD_CURSOR,), (REQUIRE_NO_RANGES, keep_s, last_batch)]
        calls.append((REQUIRE_NO_FEEDS, last_batch, keep_s))
        if events:
            calls += [(REQUIRE_REPLAY_PROGRESS, progress), (REQUIRE_NO_JOBS, period.end)]
        calls.append((DROP_PERIOD, period.kind, period.number, ACTOR, keep_s))
        return bool(await self._db.write_unless_aborted(*calls))
