"""Every rule of `outbox.core.lane` is needed: left out, it is caught.

Each mutant is found by the same random histories that the lane survives in
`test_lane`, so these tests show that the model has teeth.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from outbox.core.lane import Lane, _Busy
from outbox.core.steps import Progress, Record, Send, Wait
from tests.core.lane_model import NO_FAULTS, Faults
from tests.core.promises import Violation
from tests.core.wander import hunt_lane

if TYPE_CHECKING:
    from outbox.core.steps import Command


class SendsTheNextOneMeanwhile(Lane):
    """While the head waits for its retry, the number after it is sent."""

    def next(self, now: float) -> Command:
        command = super().next(now)
        if isinstance(command, Wait) and len(self._queue) > 1:
            self._queue[0], self._queue[1] = self._queue[1], self._queue[0]
            self._reset_retry()
            command = super().next(now)
        return command


class SendsTwoAtATime(Lane):
    """A request that is out does not keep the next one back."""

    def next(self, now: float) -> Command:
        command = super().next(now)
        self._busy = None
        return command


class AcknowledgesBeforeTheAnswer(Lane):
    """What is out counts as delivered."""

    def checkpoint(self) -> Progress:
        if self._busy is _Busy.SENDING and self.committed_seq == self.acked_seq:
            head = self._queue[0]
            return Progress(head.seq, head.seq, head.batch)
        return super().checkpoint()


class CheckpointsWhatWaits(Lane):
    """Successes count as written while they wait for their group."""

    def checkpoint(self) -> Progress:
        return Progress(self._acked, self._delivered, self._committed.floor_batch)


class CheckpointsUnwrittenRetries(Lane):
    """Retry state is written down before the attempt that it tells of."""

    def checkpoint(self) -> Progress:
        committed = super().checkpoint()
        if self._attempts and self.committed_seq == self.acked_seq:
            return replace(committed, head_seq=self._acked + 1, attempts=self._attempts)
        return committed


class GivesUpInPassing(Lane):
    """The end of a delivery may wait for its group, and the lane goes on."""

    def _give_up(self, *what: Any) -> Record:
        record = super()._give_up(*what)
        self._busy = None
        return record


class FailsInPassing(Lane):
    """A failure may wait for its group, and the lane goes on."""

    def answered(self, *what: Any, **more: Any) -> Record:
        record = super().answered(*what, **more)
        if record.dead is None:
            self._busy = None
        return record


class ForgetsItsRetries(Lane):
    """Whoever takes over starts with a new budget."""

    def __init__(self, lane_id: int, progress: Progress, *more: Any) -> None:
        super().__init__(lane_id, replace(progress, head_seq=None), *more)


class KeepsAStaleBudget(Lane):
    """Retry state is not checked to be of the head."""

    def __init__(self, lane_id: int, progress: Progress, *more: Any) -> None:
        super().__init__(lane_id, progress, *more)
        self._attempts = progress.attempts


class NamesTheNumberBefore(Lane):
    """`previous_seq` names a number that was given up."""

    def next(self, now: float) -> Command:
        command = super().next(now)
        if isinstance(command, Send):
            command = replace(command, previous_seq=command.delivery.seq - 1)
        return command


class SleepsOverTheEnd(Lane):
    """The head waits for its retry although it expires before."""

    def next(self, now: float) -> Command:
        command = super().next(now)
        if isinstance(command, Wait):
            assert self._next_attempt_at is not None
            command = Wait(self._next_attempt_at)
        return command


def _faults(value: object) -> str | None:
    """Faults by name, so that the tests are told apart."""
    if not isinstance(value, Faults):
        return None
    return " ".join(name for name, on in vars(value).items() if on != getattr(NO_FAULTS, name))


@pytest.mark.parametrize(
    ("lane", "faults", "violation"),
    [
        (SendsTheNextOneMeanwhile, NO_FAULTS, "is sent before|ends, and"),
        (SendsTwoAtATime, NO_FAULTS, "two requests"),
        (AcknowledgesBeforeTheAnswer, NO_FAULTS, "is passed without an outcome"),
        (CheckpointsWhatWaits, NO_FAULTS, "is passed without an outcome"),
        (CheckpointsUnwrittenRetries, NO_FAULTS, "attempts are not what is logged"),
        (GivesUpInPassing, NO_FAULTS, "is sent before"),
        (FailsInPassing, NO_FAULTS, "forgets its attempts"),
        (ForgetsItsRetries, NO_FAULTS, "forgets its attempts"),
        (KeepsAStaleBudget, NO_FAULTS, "forgets its attempts"),
        (NamesTheNumberBefore, NO_FAULTS, "names"),
        (SleepsOverTheEnd, NO_FAULTS, "it waits for what expires"),
        (Lane, Faults(gives_up_alone=True), "has no outcome|without an outcome"),
        (Lane, Faults(reads_no_tail=True), "although it has ended"),
        (Lane, Faults(trusts_the_receiver=True), "was sent before|refused as a copy"),
    ],
    ids=_faults,
)
def test_without_this_rule(lane: type[Lane], faults: Faults, violation: str) -> None:
    with pytest.raises(Violation, match=violation):
        hunt_lane(300, lane, replace(faults, says_so=False))
