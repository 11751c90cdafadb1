"""Cursors that are known to be wrong, each by one change to the real one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import asyncpg

from outbox.core.sequencing.gaps import GapTracker, Holders, Step
from outbox.core.sequencing.router import Sighting
from outbox.relay.sequencing.cursor import Cursor, Turn
from outbox.store.cursor import CursorStore
from tests.support.sequencers import Slow, Variant

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.core.sequencing.gaps import Range, _Gap


class NaiveTracker(GapTracker):
    """Remembers the highest id and nothing else."""

    def close(self, ids: Sequence[int], cut: bool, after: Holders, now: float) -> Step:
        step = super().close(ids, cut, after, now)
        return replace(step, young=(), dead=(*step.dead, *step.young), memory={})


class TimeOutTracker(GapTracker):
    """Takes a gap for dead after 200 ms."""

    def _settle(
        self, gap: _Gap, limit: int | None, now: float, kept: list[_Gap], dead: list[Range]
    ) -> None:
        if limit is not None and gap.lo > limit:
            kept.append(gap)
        elif now - gap.seen_at > 0.2:
            dead.append(gap.range)
        else:
            kept.append(gap)


class SnapshotStore(Slow):
    """Shows the snapshot's bounds instead of the holders of the lock."""

    async def holders(self) -> Holders:
        row = await self._db.fetchrow(
            "SELECT pg_snapshot_xmin(s)::text AS xmin, pg_snapshot_xmax(s)::text AS xmax "
            "FROM pg_current_snapshot() s"
        )
        return frozenset({f"{row['xmin']} {row['xmax']}"})

    async def look(self) -> Holders:
        return await self.holders()

    async def running(self) -> Holders:
        return await self.holders()


class XmaxTracker(GapTracker):
    """Takes a gap for dead when every xid from before its sighting has ended.

    But an id may be allocated by a transaction that has no xid yet.
    """

    @staticmethod
    def _still_there(holders: Holders, present: Holders) -> Holders:
        xmax_at_sighting = min(int(h.split()[1]) for h in holders)
        xmin_now = min(int(h.split()[0]) for h in present)
        return holders if xmin_now < xmax_at_sighting else frozenset()

    @staticmethod
    def _one_ended(holders: Holders, present: Holders) -> bool:
        return not XmaxTracker._still_there(holders, present)


class HorizonStore(Slow):
    """Reads in the order of (xid, id), below the oldest running xid."""

    async def events(self, high: int, gaps: Sequence[Range], limit: int) -> list[Sighting]:
        rows = await self._db.fetch(
            """
            SELECT id, tenant, type,
                   CASE WHEN key IS NULL THEN id
                        ELSE hashtextextended(key, 0) & 9223372036854775807 END AS spread
              FROM outbox o
             WHERE x < pg_snapshot_xmin(pg_current_snapshot())
               AND NOT EXISTS (SELECT FROM delivery d WHERE d.outbox_id = o.id)
             ORDER BY x, id LIMIT $1
            """,
            limit,
        )
        return [Sighting(*row) for row in rows]


class HorizonTracker(GapTracker):
    """Has nothing to do: whatever the horizon has passed will not come late."""

    def close(self, ids: Sequence[int], cut: bool, after: Holders, now: float) -> Step:
        high = max(self.high, *ids) if ids else self.high
        return Step(
            high=high,
            young=(),
            found=(),
            dead=(),
            old_closed=(),
            old_opened=(),
            moved=bool(ids),
            memory={},
        )


class FullBatchTracker(GapTracker):
    """Lets a batch that was cut decide about gaps it did not reach."""

    def close(self, ids: Sequence[int], cut: bool, after: Holders, now: float) -> Step:
        return super().close(ids, False, after, now)


class RepeatableReadStore(Slow):
    """Reads everything in the snapshot of the first statement."""

    ISOLATION = "repeatable_read"  # type: ignore[assignment]


class OneSnapshotCursor(Cursor):
    """Holds the row over every batch, and looks at the holders in its snapshot."""

    async def turn(self, *, asleep_s: int | None = None) -> Turn:
        self.leads, self._holders = False, None
        return await super().turn(asleep_s=asleep_s)


class ModestStore(Slow):
    """Does not count itself among the holders.

    Reading the sequence takes the lock too.  So the name of the batch that
    found a gap is one of its holders, and ends with the batch; that hides
    mistakes about old gaps, and nothing must depend on it.
    """

    async def look(self) -> Holders:
        holders = await super().look()
        own = await self._db.fetchval(
            "SELECT virtualtransaction FROM pg_locks WHERE pid = pg_backend_pid() LIMIT 1"
        )
        return holders - {own}


class LockStore(CursorStore):
    """Takes who still holds the lock for running, although its rows may be visible."""

    async def running(self) -> Holders:
        return await self.holders()


class UnfencedStore(Slow):
    """Writes whoever leads."""

    async def write(
        self, batch: int, step: Step, events: int, deliveries: Any, *_: int, **options: Any
    ) -> Any:
        newest = await self._db.fetchrow(
            "SELECT (SELECT max(batch) + 1 FROM batch), writer, version FROM cursor"
        )
        try:
            return await super().write(newest[0], step, events, deliveries, *newest[1:], **options)
        except asyncpg.UniqueViolationError:
            # Another one took the number meanwhile: the table's key refuses that much.
            return None


class FreshBeforeTracker(GapTracker):
    """Captures the holders of a gap that the read uncovers before the read."""

    def close(self, ids: Sequence[int], cut: bool, after: Holders, now: float) -> Step:
        return super().close(ids, cut, self._before, now)


class ProofAfterTracker(GapTracker):
    """Looks who is still there after the read."""

    def close(self, ids: Sequence[int], cut: bool, after: Holders, now: float) -> Step:
        self._before = after
        return super().close(ids, cut, after, now)


class KnownAfterTracker(GapTracker):
    """Captures the holders of a gap that was known before the batch after the read."""

    def close(self, ids: Sequence[int], cut: bool, after: Holders, now: float) -> Step:
        self._after = after
        return super().close(ids, cut, after, now)

    def _settle(
        self, gap: _Gap, limit: int | None, now: float, kept: list[_Gap], dead: list[Range]
    ) -> None:
        if gap.holders is None and (limit is None or gap.lo <= limit):
            kept.append(replace(gap, holders=self._after))
        else:
            super()._settle(gap, limit, now, kept, dead)


class NoRecheckTracker(GapTracker):
    """Leaves old gaps out without looking, after the read, whether that was right."""

    def complete(self, running: Holders) -> bool:
        return True


class EarlyMoveTracker(GapTracker):
    """Makes a gap old before a read that began after its holders were captured."""

    def _step(self, high: int, kept: list[_Gap], found: list[int], dead: list[Range]) -> Step:
        kept = [replace(gap, old=True) if gap.lo > self.high else gap for gap in kept]
        return super()._step(high, kept, found, dead)


class UnreachedTracker(GapTracker):
    """Takes a gap that a cut batch did not reach for read."""

    def _settle(
        self, gap: _Gap, limit: int | None, now: float, kept: list[_Gap], dead: list[Range]
    ) -> None:
        present = gap.holders and self._still_there(gap.holders, self._before)
        if limit is not None and gap.lo > limit and present:
            kept.append(replace(gap, holders=present))
        else:
            super()._settle(gap, limit, now, kept, dead)


class DeafTracker(GapTracker):
    """Does not know that `-1/…` may hold any gap."""

    @staticmethod
    def _still_there(holders: Holders, present: Holders) -> Holders:
        return holders & present


class RememberingTracker(GapTracker):
    """Keeps its holders, whatever happens."""

    def forget(self) -> None:
        pass


class RememberingCursor(Cursor):
    """Goes on after a lost connection as if nothing had happened."""

    remembers = True

    def forget(self) -> None:
        pass


class RememberingDeafTracker(RememberingTracker, DeafTracker):
    """Has neither of the two protections against a crash."""


# Right, but without help from its own lock.
MODEST = Variant(store=ModestStore)

NAIVE = Variant(tracker=NaiveTracker)
TIME_OUT = Variant(tracker=TimeOutTracker)
XMAX = Variant(store=SnapshotStore, tracker=XmaxTracker)
HORIZON = Variant(
    store=HorizonStore,
    tracker=HorizonTracker,
    prepare="ALTER TABLE relay.outbox ADD COLUMN x xid8 DEFAULT pg_current_xact_id();",
)
FULL_BATCH = Variant(tracker=FullBatchTracker)
REPEATABLE_READ = Variant(store=RepeatableReadStore, cursor=OneSnapshotCursor)
FRESH_BEFORE = Variant(tracker=FreshBeforeTracker)
PROOF_AFTER = Variant(tracker=ProofAfterTracker)
KNOWN_AFTER = Variant(store=ModestStore, tracker=KnownAfterTracker)
NO_RECHECK = Variant(tracker=NoRecheckTracker)
UNFENCED = Variant(store=UnfencedStore)
LOCK_RECHECK = Variant(store=LockStore)
EARLY_MOVE = Variant(store=ModestStore, tracker=EarlyMoveTracker)
UNREACHED = Variant(tracker=UnreachedTracker)
DEAF = Variant(tracker=DeafTracker)
REMEMBERING = Variant(cursor=RememberingCursor, tracker=RememberingTracker)
REMEMBERING_DEAF = Variant(cursor=RememberingCursor, tracker=RememberingDeafTracker)
