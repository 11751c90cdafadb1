"""Every rule of `outbox.core.delivery.lane` is necessary: without it, a violation is found.

Each mutant is found by the same random histories that the lane passes in `test_lane`, so these
tests prove that the model detects violations.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from outbox.core.delivery.commands import DeadRange, Gate, Progress, Record, Send, Wait
from outbox.core.delivery.lane import Lane
from outbox.core.delivery.owned_lane import Busy
from outbox.core.delivery.retry_state import RetryState
from outbox.core.model.response_policy import AttemptOutcome
from tests.core.invariants import Violation
from tests.core.lane_model import NO_FAULTS, Faults
from tests.core.random_walk import hunt_lane

if TYPE_CHECKING:
    from outbox.core.delivery.commands import Command, LaneSnapshot


class SendsNextDuringRetryWait(Lane):
    """Sends the next delivery while the head waits for its retry."""

    def next(self, now: float, gate: Gate = Gate.OPEN) -> Command:
        command = super().next(now, gate)
        queue = self._buffer.queue
        if isinstance(command, Wait) and len(queue) > 1:
            queue[0], queue[1] = queue[1], queue[0]
            self._retry = RetryState()
            command = super().next(now, gate)
        return command


class SendsConcurrently(Lane):
    """Sends the next request while one is in flight."""

    def next(self, now: float, gate: Gate = Gate.OPEN) -> Command:
        command = super().next(now, gate)
        self._busy = None
        return command


class AcknowledgesBeforeTheResponse(Lane):
    """Counts an in-flight request as delivered."""

    def checkpoint(self) -> Progress:
        if self._busy is Busy.SENDING and self.committed_seq == self.acked_seq:
            head = self._buffer.queue[0]
            return Progress(head.seq, head.seq, head.batch)
        return super().checkpoint()


class CheckpointsUnwrittenSuccesses(Lane):
    """Counts successes as written while they wait for their group commit."""

    def checkpoint(self) -> Progress:
        floor_batch = self._committed.floor_batch
        return Progress(
            self.acked_seq, self.delivered_seq, floor_batch, success_at=self._success_at
        )


class CheckpointsUnwrittenRetries(Lane):
    """Writes retry state before the attempt that it describes."""

    def checkpoint(self) -> Progress:
        committed = super().checkpoint()
        if self._retry.attempts and self.committed_seq == self.acked_seq:
            return committed._replace(retry_seq=self.acked_seq + 1, attempts=self._retry.attempts)
        return committed


class DoesNotAwaitDeadLetterWrite(Lane):
    """Goes on before a dead letter is written."""

    def _dead_letter(self, *args: Any, **more: Any) -> Record:
        record = super()._dead_letter(*args, **more)
        self._busy = None
        return record


class DoesNotAwaitFailureWrite(Lane):
    """Goes on before a failed attempt is written."""

    def record_result(self, *args: Any, **more: Any) -> Record:
        record = super().record_result(*args, **more)
        if record.dead is None:
            self._busy = None
        return record


class ResetsBudgetOnTakeover(Lane):
    """Gives every new owner a new retry budget."""

    def __init__(self, snapshot: LaneSnapshot, *more: Any, **named: Any) -> None:
        progress = snapshot.progress._replace(retry_seq=None)
        super().__init__(replace(snapshot, progress=progress), *more, **named)


class KeepsStaleRetryState(Lane):
    """Does not check that retry state belongs to the head."""

    def __init__(self, snapshot: LaneSnapshot, *more: Any, **named: Any) -> None:
        super().__init__(snapshot, *more, **named)
        self._retry.attempts = snapshot.progress.attempts


class LinksToDeadLetter(Lane):
    """Sets `previous_seq` to a dead-lettered number."""

    def next(self, now: float, gate: Gate = Gate.OPEN) -> Command:
        command = super().next(now, gate)
        if isinstance(command, Send):
            command = command._replace(previous_seq=command.delivery.seq - 1)
        return command


class IgnoresExpiryDuringRetryWait(Lane):
    """Waits for the head's retry although its delivery expires first."""

    def next(self, now: float, gate: Gate = Gate.OPEN) -> Command:
        command = super().next(now, gate)
        if isinstance(command, Wait) and self._retry.next_attempt_at is not None:
            command = Wait(self._retry.next_attempt_at)
        return command


class CountsFreeProbes(Lane):
    """Counts a free probe like any other attempt."""

    def record_result(self, *args: Any, **more: Any) -> Record:
        self._is_free_probe = False
        return super().record_result(*args, **more)


class CountsNoProbes(Lane):
    """Does not count a probe whose delivery is due."""

    def next(self, now: float, gate: Gate = Gate.OPEN) -> Command:
        command = super().next(now, gate)
        if isinstance(command, Send):
            self._is_free_probe = gate is Gate.PROBE
        return command


class ForgetsSpentAttempts(Lane):
    """Gives every new owner the attempts, but not the count against the budget."""

    def __init__(self, snapshot: LaneSnapshot, *more: Any, **named: Any) -> None:
        progress = snapshot.progress._replace(spent=0)
        super().__init__(replace(snapshot, progress=progress), *more, **named)


class SendsThroughShutGate(Lane):
    """Sends due deliveries although the circuit breaker is open."""

    def next(self, now: float, gate: Gate = Gate.OPEN) -> Command:
        return super().next(now, Gate.OPEN if gate is Gate.SHUT else gate)


class WakesWhileShut(Lane):
    """Wakes a shut lane when its head is due."""

    def next(self, now: float, gate: Gate = Gate.OPEN) -> Command:
        command = super().next(now, gate)
        due_at = self._retry.next_attempt_at or 0.0
        if gate is Gate.SHUT and command is None and due_at > now:
            return Wait(due_at)
        return command


class KeepsExpiredWhileShut(Lane):
    """Keeps an expired delivery until the endpoint is healthy."""

    def next(self, now: float, gate: Gate = Gate.OPEN) -> Command:
        return None if gate is Gate.SHUT else super().next(now, gate)


class DelaysProbes(Lane):
    """Delays a probe until its head is due."""

    def next(self, now: float, gate: Gate = Gate.OPEN) -> Command:
        return super().next(now, Gate.OPEN if gate is Gate.PROBE else gate)


class CutsInFlightRequest(Lane):
    """Applies a cut without waiting for the response."""

    def next(self, now: float, gate: Gate = Gate.OPEN) -> Command:
        if self._pending_cut is not None and self._busy is Busy.SENDING:
            self._busy = None
        return super().next(now, gate)


class CutsOnlyFetched(Lane):
    """Cuts only what was fetched."""

    def dead_letter_through(self, through_seq: int, reason: Any) -> None:
        super().dead_letter_through(min(through_seq, self._buffer.fetched_seq), reason)


class ReplacesPendingCut(Lane):
    """Replaces a pending cut with a later one."""

    def dead_letter_through(self, through_seq: int, reason: Any) -> None:
        self._pending_cut = None
        super().dead_letter_through(through_seq, reason)


class RefetchesCutDeliveries(Lane):
    """Fetches cut deliveries again."""

    def _advance(self, *args: Any, **more: Any) -> None:
        fetched_seq = self._buffer.fetched_seq
        super()._advance(*args, **more)
        self._buffer.fetched_seq = fetched_seq


class CutsFromWrongBatch(Lane):
    """Starts to read a range at the next delivery instead of its first."""

    def _dead_letter_range(self, through_seq: int, reason: Any) -> Record:
        record = super()._dead_letter_range(through_seq, reason)
        assert isinstance(record.dead, DeadRange)
        return record._replace(dead=replace(record.dead, batch=record.dead.batch + 1))


class CountsUnsentRequests(Lane):
    """Counts a request that was never sent as an attempt."""

    def cancel_send(self) -> None:
        super().cancel_send()
        self._retry.attempts += 1


class IgnoresSkip(Lane):
    """Goes on sending a skipped delivery."""

    def skip(self, seq: int) -> None:
        """Do nothing."""


class SkipsWhateverIsNext(Lane):
    """Skips the next delivery, although the skipped one has ended meanwhile."""

    def skip(self, seq: int) -> None:
        super().skip(self.acked_seq + 1)


class IgnoresBlock(Lane):
    """Does not wait for an operator."""

    def next(self, now: float, gate: Gate = Gate.OPEN) -> Command:
        self.blocked = False
        return super().next(now, gate)


class DoesNotPersistBlock(Lane):
    """Does not persist that the lane waits for an operator."""

    def _dead_letter(self, *args: Any, **more: Any) -> Record:
        return super()._dead_letter(*args, **more)._replace(blocks=False)


class NeverMarksLaneEnd(Lane):
    """Never marks the last delivery of a lane."""

    def next(self, now: float, gate: Gate = Gate.OPEN) -> Command:
        command = super().next(now, gate)
        return command._replace(lane_ends=False) if isinstance(command, Send) else command


class MarksLaneEndTooEarly(Lane):
    """Marks every delivery after the end of the lane as the last."""

    def next(self, now: float, gate: Gate = Gate.OPEN) -> Command:
        command = super().next(now, gate)
        return command._replace(lane_ends=self.ended) if isinstance(command, Send) else command


class MarksLaneEndOnFirstAttemptOnly(Lane):
    """Marks the last delivery on its first attempt only."""

    def next(self, now: float, gate: Gate = Gate.OPEN) -> Command:
        command = super().next(now, gate)
        if isinstance(command, Send) and command.attempt > 1:
            command = command._replace(lane_ends=False)
        return command


class IgnoresAcceptedSequence(Lane):
    """Acknowledges a whole batch regardless of the accepted sequence number."""

    def record_batch_result(
        self, batch: Any, accepted_seq: int, outcome: AttemptOutcome, *args: Any, **more: Any
    ) -> Any:
        if outcome is AttemptOutcome.DELIVERED:
            accepted_seq = batch[-1].seq
        return super().record_batch_result(batch, accepted_seq, outcome, *args, **more)


class DoesNotBisectFailedBatch(Lane):
    """Sends a failed batch again instead of bisecting it."""

    def _select_batch(self, batch_max: int, gate: Gate, now: float) -> Any:
        self._batch_size.current = 50
        attempts, self._retry.attempts = self._retry.attempts, 0
        batch = super()._select_batch(batch_max, gate, now)
        self._retry.attempts = attempts
        return batch


class ForgetsSentBatch(Lane):
    """Forgets that a whole batch was sent, not only its head."""

    def record_batch_result(self, *args: Any, **more: Any) -> Any:
        records = super().record_batch_result(*args, **more)
        self._batch_size.sent_through_seq = 0
        return records


class BatchesExpiredDeliveries(Lane):
    """Sends expired deliveries along with an unexpired head."""

    def _select_batch(self, batch_max: int, gate: Gate, now: float) -> Any:
        return super()._select_batch(batch_max, gate, 0.0)


class ChecksLaneEndOfHeadOnly(Lane):
    """Checks only the head of a batch for the end of the lane."""

    def next(self, now: float, gate: Gate = Gate.OPEN) -> Command:
        command = super().next(now, gate)
        if isinstance(command, Send):
            ends = self.ended and command.delivery.seq == self.last_seq
            command = command._replace(lane_ends=ends)
        return command


class IgnoresSuccessInStalledSince(Lane):
    """Never advances `stalled_since` on a success."""

    def record_result(self, *args: Any, **more: Any) -> Record:
        since = self.stalled_since
        record = super().record_result(*args, **more)
        self.stalled_since = since and self.stalled_since and since
        return record


class StalledWithoutPendingDeliveries(Lane):
    """Stays stalled after its deliveries are dead-lettered."""

    def _record_dead(self, *args: Any, **more: Any) -> Record:
        since = self.stalled_since
        record = super()._record_dead(*args, **more)
        self.stalled_since = since
        return record


class AdvancesStalledSinceOnNewDelivery(Lane):
    """Advances `stalled_since` with every new delivery."""

    def extend_to(self, last_seq: int, now: float) -> None:
        super().extend_to(last_seq, now)
        self.stalled_since = now if self.pending else None


class IgnoresNewerFetchedDeliveries(Lane):
    """Does not count deliveries that were fetched before they were announced."""

    def append_fetched(self, deliveries: Any) -> None:
        last_seq = self.last_seq
        super().append_fetched(deliveries)
        self.last_seq = last_seq


class ReportsDrainedTooEarly(Lane):
    """Reports drained before the last outcome is written."""

    @property
    def drained(self) -> bool:
        return not self.pending


class RunsAfterStop(Lane):
    """Goes on with a request run after a stop or a cut, or with stale deliveries."""

    def next_in_run(self, now: float, known: Send | None) -> Send | None:
        return self.peek_next_send(known)


class RunsFromRetry(Lane):
    """Begins a request run with a retry."""

    def may_run(self, send: Send) -> bool:
        return not send.batch and len(self._buffer.queue) > 1


class RunsWithPreparedSend(Lane):
    """Sends in a request run what was prepared, whatever has happened since."""

    def peek_next_send(self, known: Send | None = None) -> Send | None:
        return super().peek_next_send() if known is None else known


def _faults(value: object) -> str | None:
    """Name the faults, so that the test ids differ."""
    if not isinstance(value, Faults):
        return None
    return " ".join(name for name, on in vars(value).items() if on != getattr(NO_FAULTS, name))


# The seed range in which the walk finds the rarest faults without a long search.
FOUND_SOON_FROM: dict[type[Lane], int] = {
    IgnoresAcceptedSequence: 60,
    ForgetsSentBatch: 110,
    MarksLaneEndOnFirstAttemptOnly: 440,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lane", "faults", "violation"),
    [
        (SendsNextDuringRetryWait, NO_FAULTS, "is sent before|ends, and"),
        (SendsConcurrently, NO_FAULTS, "two requests|is due and not sent|is sent before"),
        (AcknowledgesBeforeTheResponse, NO_FAULTS, "is passed without an outcome"),
        (CheckpointsUnwrittenSuccesses, NO_FAULTS, "is passed without an outcome"),
        (CheckpointsUnwrittenRetries, NO_FAULTS, "attempts are not what is logged"),
        (DoesNotAwaitDeadLetterWrite, NO_FAULTS, "is sent before"),
        (DoesNotAwaitFailureWrite, NO_FAULTS, "forgets its attempts|is due and not sent"),
        (ResetsBudgetOnTakeover, NO_FAULTS, "forgets its attempts|are not what is logged"),
        (KeepsStaleRetryState, NO_FAULTS, "forgets its attempts"),
        (LinksToDeadLetter, NO_FAULTS, "names"),
        (IgnoresExpiryDuringRetryWait, NO_FAULTS, "has to wait until"),
        (CountsFreeProbes, NO_FAULTS, "a free attempt"),
        (CountsNoProbes, NO_FAULTS, "an attempt is not charged|ends at another time"),
        (ForgetsSpentAttempts, NO_FAULTS, "attempt is charged|is not charged|at another time"),
        (SendsThroughShutGate, NO_FAULTS, "has to wait|through a shut gate"),
        (WakesWhileShut, NO_FAULTS, "has to wait"),
        (KeepsExpiredWhileShut, NO_FAULTS, "is not given up|is gone|is not cut|has to wait"),
        (DelaysProbes, NO_FAULTS, "is due and not sent"),
        (CutsInFlightRequest, NO_FAULTS, "two things at a time"),
        (CutsOnlyFetched, NO_FAULTS, "is not cut"),
        (ReplacesPendingCut, NO_FAULTS, "is not cut"),
        (RefetchesCutDeliveries, NO_FAULTS, "although it has ended"),
        (CutsFromWrongBatch, NO_FAULTS, "reading a range begins too late"),
        (CountsUnsentRequests, NO_FAULTS, "forgets its attempts|are not what is logged"),
        (IgnoresSkip, NO_FAULTS, "is sent although it was skipped|was skipped and is not given up"),
        (SkipsWhateverIsNext, NO_FAULTS, "no operator skipped it"),
        (IgnoresBlock, NO_FAULTS, "does not wait for an operator"),
        (DoesNotPersistBlock, NO_FAULTS, "does it block"),
        (NeverMarksLaneEnd, NO_FAULTS, "wrong about the end"),
        (MarksLaneEndTooEarly, NO_FAULTS, "wrong about the end"),
        (MarksLaneEndOnFirstAttemptOnly, NO_FAULTS, "wrong about the end"),
        (IgnoresAcceptedSequence, NO_FAULTS, "a success is a failure"),
        (DoesNotBisectFailedBatch, NO_FAULTS, "is to go alone"),
        (ForgetsSentBatch, NO_FAULTS, "was sent before"),
        (BatchesExpiredDeliveries, NO_FAULTS, "has expired"),
        (ChecksLaneEndOfHeadOnly, NO_FAULTS, "wrong about the end"),
        (RunsAfterStop, NO_FAULTS, "a run goes on|has expired"),
        (
            RunsFromRetry,
            NO_FAULTS,
            "charged|budget ends|forgets its attempts|not what is logged|is due and not sent",
        ),
        (RunsWithPreparedSend, NO_FAULTS, "although it has ended"),
        (Lane, Faults(forgets_blocks=True), "does not wait for an operator"),
        (Lane, Faults(writes_failure_alone=True), "has no outcome|without an outcome"),
        (Lane, Faults(skips_tail=True), "although it has ended|has two outcomes"),
        (Lane, Faults(assumes_no_duplicates=True), "was sent before|refused as a copy"),
    ],
    ids=_faults,
)
def test_a_lane_without_this_rule_violates_the_model(
    lane: type[Lane], faults: Faults, violation: str
) -> None:
    with pytest.raises(Violation, match=violation):
        hunt_lane(
            2000,
            lane,
            replace(faults, checks_lane_state=False),
            first_seed=FOUND_SOON_FROM.get(lane, 0),
        )


@pytest.mark.parametrize(
    ("lane", "violation"),
    [
        (IgnoresSuccessInStalledSince, "stalled for another time"),
        (StalledWithoutPendingDeliveries, "stalled for another time"),
        (AdvancesStalledSinceOnNewDelivery, "stalled for another time"),
        (IgnoresNewerFetchedDeliveries, "wrong number of pending deliveries"),
        (ReportsDrainedTooEarly, "drained or not"),
    ],
)
def test_a_lane_that_reports_a_wrong_state_violates_the_model(
    lane: type[Lane], violation: str
) -> None:
    with pytest.raises(Violation, match=violation):
        hunt_lane(300, lane)
