"""The gap-aware cursor: which ids to read, and which will never appear.

Ids come from a sequence, so a lower id can commit after a higher one.  A
cursor that only remembers the highest id loses the late one; a cursor that
waits for every transaction in flight stalls behind the longest of them and
can turn two events of one key around.  This one does neither.

**The argument.**  `nextval` takes a RowExclusiveLock on the sequence before it
allocates, and the top transaction keeps it until its rows are visible (over
savepoints and PREPARE TRANSACTION too).  So an id that is missing below the
highest one seen, a *gap*, belongs to one of the transactions that hold this
lock now, its *holders*.  When none of them holds it any more, one more read in
a fresh snapshot decides: what is still absent rolled back.  No time-out is
part of this.

**Order of looking.**  Events of one key keep their order if nobody reads past
a gap whose row is already visible.  Hence:

* holders of a gap known before a batch are captured before its read; those of
  a gap that the read itself uncovers, after it;
* an old gap may be left out of a read only if all its holders are *running*
  after that read, which is to say that a later snapshot still takes them for
  unfinished; otherwise it is read again with the gap, before anything is
  sequenced.  (The lock alone does not tell: rows are visible before it is let
  go, and behind a COMMIT PREPARED that drops tables, for a long time.)
* a read that was cut says nothing about ids at or beyond its last one: gaps
  there stay due;
* a gap becomes old only after a read that began after its holders were
  captured;
* holders are memory, never state: whoever is not the one that wrote last
  forgets all of them (`forget`) and starts from the tables.

Young gaps are read with every batch.  After a second they become old and are
read only when one of their holders ended, so a transaction that stays open for
an hour costs nothing per batch.

A prepared transaction that survived a crash holds its lock as `-1/xid`, a name
that no capture before the crash can have seen; it counts as a holder of every
gap.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

Range: TypeAlias = tuple[int, int]
"""Ids from the first to the second, both included."""

Holders: TypeAlias = frozenset[str]
"""`pg_locks.virtualtransaction` of everyone who holds the sequence's lock."""

AGE_S = 1.0
"""How long a gap is read with every batch before it becomes old."""


@dataclass(frozen=True, slots=True)
class CursorState:
    """What the tables say: all a new sequencer has to start from."""

    batch: int = 0
    high: int = 0
    young: tuple[Range, ...] = ()
    old: tuple[Range, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """What one batch does to the cursor; to be written in its transaction."""

    high: int
    young: tuple[Range, ...]
    found: tuple[Range, ...]
    """Late ids: they were gaps, and are sequenced now."""
    dead: tuple[Range, ...]
    """Ids proven never to appear."""
    old_closed: tuple[Range, ...]
    """Rows to delete from the table of old gaps …"""
    old_opened: tuple[Range, ...]
    """… and to insert into it."""
    moved: bool
    """False when the tables need no change."""
    memory: dict[Range, _Gap] = field(repr=False)


@dataclass(frozen=True, slots=True)
class _Gap:
    """An open gap; `holders` is None while nobody has looked."""

    lo: int
    hi: int
    old: bool
    holders: Holders | None
    seen_at: float

    @property
    def range(self) -> Range:
        return (self.lo, self.hi)


class GapTracker:
    """The cursor's memory between batches, and the arithmetic of one batch.

    One batch of who leads, each line that reads in a snapshot of its own:

        tracker.begin(state, holders, now)      # holders: before the read
        while True:
            ids, after = read(tracker.high, tracker.ranges(), limit)
                                                # holders: after its snapshot was taken
            if not tracker.left_out or tracker.complete(running()): break
        step = tracker.close(ids, cut, after, now)
        … write step, unless somebody else leads by now; commit …
        tracker.committed(step)

    Anything else than a known commit must be answered with `forget`.
    """

    def __init__(self) -> None:
        self.high = 0
        # Whether the gaps below are those of the tables; see `forget`.
        self._known = False
        self._young: dict[Range, _Gap] = {}
        # By their holders, so that a batch looks at a few sets of holders and
        # not at each of a hundred thousand gaps.
        self._old: dict[Holders | None, dict[Range, _Gap]] = {}
        self._due: set[Holders | None] = set()
        self._before: Holders = frozenset()

    def forget(self) -> None:
        """Drop everything: someone else wrote, or a commit is in doubt."""
        self._known = False

    # ------------------------------------------------------------ one batch

    def begin(self, state: CursorState, before: Holders, now: float) -> None:
        """Start a batch.

        Args:
            state: the tables; who remembers the last batch has them in memory,
                and looks at `high` alone.
            before: the holders of this moment.
            now: monotonic seconds.
        """
        self.high = state.high
        self._before = before
        if not self._known:
            self._young = {r: _Gap(*r, False, None, now) for r in state.young}
            self._old = {None: {r: _Gap(*r, True, None, now) for r in state.old}}
            self._known = True
        # Without holders: nobody has looked yet, or nobody is left.
        self._due = {h for h in self._old if not h or self._one_ended(h, before)}

    def ranges(self) -> list[Range]:
        """The gaps to read besides everything above `high`."""
        return sorted(gap.range for gap in self._to_read())

    @property
    def left_out(self) -> bool:
        """Whether a gap is left out of the read, so that `complete` has to be asked."""
        return len(self._due) < len(self._old)

    def complete(self, running: Holders) -> bool:
        """Whether the read may be used; if not, read again with more ranges.

        `running`: the holders that a snapshot taken after the read takes for
        unfinished, so that the read saw none of their rows.
        """
        late = {h for h in self._old if h not in self._due and h and self._one_ended(h, running)}
        self._due |= late
        return not late

    def close(self, ids: Sequence[int], cut: bool, after: Holders, now: float) -> Step:
        """Work out what the batch did.

        Args:
            ids: what is sequenced, ascending.
            cut: there may be more to read at or beyond the last id.
            after: the holders seen after the read.
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
                self._settle(replace(gap, lo=lo, hi=hi), limit, now, kept, dead)
        high = max(self.high, ids[-1]) if ids else self.high
        fresh = ids[bisect_right(ids, self.high) :]
        kept.extend(
            _Gap(lo, hi, False, after, now) for lo, hi in _without((self.high + 1, high), fresh)
        )
        return self._step(high, kept, found, dead)

    def committed(self, step: Step) -> None:
        """The batch is durable (or changed nothing): remember its gaps."""
        self._young = {}
        for holders in self._due:
            del self._old[holders]
        for gap in step.memory.values():
            gaps = self._old.setdefault(gap.holders, {}) if gap.old else self._young
            gaps[gap.range] = gap

    # ------------------------------------------------------------ the rules

    def _settle(
        self, gap: _Gap, limit: int | None, now: float, kept: list[_Gap], dead: list[Range]
    ) -> None:
        """Decide about a gap, or what is left of it, that was to be read and is absent."""
        if limit is not None and gap.lo > limit:
            # The cut read did not reach it; unchanged, it is due again.
            kept.append(gap)
            return
        if gap.holders is None:
            kept.append(replace(gap, holders=self._before))
            return
        holders = self._still_there(gap.holders, self._before)
        if not holders:
            dead.append(gap.range)
        else:
            # Its holders were captured by an earlier batch, so this read
            # began after that, and it may become old.
            old = gap.old or now - gap.seen_at > AGE_S
            kept.append(replace(gap, holders=holders, old=old))

    @staticmethod
    def _one_ended(holders: Holders, present: Holders) -> bool:
        return not holders <= present

    @staticmethod
    def _still_there(holders: Holders, present: Holders) -> Holders:
        return frozenset(h for h in present if h in holders or h.startswith("-1/"))

    def _to_read(self) -> Iterator[_Gap]:
        yield from self._young.values()
        for holders in self._due:
            yield from self._old[holders].values()

    def _step(self, high: int, kept: list[_Gap], found: list[int], dead: list[Range]) -> Step:
        young = tuple(sorted(g.range for g in kept if not g.old))
        old = {g.range for g in kept if g.old}
        old_before = {g.range for g in self._to_read() if g.old}
        return Step(
            high=high,
            young=young,
            found=_as_ranges(sorted(found)),
            dead=tuple(sorted(dead)),
            old_closed=tuple(sorted(old_before - old)),
            old_opened=tuple(sorted(old - old_before)),
            moved=high != self.high or {*young} != self._young.keys() or old != old_before,
            memory={g.range: g for g in kept},
        )


def _without(whole: Range, ids: Iterable[int]) -> list[Range]:
    """What is left of a range without the given ascending ids inside it."""
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
    """Ascending ids as ranges."""
    ranges: list[Range] = []
    for i in ids:
        if ranges and ranges[-1][1] == i - 1:
            ranges[-1] = (ranges[-1][0], i)
        else:
            ranges.append((i, i))
    return tuple(ranges)
