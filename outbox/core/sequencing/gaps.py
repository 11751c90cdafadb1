"""The gap-aware cursor: which ids to read, and which will never appear.

Ids come from a sequence, so a lower id can commit after a higher one.  A
cursor that only remembers the highest id loses the late one; a cursor that
waits for every transaction in flight stalls behind the longest of them and
can reorder two events of one key.  This one does neither.

**The argument.**  `nextval` takes a RowExclusiveLock on the sequence before it
allocates, and the top transaction keeps it until its rows are visible (over
savepoints and PREPARE TRANSACTION too).  So an id that is missing below the
highest one seen, a *gap*, belongs to one of the transactions that hold this
lock now, its *lock holders*.  When none of them holds it any more, one more read in
a new snapshot decides: an id that is still absent was rolled back.  This involves no
time-out.

**Order of steps.**  Events of one key keep their order if no read passes a gap
whose row is already visible.  Hence:

* holders of a gap known before a batch are captured before its read; those of
  a gap that the read itself discovers, after it;
* an old gap may be left out of a read only if all its holders are *running*
  after that read: a later snapshot still shows them as unfinished.  Otherwise the
  read is repeated with the gap, before anything is sequenced.  (The lock alone is
  not sufficient: rows become visible before it is released, with a COMMIT PREPARED
  that drops tables even long before.)
* a read that reached its limit proves nothing about ids at or beyond its last
  one: gaps there stay due;
* a gap becomes old only after a read that began after its holders were
  captured;
* holders are memory, never state: a replica that was not the last writer
  drops all of them (`forget`) and starts from the tables.

Young gaps are read with every batch.  After a second they become old and are
read only when one of their holders has ended, so a transaction that stays open for
an hour costs nothing per batch.

A prepared transaction that survived a crash holds its lock as `-1/xid`, a name
that was not captured before the crash; it counts as a holder of every gap.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

Range: TypeAlias = tuple[int, int]
"""A range of ids, both ends inclusive."""

LockHolders: TypeAlias = frozenset[str]
"""`pg_locks.virtualtransaction` of the transactions that hold the sequence's lock."""

AGE_S = 1.0
"""How long a gap is read with every batch before it becomes old."""


@dataclass(frozen=True, slots=True)
class CursorState:
    """The stored state of the cursor, from which a new sequencer starts."""

    batch: int = 0
    high: int = 0
    young: tuple[Range, ...] = ()
    old: tuple[Range, ...] = ()


@dataclass(frozen=True, slots=True)
class CursorChange:
    """The changes of one batch to the cursor, written in its transaction."""

    high: int
    young: tuple[Range, ...]
    found: tuple[Range, ...]
    """Late ids: former gaps that are sequenced now."""
    dead: tuple[Range, ...]
    """Ids that were proven to be rolled back."""
    old_closed: tuple[Range, ...]
    """Rows to delete from the table of old gaps …"""
    old_opened: tuple[Range, ...]
    """… and to insert into it."""
    changed: bool
    """Whether the tables need a write."""
    memory: dict[Range, _Gap] = field(repr=False)


@dataclass(frozen=True, slots=True)
class _Gap:
    """An open gap; `holders` is None until they are captured."""

    lo: int
    hi: int
    old: bool
    holders: LockHolders | None
    seen_at: float

    @property
    def range(self) -> Range:
        return (self.lo, self.hi)


class GapTracker:
    """The cursor's memory between batches, and the arithmetic of one batch.

    One batch of the leader; each reading line uses a snapshot of its own:

        tracker.begin(state, holders, now)      # holders: before the read
        while True:
            ids, after = read(tracker.high, tracker.ranges(), limit)
                                                # holders: after its snapshot was taken
            if not tracker.left_out or tracker.complete(running()): break
        step = tracker.close(ids, cut, after, now)
        … write step, unless another replica leads by now; commit …
        tracker.committed(step)

    After anything but a confirmed commit, call `forget`.
    """

    def __init__(self) -> None:
        self.high = 0
        # Whether the gaps below match the tables; see `forget`.
        self._known = False
        self._young: dict[Range, _Gap] = {}
        # By holders, so that a batch compares a few sets of holders instead of
        # a hundred thousand gaps.
        self._old: dict[LockHolders | None, dict[Range, _Gap]] = {}
        self._due: set[LockHolders | None] = set()
        self._before: LockHolders = frozenset()

    def forget(self) -> None:
        """Drop all memory: another replica wrote, or a commit is in doubt."""
        self._known = False

    # ------------------------------------------------------------ one batch

    def begin_batch(self, state: CursorState, before: LockHolders, now: float) -> None:
        """Start a batch.

        Args:
            state: the stored state; after a committed batch only its `high` is used.
            before: the current lock holders.
            now: monotonic seconds.
        """
        self.high = state.high
        self._before = before
        if not self._known:
            self._young = {r: _Gap(*r, False, None, now) for r in state.young}
            self._old = {None: {r: _Gap(*r, True, None, now) for r in state.old}}
            self._known = True
        # Also gaps without holders: not captured yet, or none left.
        self._due = {h for h in self._old if not h or self._one_ended(h, before)}

    def ranges(self) -> list[Range]:
        """The gaps to read, besides all ids above `high`."""
        return sorted(gap.range for gap in self._to_read())

    @property
    def left_out(self) -> bool:
        """Whether a gap is left out of the read, so that `complete` must be called."""
        return len(self._due) < len(self._old)

    def complete(self, running: LockHolders) -> bool:
        """Whether the read may be used; if not, read again with more ranges.

        Args:
            running: the holders that are unfinished in a snapshot taken after the
                read, so that the read saw none of their rows.
        """
        late = {h for h in self._old if h not in self._due and h and self._one_ended(h, running)}
        self._due |= late
        return not late

    def close_batch(
        self, ids: Sequence[int], cut: bool, after: LockHolders, now: float
    ) -> CursorChange:
        """Compute the batch's changes to the cursor.

        Args:
            ids: the sequenced ids, ascending.
            cut: there may be more to read at or beyond the last id.
            after: the lock holders captured after the read.
            now: monotonic seconds.
        """
        # Nothing at or beyond `limit` was read to its end.
        limit = (ids[-1] if ids else 0) if cut else None
        found: list[int] = []
        dead: list[Range] = []
        kept: list[_Gap] = []
        for gap in self._to_read():
            hits = ids[bisect_left(ids, gap.lo) : bisect_right(ids, gap.hi)]
            found.extend(hits)
            for lo, hi in _without(gap.range, hits):
                self._resolve_gap(replace(gap, lo=lo, hi=hi), limit, now, kept, dead)
        high = max(self.high, ids[-1]) if ids else self.high
        fresh = ids[bisect_right(ids, self.high) :]
        kept.extend(
            _Gap(lo, hi, False, after, now) for lo, hi in _without((self.high + 1, high), fresh)
        )
        return self._step(high, kept, found, dead)

    def committed(self, step: CursorChange) -> None:
        """Remember the gaps of a batch that is durable (or changed nothing)."""
        self._young = {}
        for holders in self._due:
            del self._old[holders]
        for gap in step.memory.values():
            gaps = self._old.setdefault(gap.holders, {}) if gap.old else self._young
            gaps[gap.range] = gap

    # ------------------------------------------------------------ the rules

    def _resolve_gap(
        self, gap: _Gap, limit: int | None, now: float, kept: list[_Gap], dead: list[Range]
    ) -> None:
        """Decide about a gap that was to be read and is absent, or the rest of one."""
        if limit is not None and gap.lo > limit:
            # The limited read did not reach it; it stays due.
            kept.append(gap)
            return
        if gap.holders is None:
            kept.append(replace(gap, holders=self._before))
            return
        holders = self._still_held(gap.holders, self._before)
        if not holders:
            dead.append(gap.range)
        else:
            # Its holders were captured by an earlier batch, so this read
            # began after that, and it may become old.
            old = gap.old or now - gap.seen_at > AGE_S
            kept.append(replace(gap, holders=holders, old=old))

    @staticmethod
    def _one_ended(holders: LockHolders, present: LockHolders) -> bool:
        return not holders <= present

    @staticmethod
    def _still_held(holders: LockHolders, present: LockHolders) -> LockHolders:
        return frozenset(h for h in present if h in holders or h.startswith("-1/"))

    def _to_read(self) -> Iterator[_Gap]:
        yield from self._young.values()
        for holders in self._due:
            yield from self._old[holders].values()

    def _step(
        self, high: int, kept: list[_Gap], found: list[int], dead: list[Range]
    ) -> CursorChange:
        young = tuple(sorted(g.range for g in kept if not g.old))
        old = {g.range for g in kept if g.old}
        old_before = {g.range for g in self._to_read() if g.old}
        return CursorChange(
            high=high,
            young=young,
            found=_as_ranges(sorted(found)),
            dead=tuple(sorted(dead)),
            old_closed=tuple(sorted(old_before - old)),
            old_opened=tuple(sorted(old - old_before)),
            changed=high != self.high or {*young} != self._young.keys() or old != old_before,
            memory={g.range: g for g in kept},
        )


def _without(whole: Range, ids: Iterable[int]) -> list[Range]:
    """The parts of a range without the given ids, which are ascending."""
    left: list[Range] = []
    lo = whole[0]
    for i in ids:
        if i > lo:
            left.append((lo, i - 1))
        lo = i + 1
    if lo <= whole[1]:
        left.append((lo, whole[1]))
    return left


def _as_ranges(ids: Iterable[int]) -> tuple[Range, ...]:
    """Convert ascending ids to ranges."""
    ranges: list[Range] = []
    for i in ids:
        if ranges and ranges[-1][1] == i - 1:
            ranges[-1] = (ranges[-1][0], i)
        else:
            ranges.append((i, i))
    return tuple(ranges)
