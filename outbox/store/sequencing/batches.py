"""SQL of the sequencer: the cursor row, the gaps, and the message that writes a batch.

All of it runs on one connection as separate statements: each needs a snapshot of its own,
and their order is the argument of `outbox.core.sequencing.gaps`.  What is read is not locked;
the message that writes a batch checks that nothing has changed since.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import structlog
from asyncpg import PostgresError

from outbox.core.sequencing.gaps import CursorChange, CursorState, LockHolders, Range
from outbox.errors import CursorBroken
from outbox.store.absence_proof import AbsenceProof, multirange, ranges_of
from outbox.store.channels import WAKE_OWNERS
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
    READ_NEXT,
    READ_RUNNING,
    parse_reading,
)
from outbox.store.sequencing.feeds import FeedStore, write_feeds
from outbox.store.sequencing.filters import FilterStore, stop_filters
from outbox.store.sequencing.routing import RoutingStore
from outbox.store.sequencing.stalls import StallStore
from outbox.store.sql.expressions import CURRENT_XID, SERVER_FENCE, proves_itself
from outbox.store.sql.message import WriteStatement
from outbox.store.sql.row_params import number_rows

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from datetime import datetime

    from outbox.core.sequencing.feeds import FedPart
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
#   advanced: the lanes with deliveries; MATERIALIZED: $7 is parsed once.
#   row: the batch itself.
#   counted: the lane counters, if they are those that were read, and prove themselves.
#   refused: raises an error for a counter that was not advanced, with the reason.
#   delivered: the deliveries.
# $3: the young gaps, or NULL if they are those of the batch before; the ids found; the dead ones.
# $12: the number of erasures, if the content of events was read with them, which lanes may send.
WRITE_BATCH = WriteStatement(
    "write_batch",
    f"""
WITH locked AS MATERIALIZED (
    SELECT previous.young FROM cursor, batch AS previous
     WHERE cursor.writer = $9 AND version = $10 AND ($11::bigint IS NULL OR {SERVER_FENCE} = $11)
       AND ($12::bigint IS NULL OR erasures = $12)
       AND previous.batch = $1::bigint - 1
       FOR UPDATE OF cursor SKIP LOCKED),
advanced AS MATERIALIZED (
    SELECT * FROM unnest($7::counter_row[])),
row AS (
    INSERT INTO batch (batch, high, young, found, dead, events, deliveries, lanes, writer,
                       committed_after)
    SELECT $1, $2, coalesce(ids[1], locked.young), ids[2], ids[3], $4, $5,
           array(SELECT lane_id FROM advanced), $9, $6
      FROM locked, (SELECT $3::int8multirange[] AS ids) AS gaps),
counted AS (
    UPDATE lane_counter c SET last_seq = a.last_seq, by_xid = {CURRENT_XID}
      FROM locked, advanced a
     WHERE c.lane_id = a.lane_id AND c.last_seq = a.old_seq AND {proves_itself("c")}
    RETURNING c.lane_id),
refused AS MATERIALIZED (
    SELECT advance_lane_counter(lane_id, old_seq, last_seq) FROM locked, advanced
     WHERE lane_id NOT IN (SELECT lane_id FROM counted)),
delivered AS (
    INSERT INTO delivery_run (lane_id, batch, seq, outbox_id, offsets, replay_id, replay_seq,
                              backfill_id, copy_id, feed_id)
    SELECT d.lane_id, $1, d.seq, d.outbox_id, d.offsets, d.replay_id, d.replay_seq, d.backfill_id,
           d.copy_id, d.feed_id
      FROM locked, unnest($8::delivery_run_row[]) AS d)
SELECT FROM locked WHERE (SELECT count(*) FROM refused) >= 0
""",  # noqa: S608 (constants only)
)

# Both after the batch, in its message.
SET_AWAKE = WriteStatement("set_awake", f"SELECT setval('wakeup', {AWAKE})")
NOTIFY_OWNERS = WriteStatement("notify_owners", WAKE_OWNERS)

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
        self.feeds = FeedStore(connection)
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
            young=ranges_of(row["young"]),
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
        if with_content and high is not None and not (gaps or with_holders):
            reading = await self._read_next(high, limit)
            if not reading.is_incomplete(high):
                return reading
        return await self._read(
            READ_CONTENT_AND_STATE if with_content else READ_EVENTS_AND_STATE,
            (high, limit, *_bounds(gaps), self.proof.sequence, with_holders),
            with_content=with_content,
        )

    async def _read_next(self, high: int, limit: int) -> Reading:
        return await self._read(READ_NEXT, (high, limit, self.proof.sequence), with_content=True)

    async def _read(
        self, statement: str, arguments: Sequence[object], *, with_content: bool
    ) -> Reading:
        reading = parse_reading(
            await self._db.fetch(statement, *arguments), with_content=with_content
        )
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
        fed: Sequence[FedPart],
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
            fed: the progress of feeds.
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
        young = multirange(step.young) if step.young_changed else None
        call: WriteCall = (
            WRITE_BATCH, batch, step.high, [young, multirange(step.found), multirange(step.dead)],
            events, len(deliveries), committed_after, advanced, delivery_runs(deliveries),
            writer, version, self._fence, erasures,
        )  # fmt: skip
        actor = f"replica {writer}"
        further = write_progress(batch, replays, actor)
        if fed:
            further += write_feeds(batch, fed, actor)
        if step.old_closed or step.old_opened:
            further.append((CLOSE_OLD_GAPS, _bounds(step.old_closed)[0]))
            further.append((OPEN_OLD_GAPS, *_bounds(step.old_opened)))
        if stopped:
            further.append(stop_filters(batch, stopped, actor))
        if awake:
            further.append((SET_AWAKE,))
        if notification is not None and deliveries:
            further.append((NOTIFY_OWNERS, notification))
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


def _bounds(ranges: Sequence[Range]) -> tuple[list[int], list[int]]:
    return [lo for lo, _ in ranges], [hi for _, hi in ranges]
