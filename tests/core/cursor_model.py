"""Model of replicas that alternate at the cursor, step by step, over `database_model`.

The tracker under test is compared with what the database model knows: which rows can still appear,
and which events of a key were inserted after which were committed. Every error of the tracker is a
`Violation`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outbox.core.sequencing.gaps import CursorChange, CursorState, GapTracker, Range
from tests.core.invariants import expect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from outbox.core.sequencing.gaps import LockHolders
    from tests.core.database_model import Database, LockScan, Row

REPLICAS = 2


@dataclass(frozen=True)
class Faults:
    """Errors of the code around the tracker."""

    one_snapshot: bool = False
    """Run the batch in REPEATABLE READ: all its statements use the first one's snapshot."""
    keeps_holders: bool = False
    """Keep holders although another replica wrote."""
    keeps_state: bool = False
    """Keep the cached tables although another replica wrote."""
    trusts_lost_commits: bool = False
    """Treat a commit with an unknown outcome as applied."""
    trusts_locks: bool = False
    """Treat a transaction that holds the lock after a read as invisible to it."""


NO_FAULTS = Faults()


class Replica:
    """The state that the sequencer keeps between batches."""

    def __init__(self, tracker: GapTracker) -> None:
        self.tracker = tracker
        self.state: CursorState | None = None
        self.quiet: dict[Range, int] = {}
        """Old gaps that were read, and the database's `ends` at that time."""

    def forget(self) -> None:
        self.tracker.forget()
        self.state = None
        self.quiet.clear()


@dataclass
class Batch:
    """The transaction that locks the cursor row."""

    me: int
    state: CursorState
    snapshot: Mapping[int, Row] | None
    next: Callable[[Batch, int], None]
    """The next step, which is also the progress of the batch."""
    scan_locks: LockScan | None = None
    before: LockHolders = frozenset()
    ends_before: int = 0
    rows: list[Row] = field(default_factory=list)
    full: bool = False
    again: bool = False
    """The first read was not usable."""
    after: LockHolders = frozenset()
    cut: bool = False
    step: CursorChange | None = None


class Cursor:
    """The relay's tables and its replicas."""

    def __init__(
        self,
        database: Database,
        tracker: Callable[[], GapTracker] = GapTracker,
        faults: Faults = NO_FAULTS,
        limit_max: int = 5,
        gaps_max: int = 1000,
    ) -> None:
        self.database = database
        self.limit_max = limit_max
        """Maximum number of events per batch."""
        self.gaps_max = gaps_max
        """Maximum number of gaps per read."""
        self.tables = CursorState()
        self.writer: int | None = None
        self.sequenced: set[int] = set()
        self.replicas = [Replica(tracker()) for _ in range(REPLICAS)]
        self.batch: Batch | None = None
        self.now = 0.0
        self._faults = faults

    def waiting(self) -> list[Row]:
        """Events that are committed and not sequenced yet."""
        return [row for i, row in self.database.visible.items() if i not in self.sequenced]

    # ---------------------------------------------------------------- events

    def tick(self, tenths: int) -> None:
        self.now += tenths / 10

    def advance(self, choice: int) -> None:
        """Execute the next step of the current batch, or the first step of a new one."""
        if self.batch is None:
            # Mostly the same replica; a replica that takes over knows no holders.
            me = self.writer or 0
            self._lock(me if choice % 4 else (me + 1) % REPLICAS)
            return
        self.batch.next(self.batch, choice)

    def whole_batch(self, me: int | None = None) -> None:
        """Finish the current batch, or execute a new one, by default of the last writer."""
        if self.batch is None:
            self._lock((self.writer or 0) if me is None else me)
        while self.batch is not None:
            self.advance(self.limit_max - 1 if self.batch.next == self._read else 0)

    def lose_batch(self, *, applied: bool) -> None:
        """Lose the sequencer's connection; its commit may have been applied."""
        b, self.batch = self.batch, None
        if b is None:
            return
        if b.scan_locks is not None:
            self.database.end_lock_scan(b.scan_locks)
        if b.step is not None and applied:
            self._apply(b, b.step)
        if b.step is not None and self._faults.trusts_lost_commits:
            self._remember(b, b.step)
        else:
            self.replicas[b.me].forget()

    def crash(self, skipped: int, *, hidden: bool, applied: bool) -> None:
        """Crash the server and recover it.

        `hidden`: a pooler keeps connections, so that a replica without an open transaction does not
        notice. `applied`: the commit in progress had reached the disk.
        """
        self.lose_batch(applied=applied)
        self.database.crash(skipped)
        if not hidden:
            for replica in self.replicas:
                replica.forget()

    # ------------------------------------------------------------- one batch

    def _lock(self, me: int) -> None:
        replica, faults = self.replicas[me], self._faults
        if replica.state is None or self.writer != me:
            if not faults.keeps_holders:
                replica.tracker.forget()
                replica.quiet.clear()
            if replica.state is None or not faults.keeps_state:
                replica.state = self.tables
        snapshot = dict(self.database.visible) if faults.one_snapshot else None
        self.batch = Batch(me, replica.state, snapshot, self._scan_before_read)

    def _scan_before_read(self, b: Batch, _: int) -> None:
        b.scan_locks = self.database.scan_locks()
        b.ends_before = self.database.ends
        b.next = self._begin

    def _finish_scan(self, b: Batch, choice: int) -> tuple[LockHolders, LockHolders]:
        """Return the holders, and those that no snapshot until then could see."""
        assert b.scan_locks is not None
        scan_locks, b.scan_locks = b.scan_locks, None
        self.database.end_lock_scan(scan_locks)
        holders = scan_locks.holders(choice)
        return holders, holders if self._faults.trusts_locks else scan_locks.running(holders)

    def _begin(self, b: Batch, choice: int) -> None:
        b.before, _ = self._finish_scan(b, choice)
        self.replicas[b.me].tracker.begin_batch(b.state, b.before, self.now)
        b.next = self._read

    def _read(self, b: Batch, choice: int) -> None:
        replica = self.replicas[b.me]
        ranges = replica.tracker.ranges(self.gaps_max)
        if not b.again:
            self._expect_no_idle_reads(replica)
        snapshot = self.database.visible if b.snapshot is None else b.snapshot
        above = math.inf if replica.tracker.is_partial else replica.tracker.high
        visible = sorted(
            i for i in snapshot if i > above or any(lo <= i <= hi for lo, hi in ranges)
        )
        limit = 1 + choice % self.limit_max
        b.rows, b.full = [snapshot[i] for i in visible[:limit]], len(visible) >= limit
        b.next = self._scan_after_read

    def _scan_after_read(self, b: Batch, _: int) -> None:
        b.scan_locks = self.database.scan_locks()
        b.next = self._check

    def _check(self, b: Batch, choice: int) -> None:
        replica = self.replicas[b.me]
        b.after, running = self._finish_scan(b, choice)
        if not replica.tracker.left_out or replica.tracker.complete(running):
            b.next = self._close
            return
        b.next, b.again = self._read, True
        if running == b.after:
            self._expect_no_idle_reads(replica)
        else:
            # Gaps of holders that may have committed are due until a batch reaches them.
            replica.quiet.clear()

    def _close(self, b: Batch, choice: int) -> None:
        """Close the batch; `choice` is the number of events that exceed its delivery limit."""
        fits = max(len(b.rows) - choice // 3, 1)
        b.cut = b.full or fits < len(b.rows)
        b.rows = b.rows[:fits]
        ids = [row.id for row in b.rows]
        tracker = self.replicas[b.me].tracker
        new = [i for i in ids if i > tracker.high]
        if not tracker.needs_holders and len(new) == max([*new, tracker.high]) - tracker.high:
            b.after = frozenset()  # They are not read.
        b.step = tracker.close_batch(ids, b.cut, b.after, self.now)
        self._expect_sound(b, b.step)
        b.next = self._commit

    def _commit(self, b: Batch, _: int) -> None:
        assert b.step is not None
        self.batch = None
        if b.step.changed or self.writer == b.me or b.state.young or b.state.old:
            self._apply(b, b.step)
            self._remember(b, b.step)

    def _remember(self, b: Batch, step: CursorChange) -> None:
        replica = self.replicas[b.me]
        reached = b.rows[-1].id if b.cut and b.rows else None
        for gap in replica.tracker.ranges(self.gaps_max):
            if b.before and gap in b.state.old and (reached is None or gap[0] <= reached):
                replica.quiet[gap] = b.ends_before
        replica.tracker.committed(step)
        replica.state = self._after(b, step)

    def _apply(self, b: Batch, step: CursorChange) -> None:
        self.writer = b.me
        if step.changed:
            for row in b.rows:
                expect(row.id not in self.sequenced, f"{row.id} is sequenced twice")
                overtaken = sorted(row.after - self.sequenced)
                expect(not overtaken, f"{row.id} overtakes {overtaken} of its key")
                self.sequenced.add(row.id)
            self.tables = self._after(b, step)

    @staticmethod
    def _after(b: Batch, step: CursorChange) -> CursorState:
        if not step.changed:
            return b.state
        old = tuple(sorted({*b.state.old, *step.old_opened} - {*step.old_closed}))
        young = step.young if step.young_changed else b.state.young
        return CursorState(b.state.batch + 1, step.high, young, old)

    # ------------------------------------------------------------ invariants

    def _expect_sound(self, b: Batch, step: CursorChange) -> None:
        """Check that the batch is consistent with the tables and the database model."""
        before, after = b.state, self._after(b, step)
        ids = [(row.id, row.id) for row in b.rows]
        if not step.changed:
            unchanged = (step.high, step.young) == (before.high, before.young)
            changes = [*ids, *step.found, *step.dead, *step.old_closed, *step.old_opened]
            expect(unchanged and not changes, "a change would not be written", step)
        expect(
            _joined([*before.young, *before.old, (before.high + 1, step.high)])
            == _joined([*after.young, *after.old, *step.dead, *ids]),
            "an id vanishes, or stands for two things",
            (before, step, ids),
        )
        expect(set(step.old_closed) <= set(before.old), "there is no such gap to close", step)
        late = [i for i in ids if i[0] <= before.high]
        expect(_joined(late) == _joined(step.found), "late ids are not reported", step)
        for row in (*self.database.rows_to_come(), *self.waiting()):
            lost = [gap for gap in step.dead if gap[0] <= row.id <= gap[1]]
            expect(not lost, f"{row.id} is declared dead", lost)

    def _expect_no_idle_reads(self, replica: Replica) -> None:
        """Check that an old gap is read again only if a transaction ended since."""
        ends = self.database.ends
        ranges = replica.tracker.ranges(self.gaps_max)
        idle = [gap for gap in ranges if replica.quiet.get(gap) == ends]
        expect(not idle, "old gaps are read for nothing", idle)

    def expect_everything_ends(self, commits: int) -> None:
        """Check that nothing stays open or pending after all transactions end.

        `commits`: which of them commit, see `Database.end_all`.
        """
        self.lose_batch(applied=True)
        self.database.end_all(commits)
        # Batches full of events, then one each for the holders, the end of the gaps, and nothing.
        # Holders and ends take several batches if a read does not take all gaps.
        gaps = len(self.waiting()) + len(self.tables.young) + len(self.tables.old)
        portions = 2 * (gaps // self.gaps_max)
        for _ in range(len(self.waiting()) // self.limit_max + portions + 4):
            self.tick(10)  # The proof is due.
            self.whole_batch(me=0)
        pending = sorted(row.id for row in self.waiting())
        expect(not pending, "events are never sequenced", pending)
        expect(not self.tables.young and not self.tables.old, "gaps stay open", self.tables)
        expect(self.sequenced == set(self.database.visible), "more than was committed")


def _joined(ranges: Iterable[Range]) -> list[Range]:
    """Join adjacent ranges; overlapping ranges stay separate, and so compare as different."""
    joined: list[Range] = []
    for lo, hi in sorted(r for r in ranges if r[0] <= r[1]):
        if joined and joined[-1][1] + 1 == lo:
            joined[-1] = (joined[-1][0], hi)
        else:
            joined.append((lo, hi))
    return joined
