"""SQL of the sequencer: the cursor row, the gaps, and the message that writes a batch.

All of it runs on one connection as separate statements: each needs a snapshot of its own,
and their order is the argument of `outbox.core.sequencing.gaps`.  What is read is not locked;
the message that writes a batch checks that nothing has changed since.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import orjson
import structlog
from asyncpg import PostgresError

from outbox.core.sequencing.gaps import CursorChange, CursorState, LockHolders, Range
from outbox.errors import CursorBroken
from outbox.store.absence_proof import AbsenceProof, multirange
from outbox.store.channels import OWNERS_SUFFIX, QUEUE_HAS_ROOM
from outbox.store.cluster import timeline
from outbox.store.cluster.leadership import (
    AWAKE,
    FALL_ASLEEP,
    READ_LEADER_STATUS,
    RELEASE_LEADERSHIP,
    REQUIRE_LEADER,
    TAKE_LEADERSHIP,
    LeaderStatus,
)
from outbox.store.cluster.timeline import COUNTER_RESTORED, CursorRow, History
from outbox.store.connection.row_security import rows_hidden, stop_empty, stop_hidden
from outbox.store.delivery.lanes import READ_COUNTERS
from outbox.store.errors import Fenced
from outbox.store.replays.replay_feed import ReplayFeedStore
from outbox.store.replays.replay_progress import write_progress
from outbox.store.sequencing.delivery_runs import delivery_runs
from outbox.store.sequencing.event_reads import (
    READ_CONTENT_AND_STATE,
    READ_EVENTS_AND_STATE,
    READ_LOCK_HOLDERS,
    READ_RUNNING,
    parse_reading,
)
from outbox.store.sequencing.filters import FilterStore, stop_filters
from outbox.store.sequencing.routing import RoutingStore
from outbox.store.sequencing.stalls import StallStore
from outbox.store.sql.expressions import SERVER_FENCE
from outbox.store.sql.message import WriteStatement
from outbox.store.sql.row_params import number_rows

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from datetime import datetime

    from outbox.core.sequencing.filter_budget import FilterFailure
    from outbox.core.sequencing.router import Deliveries, TenantFilter
    from outbox.store.connection.store_connection import StoreConnection
    from outbox.store.replays.replay_progress import ReplayBatch
    from outbox.store.sequencing.event_reads import Reading
    from outbox.store.sql.message import WriteCall

log = structlog.get_logger("outbox.sequencer")

# The newest batch is the cursor's position.
READ_STATE = f"""
SELECT batch, high, young, {rows_hidden("batch")} AS hidden FROM batch ORDER BY batch DESC LIMIT 1
"""  # noqa: S608 (constants only)

# A row without values if row security may have hidden some.
READ_OLD_GAPS = f"""
SELECT lo, hi FROM gap UNION ALL SELECT NULL, NULL WHERE {rows_hidden("gap")}
"""  # noqa: S608 (constants only)

# Writes a whole batch: its row, its deliveries and the lane counters.  Optimistic concurrency:
# it is written only while this replica leads, no routing change was made, and the server is
# the one from which everything was read (a proxy may have switched to a server that does not
# have the last batch).  One row, or none if nothing was written.
#   locked: the cursor row, if all of that holds; FOR UPDATE until the batch commits.
#     SKIP LOCKED: a routing change that holds the row raises the version anyway.  And the young
#     gaps of the batch before: mostly they stay until the proof, and a copy costs hardly anything.
#   advanced: the lanes with deliveries; MATERIALIZED: $3 is parsed once.
#   row: the batch itself.
#   counted: the lane counters.  MATERIALIZED, because the function has side effects
#     and must be evaluated exactly once per lane.
#   delivered: the deliveries.
#   awake: sets the wake-up flag, if $9.
#   notified: NOTIFY to other replicas at commit, if there are any and lanes have deliveries.
# $8: the number of erasures, if the content of events was read with them, which lanes may send.
WRITE_BATCH = WriteStatement(
    "write_batch",
    f"""
WITH locked AS MATERIALIZED (
    SELECT previous.young FROM cursor, batch AS previous
     WHERE cursor.writer = $5 AND version = $6 AND ($7::bigint IS NULL OR {SERVER_FENCE} = $7)
       AND ($8::bigint IS NULL OR erasures = $8)
       AND previous.batch = $1::bigint - 1
       FOR UPDATE OF cursor SKIP LOCKED),
advanced AS MATERIALIZED (
    SELECT * FROM unnest($3::counter_row[])),
row AS (
    INSERT INTO batch (batch, high, young, found, dead, events, deliveries, lanes, writer,
                       committed_after)
    SELECT $1, r.high, coalesce(r.young, locked.young), coalesce(r.found, '{{}}'),
           coalesce(r.dead, '{{}}'), r.events, r.deliveries,
           array(SELECT lane_id FROM advanced), $5, r.committed_after
      FROM locked, json_to_record($2::json)
           AS r(high bigint, young int8multirange, found int8multirange, dead int8multirange,
                events integer, deliveries integer, committed_after timestamptz)),
counted AS MATERIALIZED (
    SELECT advance_lane_counter(lane_id, old_seq, last_seq) FROM locked, advanced),
delivered AS (
    INSERT INTO delivery_run (lane_id, batch, seq, outbox_id, offsets, replay_id, replay_seq,
                              backfill_id, copy_id)
    SELECT d.lane_id, $1, d.seq, d.outbox_id, d.offsets, d.replay_id, d.replay_seq, d.backfill_id,
           d.copy_id
      FROM locked, unnest($4::delivery_run_row[]) AS d),
awake AS MATERIALIZED (SELECT setval('wakeup', {AWAKE}) FROM locked WHERE $9),
notified AS MATERIALIZED (
    SELECT pg_notify(current_schema() || '{OWNERS_SUFFIX}', $10) FROM locked
     WHERE $10::text IS NOT NULL AND EXISTS (SELECT FROM advanced)
       AND EXISTS (SELECT FROM replica WHERE id <> $5) AND {QUEUE_HAS_ROOM})
SELECT FROM locked
 WHERE (SELECT count(*) FROM awake) + (SELECT count(*) FROM notified)
           + (SELECT count(*) FROM counted) >= 0
""",  # noqa: S608 (constants only)
)

# Aborts the message of a batch that was not written, before its other statements.
REQUIRE_BATCH = WriteStatement(
    "require_batch",
    "SELECT abort_unless(EXISTS (SELECT FROM batch WHERE batch = $1 AND writer = $2))",
)

CLOSE_OLD_GAPS = WriteStatement("close_old_gaps", "DELETE FROM gap WHERE lo = ANY ($1::bigint[])")
OPEN_OLD_GAPS = WriteStatement(
    "open_old_gaps",
    "INSERT INTO gap (lo, hi) SELECT * FROM unnest($1::bigint[], $2::bigint[])",
)


class SequencingStore:
    """The sequencer's database operations, on one connection.

    Not safe for concurrent use; asyncpg's errors propagate.

    Args:
        server_fence: `server_fence()` when this replica registered; None: not known.

    Raises:
        Fenced: (from `cursor_row` and `read`) this replica is not registered on this timeline and
            in this state.
    """

    def __init__(self, connection: StoreConnection, server_fence: int | None = None) -> None:
        self._db = connection
        self._fence = server_fence
        self.proof = AbsenceProof(connection)
        self.routing = RoutingStore(connection)
        self.replay_feed = ReplayFeedStore(connection, server_fence)
        self.filters = FilterStore(connection)
        self.stalls = StallStore(connection, server_fence)

    async def check(self) -> None:
        """Check the conditions under which absent rows prove anything.

        Raises:
            CursorBroken: the sequence was altered, rows are hidden, or this server is a standby.
        """
        await self.proof.check()

    async def cursor_row(self) -> CursorRow:
        """Read the cursor row, without a lock."""
        row = await self._db.fetchrow(timeline.READ_CURSOR)
        if row is None:
            await stop_empty(self._db, "cursor")
        if row["batch"] is None:
            await stop_empty(self._db, "batch")
        return self._checked_row(row)

    async def take_leadership(self, replica_id: int) -> bool:
        """Take the leadership; returns False while another session holds the cursor row."""
        return bool(await self._db.write(TAKE_LEADERSHIP, replica_id, self._fence))

    async def release_leadership(self, replica_id: int) -> bool:
        """Let another replica lead at once.

        Returns False if this one does not lead, or another session holds the cursor row.
        """
        return bool(await self._db.write(RELEASE_LEADERSHIP, replica_id, self._fence))

    async def fall_asleep(self, replica_id: int, for_s: int) -> bool:
        """Announce that the leader may be asleep for the next seconds.

        Returns False if another replica leads, or another session holds the cursor row.
        """
        # It changes no row, so no crash can undo it: it need not wait for the disk.
        return bool(
            await self._db.write(FALL_ASLEEP, replica_id, for_s, self._fence, durable=False)
        )

    async def state(self) -> CursorState:
        """Read the cursor's position and its gaps."""
        row = await self._db.fetchrow(READ_STATE)
        if row is None:
            await stop_empty(self._db, "batch")
        old = await self._db.fetch(READ_OLD_GAPS)
        if row["hidden"] or any(r["lo"] is None for r in old):
            await stop_hidden(self._db)
        return CursorState(
            batch=row["batch"],
            high=row["high"],
            young=tuple((r.lower, r.upper - 1) for r in row["young"]),
            old=tuple((r["lo"], r["hi"]) for r in old),
        )

    async def holders(self) -> LockHolders:
        """The transactions that may still insert an id allocated by now."""
        rows = await self._db.fetch(READ_LOCK_HOLDERS, self.proof.sequence)
        return frozenset(r["virtualtransaction"] for r in rows)

    async def read(
        self,
        high: int | None,
        gaps: Sequence[Range],
        limit: int,
        *,
        with_holders: bool,
        with_content: bool = False,
    ) -> Reading:
        """Read committed events in the gaps and above `high`, by id, at most `limit`.

        Args:
            high: the highest sequenced id; None: read the gaps only.
            with_holders: whether to read the lock holders although no id above `high` is missing.
            with_content: whether to read the content of the first small events, too.
        """
        rows = await self._db.fetch(
            READ_CONTENT_AND_STATE if with_content else READ_EVENTS_AND_STATE,
            high,
            [lo for lo, _ in gaps],
            [hi for _, hi in gaps],
            limit,
            self.proof.sequence,
            with_holders,
        )
        reading = parse_reading(rows, with_content=with_content)
        if reading is None:
            await stop_empty(self._db, "cursor")
        self._check_fence(reading.server_fence)
        if reading.hidden:
            await stop_hidden(self._db)
        return reading

    async def running(self) -> LockHolders:
        """The transactions whose rows no earlier read can have seen."""
        rows = await self._db.fetch(READ_RUNNING)
        return frozenset(r["virtualtransaction"] for r in rows)

    async def counters(self, lane_ids: Collection[int]) -> dict[int, int]:
        """The last sequence number of each lane.

        Raises:
            CursorBroken: a lane has no counter.
        """
        rows = await self._db.fetch(READ_COUNTERS, list(lane_ids))
        counters = {r["lane_id"]: r["last_seq"] for r in rows}
        if missing := set(lane_ids) - counters.keys():
            raise CursorBroken(f"lane {min(missing)} has no row in lane_counter; see outbox verify")
        return counters

    async def leader_status(self, me: int) -> LeaderStatus:
        """The status of the leader, for replica `me`."""
        row = await self._db.fetchrow(READ_LEADER_STATUS, me)
        if row is None:
            await stop_empty(self._db, "cursor")
        if row["batch"] is None:
            await stop_empty(self._db, "batch")
        return LeaderStatus(row["leader"], row["batch"], row["free"], row["behind"])

    async def write(
        self,
        batch: int,
        step: CursorChange,
        events: int,
        deliveries: Deliveries,
        writer: int,
        version: int,
        *,
        committed_after: datetime | None,
        awake: bool,
        erasures: int | None,
        notification: str | None,
        replays: ReplayBatch,
        stopped: Mapping[TenantFilter, FilterFailure],
    ) -> bool:
        """Write one batch: its row, its deliveries, the lane counters, and all that comes with it.

        Args:
            writer: nothing is written unless this replica leads.
            version: nothing is written unless this is still the routing version.
            committed_after: lower bound of the commit time of the batch's events.
            awake: set the wake-up flag to "awake".
            erasures: nothing is written unless payloads were erased this often.
            notification: payload for other replicas, sent at commit if lanes have deliveries.
            replays: the progress of replay jobs.
            stopped: filters that count as matching from this batch on.

        Returns:
            Whether the batch was written.

        Raises:
            CursorBroken: rows that were not read may be hidden; nothing was written.
            Fenced: the counter of a lane was restored; nothing was written.
        """
        new = Counter(deliveries.lane_ids)
        advanced = number_rows(
            (lane_id, last_seq - new[lane_id], last_seq)
            for lane_id, last_seq in deliveries.counters.items()
        )
        row: dict[str, object] = {
            "high": step.high,
            "events": events,
            "deliveries": len(deliveries),
            "committed_after": committed_after,
        }
        if step.young_changed:
            row["young"] = multirange(step.young)
        if step.found:
            row["found"] = multirange(step.found)
        if step.dead:
            row["dead"] = multirange(step.dead)
        call = (
            WRITE_BATCH,
            batch,
            orjson.dumps(row).decode(),
            advanced,
            delivery_runs(deliveries),
            writer,
            version,
            self._fence,
            erasures,
            awake,
            notification,
        )
        actor = f"replica {writer}"
        further = write_progress(batch, replays, actor)
        if step.old_closed or step.old_opened:
            opened = [lo for lo, _ in step.old_opened], [hi for _, hi in step.old_opened]
            further.append((CLOSE_OLD_GAPS, [lo for lo, _ in step.old_closed]))
            further.append((OPEN_OLD_GAPS, *opened))
        if stopped:
            further.append(stop_filters(batch, stopped, actor))
        required: WriteCall = (REQUIRE_BATCH, batch, writer)
        try:
            if step.dead:
                proof = await self.proof.prove(step.dead)
                return bool(await self.proof.write(step.dead, call, required, *further, *proof))
            if further:
                # Also at the end, because the rows of the last statement are the result.
                further = [required, *further, required]
            return bool(await self._db.write_unless_aborted(call, *further))
        except PostgresError as error:
            if error.sqlstate != COUNTER_RESTORED:
                raise
        log.warning("the counter of a lane was restored, or changed by hand")
        leader = REQUIRE_LEADER, writer, version, self._fence
        await self._db.write_unless_aborted(leader, (timeline.WITHDRAW_INCARNATION,))
        raise Fenced

    async def begin_timeline(self, replica_id: int, row: CursorRow, actor: str) -> None:
        """Continue in the server's history, with new lanes if it is another one.

        Has no effect unless this replica leads and the cursor row is unchanged.

        Raises:
            CursorBroken: the state is restored, and not complete.
        """
        calls = timeline.begin_timeline(replica_id, row, actor)
        if not await self._db.write_unless_aborted(*calls) and row.begins_history:
            problem = await self._db.fetchval(timeline.RESTORE_PROBLEM)
            if problem is not None:
                raise CursorBroken(timeline.INCOMPLETE.format(problem))

    def _checked_row(self, row: Any) -> CursorRow:
        self._check_fence(row["server_fence"])
        return CursorRow(
            row["writer"],
            row["version"],
            History(row["timeline"], row["identity"]),
            History(row["server_timeline"], row["server_identity"]),
            row["batch"],
            row["incarnation"],
        )

    def _check_fence(self, server_fence: int | None) -> None:
        if self._fence is not None and server_fence != self._fence:
            raise Fenced
