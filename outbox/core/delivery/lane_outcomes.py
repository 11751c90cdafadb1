"""How the deliveries of a lane end: the results of attempts, and dead letters.

The record of a failure or a dead letter is durable before the lane continues; that of a success may
wait for a group commit.

**Brokers.**  Failures are the broker's and not a delivery's, so they never exhaust its budget.

**Refused dead letters.**  The database may refuse the row of a dead letter, by a trigger or a
constraint.  The record is taken back (`refuse_dead_letter`), so the delivery is pending again, and
the lane waits before its next command, longer each time in a row.  The dead letter is then written
again, and nothing is sent: its response is known.
"""

from __future__ import annotations

from bisect import bisect_right
from http import HTTPStatus
from operator import attrgetter
from typing import TYPE_CHECKING, Literal

from outbox.core.delivery.commands import (
    AttemptRow,
    DeadLetter,
    DeadRange,
    ErasedEvent,
    LaneEnd,
    Progress,
    Record,
    Successes,
)
from outbox.core.delivery.owned_lane import Busy, OwnedLane
from outbox.core.delivery.retry_state import RetryState
from outbox.core.model.response_policy import AttemptOutcome, is_application_failure
from outbox.core.model.stored_response import stored_response, stored_success, strip_batch_response

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.core.model.dead_letter_reason import LaneDeadLetterReason
    from outbox.core.model.delivery import Delivery
    from outbox.core.model.response import AttemptResult
    from outbox.core.model.retry_policy import RetryPolicy

# Bound once: enum member access is slow in Python 3.11.
_DELIVERED, _REFUSED = AttemptOutcome.DELIVERED, AttemptOutcome.REFUSED
_SEQ = attrgetter("seq")

BROKER_RETRY_S_MAX = 60.0
"""Maximum delay between two attempts of a broker's lane, which cost no budget."""


class LaneOutcomes(OwnedLane):
    """A lane whose deliveries are delivered, fail or are dead-lettered."""

    __slots__ = ()

    # -------------------------------------------------------------- results

    def record_result(
        self,
        outcome: AttemptOutcome,
        response: AttemptResult,
        policy: RetryPolicy,
        *,
        started_at: float,
        now: float,
        u: float,
        blocks: bool = False,
        preempted: bool = False,
        endpoint_healthy: bool = False,
        observed_s: float = 0.0,
    ) -> Record:
        """Record the result of a Send with one delivery.

        Args:
            started_at: when the request began, in epoch seconds.
            u: uniform in [0, 1), for the jitter.
            observed_s: observed seconds from the start of the delivery's first attempt to the
                start of this one.
            blocks: whether the lane waits for an operator if this dead-letters the delivery.
            preempted: the request was cancelled by admission control before it got a response.
            endpoint_healthy: the circuit breaker is closed, so the delivery fails and not the
                endpoint.
        """
        first, retry = self._buffer.queue[0], self._retry
        if outcome is _DELIVERED:
            row = AttemptRow.from_response(
                first, retry.attempts + 1, "delivered", response, stored_success(response),
                started_at,
            )  # fmt: skip
            self._deliver_through(first.seq, first.batch, now)
            if self._buffer.batch_max is not None:
                self._batch_size.record_accepted(first.seq, 1, of=1)
            return Record(self.id, first.seq, row)
        if outcome is _REFUSED:
            row = self._fail(first, "refused", response, started_at)
            return self._dead_letter(first, "refused", row, blocks=blocks)
        row = self._fail(first, "retry", response, started_at)
        if not preempted:
            retry.delay_probe(now, u, by_application=is_application_failure(response.status))
        if self.stream is not None:
            self._postpone(policy, now, u)
            return self._record_retry(first, row)
        if not self._is_free_probe and retry.charge_attempt(
            policy, now=now, u=u, observed_s=observed_s, preempted=preempted
        ):
            return self._dead_letter(first, "exhausted", row, blocks=blocks)
        stuck = endpoint_healthy and retry.report_stuck()
        return self._record_retry(first, row, stuck=stuck)

    def record_batch_result(
        self,
        batch: Sequence[Delivery],
        accepted_seq: int,
        outcome: AttemptOutcome,
        response: AttemptResult,
        policy: RetryPolicy,
        *,
        started_at: float,
        now: float,
        u: float,
    ) -> tuple[Successes, Record | None]:
        """Record the result of a Send with several deliveries.

        Args:
            accepted_seq: the last sequence that was delivered.
            outcome: the outcome of the batch; if it is not a success, the first delivery that was
                not accepted is sent again alone, and that result decides about it.
            started_at: when the request began, in epoch seconds.
            u: uniform in [0, 1), for the jitter.

        Returns:
            The deliveries that were accepted, and the failure of the first one that was not; None:
            all were.
        """
        # A 409 for deliveries that were not sent before is not about a duplicate.
        is_refusal = response.status == HTTPStatus.CONFLICT and not (
            response.resent or self._may_have_been_sent(batch[0])
        )
        response = strip_batch_response(response)
        count = bisect_right(batch, accepted_seq, key=_SEQ)
        results = Successes.of_batch(batch[:count], response, started_at)
        if count:
            self._deliver_through(accepted_seq, self.floor_batch, now)
        # All may be delivered although the batch as a whole was not: a broker's connection can end
        # just after the last confirm.
        if outcome is _DELIVERED or count == len(batch):
            self._batch_size.record_accepted(batch[-1].seq, count, of=len(batch))
            self._busy = None
            return results, None
        first, retry = batch[count], self._retry
        self._conflict_seq = first.seq if is_refusal else 0
        self._batch_size.record_failed(first.seq - 1 if is_refusal else batch[-1].seq, len(batch))
        retry.attempts += 1
        # The budget of time starts with its own first attempt, not with that of the batch.
        retry.last_response = stored_response(response)
        # Isolate a refused delivery at once; after a failure the receiver needs a delay.
        retry.postpone(now + (0.0 if outcome is _REFUSED else policy.delay_s(1, u)))
        row = AttemptRow.from_response(
            first, retry.attempts, "retry", response, retry.last_response, started_at
        )
        return results, self._record_retry(first, row)

    def record_stream_failed(
        self,
        response: AttemptResult,
        policy: RetryPolicy,
        *,
        started_at: float,
        now: float,
        u: float,
        held: bool,
    ) -> Record:
        """Record that a broker's lane could not be opened, or its end entry not be appended.

        It is logged as an attempt of the next delivery; the end entry is no delivery.

        Args:
            started_at: when the request began, in epoch seconds.
            u: uniform in [0, 1), for the jitter.
            held: the stream of its lane needs a person, see `outbox.core.brokers.take_over`.
        """
        assert self.stream is not None
        first, last_response = self._first, self._retry.last_response or {}
        is_new_hold = held and last_response.get("failure") != response.failure
        row = self._fail(first, "retry", response, started_at)
        self._postpone(policy, now, u)
        self.stream.held = held
        return self._record_retry(
            first, None if isinstance(first, LaneEnd) else row, stuck=is_new_hold
        )

    def record_position(self, position: int) -> None:
        """Record the result of an Open: where the lane stands in the stream."""
        assert self.stream is not None
        self.stream.record_opened(position)
        self._busy = None

    def record_found(self, seq: int, batch: int, now: float) -> None:
        """Record the result of an Open: the stream has the deliveries up to `seq`, and their
        acknowledgement is durable.

        Args:
            batch: the batch of the delivery `seq`.
        """
        self.record_position(seq)
        self._deliver_through(seq, batch, now)
        self.floor_batch = batch
        self._committed = Progress(seq, seq, batch, success_at=now)

    def record_end(self) -> None:
        """Record that the stream has the lane's end entry, and that this is durable."""
        assert self.stream is not None
        self.stream.end_written = True
        self._retry = RetryState()
        self._busy = None

    def refuse_dead_letter(self, record: Record) -> Record:
        """Take back a record whose dead letter the database refused.

        Returns:
            What to record instead: the attempt, with the delivery pending.
        """
        dead = record.dead
        assert dead is not None
        self.acked_seq, self.floor_batch, self._retry, self.stalled_since = self._before_dead
        self.blocked = self.blocked and not record.blocks
        self._buffer.invalidate()
        if isinstance(dead, DeadLetter):
            # For another reason it is decided again: the event may exist again, or not be expired.
            if dead.reason in ("refused", "exhausted"):
                self._refused_dead = (record.seq, dead.reason, record.blocks)
            return self._record_retry(dead.delivery, record.attempt)
        if dead.reason != "missing":
            # Another one that was made meanwhile is longer.
            self._pending_cut = self._pending_cut or (dead.to_seq, dead.reason)
        return self._record_retry(LaneEnd(dead.seq, dead.batch), None)

    # ------------------------------------------------------------- internal

    @property
    def _end(self) -> LaneEnd:
        return LaneEnd(self.last_seq + 1, self.floor_batch)

    @property
    def _first(self) -> Delivery | ErasedEvent | LaneEnd:
        """What is attempted next."""
        queue = self._buffer.queue
        return queue[0] if queue else self._end

    def _may_have_been_sent(self, first: Delivery) -> bool:
        """Whether the receiver may have this delivery already, so that 409 means a duplicate."""
        was_tried = self._retry.attempts > 0 and first.seq != self._conflict_seq
        return (
            was_tried
            or first.batch <= self._sent_through_batch
            or first.seq <= self._batch_size.sent_through_seq
        )

    def _fail(
        self,
        first: Delivery | ErasedEvent | LaneEnd,
        outcome: Literal["retry", "refused"],
        response: AttemptResult,
        started_at: float,
    ) -> AttemptRow:
        """Count a failed attempt of what is next; returns its row."""
        retry, stored = self._retry, stored_response(response)
        self._batch_size.record_failed(first.seq)
        retry.attempts += 1
        retry.record_failure(stored, started_at)
        logged = "probe" if outcome == "retry" and self._is_free_probe else outcome
        return AttemptRow.from_response(first, retry.attempts, logged, response, stored, started_at)

    def _postpone(self, policy: RetryPolicy, now: float, u: float) -> None:
        """Set the next attempt of a broker's lane, which costs no budget."""
        delay_s = policy.delay_s(self._retry.attempts, u)
        self._retry.postpone(now + min(delay_s, BROKER_RETRY_S_MAX))

    def _record_retry(
        self,
        first: Delivery | ErasedEvent | LaneEnd,
        row: AttemptRow | None,
        *,
        stuck: bool = False,
    ) -> Record:
        """Record a failed attempt; the lane waits until its retry state is durable."""
        self._busy = Busy.RECORDING
        self.floor_batch = first.batch
        retry = self._retry
        progress = Progress(
            self.acked_seq,
            self.delivered_seq,
            self.floor_batch,
            first.seq,
            retry.attempts,
            retry.spent,
            retry.first_attempt_at,
            retry.next_attempt_at,
            retry.last_response,
            self._success_at,
        )
        return Record(self.id, first.seq, row, progress, stuck=stuck)

    def _deliver_through(self, seq: int, batch: int, now: float) -> None:
        """Advance past deliveries that were delivered; their record may wait."""
        self._advance(seq, batch)
        self.delivered_seq = seq
        self._success_at = now
        self.stalled_since = now if seq < self.last_seq else None
        self._refused_wait_s = 0.0
        self._busy = None
        stream = self.stream
        if stream is not None and stream.seq is not None:
            stream.seq = seq

    def _advance(self, seq: int, batch: int) -> None:
        last_batch = self._buffer.discard_through(seq)
        self.acked_seq = seq
        self.floor_batch = batch if last_batch is None else last_batch
        if self._retry.attempts:
            self._retry = RetryState()

    def _dead_letter(
        self,
        first: Delivery | ErasedEvent,
        reason: LaneDeadLetterReason,
        row: AttemptRow | None,
        *,
        blocks: bool = False,
    ) -> Record:
        # The stored response of an erased event is dropped as well.
        stored = None if isinstance(first, ErasedEvent) else self._retry.last_response
        dead = DeadLetter(first, reason, self._retry.requests, stored)
        return self._record_dead(first.seq, first.batch, row, dead, blocks=blocks)

    def _dead_letter_range(self, through_seq: int, reason: LaneDeadLetterReason) -> Record:
        dead = DeadRange(
            self.floor_batch,
            self.acked_seq + 1,
            through_seq,
            reason,
            self._retry.requests,
            self._retry.last_response,
        )
        return self._record_dead(through_seq, self.floor_batch, None, dead, blocks=False)

    def _record_dead(
        self,
        seq: int,
        batch: int,
        row: AttemptRow | None,
        dead: DeadLetter | DeadRange,
        *,
        blocks: bool,
    ) -> Record:
        """Advance past dead letters; the lane waits until they are durable."""
        self._before_dead = (self.acked_seq, self.floor_batch, self._retry, self.stalled_since)
        self._advance(seq, batch)
        if not self.pending:
            self.stalled_since = None
        self.blocked = self.blocked or blocks
        self._busy = Busy.RECORDING
        progress = Progress(seq, self.delivered_seq, self.floor_batch, success_at=self._success_at)
        return Record(self.id, seq, row, progress, dead, blocks)
