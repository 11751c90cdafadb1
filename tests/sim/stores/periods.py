"""Periods that begin, settle and are dropped."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from outbox.core.sequencing import partition_window
from outbox.core.sequencing.partition_window import (
    PartitionWindow,
    Retention,
    due_windows,
    window_length_s,
)
from outbox.store.absence_proof import AbsenceProof
from outbox.store.retention import periods as retention
from outbox.store.retention.periods import ACTOR, OBSERVED_S_MIN
from tests.sim.database.engine import UPDATE, Wait, perform
from tests.sim.database.tables import KINDS, Batch
from tests.sim.stores import batches, channels, routing_change, timeline
from tests.sim.stores.feed_pins import delete_feed_steps, pinned_by_feeds

if TYPE_CHECKING:
    from outbox.core.sequencing.gaps import LockHolders
    from outbox.core.sequencing.partition_window import WindowKind
    from tests.sim.database.connection import Connection
    from tests.sim.database.engine import Row, Steps, Transaction
    from tests.sim.database.tables import Database

    ReplayProgress = tuple[int | None, int, int]


DAY_S = 86400


class RetentionStore(retention.RetentionStore):
    """Stands in for `outbox.store.retention.periods.RetentionStore`."""

    def __init__(self, connection: Any, keep: Retention, *, period_s: float | None = None) -> None:
        self._db: Connection = connection  # type: ignore[assignment]
        self._keep = keep
        self._period_s = period_s
        self.proof = AbsenceProof(connection)

    async def advance_periods(self) -> list[PartitionWindow]:
        dropped = []
        periods = await self._db.call(read_periods)
        for kind in KINDS:
            keep_s, period_s = self._keep.retention_s(kind), self._period_s
            found = due_windows(
                kind, periods, keep_s, window_length_s(keep_s) if period_s is None else period_s
            )
            if found.ends is not None:
                await self._begin(found.ends)
            for period in found.unsettled:
                await self._db.call(settle_held, period.number)
            if found.oldest is not None and await self._drop(found.oldest):
                dropped.append(found.oldest)
        return dropped

    async def delete_expired(self) -> int:
        await self._db.call(delete_none)
        for keep_s in (self._keep.dead_letters_s, self._keep.events_s):
            if keep_s is not None:
                await self._db.call(delete_none)
        await self._db.call(delete_feed_steps)
        await self._db.call(thin_marks)
        return 0

    async def _begin(self, period: PartitionWindow) -> None:
        db = self._db
        if not await db.call(was_written, period):
            return
        if period.kind == "events":
            # The partition of the next period must exist, and be known to every writer.
            await db.call(has_partition)
            await db.call(read_writers)
        await db.call(begin_next_period, period.kind, period.number)

    async def _drop(self, period: PartitionWindow) -> bool:
        db, keep_s, events = self._db, self._keep.dead_letters_s, period.kind == "events"
        last_batch = period.last_batch if events else period.end - 1
        assert last_batch is not None
        if not await db.call(is_observed, period.kind, period.number, self._keep):
            return False
        progress = await db.call(read_replay_progress)
        if await db.call(has_pending_lanes, last_batch):
            return False
        if events and await db.call(pinned_by_replays, keep_s, period):
            return False
        return await db.call(decide_drop, period, keep_s, last_batch, progress)


def delete_none(db: Database, tx: Transaction) -> None:
    """The simulation keeps all dead letters and has no idempotency keys."""


def thin_marks(db: Database, tx: Transaction) -> None:
    """Thin the marks of the odometer, but for those after the clock was set back."""
    meter = tx.get(db.odometer, 1)
    assert meter is not None
    marks = sorted(tx.rows(db.odometer_mark), key=itemgetter("seconds"))
    for earlier, mark in pairwise(marks):
        ago_s, passed_s = meter["seconds"] - mark["seconds"], mark["seconds"] - earlier["seconds"]
        every_s = 60 if ago_s < DAY_S else 1800 if ago_s < 60 * DAY_S else DAY_S
        is_same = mark["seconds"] // every_s == earlier["seconds"] // every_s
        if is_same and mark["at"] - earlier["at"] > passed_s - 1:
            tx.put(db.odometer_mark, mark["seconds"], None)


# -------------------------------------------------------------- begin and settle


def read_periods(db: Database, tx: Transaction) -> list[PartitionWindow]:
    now = db.wall()
    return [
        PartitionWindow(
            row["kind"],
            row["number"],
            now - row["began_at"],
            None if row["ended_at"] is None else now - row["ended_at"],
            row["last_batch"],
        )
        for row in tx.rows(db.period)
        if not row["dropped"]
    ]


def was_written(db: Database, tx: Transaction, period: PartitionWindow) -> bool:
    """Whether a period has rows besides the batch that begins it."""
    if period.kind == "events":
        return bool(db.outbox_ids) and db.outbox_ids[-1] >= period.first
    return db.batches[-1].batch > period.first


def has_partition(db: Database, tx: Transaction) -> bool:
    return True


def read_writers(db: Database, tx: Transaction) -> LockHolders:
    return frozenset()


def end_period(db: Database, tx: Transaction, kind: WindowKind, number: int) -> bool:
    """End the newest period; returns False if another session has ended it."""
    row = tx.get(db.period, (kind, number))
    if row is None or row["ended_at"] is not None:
        return False
    tx.change(db.period, (kind, number), ended_at=db.wall())
    tx.put(db.period, (kind, number + 1), db.new_period(kind, number + 1))
    begins_at = (number + 1) * partition_window.WIDTH
    if kind == "log":
        newest = db.batches[-1]
        batch = Batch(begins_at, newest.high, newest.young, (), (), (), None, db.clock_timestamp())
        tx.append(lambda: db.batches.append(batch))
    # A sequence: no rollback undoes it, and its lock is held to the end.
    elif db.last_id < begins_at - 1:
        db.last_id = begins_at - 1
        db.holders[tx.vxid] = None
    return True


def begin_next_period(db: Database, tx: Transaction, kind: WindowKind, number: int) -> Steps[None]:
    """The statements of one message."""
    yield from perform(routing_change.lock_cursor(db, tx))
    yield db.pause_s()
    if end_period(db, tx, kind, number) and kind == "log":
        yield from perform(batches.clear_leader(db, tx))
        channels.notify_all(db, tx)


def settle_held(db: Database, tx: Transaction, number: int) -> Steps[None]:
    yield from perform(routing_change.lock_cursor(db, tx))
    settle_period(db, tx, number)


def settle_period(db: Database, tx: Transaction, number: int) -> bool:
    """Settle a period if all its events are sequenced, now and later; returns whether it did."""
    first, end = number * partition_window.WIDTH, (number + 1) * partition_window.WIDTH
    newest = db.batches[-1]
    if db.last_id < end - 1 or any(lo < end and hi >= first for lo, hi in db.open_gaps(tx)):
        return False
    above = bisect_left(db.outbox_ids, newest.high + 1) < bisect_left(db.outbox_ids, end)
    if newest.high < end - 1 and (db.holders or above):
        return False
    return mark_settled(db, tx, number)


def mark_settled(db: Database, tx: Transaction, number: int) -> bool:
    """Write that the newest batch is the last one that can have events of the period."""
    tx.change(db.period, ("events", number), last_batch=db.batches[-1].batch)
    return True


# ------------------------------------------------------------------------- drop


def is_observed(db: Database, tx: Transaction, kind: WindowKind, n: int, keep: Retention) -> bool:
    """Whether a period ended so many observed seconds ago."""
    row, keep_s = tx.get(db.period, (kind, n)), keep.retention_s(kind)
    assert row is not None
    assert keep_s is not None
    return _is_observed(db, tx, row["ended_at"], keep_s)


def is_kept(db: Database, tx: Transaction, at: float, keep_s: float) -> bool:
    """Whether what has this time is kept."""
    if at > db.wall() - keep_s:
        return True
    return not _is_observed(db, tx, at, keep_s)


def _is_observed(db: Database, tx: Transaction, at: float, keep_s: float) -> bool:
    """Whether what has this time was observed for long enough since the last restore."""
    meter, limit_s = tx.get(db.odometer, 1), min(keep_s, OBSERVED_S_MIN)
    assert meter is not None
    if meter["seconds"] - meter["began_s"] < limit_s or timeline.history_changed(db, tx):
        return False
    return db.observed_time(tx).since(at) >= limit_s


def has_pending_lanes(db: Database, tx: Transaction, last_batch: int) -> bool:
    """Whether a lane may have a pending delivery of a batch up to this one."""
    for p in tx.rows(db.lane_progress):
        c = tx.get(db.lane_counter, p["lane_id"])
        assert c is not None
        if c["last_seq"] > p["acked_seq"] and p["floor_batch"] <= last_batch:
            return True
    return False


def _open_ranges(db: Database, tx: Transaction, keep_s: float | None) -> list[Row]:
    """Ranges that an operator or a job may send again."""
    parts = [
        part
        for part in tx.rows(db.replay_job_endpoint)
        if part["ended_at"] is None and db.replay_job.rows[part["job_id"]]["kind"] == "dead"
    ]

    def is_ahead(row: Row) -> bool:
        return any(
            part["endpoint_id"] == row["endpoint_id"]
            and part["next_id"] <= row["id"] <= part["last_id"]
            for part in parts
        )

    return [
        row
        for row in tx.rows(db.dead_letter)
        if row["outbox_id"] is None
        and row["state"] == "dead"
        and (keep_s is None or is_kept(db, tx, row["began_at"], keep_s) or is_ahead(row))
    ]


def pinned_by_ranges(db: Database, tx: Transaction, keep_s: float | None, last_batch: int) -> bool:
    """Whether ranges, or pending replays of ranges, need these batches."""
    ranges = {row["id"] for row in tx.rows(db.dead_letter) if row["outbox_id"] is None}
    return any(row["batch"] <= last_batch for row in _open_ranges(db, tx, keep_s)) or any(
        r["next_seq"] <= r["to_seq"] and r["dead_id"] in ranges and r["next_batch"] <= last_batch
        for r in tx.rows(db.replay)
    )


def pinned_by_replays(
    db: Database, tx: Transaction, keep_s: float | None, period: PartitionWindow
) -> bool:
    """Whether deliveries of replays need events of the period."""
    needed = [(r["lane_id"], r["seq"], r["to_seq"]) for r in _open_ranges(db, tx, keep_s)]
    for r in tx.rows(db.replay):
        dead_letter = db.dead_letter.rows[r["dead_id"]]
        if dead_letter["outbox_id"] is None:
            needed.append((dead_letter["lane_id"], r["next_seq"], r["to_seq"]))
    for lane_id, given in db.deliveries.items():
        if not given:
            continue  # The lane may be removed.
        p = tx.get(db.lane_progress, lane_id)
        assert p is not None
        for g in given:
            of_period = period.first <= g.outbox_id < period.end
            if not g.again or g.copy_id is not None or not of_period:
                continue
            if g.seq > p["acked_seq"] or any(
                each == lane_id and first <= g.seq <= last for each, first, last in needed
            ):
                return True
    return False


def read_replay_progress(db: Database, tx: Transaction) -> ReplayProgress:
    """A value that changes when a replay job is added or advances."""
    parts = [part for part in tx.rows(db.replay_job_endpoint) if part["ended_at"] is None]
    newest = max((row["id"] for row in tx.rows(db.replay_job)), default=None)
    return newest, len(parts), sum(part["batch"] or 0 for part in parts)


def pinned_by_jobs(db: Database, tx: Transaction, end: int) -> bool:
    """Whether a backfill may have to read events below this id."""
    return any(
        part["ended_at"] is None and part["from_id"] is not None and part["from_id"] < end
        for part in tx.rows(db.replay_job_endpoint)
    )


def decide_drop(
    db: Database,
    tx: Transaction,
    period: PartitionWindow,
    keep_s: float | None,
    last_batch: int,
    progress: ReplayProgress,
) -> Steps[bool]:
    """The statements of one message; returns whether the period is dropped."""
    yield from perform(routing_change.lock_cursor(db, tx))
    yield db.pause_s()
    events = period.kind == "events"
    if pinned_by_ranges(db, tx, keep_s, last_batch):
        return False
    if pinned_by_feeds(db, tx, _open_ranges(db, tx, keep_s), last_batch):
        return False
    if events and read_replay_progress(db, tx) != progress:
        return False
    if events and pinned_by_jobs(db, tx, period.end):
        return False
    if not drop_period(db, tx, period.kind, period.number):
        return False
    discarded = yield from discard_ranges(db, tx, keep_s)
    data = {"kind": period.kind, "number": period.number, "ranges_discarded": discarded}
    routing_change.add_to_journal(db, tx, "period_dropped", ACTOR, None, data)
    return True


def drop_period(db: Database, tx: Transaction, kind: WindowKind, number: int) -> bool:
    row = tx.get(db.period, (kind, number))
    if row is None or row["dropped"] or row["ended_at"] is None:
        return False
    if any(
        older["kind"] == kind and older["number"] < number and not older["dropped"]
        for older in tx.rows(db.period)
    ):
        return False
    last_batch = (
        row["last_batch"] if kind == "events" else (number + 1) * partition_window.WIDTH - 1
    )
    if last_batch is None or has_pending_lanes(db, tx, last_batch):
        return False
    return mark_dropped(db, tx, kind, number)


def mark_dropped(db: Database, tx: Transaction, kind: WindowKind, number: int) -> bool:
    tx.change(db.period, (kind, number), dropped=True)
    tx.append(lambda: db.drop_below(kind, number + 1))
    return True


def discard_ranges(db: Database, tx: Transaction, keep_s: float | None) -> Steps[int]:
    """Discard the ranges that are too old to keep a period; returns how many."""
    kept = {row["id"] for row in _open_ranges(db, tx, keep_s)}
    found = [
        row["id"]
        for row in tx.rows(db.dead_letter)
        if row["outbox_id"] is None and row["state"] == "dead" and row["id"] not in kept
    ]
    for dead_id in found:
        yield Wait(db.dead_letter, dead_id, UPDATE)
        row = tx.get(db.dead_letter, dead_id)
        if row is not None and row["state"] == "dead":
            tx.change(db.dead_letter, dead_id, state="discarded")
    return len(found)
