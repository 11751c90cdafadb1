"""Incorrect cursors, each by one change to the real one."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import asyncpg

from outbox.core.sequencing.gaps import CursorChange, GapTracker, LockHolders
from outbox.core.sequencing.router import RoutableEvent
from outbox.relay.sequencing.cursor import Cursor
from outbox.store.sequencing.batches import SequencingStore
from outbox.store.sequencing.event_reads import Reading
from outbox.store.sql.expressions import key_hash
from tests.support.sequencers import Slow, Variant

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.core.sequencing.gaps import Range, _Gap


class NaiveTracker(GapTracker):
    """Keeps the highest id and nothing else."""

    def close_batch(
        self, ids: Sequence[int], cut: bool, after: LockHolders, now: float
    ) -> CursorChange:
        step = super().close_batch(ids, cut, after, now)
        return replace(step, young=(), dead=(*step.dead, *step.young), memory={})


class TimeOutTracker(GapTracker):
    """Considers a gap dead after 200 ms."""

    def _resolve_gap(
        self, gap: _Gap, limit: int | None, now: float, kept: list[_Gap], dead: list[Range]
    ) -> None:
        if limit is not None and gap.lo > limit:
            kept.append(gap)
        elif now - gap.seen_at > 0.2:
            dead.append(gap.range)
        else:
            kept.append(gap)


class SnapshotStore(Slow):
    """Returns the snapshot's bounds instead of the holders of the lock."""

    async def holders(self) -> LockHolders:
        row = await self._db.fetchrow(
            "SELECT pg_snapshot_xmin(s)::text AS xmin, pg_snapshot_xmax(s)::text AS xmax "
            "FROM pg_current_snapshot() s"
        )
        return frozenset({f"{row['xmin']} {row['xmax']}"})

    async def holders_after_read(self) -> LockHolders:
        return await self.holders()

    async def running(self) -> LockHolders:
        return await self.holders()


class XmaxTracker(GapTracker):
    """Considers a gap dead when every xid from before its sighting has ended.

    But an id may be allocated by a transaction that has no xid yet.
    """

    @staticmethod
    def _still_held(holders: LockHolders, present: LockHolders) -> LockHolders:
        xmax_at_sighting = min(int(h.split()[1]) for h in holders)
        xmin_now = min(int(h.split()[0]) for h in present)
        return holders if xmin_now < xmax_at_sighting else frozenset()

    @staticmethod
    def _one_ended(holders: LockHolders, present: LockHolders) -> bool:
        return not XmaxTracker._still_held(holders, present)


class HastyReading(Reading):
    def is_incomplete(self, high: int) -> bool:
        return False


class HastyStore(SequencingStore):
    """Takes the read without lock holders as it is, although it misses an id."""

    async def _read_next(self, high: int, limit: int) -> Reading:
        reading = await super()._read_next(high, limit)
        return HastyReading(*(getattr(reading, field.name) for field in fields(reading)))


class HorizonStore(Slow):
    """Reads in the order of (xid, id), below the oldest running xid."""

    async def events(
        self, high: int | None, gaps: Sequence[Range], limit: int
    ) -> list[RoutableEvent]:
        rows = await self._db.fetch(
            f"""
            SELECT id, tenant, type, {key_hash("key", "id")} AS spread
              FROM outbox o
             WHERE x < pg_snapshot_xmin(pg_current_snapshot())
               AND NOT EXISTS (SELECT FROM delivery d WHERE d.outbox_id = o.id)
             ORDER BY x, id LIMIT $1
            """,
            limit,
        )
        return [RoutableEvent(*row) for row in rows]


class HorizonTracker(GapTracker):
    """Does nothing: no event below the horizon can come late."""

    def close_batch(
        self, ids: Sequence[int], cut: bool, after: LockHolders, now: float
    ) -> CursorChange:
        high = max(self.high, *ids) if ids else self.high
        return CursorChange(
            high=high,
            young=(),
            found=(),
            dead=(),
            old_closed=(),
            old_opened=(),
            young_changed=False,
            changed=bool(ids),
            memory={},
        )


class FullBatchTracker(GapTracker):
    """Lets a cut batch decide about gaps that it did not reach."""

    def close_batch(
        self, ids: Sequence[int], cut: bool, after: LockHolders, now: float
    ) -> CursorChange:
        return super().close_batch(ids, False, after, now)


class ModestStore(Slow):
    """Excludes its own backend from the holders.

    Reading the sequence takes the lock, too. So the transaction of the batch that found a gap is
    one of its holders, and ends with the batch; that hides mistakes about old gaps, so correctness
    must not depend on it.
    """

    async def holders_after_read(self) -> LockHolders:
        holders = await super().holders_after_read()
        own = await self._db.fetchval(
            "SELECT virtualtransaction FROM pg_locks WHERE pid = pg_backend_pid() LIMIT 1"
        )
        return holders - {own}


class LockStore(SequencingStore):
    """Considers a transaction running while it holds the lock, although its rows may be visible."""

    async def running(self) -> LockHolders:
        return await self.holders()


class UnfencedStore(Slow):
    """Writes without a check of the leader."""

    async def write(
        self, batch: int, step: CursorChange, events: int, deliveries: Any, *_: int, **options: Any
    ) -> Any:
        newest = await self._db.fetchrow(
            "SELECT (SELECT max(batch) + 1 FROM batch), writer, version FROM cursor"
        )
        try:
            return await super().write(newest[0], step, events, deliveries, *newest[1:], **options)
        except asyncpg.UniqueViolationError:
            # Another replica took the sequence number meanwhile: the primary key rejects that much.
            return False


class FreshBeforeTracker(GapTracker):
    """Captures the holders of a gap that the read uncovers before the read."""

    def close_batch(
        self, ids: Sequence[int], cut: bool, after: LockHolders, now: float
    ) -> CursorChange:
        return super().close_batch(ids, cut, self._before, now)


class ProofAfterTracker(GapTracker):
    """Reads the remaining holders after the read."""

    def close_batch(
        self, ids: Sequence[int], cut: bool, after: LockHolders, now: float
    ) -> CursorChange:
        self._before = after
        return super().close_batch(ids, cut, after, now)


class KnownAfterTracker(GapTracker):
    """Captures the holders of a gap that was known before the batch after the read."""

    def close_batch(
        self, ids: Sequence[int], cut: bool, after: LockHolders, now: float
    ) -> CursorChange:
        self._after = after
        return super().close_batch(ids, cut, after, now)

    def _resolve_gap(
        self, gap: _Gap, limit: int | None, now: float, kept: list[_Gap], dead: list[Range]
    ) -> None:
        if gap.holders is None and (limit is None or gap.lo <= limit):
            kept.append(replace(gap, holders=self._after))
        else:
            super()._resolve_gap(gap, limit, now, kept, dead)


class NoRecheckTracker(GapTracker):
    """Skips the recheck of omitted old gaps after the read."""

    def complete(self, running: LockHolders) -> bool:
        return True


class EarlyMoveTracker(GapTracker):
    """Ages a gap before a read that began after its holders were captured."""

    def _step(
        self, high: int, kept: list[_Gap], found: list[int], dead: list[Range]
    ) -> CursorChange:
        kept = [replace(gap, old=True) if gap.lo > self.high else gap for gap in kept]
        return super()._step(high, kept, found, dead)


class UnreachedTracker(GapTracker):
    """Considers a gap that a cut batch did not reach as read."""

    def _resolve_gap(
        self, gap: _Gap, limit: int | None, now: float, kept: list[_Gap], dead: list[Range]
    ) -> None:
        present = gap.holders and self._still_held(gap.holders, self._before)
        if limit is not None and gap.lo > limit and present:
            kept.append(replace(gap, holders=present))
        else:
            super()._resolve_gap(gap, limit, now, kept, dead)


class DeafTracker(GapTracker):
    """Ignores that `-1/…` may hold any gap."""

    @staticmethod
    def _still_held(holders: LockHolders, present: LockHolders) -> LockHolders:
        return holders & present


class RememberingTracker(GapTracker):
    """Keeps its holders after errors."""

    def forget(self) -> None:
        pass


class RememberingCursor(Cursor):
    """Continues after a lost connection without a reset."""

    remembers = True

    def forget(self) -> None:
        pass


class RememberingDeafTracker(RememberingTracker, DeafTracker):
    """Has neither of the two protections against a crash."""


# Correct, but without help from its own lock.
MODEST = Variant(store=ModestStore)

NAIVE = Variant(tracker=NaiveTracker)
TIME_OUT = Variant(tracker=TimeOutTracker)
XMAX = Variant(store=SnapshotStore, tracker=XmaxTracker)
HASTY = Variant(store=HastyStore)
HORIZON = Variant(
    store=HorizonStore,
    tracker=HorizonTracker,
    prepare="ALTER TABLE relay.outbox ADD COLUMN x xid8 DEFAULT pg_current_xact_id();",
)
FULL_BATCH = Variant(tracker=FullBatchTracker)
FRESH_BEFORE = Variant(tracker=FreshBeforeTracker)
PROOF_AFTER = Variant(tracker=ProofAfterTracker)
KNOWN_AFTER = Variant(store=ModestStore, tracker=KnownAfterTracker)
NO_RECHECK = Variant(tracker=NoRecheckTracker)
# Without the check of the counters, which would refuse most of its batches.
UNFENCED = Variant(
    store=UnfencedStore,
    prepare="""
CREATE OR REPLACE FUNCTION relay.advance_lane_counter(lane bigint, old_seq bigint, new_seq bigint)
RETURNS void LANGUAGE sql AS
    'UPDATE relay.lane_counter SET last_seq = $3, by_xid = txid_current()
      WHERE lane_id = $1'
""",
)
LOCK_RECHECK = Variant(store=LockStore)
EARLY_MOVE = Variant(store=ModestStore, tracker=EarlyMoveTracker)
UNREACHED = Variant(store=ModestStore, tracker=UnreachedTracker)
DEAF = Variant(tracker=DeafTracker)
REMEMBERING = Variant(cursor=RememberingCursor, tracker=RememberingTracker)
REMEMBERING_DEAF = Variant(cursor=RememberingCursor, tracker=RememberingDeafTracker)
