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
* a read may take a portion of the gaps that are due, the lowest, but then nothing
  above the highest id seen: every row above it may follow one in a gap that is left
  out.  (A row in a gap cannot: the read that passed its id saw what came before.)
  Gaps that are left out stay due.
* a read that reached its limit proves nothing about ids at or beyond its last
  one: gaps there stay due;
* the message that declares ids dead proves that they are absent, at most twice a second unless a
  read takes a portion.  Until then a gap that was absent after the end of its holders stays open,
  and is not read again before the proof reads it; it costs a batch nothing but a copy of the
  stored gaps.  If the proof finds a row, nothing is written, and the next batch reads all of them
  again;
* a gap becomes old only after a read that began after its holders were
  captured;
* holders are memory, never state: a replica that was not the last writer
  drops all of them (`forget`) and starts from the tables.

Young gaps are read with every batch, until they are absent.  After a second, or sooner if there
are many, they become old and are read only when one of their holders has ended, so a transaction
that stays open for an hour costs nothing per batch.  When it commits, all its gaps are due at
once, perhaps hundreds of thousands: each batch handles a portion, and its cost does not depend on
the number of all gaps.

A prepared transaction that survived a crash holds its lock as `-1/xid`, a name
that was not captured before the crash; it counts as a holder of every gap.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Range: TypeAlias = tuple[int, int]
"""A range of ids, both ends inclusive."""

LockHolders: TypeAlias = frozenset[str]
"""`pg_locks.virtualtransaction` of the transactions that hold the sequence's lock."""

AGE_S = 1.0
"""How long a gap is read with every batch before it becomes old."""

YOUNG_SHARE = 0.25
"""Young gaps become old sooner if they take more than this share of a read."""

PROOF_EVERY_S = 0.5
"""Minimum interval between batches that declare ids dead: each proves it, which costs the server
nearly as much as a batch."""

GAPS_SPARE = 100
"""A read takes this many gaps more than its batch can probably reach."""


@dataclass(frozen=True, slots=True)
class CursorState:
    """The stored state of the cursor, from which a new sequencer starts."""

    batch: int = 0
    high: int = 0
    young: tuple[Range, ...] = ()
    old: tuple[Range, ...] = ()


# Not frozen, nor is `_Gap`: they are made with each batch, and that would cost twice as much.
@dataclass(slots=True)
class CursorChange:
    """The changes of one batch to the cursor, written in its transaction."""

    high: int
    young: tuple[Range, ...]
    """All young gaps, including those that await the proof."""
    found: tuple[Range, ...]
    """Late ids: former gaps that are sequenced now."""
    dead: tuple[Range, ...]
    """Ids that were proven to be rolled back."""
    old_closed: tuple[Range, ...]
    """Rows to delete from the table of old gaps …"""
    old_opened: tuple[Range, ...]
    """… and to insert into it."""
    young_changed: bool
    """Whether `young` differs from that of the batch before, which is copied otherwise."""
    changed: bool
    """Whether the tables need a write."""
    memory: dict[Range, _Gap] = field(repr=False)


@dataclass(slots=True)
class _Gap:
    """An open gap; `holders` is None until they are captured."""

    lo: int
    hi: int
    old: bool
    holders: LockHolders | None
    seen_at: float
    is_absent: bool = False
    """Whether it was read after the end of its holders, and only the proof is missing."""

    @property
    def range(self) -> Range:
        return (self.lo, self.hi)


_LO = attrgetter("lo")


class GapTracker:
    """The cursor's memory between batches, and the arithmetic of one batch.

    One batch of the leader; each reading line uses a snapshot of its own:

        tracker.begin_batch(state, holders, now)    # holders: before the read
        while True:
            ranges = tracker.ranges(gaps_max)
            above = None if tracker.is_partial else tracker.high
            ids, after = read(above, ranges, limit)
                                                # holders: after its snapshot was taken, if
                                                # `needs_holders` or an id above is missing
            if not tracker.left_out or tracker.complete(running()): break
        step = tracker.close_batch(ids, cut, after, now)
        … write step, unless another replica leads by now; commit …
        tracker.committed(step)

    After anything but a confirmed commit, call `forget`, or begin the batch again.
    """

    proof_every_s = PROOF_EVERY_S

    def __init__(self) -> None:
        self.high = 0
        # Whether the gaps below match the tables; see `forget`.
        self._known = False
        self._young: dict[Range, _Gap] = {}
        # Old gaps to leave out.  By holders, so that a batch compares a few sets of holders
        # instead of a hundred thousand gaps.
        self._old: dict[LockHolders | None, list[_Gap]] = {}
        # Gaps that await the proof, young and old.
        self._absent: dict[Range, _Gap] = {}
        # The young gaps of the newest batch, ascending: those above that are not old.
        self._young_stored: tuple[Range, ...] = ()
        # Whether the last batch proved them, and is not committed.
        self._is_proving = False
        # Old gaps to read, highest first, so that the lowest are taken at the end.
        self._due: list[_Gap] = []
        # Gaps of the current read, ascending; None: not chosen yet.
        self._portion: list[_Gap] | None = None
        # Sets of holders of which one was not running after a read, though it held the lock.
        self._never_running: set[LockHolders] = set()
        self._forced: list[_Gap] = []
        self._before: LockHolders = frozenset()
        self._is_crowded = False
        # When ids were last declared dead, in monotonic seconds.
        self._proved_at = -math.inf
        # How many gaps a batch can probably reach.
        self._gaps_reached: float = math.inf
        self.is_partial = False
        """Whether the read must leave out gaps that are due, and so all ids above `high`."""

    def forget(self) -> None:
        """Drop all memory: another replica wrote, or a commit is in doubt."""
        self._known = False

    def reads_gaps(self, state: CursorState) -> bool:
        """Whether the next read includes gaps, so that the lock holders must be known before it."""
        if not self._known:
            return bool(state.young or state.old)
        absent = self._is_proving and self._absent
        return bool(self._young or self._old or self._due or self._portion or absent)

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
            self._old = {None: [_Gap(*r, True, None, now) for r in state.old]}
            self._due, self._portion, self._forced = [], None, []
            self._absent.clear()
            self._young_stored = tuple(sorted(state.young))
            self._never_running.clear()
            self._known = True
        self._return_portion()
        if self._is_proving:
            self._return_absent()
        if self._old:
            # Also gaps without holders: not captured yet, or none left.
            self._make_due({h for h in self._old if not h or self._one_ended(h, before)})
        if self._never_running and not self._due:
            self._never_running &= self._old.keys()

    def ranges(self, gaps_max: int) -> list[Range]:
        """The gaps to read, ascending; besides them all ids above `high`, unless `is_partial`.

        Args:
            gaps_max: the number of gaps that one read takes.  It is exceeded only by gaps that
                were read before, and whose holders are idle before their first write; and not
                while a portion of the others is read.
        """
        if self._portion is None:
            self._choose_portion(gaps_max)
        assert self._portion is not None
        return [gap.range for gap in self._portion]

    @property
    def left_out(self) -> bool:
        """Whether an old gap is left out of the read, so that `complete` must be called."""
        return bool(self._old)

    @property
    def needs_holders(self) -> bool:
        """Whether the lock holders after the read decide about a gap that is known already.

        They do not if all that it reads are gaps whose holders have ended: it decides about them.
        """
        return self.left_out or any(
            gap.holders is None or self._still_held(gap.holders, self._before)
            for gap in self._portion or ()
        )

    def complete(self, running: LockHolders) -> bool:
        """Whether the read may be used; if not, read again with other ranges.

        Args:
            running: the holders that are unfinished in a snapshot taken after the
                read, so that the read saw none of their rows.
        """
        late = {h for h in self._old if h and self._one_ended(h, running)}
        if not late:
            return True
        self._return_portion()
        # Holders that have not written yet are not running, for as long as they like.  Once
        # their gaps were read in portions, each read includes all of them, or the cursor would
        # read portions for ever.
        again = late & self._never_running
        for holders in again:
            self._forced += self._old.pop(holders)
        self._never_running |= {h for h in late if h is not None}
        self._make_due(late - again)
        return False

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
        assert self._portion is not None, "ranges was not called"
        for gap in self._portion:
            first = bisect_left(ids, gap.lo)
            if first == len(ids) or ids[first] > gap.hi:
                self._resolve_gap(gap, limit, now, kept, dead)
                continue
            hits = ids[first : bisect_right(ids, gap.hi, first)]
            found.extend(hits)
            for lo, hi in _without(gap.range, hits):
                self._resolve_gap(replace(gap, lo=lo, hi=hi), limit, now, kept, dead)
        if self._is_proof_due(now):
            dead += self._absent
            self._is_proving = True
        if dead:
            self._proved_at = now
        self._adapt_portion(limit)
        high = max(self.high, ids[-1]) if ids else self.high
        first = bisect_right(ids, self.high)
        if len(ids) - first < high - self.high:
            fresh = _without((self.high + 1, high), ids[first:])
            kept.extend(_Gap(lo, hi, False, after, now) for lo, hi in fresh)
        return self._step(high, kept, found, dead)

    def committed(self, step: CursorChange) -> None:
        """Remember the gaps of a batch that is durable (or changed nothing)."""
        for gap in self._portion or ():
            if not gap.old:
                del self._young[gap.range]
        for each in step.dead:
            self._absent.pop(each, None)
        self._young_stored = step.young
        self._is_proving = False
        self._portion, self._forced = None, []
        for gap in step.memory.values():
            if gap.is_absent:
                self._absent[gap.range] = gap
            elif gap.old:
                self._old.setdefault(gap.holders, []).append(gap)
            else:
                self._young[gap.range] = gap

    # ------------------------------------------------------------ the portion

    def _choose_portion(self, gaps_max: int) -> None:
        """Take the lowest gaps that are young or due."""
        if not (self._young or self._due or self._forced):
            self._portion, self.is_partial, self._is_crowded = [], False, False
            return
        gaps_max = int(min(gaps_max, max(self._gaps_reached, len(self._young))))
        count = min(gaps_max, len(self._due))
        taken = self._due[len(self._due) - count :]
        del self._due[len(self._due) - count :]
        gaps = sorted([*self._young.values(), *taken], key=_LO)
        portion, rest = gaps[:gaps_max], gaps[gaps_max:]
        self._add_due([gap for gap in rest if gap.old])
        self.is_partial = bool(rest or self._due)
        self._is_crowded = self.is_partial or len(self._young) > YOUNG_SHARE * gaps_max
        if self._forced and self.is_partial:
            # Nothing beyond the portion, or events of one transaction would overtake others of it.
            last = portion[-1].lo
            self._add_due([gap for gap in self._forced if gap.lo > last])
            self._forced = [gap for gap in self._forced if gap.lo <= last]
        self._portion = sorted([*portion, *self._forced], key=_LO) if self._forced else portion

    def _adapt_portion(self, limit: int | None) -> None:
        """Do not read twice as many gaps as the limit on events lets a batch reach."""
        portion = self._portion or []
        if limit is None:
            self._gaps_reached = math.inf
        else:
            reached = bisect_right(portion, limit, key=_LO)
            self._gaps_reached = reached + reached // 4 + GAPS_SPARE

    def _return_portion(self) -> None:
        """Undo the choice of the portion."""
        if self._portion is not None:
            forced = {gap.lo for gap in self._forced}
            self._add_due([gap for gap in self._portion if gap.old and gap.lo not in forced])
            self._portion = None

    def _return_absent(self) -> None:
        """Read the gaps again that await the proof: it may have found a row in one."""
        self._is_proving = False
        gaps = [replace(gap, is_absent=False) for gap in self._absent.values()]
        self._absent.clear()
        self._young |= {gap.range: gap for gap in gaps if not gap.old}
        self._add_due([gap for gap in gaps if gap.old])

    def _make_due(self, groups: Iterable[LockHolders | None]) -> None:
        for holders in groups:
            self._add_due(self._old.pop(holders))

    def _add_due(self, gaps: list[_Gap]) -> None:
        if not gaps:
            return
        gaps.sort(key=_LO, reverse=True)
        # Mostly the portion that was taken before.
        in_order = not self._due or gaps[0].lo < self._due[-1].lo
        self._due += gaps
        if not in_order:
            self._due.sort(key=_LO, reverse=True)

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
        if not holders and self._is_proof_due(now):
            dead.append(gap.range)
        elif not holders:
            kept.append(replace(gap, holders=holders, is_absent=True))
        else:
            # Its holders were captured by an earlier batch, so this read
            # began after that, and it may become old.
            old = gap.old or now - gap.seen_at > AGE_S or self._is_crowded
            kept.append(replace(gap, holders=holders, old=old))

    def _is_proof_due(self, now: float) -> bool:
        # While a portion is read, events above it wait for its end.
        return self.is_partial or now - self._proved_at >= self.proof_every_s

    @staticmethod
    def _one_ended(holders: LockHolders, present: LockHolders) -> bool:
        return not holders <= present

    @staticmethod
    def _still_held(holders: LockHolders, present: LockHolders) -> LockHolders:
        return frozenset(h for h in present if h in holders or h.startswith("-1/"))

    def _step(
        self, high: int, kept: list[_Gap], found_ids: list[int], dead: list[Range]
    ) -> CursorChange:
        young = self._young_stored
        if not (self._portion or kept or dead):
            # As in most batches.
            moved = high != self.high
            return CursorChange(high, young, (), (), (), (), False, moved, {})
        read_young, read_old = _split(self._portion or ())
        kept_young, kept_old = _split(kept)
        proven_young, proven_old = _split(self._absent[r] for r in dead if r in self._absent)
        closed = read_young - kept_young | proven_young
        opened = kept_young - read_young
        if closed or opened:
            young = tuple(sorted({*young} - closed | opened))
        old_closed = read_old - kept_old | proven_old
        old_opened = kept_old - read_old
        return CursorChange(
            high=high,
            young=young,
            found=_as_ranges(sorted(found_ids)),
            dead=tuple(sorted(dead)),
            old_closed=tuple(sorted(old_closed)),
            old_opened=tuple(sorted(old_opened)),
            young_changed=bool(closed or opened),
            changed=high != self.high or bool(closed or opened or old_closed or old_opened),
            memory={g.range: g for g in kept},
        )


def _split(gaps: Iterable[_Gap]) -> tuple[set[Range], set[Range]]:
    """The ranges of the young gaps, and those of the old ones."""
    young: set[Range] = set()
    old: set[Range] = set()
    for gap in gaps:
        (old if gap.old else young).add((gap.lo, gap.hi))
    return young, old


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
