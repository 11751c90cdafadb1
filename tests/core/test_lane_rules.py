"""Every rule of `outbox.core.delivery.lane` is needed: left out, it is caught.

Each mutant is found by the same random histories that the lane survives in
`test_lane`, so these tests show that the model has teeth.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from outbox.core.delivery.commands import DeadRange, Gate, Progress, Record, Send, Wait
from outbox.core.delivery.lane import Lane, _Busy
from outbox.core.delivery.retry_state import Head
from outbox.core.model.response import Verdict
from tests.core.invariants import Violation
from tests.core.lane_model import NO_FAULTS, Faults
from tests.core.random_walk import hunt_lane

if TYPE_CHECKING:
    from collections.abc import Iterable

    from outbox.core.delivery.commands import Command
    from outbox.core.delivery.message import Delivery


class SendsTheNextOneMeanwhile(Lane):
    """While the head waits for its retry, the number after it is sent."""

    def next(self, now: float, gate: Gate = Gate.OPEN) -> Command:
        command = super().next(now, gate)
        queue = self._hand.queue
        if isinstance(command, Wait) and len(queue) > 1:
            queue[0], queue[1] = queue[1], queue[0]
            self._head = Head()
            command = super().next(now, gate)
        return command


class TakesWhatDoesNotFollow(Lane):
    """What it is given goes behind what is in hand, whatever is missing in between."""

    def given(self, deliveries: Iterable[Delivery]) -> None:
        for each in deliveries:
            if each.seq > self._hand.fetched_seq:
                self._hand._take(each)


class SendsTwoAtATime(Lane):
    """A request that is out does not keep the next one back."""

    def next(self, now: float, gate: Gate = Gate.OPEN) -> Command:
        command = super().next(now, gate)
        self._busy = None
        return command


class AcknowledgesBeforeTheAnswer(Lane):
    """What is out counts as delivered."""

    def checkpoint(self) -> Progress:
        if self._busy is _Busy.SENDING and self.committed_seq == self.acked_seq:
            head = self._hand.queue[0]
            return Progress(head.seq, head.seq, head.batch)
        return super().checkpoint()


class CheckpointsWhatWaits(Lane):
    """Successes count as written while they wait for their group."""

    def checkpoint(self) -> Progress:
        floor_batch = self._committed.floor_batch
        return Progress(self._acked, self._delivered, floor_batch, success_at=self._success_at)


class CheckpointsUnwrittenRetries(Lane):
    """Retry state is written down before the attempt that it tells of."""

    def checkpoint(self) -> Progress:
        committed = super().checkpoint()
        if self._head.attempts and self.committed_seq == self.acked_seq:
            return committed._replace(head_seq=self._acked + 1, attempts=self._head.attempts)
        return committed


class GivesUpInPassing(Lane):
    """The end of a delivery may wait for its group, and the lane goes on."""

    def _give_up(self, *what: Any, **more: Any) -> Record:
        record = super()._give_up(*what, **more)
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

    def __init__(self, lane_id: int, progress: Progress, *more: Any, **named: Any) -> None:
        super().__init__(lane_id, progress._replace(head_seq=None), *more, **named)


class KeepsAStaleBudget(Lane):
    """Retry state is not checked to be of the head."""

    def __init__(self, lane_id: int, progress: Progress, *more: Any, **named: Any) -> None:
        super().__init__(lane_id, progress, *more, **named)
        self._head.attempts = progress.attempts


class NamesTheNumberBefore(Lane):
    """`previous_seq` names a number that was given up."""

    def next(self, now: float, gate: Gate = Gate.OPEN) -> Command:
        command = super().next(now, gate)
        if isinstance(command, Send):
            command = command._replace(previous_seq=command.delivery.seq - 1)
        return command


class SleepsOverTheEnd(Lane):
    """The head waits for its retry although it expires before."""

    def next(self, now: float, gate: Gate = Gate.OPEN) -> Command:
        command = super().next(now, gate)
        if isinstance(command, Wait) and self._head.next_attempt_at is not None:
            command = Wait(self._head.next_attempt_at)
        return command


class ChargesEveryAttempt(Lane):
    """A probe before its time counts like any other attempt."""

    def answered(self, *what: Any, **more: Any) -> Record:
        self._free = False
        return super().answered(*what, **more)


class ChargesNoProbe(Lane):
    """A probe is free also when the time of the delivery has come."""

    def next(self, now: float, gate: Gate = Gate.OPEN) -> Command:
        command = super().next(now, gate)
        if isinstance(command, Send):
            self._free = gate is Gate.PROBE
        return command


class ForgetsWhatWasSpent(Lane):
    """Whoever takes over has the attempts, and not those that count."""

    def __init__(self, lane_id: int, progress: Progress, *more: Any, **named: Any) -> None:
        super().__init__(lane_id, progress._replace(spent=0), *more, **named)


class SendsThroughAShutGate(Lane):
    """What is due is sent, whatever its endpoint's health."""

    def next(self, now: float, gate: Gate = Gate.OPEN) -> Command:
        return super().next(now, Gate.OPEN if gate is Gate.SHUT else gate)


class WakesForNothing(Lane):
    """A shut lane waits for the time of its head."""

    def next(self, now: float, gate: Gate = Gate.OPEN) -> Command:
        command = super().next(now, gate)
        due_at = self._head.next_attempt_at or 0.0
        if gate is Gate.SHUT and command is None and due_at > now:
            return Wait(due_at)
        return command


class SleepsWhileShut(Lane):
    """What has expired waits until the endpoint is well again."""

    def next(self, now: float, gate: Gate = Gate.OPEN) -> Command:
        return None if gate is Gate.SHUT else super().next(now, gate)


class KeepsProbesWaiting(Lane):
    """A probe waits for the time of its head."""

    def next(self, now: float, gate: Gate = Gate.OPEN) -> Command:
        return super().next(now, Gate.OPEN if gate is Gate.PROBE else gate)


class CutsWhatIsInFlight(Lane):
    """A cut does not wait for the answer."""

    def next(self, now: float, gate: Gate = Gate.OPEN) -> Command:
        if self._cut is not None and self._busy is _Busy.SENDING:
            self._busy = None
        return super().next(now, gate)


class CutsWhatItHas(Lane):
    """A cut goes no further than what was read."""

    def cut(self, through_seq: int, reason: Any) -> None:
        super().cut(min(through_seq, self._hand.fetched_seq), reason)


class CutsLessTheSecondTime(Lane):
    """A later cut takes the place of one that is still waiting."""

    def cut(self, through_seq: int, reason: Any) -> None:
        self._cut = None
        super().cut(through_seq, reason)


class ReadsWhatIsCut(Lane):
    """What was cut is read again."""

    def _pass(self, *what: Any, **more: Any) -> None:
        fetched_seq = self._hand.fetched_seq
        super()._pass(*what, **more)
        self._hand.fetched_seq = fetched_seq


class CutsInTheWrongPlace(Lane):
    """Reading a range begins where the next delivery lies."""

    def _give_up_range(self, through_seq: int, reason: Any) -> Record:
        record = super()._give_up_range(through_seq, reason)
        assert isinstance(record.dead, DeadRange)
        return record._replace(dead=replace(record.dead, batch=record.dead.batch + 1))


class CountsWhatWasNotSent(Lane):
    """A request that never went out is an attempt."""

    def unsent(self) -> None:
        super().unsent()
        self._head.attempts += 1


class GoesOnThoughBlocked(Lane):
    """Nobody waits for an operator."""

    def next(self, now: float, gate: Gate = Gate.OPEN) -> Command:
        self._blocked = False
        return super().next(now, gate)


class BlocksAndDoesNotSaySo(Lane):
    """The next owner does not know that the lane waits for an operator."""

    def _give_up(self, *what: Any, **more: Any) -> Record:
        return super()._give_up(*what, **more)._replace(blocks=False)


class NeverSaysThatItEnds(Lane):
    """Receivers are not told which delivery is the last."""

    def next(self, now: float, gate: Gate = Gate.OPEN) -> Command:
        command = super().next(now, gate)
        return command._replace(lane_ends=False) if isinstance(command, Send) else command


class EndsBeforeItsTime(Lane):
    """Everything that is sent after the end of the lane is its last delivery."""

    def next(self, now: float, gate: Gate = Gate.OPEN) -> Command:
        command = super().next(now, gate)
        return command._replace(lane_ends=self._ended) if isinstance(command, Send) else command


class SaysSoOnce(Lane):
    """The end is told on the first attempt alone."""

    def next(self, now: float, gate: Gate = Gate.OPEN) -> Command:
        command = super().next(now, gate)
        if isinstance(command, Send) and command.attempt > 1:
            command = command._replace(lane_ends=False)
        return command


class AcknowledgesAllThatWasSent(Lane):
    """Whatever a receiver accepted of it."""

    def batch_answered(
        self, batch: Any, accepted_seq: int, verdict: Verdict, *what: Any, **more: Any
    ) -> Any:
        if verdict is Verdict.DELIVERED:
            accepted_seq = batch[-1].seq
        return super().batch_answered(batch, accepted_seq, verdict, *what, **more)


class SendsWhatFailedTogetherAgain(Lane):
    """Who is to blame is not found out."""

    def _together(self, batch_max: int, gate: Gate, now: float) -> Any:
        self._batch_size.now = 50
        attempts, self._head.attempts = self._head.attempts, 0
        batch = super()._together(batch_max, gate, now)
        self._head.attempts = attempts
        return batch


class ForgetsWhatWentTogether(Lane):
    """Only its head was sent."""

    def batch_answered(self, *what: Any, **more: Any) -> Any:
        records = super().batch_answered(*what, **more)
        self._batch_size.sent_through_seq = 0
        return records


class TakesExpiredOnesAlong(Lane):
    """The head has not expired, so the others go."""

    def _together(self, batch_max: int, gate: Gate, now: float) -> Any:
        return super()._together(batch_max, gate, 0.0)


class EndsWithTheFirst(Lane):
    """The end is looked for in the head alone."""

    def next(self, now: float, gate: Gate = Gate.OPEN) -> Command:
        command = super().next(now, gate)
        if isinstance(command, Send):
            ends = self._ended and command.delivery.seq == self._last_seq
            command = command._replace(lane_ends=ends)
        return command


class IsNeverMovedByASuccess(Lane):
    """It is stalled since it first owed something."""

    def answered(self, *what: Any, **more: Any) -> Record:
        since = self._stalled_since
        record = super().answered(*what, **more)
        self._stalled_since = since and self._stalled_since and since
        return record


class OwesNothingAndIsStalled(Lane):
    """What is given up leaves the lane stalled."""

    def _end_of(self, *what: Any, **more: Any) -> Record:
        since = self._stalled_since
        record = super()._end_of(*what, **more)
        self._stalled_since = since
        return record


class IsStalledSinceLately(Lane):
    """Every new delivery moves the time."""

    def offered(self, last_seq: int, now: float) -> None:
        super().offered(last_seq, now)
        self._stalled_since = now if self.owed else None


class CountsWhatItWasTold(Lane):
    """What was read before it was offered is not counted."""

    def fetched(self, deliveries: Any) -> None:
        told = self._last_seq
        super().fetched(deliveries)
        self._last_seq = told


class IsDrainedTooSoon(Lane):
    """Nothing is owed, and the end of the last delivery is not on disk."""

    @property
    def drained(self) -> bool:
        return not self.owed


def _faults(value: object) -> str | None:
    """Faults by name, so that the tests are told apart."""
    if not isinstance(value, Faults):
        return None
    return " ".join(name for name, on in vars(value).items() if on != getattr(NO_FAULTS, name))


@pytest.mark.parametrize(
    ("lane", "faults", "violation"),
    [
        (SendsTheNextOneMeanwhile, NO_FAULTS, "is sent before|ends, and"),
        (TakesWhatDoesNotFollow, NO_FAULTS, "is sent before"),
        (SendsTwoAtATime, NO_FAULTS, "two requests|is due and not sent"),
        (AcknowledgesBeforeTheAnswer, NO_FAULTS, "is passed without an outcome"),
        (CheckpointsWhatWaits, NO_FAULTS, "is passed without an outcome"),
        (CheckpointsUnwrittenRetries, NO_FAULTS, "attempts are not what is logged"),
        (GivesUpInPassing, NO_FAULTS, "is sent before"),
        (FailsInPassing, NO_FAULTS, "forgets its attempts|is due and not sent"),
        (ForgetsItsRetries, NO_FAULTS, "forgets its attempts|are not what is logged"),
        (KeepsAStaleBudget, NO_FAULTS, "forgets its attempts"),
        (NamesTheNumberBefore, NO_FAULTS, "names"),
        (SleepsOverTheEnd, NO_FAULTS, "has to wait until"),
        (ChargesEveryAttempt, NO_FAULTS, "a free attempt"),
        (ChargesNoProbe, NO_FAULTS, "an attempt is not charged|ends at another time"),
        (ForgetsWhatWasSpent, NO_FAULTS, "attempt is charged|is not charged|at another time"),
        (SendsThroughAShutGate, NO_FAULTS, "has to wait|through a shut gate"),
        (WakesForNothing, NO_FAULTS, "has to wait"),
        (SleepsWhileShut, NO_FAULTS, "is not given up|is gone|is not cut|has to wait"),
        (KeepsProbesWaiting, NO_FAULTS, "is due and not sent"),
        (CutsWhatIsInFlight, NO_FAULTS, "two things at a time"),
        (CutsWhatItHas, NO_FAULTS, "is not cut"),
        (CutsLessTheSecondTime, NO_FAULTS, "is not cut"),
        (ReadsWhatIsCut, NO_FAULTS, "although it has ended"),
        (CutsInTheWrongPlace, NO_FAULTS, "reading a range begins too late"),
        (CountsWhatWasNotSent, NO_FAULTS, "forgets its attempts|are not what is logged"),
        (GoesOnThoughBlocked, NO_FAULTS, "does not wait for an operator"),
        (BlocksAndDoesNotSaySo, NO_FAULTS, "does it block"),
        (NeverSaysThatItEnds, NO_FAULTS, "wrong about the end"),
        (EndsBeforeItsTime, NO_FAULTS, "wrong about the end"),
        (SaysSoOnce, NO_FAULTS, "wrong about the end"),
        (AcknowledgesAllThatWasSent, NO_FAULTS, "a success is a failure"),
        (SendsWhatFailedTogetherAgain, NO_FAULTS, "is to go alone"),
        (ForgetsWhatWentTogether, NO_FAULTS, "was sent before"),
        (TakesExpiredOnesAlong, NO_FAULTS, "has expired"),
        (EndsWithTheFirst, NO_FAULTS, "wrong about the end"),
        (Lane, Faults(forgets_blocks=True), "does not wait for an operator"),
        (Lane, Faults(gives_up_alone=True), "has no outcome|without an outcome"),
        (Lane, Faults(reads_no_tail=True), "although it has ended|has two outcomes"),
        (Lane, Faults(trusts_the_receiver=True), "was sent before|refused as a copy"),
    ],
    ids=_faults,
)
def test_without_this_rule(lane: type[Lane], faults: Faults, violation: str) -> None:
    with pytest.raises(Violation, match=violation):
        hunt_lane(2000, lane, replace(faults, says_so=False))


@pytest.mark.parametrize(
    ("lane", "violation"),
    [
        (IsNeverMovedByASuccess, "stalled for another time"),
        (OwesNothingAndIsStalled, "stalled for another time"),
        (IsStalledSinceLately, "stalled for another time"),
        (CountsWhatItWasTold, "owes another number"),
        (IsDrainedTooSoon, "drained or not"),
    ],
)
def test_a_lane_that_is_wrong_about_itself(lane: type[Lane], violation: str) -> None:
    with pytest.raises(Violation, match=violation):
        hunt_lane(300, lane)
