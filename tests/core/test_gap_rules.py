"""Every rule of `outbox.core.sequencing.gaps` is needed: left out, it is caught.

Each mutant is found by the same random histories that the tracker survives in
`test_gaps`, so these tests show that the model has teeth.
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

    from outbox.core.sequencing.gaps import CursorState, Holders, Step


class DropsGaps(GapTracker):
    """The naive cursor: what is missing now will never come."""

    def close(self, ids: Sequence[int], cut: bool, after: Holders, now: float) -> Step:
        step = super().close(ids, cut, after, now)
        return replace(step, young=(), dead=(*step.dead, *step.young), memory={})


class GivesUpInTime(GapTracker):
    """The time-out cursor: what is missing for a second will never come."""

    def _settle(self, gap, limit, now, kept, dead):  # type: ignore[no-untyped-def]
        if now - gap.seen_at > AGE_S:
            dead.append(gap.range)
        else:
            super()._settle(gap, limit, now, kept, dead)


class ReadsCutBatchesAsWhole(GapTracker):
    """A cut batch declares gaps dead that it did not reach."""

    def close(self, ids: Sequence[int], cut: bool, after: Holders, now: float) -> Step:
        return super().close(ids, False, after, now)


class SettlesWhatACutDidNotReach(GapTracker):
    """An old gap that a cut batch did not reach counts as read."""

    def _settle(self, gap, limit, now, kept, dead):  # type: ignore[no-untyped-def]
        if limit is not None and gap.lo > limit and gap.holders is not None:
            kept.append(replace(gap, holders=self._still_there(gap.holders, self._before)))
        else:
            super()._settle(gap, limit, now, kept, dead)


class LooksAfterTheRead(GapTracker):
    """Holders of known gaps are captured after the read instead of before it."""

    def close(self, ids: Sequence[int], cut: bool, after: Holders, now: float) -> Step:
        self._before = after
        return super().close(ids, cut, after, now)


class LooksBeforeTheRead(GapTracker):
    """Holders of new gaps are captured before the read that uncovers them."""

    def close(self, ids: Sequence[int], cut: bool, after: Holders, now: float) -> Step:
        return super().close(ids, cut, self._before, now)


class NeverReadsAgain(GapTracker):
    """Old gaps are left out of a read although a holder ended during it."""

    def complete(self, running: Holders) -> bool:
        return True


class AgesAtOnce(GapTracker):
    """A gap becomes old before a read that began after its holders were captured."""

    def _step(self, high, kept, found, dead):  # type: ignore[no-untyped-def]
        return super()._step(high, [replace(gap, old=True) for gap in kept], found, dead)


class TrustsTheTable(GapTracker):
    """After a take-over, holders are captured, but old gaps are left out of the read."""

    def begin(self, state: CursorState, before: Holders, now: float) -> None:
        super().begin(state, before, now)
        if before and None in self._old:
            gaps = {r: replace(gap, holders=before) for r, gap in self._old.pop(None).items()}
            self._old.setdefault(before, {}).update(gaps)
            self._due.discard(None)


class WaitsForNobody(GapTracker):
    """An old gap without holders waits until one of them ends."""

    def begin(self, state: CursorState, before: Holders, now: float) -> None:
        super().begin(state, before, now)
        self._due.discard(frozenset())


class KnowsNoPreparedTransactions(GapTracker):
    """`-1/xid` is a name like any other."""

    @staticmethod
    def _still_there(holders: Holders, present: Holders) -> Holders:
        return holders & present


# Where the hunt finds the rarest of them without a long search.
FOUND_SOON_FROM = {SettlesWhatACutDidNotReach: 470, AgesAtOnce: 460}

LOST = "is declared dead"
OVERTAKEN = "overtakes"


def _faults(value: object) -> str | None:
    """Faults by name, so that the tests are told apart."""
    if not isinstance(value, Faults):
        return None
    return " ".join(name for name, on in vars(value).items() if on != getattr(NO_FAULTS, name))


@pytest.mark.parametrize(
    ("tracker", "faults", "violation"),
    [
        (DropsGaps, NO_FAULTS, LOST),
        (GivesUpInTime, NO_FAULTS, LOST),
        (ReadsCutBatchesAsWhole, NO_FAULTS, LOST),
        (SettlesWhatACutDidNotReach, NO_FAULTS, OVERTAKEN),
        (LooksAfterTheRead, NO_FAULTS, LOST),
        (LooksBeforeTheRead, NO_FAULTS, LOST),
        (NeverReadsAgain, NO_FAULTS, OVERTAKEN),
        (AgesAtOnce, NO_FAULTS, OVERTAKEN),
        (TrustsTheTable, NO_FAULTS, OVERTAKEN),
        (WaitsForNobody, NO_FAULTS, "gaps stay open"),
        (KnowsNoPreparedTransactions, NO_FAULTS, LOST),
        (GapTracker, Faults(one_snapshot=True), LOST),
        (GapTracker, Faults(keeps_state=True), "sequenced twice"),
        (GapTracker, Faults(keeps_holders=True), "an id vanishes|a change would not be written"),
        (GapTracker, Faults(trusts_lost_commits=True), OVERTAKEN),
        (GapTracker, Faults(trusts_locks=True), OVERTAKEN),
    ],
    ids=_faults,
)
def test_without_this_rule(tracker: type[GapTracker], faults: Faults, violation: str) -> None:
    with pytest.raises(Violation, match=violation):
        hunt_cursor(5000, tracker, faults, first_seed=FOUND_SOON_FROM.get(tracker, 0))
