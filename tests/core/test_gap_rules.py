"""Every rule of `outbox.core.sequencing.gaps` is necessary: without it, a violation is found.

Each mutant is found by the same random histories that the tracker passes in `test_gaps`, so these
tests prove that the model detects violations.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from outbox.core.sequencing.gaps import AGE_S, GapTracker
from tests.core.cursor_model import NO_FAULTS, Faults
from tests.core.invariants import Violation
from tests.core.random_walk import hunt_cursor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.core.sequencing.gaps import CursorChange, CursorState, LockHolders, Range

pytestmark = pytest.mark.system


class DropsGaps(GapTracker):
    """The naive cursor: treats a missing id as gone forever."""

    def close_batch(
        self, ids: Sequence[int], cut: bool, after: LockHolders, now: float
    ) -> CursorChange:
        step = super().close_batch(ids, cut, after, now)
        return replace(step, young=(), dead=(*step.dead, *step.young), memory={})


class ClosesGapsAfterTimeout(GapTracker):
    """The time-out cursor: treats an id missing for a second as gone forever."""

    def _resolve_gap(self, gap, limit, now, retained, dead):  # type: ignore[no-untyped-def]
        if now - gap.seen_at > AGE_S:
            dead.append(gap.range)
        else:
            super()._resolve_gap(gap, limit, now, retained, dead)


class TreatsCutBatchAsWhole(GapTracker):
    """Declares gaps dead that a cut batch did not reach."""

    def close_batch(
        self, ids: Sequence[int], cut: bool, after: LockHolders, now: float
    ) -> CursorChange:
        return super().close_batch(ids, False, after, now)


class ResolvesGapsBeyondCut(GapTracker):
    """Counts an old gap as read although a cut batch did not reach it."""

    def _resolve_gap(self, gap, limit, now, retained, dead):  # type: ignore[no-untyped-def]
        if limit is not None and gap.lo > limit and gap.holders is not None:
            retained.append(replace(gap, holders=self._still_held(gap.holders, self._before)))
        else:
            super()._resolve_gap(gap, limit, now, retained, dead)


class CapturesKnownGapsAfterRead(GapTracker):
    """Captures the holders of known gaps after the read instead of before it."""

    def close_batch(
        self, ids: Sequence[int], cut: bool, after: LockHolders, now: float
    ) -> CursorChange:
        self._before = after
        return super().close_batch(ids, cut, after, now)


class CapturesNewGapsBeforeRead(GapTracker):
    """Captures the holders of new gaps before the read that reveals them."""

    def close_batch(
        self, ids: Sequence[int], cut: bool, after: LockHolders, now: float
    ) -> CursorChange:
        return super().close_batch(ids, cut, self._before, now)


class DoesNotRereadOldGaps(GapTracker):
    """Leaves old gaps out of a read although a holder ended during it."""

    def complete(self, running: LockHolders) -> bool:
        return True


class AgesGapsTooEarly(GapTracker):
    """Ages a gap before a read that began after its holders were captured."""

    def _step(self, high, retained, found, dead):  # type: ignore[no-untyped-def]
        return super()._step(high, [replace(gap, old=True) for gap in retained], found, dead)


class SkipsOldGapsAfterTakeover(GapTracker):
    """Captures holders after a takeover, but leaves old gaps out of the read."""

    def begin_batch(self, state: CursorState, before: LockHolders, now: float) -> None:
        super().begin_batch(state, before, now)
        if before:
            gaps = [replace(gap, holders=before) for gap in self._due if gap.holders is None]
            self._due = [gap for gap in self._due if gap.holders is not None]
            self._old.setdefault(before, []).extend(gaps)


class ReadsBeyondPortion(GapTracker):
    """Reads ids above the cursor although due gaps are left out."""

    def ranges(self, gaps_max: int) -> list[Range]:
        ranges = super().ranges(gaps_max)
        self.is_partial = False
        return ranges


class ResolvesUnreadGaps(GapTracker):
    """Counts all due gaps as read by a portion of them."""

    def close_batch(
        self, ids: Sequence[int], cut: bool, after: LockHolders, now: float
    ) -> CursorChange:
        assert self._portion is not None
        self._portion = sorted([*self._portion, *self._due], key=lambda gap: gap.lo)
        self._due = []
        return super().close_batch(ids, cut, after, now)


class CopiesChangedGaps(GapTracker):
    """Copies the young gaps of the batch before although they changed."""

    def close_batch(
        self, ids: Sequence[int], cut: bool, after: LockHolders, now: float
    ) -> CursorChange:
        step = super().close_batch(ids, cut, after, now)
        return replace(step, young_changed=False)


class WaitsForAbsentHolders(GapTracker):
    """Makes an old gap without holders wait until one of them ends."""

    def begin_batch(self, state: CursorState, before: LockHolders, now: float) -> None:
        super().begin_batch(state, before, now)
        idle = [gap for gap in self._due if gap.holders == frozenset()]
        self._due = [gap for gap in self._due if gap.holders != frozenset()]
        self._old.setdefault(frozenset(), []).extend(idle)


class IgnoresPreparedTransactions(GapTracker):
    """Treats `-1/xid` like any other virtual transaction id."""

    @staticmethod
    def _still_held(holders: LockHolders, present: LockHolders) -> LockHolders:
        return holders & present


# The seed range in which the walk finds the rarest faults without a long search.
FOUND_SOON_FROM: dict[type[GapTracker], int] = {
    TreatsCutBatchAsWhole: 50,
    ResolvesGapsBeyondCut: 590,
    AgesGapsTooEarly: 360,
    CapturesNewGapsBeforeRead: 150,
    SkipsOldGapsAfterTakeover: 90,
}

LOST = "is declared dead"
OVERTAKEN = "overtakes"


def _faults(value: object) -> str | None:
    """Name the faults, so that the test ids differ."""
    if not isinstance(value, Faults):
        return None
    return " ".join(name for name, on in vars(value).items() if on != getattr(NO_FAULTS, name))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tracker", "faults", "violation"),
    [
        (DropsGaps, NO_FAULTS, LOST),
        (ClosesGapsAfterTimeout, NO_FAULTS, LOST),
        (TreatsCutBatchAsWhole, NO_FAULTS, LOST),
        (ResolvesGapsBeyondCut, NO_FAULTS, OVERTAKEN),
        (CapturesKnownGapsAfterRead, NO_FAULTS, LOST),
        (CapturesNewGapsBeforeRead, NO_FAULTS, LOST),
        (DoesNotRereadOldGaps, NO_FAULTS, OVERTAKEN),
        (AgesGapsTooEarly, NO_FAULTS, OVERTAKEN),
        (SkipsOldGapsAfterTakeover, NO_FAULTS, OVERTAKEN),
        (ReadsBeyondPortion, NO_FAULTS, OVERTAKEN),
        (ResolvesUnreadGaps, NO_FAULTS, LOST),
        (CopiesChangedGaps, NO_FAULTS, "an id vanishes"),
        (WaitsForAbsentHolders, NO_FAULTS, "gaps stay open"),
        (IgnoresPreparedTransactions, NO_FAULTS, LOST),
        (GapTracker, Faults(one_snapshot=True), LOST),
        (GapTracker, Faults(keeps_state=True), "sequenced twice"),
        (GapTracker, Faults(keeps_holders=True), f"an id vanishes|{OVERTAKEN}"),
        (GapTracker, Faults(trusts_lost_commits=True), OVERTAKEN),
        (GapTracker, Faults(trusts_locks=True), OVERTAKEN),
    ],
    ids=_faults,
)
def test_a_tracker_without_this_rule_violates_the_model(
    tracker: type[GapTracker], faults: Faults, violation: str
) -> None:
    with pytest.raises(Violation, match=violation):
        hunt_cursor(5000, tracker, faults, first_seed=FOUND_SOON_FROM.get(tracker, 0))
