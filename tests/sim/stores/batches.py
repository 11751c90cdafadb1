"""The cursor row, events, gaps and batches, as the sequencer reads and writes them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import asyncpg

from outbox.core.sequencing.gaps import CursorState
from outbox.core.sequencing.router import RoutableEvent
from outbox.store.absence_proof import AbsenceProof
from outbox.store.cluster.leadership import LeaderStatus
from outbox.store.cluster.timeline import CursorRow
from outbox.store.sequencing import batches as real
from outbox.store.sequencing.event_reads import CONTENT_EVENTS_MAX, Reading
from outbox.store.sql.message import is_aborted
from tests.sim.database.engine import EXCLUSIVE, UPDATE, Wait, abort_unless
from tests.sim.database.tables import AWAKE, Batch, Given
from tests.sim.stores import timeline
from tests.sim.stores.channels import OWNERS
from tests.sim.stores.feeds import FeedStore, write_feeds
from tests.sim.stores.filters import FilterStore, stop_filters
from tests.sim.stores.lanes import content_of, read_counters
from tests.sim.stores.replay_feed import ReplayFeedStore
from tests.sim.stores.replay_progress import write_progress
from tests.sim.stores.replicas import fence
from tests.sim.stores.routing import RoutingStore
from tests.sim.stores.stalls import StallStore

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from datetime import datetime

    from outbox.core.sequencing.feeds import FedPart
    from outbox.core.sequencing.filter_budget import FilterFailure
    from outbox.core.sequencing.gaps import CursorChange, LockHolders, Range
    from outbox.core.sequencing.router import Deliveries, TenantFilter
    from outbox.store.replays.replay_progress import ReplayBatch
    from tests.sim.database.connection import Connection
    from tests.sim.database.engine import Steps, Transaction
    from tests.sim.database.tables import Database


class SequencingStore(real.SequencingStore):
    """Stands in for `outbox.store.sequencing.batches.SequencingStore`."""

    routing: RoutingStore
    replay_feed: ReplayFeedStore
    feeds: FeedStore
    filters: FilterStore
    stalls: StallStore

    def __init__(self, connection: Any, server_fence: int | None = None) -> None:
        assert server_fence is None
        self._db: Connection = connection  # type: ignore[assignment]
        self.routing = RoutingStore(connection)
        self.replay_feed = ReplayFeedStore(connection)
        self.feeds = FeedStore(connection)
        self.filters = FilterStore(connection)
        self.stalls = StallStore(connection)
        self.proof = AbsenceProof(connection)

    async def check(self) -> None:
        await self._db.call(check_sequence)

    async def cursor_row(self) -> CursorRow:
        return await self._db.call(read_cursor)

    async def take_leadership(self, replica_id: int) -> bool:
        return await self._db.call(take_leadership, replica_id)

    async def release_leadership(self, replica_id: int) -> bool:
        return await self._db.call(release_leadership, replica_id)

    async def fall_asleep(self, replica_id: int, for_s: int) -> bool:
        return await self._db.call(fall_asleep, replica_id, for_s)

    async def state(self) -> CursorState:
        state = await self._db.call(read_state)
        return replace(state, old=await self._db.call(read_old_gaps))

    async def holders(self) -> LockHolders:
        return await self._db.call(read_holders)

    async def read(
        self,
        high: int | None,
        gaps: Sequence[Range],
        limit: int,
        *,
        with_holders: bool,
        with_content: bool = False,
    ) -> Reading:
        return await self._db.call(
            read_events, high, gaps, limit, with_holders=with_holders, with_content=with_content
        )

    async def running(self) -> LockHolders:
        return await self._db.call(read_running)

    async def counters(self, lane_ids: Collection[int]) -> dict[int, int]:
        return await self._db.call(read_counters, set(lane_ids))

    async def leader_status(self, me: int) -> LeaderStatus:
        return await self._db.call(read_leader_status, me)

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
        step_of = write_replays if replays.has_changes else write_fed if fed else write_batch
        try:
            return await self._db.call(
                step_of,
                batch,
                step,
                deliveries,
                writer,
                version,
                events=events,
                committed_after=committed_after,
                awake=awake,
                erasures=erasures,
                notification=notification,
                replays=replays,
                fed=fed,
                stopped=stopped,
            )
        except asyncpg.PostgresError as error:
            if not is_aborted(error):
                raise
            return False

    async def begin_timeline(self, replica_id: int, row: CursorRow, actor: str) -> None:
        if not row.begins_history:
            await self._db.call(timeline.set_first_history, replica_id, row)
        else:
            await self._db.call(timeline.change_history, replica_id, row, actor)


# --------------------------------------------------------------- the cursor row


def check_sequence(db: Database, tx: Transaction) -> None:
    """The sequence of outbox.id has the options that the cursor requires."""


def read_cursor(db: Database, tx: Transaction) -> CursorRow:
    row = tx.get(db.cursor, 1)
    assert row is not None
    known, server = timeline.history_of_cursor(db, tx), timeline.history_of_server(db)
    incarnation = timeline.incarnation_holds(db, tx)
    batch = db.batches[-1].batch
    return CursorRow(row["writer"], row["version"], known, server, batch, incarnation)


def clear_leader(db: Database, tx: Transaction) -> Steps[None]:
    yield Wait(db.cursor, 1, EXCLUSIVE)
    tx.change(db.cursor, 1, writer=None)


def take_leadership(db: Database, tx: Transaction, me: int) -> Steps[bool]:
    if not (yield from fence(db, tx, me)) or not tx.try_lock(db.cursor, 1, EXCLUSIVE):
        return False
    tx.change(db.cursor, 1, writer=me)
    return True


def _try_lock_as_leader(db: Database, tx: Transaction, me: int) -> bool:
    """Lock the cursor row if this replica leads, also after waiting for nothing."""
    row = tx.get(db.cursor, 1)
    assert row is not None
    if row["writer"] != me or not tx.try_lock(db.cursor, 1, EXCLUSIVE):
        return False
    row = tx.get(db.cursor, 1)
    return row is not None and row["writer"] == me


def release_leadership(db: Database, tx: Transaction, me: int) -> bool:
    if not _try_lock_as_leader(db, tx, me):
        return False
    db.wakeup = AWAKE
    tx.change(db.cursor, 1, writer=None)
    return True


def fall_asleep(db: Database, tx: Transaction, me: int, for_s: int) -> bool:
    if not _try_lock_as_leader(db, tx, me):
        return False
    db.wakeup = int(db.wall()) + for_s
    return True


def read_state(db: Database, tx: Transaction) -> CursorState:
    newest = db.batches[-1]
    return CursorState(newest.batch, newest.high, newest.young)


def read_old_gaps(db: Database, tx: Transaction) -> tuple[Range, ...]:
    return tuple((row["lo"], row["hi"]) for row in tx.rows(db.gap))


def read_leader_status(db: Database, tx: Transaction, me: int) -> LeaderStatus:
    row = tx.get(db.cursor, 1)
    assert row is not None
    leader, newest = row["writer"], db.batches[-1]
    alive = tx.get(db.replica, leader) if leader is not None else None
    free = leader is None or leader == me or alive is None or alive["expires_at"] <= db.wall()
    behind = bool(db.outbox_ids) and db.outbox_ids[-1] > newest.high
    behind = behind or any(_ids_between(db, lo, hi) for lo, hi in newest.young)
    return LeaderStatus(leader, newest.batch, free, behind)


# ---------------------------------------------------------------------- reading


def _ids_between(db: Database, lo: int, hi: int) -> list[int]:
    return db.outbox_ids[bisect_left(db.outbox_ids, lo) : bisect_right(db.outbox_ids, hi)]


def read_holders(db: Database, tx: Transaction) -> LockHolders:
    return frozenset(db.holders)


def read_running(db: Database, tx: Transaction) -> LockHolders:
    return frozenset(db.running)


def read_events(
    db: Database,
    tx: Transaction,
    high: int | None,
    gaps: Sequence[Range],
    limit: int,
    *,
    with_holders: bool,
    with_content: bool,
) -> Steps[Reading]:
    began_at = db.clock_timestamp()
    # The snapshot: the events and the cursor row.
    ids: list[int] = []
    for lo, hi in gaps:
        ids += _ids_between(db, lo, hi)[:limit]
    if high is not None:
        start = bisect_right(db.outbox_ids, high)
        ids += db.outbox_ids[start : start + limit]
    ids = sorted(ids)[:limit]
    events = [db.outbox[i] for i in ids]
    contents = {
        event.id: content_of(event)
        for event in events
        if with_content and high is not None and high < event.id <= high + CONTENT_EVENTS_MAX
    }
    row = tx.get(db.cursor, 1)
    assert row is not None
    if db.rng.random() < 0.3:
        yield db.pause_s()
    # No snapshot covers sequences and locks.
    missing = with_holders
    if high is not None:
        newer = [i for i in ids if i > high]
        missing = missing or (bool(newer) and len(newer) < newer[-1] - high)
    return Reading(
        [RoutableEvent(event.id, None, event.type, event.key_hash) for event in events],
        db.last_id,
        db.wakeup,
        0,
        frozenset(db.holders) if missing else None,
        row["writer"],
        row["version"],
        row["erasures"],
        None,
        began_at,
        contents,
    )


# ---------------------------------------------------------------------- batches


def write_batch(
    db: Database,
    tx: Transaction,
    batch: int,
    step: CursorChange,
    deliveries: Deliveries,
    writer: int,
    version: int,
    *,
    events: int,
    committed_after: datetime | None,
    awake: bool,
    erasures: int | None,
    notification: str | None,
    replays: ReplayBatch,
    fed: Sequence[FedPart],
    stopped: Mapping[TenantFilter, FilterFailure],
) -> Steps[bool]:
    def unchanged() -> bool:
        row = tx.get(db.cursor, 1)
        assert row is not None
        fence = (row["writer"], row["version"]) == (writer, version)
        return fence and erasures in (None, row["erasures"])

    # The snapshot of the statement; the row is checked again after it was locked.
    if not unchanged():
        return False
    others = any(r["id"] != writer for r in tx.rows(db.replica))
    if not tx.try_lock(db.cursor, 1, EXCLUSIVE) or not unchanged():
        return False
    if not _has_batch(db, batch - 1):
        return False
    tx.wrote()
    if db.rng.random() < 0.2:
        yield db.pause_s()
    if _has_batch(db, batch):
        raise asyncpg.UniqueViolationError(f"batch {batch} exists")
    new = Batch(
        batch,
        step.high,
        step.young if step.young_changed else db.batches[-1].young,
        step.found,
        step.dead,
        tuple(deliveries.counters),
        writer,
        db.clock_timestamp(),
        committed_after,
        events,
    )
    tx.append(lambda: db.batches.append(new))
    for lane_id, last_seq in deliveries.counters.items():
        yield Wait(db.lane_counter, lane_id, UPDATE)
        tx.change(db.lane_counter, lane_id, last_seq=last_seq)
    given = _given(batch, deliveries)

    def deliver() -> None:
        for lane_id, each in given:
            db.deliveries.setdefault(lane_id, []).append(each)

    tx.append(deliver)
    tx.notes.append(("batch", (new, given)))
    if awake:
        db.wakeup = AWAKE
    if given and others and notification is not None:
        tx.notify(OWNERS, notification)
    for lo, _ in step.old_closed:
        tx.put(db.gap, lo, None)
    for lo, hi in step.old_opened:
        tx.put(db.gap, lo, {"lo": lo, "hi": hi})
    yield from write_progress(db, tx, batch, replays, f"replica {writer}")
    yield from write_feeds(db, tx, batch, fed, f"replica {writer}")
    stop_filters(db, tx, stopped)
    # The second read of the proof; its conditions hold, because nothing hides rows here.
    if any(_ids_between(db, lo, hi) for lo, hi in step.dead):
        db.proof_aborts += 1
        abort_unless(False)
    return True


def write_replays(db: Database, tx: Transaction, *batch: Any, **options: Any) -> Steps[bool]:
    """Write a batch with replays; a run finds these batches by the name of this step."""
    return (yield from write_batch(db, tx, *batch, **options))


def write_fed(db: Database, tx: Transaction, *batch: Any, **options: Any) -> Steps[bool]:
    """Write a batch with feeds; a run finds these batches by the name of this step."""
    return (yield from write_batch(db, tx, *batch, **options))


def _has_batch(db: Database, batch: int) -> bool:
    n = bisect_left(db.batches, batch, key=lambda b: b.batch)
    return n < len(db.batches) and db.batches[n].batch == batch


def _given(batch: int, deliveries: Deliveries) -> list[tuple[int, Given]]:
    """The rows of delivery, each with its lane."""
    columns = (
        deliveries.lane_ids,
        deliveries.seqs,
        deliveries.outbox_ids,
    )
    repeats = deliveries.repeats
    origins: list[Any] = [(*(None,) * 4, feed_id) for feed_id in deliveries.feed_ids]
    origins += [(None,) * 5] * (len(deliveries) - len(repeats) - len(origins))
    origins += [(each.id, each.seq, each.backfill_id, each.copy_id, None) for each in repeats]
    rows: Any = zip(*columns, origins, strict=True)
    return [(lane_id, Given(batch, *rest, *also)) for lane_id, *rest, also in rows]
