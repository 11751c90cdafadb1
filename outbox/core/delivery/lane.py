"""One lane: an ordered stream of deliveries, one request in flight at a time.

The lane does no I/O.  Its owner calls `next` for a command, executes it, and reports the
result with the other methods.

    next ──▶ Send ──▶ record_result ──▶ Record(delivered) ──▶ next     (may be group-committed)
      │                     └─────────▶ Record(retry, dead letter) ──▶ confirm_recorded ──▶ next
      ├────▶ Record(dead letter unsent: erased, missing, skipped, expired, exhausted by a new
      │             policy, backlog) ──▶ confirm_recorded ──▶ next
      ├────▶ Open ──▶ record_position, record_found or record_result ──▶ next      (brokers)
      ├────▶ End ──▶ record_end or record_result ──▶ next                          (brokers)
      ├────▶ Record(held: its event is missing) ──▶ confirm_recorded ──▶ next
      ├────▶ Fetch ───▶ append_fetched ──▶ next
      ├────▶ Wait(until) … next
      └────▶ None     … extend_to, unblock, or the gate opens ──▶ next

**No loss and no reordering.**  Sequence n+1 is sent only after n was delivered or its dead
letter is durable.  The record of a success may wait for a group commit: if the owner dies
first, the next owner finds n without a record and sends it again, with the same sequence
and `X-Delivery`, before it repeats n+1.  The record of a failure or dead letter may not
wait: it is durable before the next command, and all waiting successes of the lane are
written in the same statement.  The attempt log therefore never skips a sequence.

The attempts of the next sequence, `acked_seq + 1`, are its `RetryState`.

**Brokers.**  The lane of a broker's endpoint has a position in the stream, and is opened to learn
it: at the start, and after a response was lost.  Until then it neither sends nor dead-letters,
because the stream may have the next deliveries already.  Failures are the broker's and not a
delivery's, so they never exhaust its budget.  A lane of an older generation ends with an entry of
its own, also if nothing was delivered: readers need it to know that the newer lanes may begin.

**Missing events.**  The event of the next delivery may be gone without a record.  The delivery is
dead-lettered, or, with `holds_missing`, holds the lane: it is read again every `MISSING_POLL_S`,
until its event exists again, or the delivery is skipped or dead-lettered by a limit, or the
setting changes.  Both are written only with the proof that the event is gone.

**Refused dead letters.**  The database may refuse the row of a dead letter, by a trigger or a
constraint.  The record is taken back (`refuse_dead_letter`), so the delivery is pending again, and
the lane waits before its next command, longer each time in a row.  The dead letter is then written
again, and nothing is sent: its response is known.
"""

from __future__ import annotations

from bisect import bisect_right
from enum import Enum, auto
from http import HTTPStatus
from itertools import takewhile
from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING, Literal

from outbox.core.delivery.commands import (
    AttemptRow,
    DeadLetter,
    DeadRange,
    End,
    ErasedEvent,
    Fetch,
    Gate,
    LaneEnd,
    MissingEvent,
    Open,
    Progress,
    Record,
    RunResults,
    Send,
    Wait,
)
from outbox.core.delivery.delivery_buffer import DeliveryBuffer, is_expired
from outbox.core.delivery.retry_state import RetryState
from outbox.core.messages.batch import BatchSize
from outbox.core.model.delivery import Delivery
from outbox.core.model.response_policy import AttemptOutcome
from outbox.core.model.stored_response import (
    missing_response,
    stored_response,
    stored_success,
    strip_batch_response,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from outbox.core.delivery.buffer_budget import BufferShare, ReadBounds
    from outbox.core.delivery.commands import Command
    from outbox.core.model.dead_letter_reason import LaneDeadLetterReason
    from outbox.core.model.response import AttemptResult
    from outbox.core.model.retry_policy import RetryPolicy


class _Busy(Enum):
    SENDING = auto()
    RECORDING = auto()


# Bound once: enum member access is slow in Python 3.11.
_SENDING = _Busy.SENDING
_SEQ = attrgetter("seq")
_OPEN, _SHUT, _DELIVERED = Gate.OPEN, Gate.SHUT, AttemptOutcome.DELIVERED

MISSING_POLL_S = 10.0
"""Seconds after which a delivery whose event is gone is read again, while it holds its lane."""

REFUSED_RETRY_S_MIN, REFUSED_RETRY_S_MAX = 10.0, 600.0
"""Seconds for which a lane waits after its dead letter was refused, doubled each time in a row."""

BROKER_RETRY_S_MAX = 60.0
"""Maximum delay between two attempts of a broker's lane, which cost no budget."""


class Lane:
    """The state of one lane in its owner's memory; times are epoch seconds.

    Args:
        progress: the lane's checkpoint.
        tail: (seq, batch, time) of the delivered rows of the attempt log after the checkpoint.
        last_seq: the last assigned sequence.
        sent_through_batch: deliveries up to this batch may have been sent by an earlier owner.
        pending_since: when the first pending delivery got its sequence.
        blocked: the lane is blocked until an operator unblocks it.
        ended: the lane belongs to an older generation and gets no new deliveries.
        batch_max: deliveries per request; None: requests are not batches.
        skip_seq: the sequence that an operator skipped last; 0: none.
        has_position: the destination is a broker, where the lane must be opened.
        receipt: the receipt of the last durable append to a broker.
        end_written: whether its broker's stream has the lane's end entry.
        share: the share of its tenant in the buffer budget; None: there is no budget.
    """

    __slots__ = (
        "_acked",
        "_batch_size",
        "_before_dead",
        "_blocked",
        "_buffer",
        "_busy",
        "_committed",
        "_conflict_seq",
        "_delivered",
        "_end_written",
        "_ended",
        "_floor_batch",
        "_has_position",
        "_held_event",
        "_is_free_probe",
        "_is_held",
        "_last_seq",
        "_missing_seq",
        "_openings",
        "_pending_cut",
        "_position",
        "_receipt",
        "_receipts",
        "_refused_dead",
        "_refused_wait_s",
        "_reopened_at",
        "_resumes_at",
        "_retry",
        "_sent_through_batch",
        "_skip_seq",
        "_stalled_since",
        "_stopped",
        "_success_at",
        "holds_missing",
        "id",
    )

    def __init__(
        self,
        lane_id: int,
        progress: Progress,
        tail: Iterable[tuple[int, int, float]],
        last_seq: int,
        sent_through_batch: int,
        *,
        pending_since: float | None = None,
        blocked: bool = False,
        ended: bool = False,
        batch_max: int | None = None,
        skip_seq: int = 0,
        has_position: bool = False,
        receipt: str | None = None,
        end_written: bool = False,
        share: BufferShare | None = None,
    ) -> None:
        self.id = lane_id
        self._batch_size = BatchSize()
        # A delivery whose batch got 409 although it was not sent before: its next 409 is a
        # refusal, not a duplicate.
        self._conflict_seq = 0
        for seq, batch, at in sorted(set(tail)):
            # Records are written in order, so the tail has no holes.  If it had one, resending
            # would be safe and skipping would not.
            if seq == progress.acked_seq + 1:
                progress = Progress(seq, seq, batch, success_at=at)
        self._acked = progress.acked_seq
        self._delivered = progress.delivered_seq
        self._floor_batch = progress.floor_batch
        self._success_at = progress.success_at
        # Durable progress; retry state of another sequence than the next one is stale.
        self._committed = progress
        self._last_seq = last_seq
        self._sent_through_batch = sent_through_batch
        self._blocked = blocked
        self._ended = ended
        self._skip_seq = skip_seq
        self._buffer = DeliveryBuffer(self._acked, self._floor_batch, batch_max, share)
        self._busy: _Busy | None = None
        self._is_free_probe = False
        self._stopped = False
        self._has_position = has_position
        self._end_written = end_written
        # The lane's last sequence in its stream; None: it must be opened.  Without a broker: 0.
        self._position: int | None = None if has_position else 0
        self._openings = 0
        # The last opening found a stream that needs a person.
        self._is_held = False
        # The receipt of the durable progress, and those of later appends with their sequences.
        self._receipt = receipt
        self._receipts: list[tuple[int, str]] = []
        # The last acknowledged sequence when it was last opened again.
        self._reopened_at = -1
        self._pending_cut: tuple[int, LaneDeadLetterReason] | None = None
        self._stalled_since: float | None = None
        if self.pending:
            known = [at for at in (pending_since, self._success_at) if at is not None]
            self._stalled_since = max(known, default=None)
        self._retry = RetryState.from_progress(progress)
        # The last dead letter after a response that the database refused: sequence, reason, and
        # whether it blocks.
        self._refused_dead: tuple[int, LaneDeadLetterReason, bool] | None = None
        # What the last dead letter changed, until it is durable.
        self._before_dead = (self._acked, self._floor_batch, self._retry, self._stalled_since)
        # The last wait for a dead letter that the database refused, and until when it lasts; 0: the
        # last delivery that ended was not refused.
        self._refused_wait_s = 0.0
        self._resumes_at = -inf
        self.holds_missing = False
        """Whether a delivery holds the lane if its event is gone."""
        # The row that holds the lane, as it was read last.
        self._held_event: MissingEvent | None = None
        # The sequence whose event was missing in a read that was made when it was the next one.
        self._missing_seq = 0

    # ---------------------------------------------------------------- state

    @property
    def acked_seq(self) -> int:
        """The last sequence that was delivered or dead-lettered, in memory."""
        return self._acked

    @property
    def delivered_seq(self) -> int:
        """The last sequence that was delivered, in memory; 0: none."""
        return self._delivered

    @property
    def last_seq(self) -> int:
        """The last assigned sequence."""
        return self._last_seq

    @property
    def position(self) -> int | None:
        """The lane's last sequence in its broker's stream; None: it must be opened."""
        return self._position

    @property
    def ended(self) -> bool:
        """Whether a newer generation replaced the lane."""
        return self._ended

    @property
    def openings(self) -> int:
        """How often the lane was opened by this owner."""
        return self._openings

    def release_receipt(self) -> str | None:
        """Return the receipt of the last append whose acknowledgements are durable, and discard
        the earlier ones.
        """
        while self._receipts and self._receipts[0][0] <= self._committed.acked_seq:
            _, self._receipt = self._receipts.pop(0)
        return self._receipt

    @property
    def committed_seq(self) -> int:
        """The last sequence whose delivery or dead letter is durable."""
        return self._committed.acked_seq

    @property
    def unwritten(self) -> int:
        """The number of deliveries whose end is not durable yet."""
        return self._acked - self._committed.acked_seq

    @property
    def floor_batch(self) -> int:
        """No pending delivery has a batch below this one."""
        return self._floor_batch

    @property
    def pending(self) -> int:
        """The number of pending deliveries."""
        return self._last_seq - self._acked

    @property
    def lacks_end(self) -> bool:
        """Whether its end entry is missing in its broker's stream."""
        return self._ended and self._has_position and not self._end_written

    @property
    def has_work(self) -> bool:
        """Whether there are pending deliveries, or an end entry to append."""
        return self._acked != self._last_seq or self.lacks_end

    @property
    def in_flight(self) -> bool:
        """Whether a request is in flight or its result is being written."""
        return self._busy is not None

    @property
    def needs_refill(self) -> bool:
        """Whether the delivery buffer is low and everything known was fetched."""
        buffer = self._buffer
        return not self._stopped and buffer.fetched_seq >= self._last_seq and buffer.is_low

    @property
    def is_buffered(self) -> bool:
        """Whether the next delivery is in memory."""
        return bool(self._buffer.queue)

    @property
    def drained(self) -> bool:
        """Whether nothing is pending or being written, and the lane is not blocked."""
        return not self.has_work and self._busy is None and not self._blocked

    @property
    def settled(self) -> bool:
        """Whether nothing is in flight and all progress is durable."""
        return self._busy is None and self._committed.acked_seq == self._acked

    @property
    def stalled_since(self) -> float | None:
        """Since when deliveries are pending without a success; None: no delivery is pending."""
        return self._stalled_since

    @property
    def head_since(self) -> float | None:
        """Since when the next delivery is pending; None: no delivery is pending."""
        first = self._buffer.queue[0] if self._buffer.queue else None
        since = first.waits_since if isinstance(first, Delivery) else None
        return self._stalled_since if since is None else since

    @property
    def failing(self) -> bool:
        """Whether the next delivery was attempted and is still pending."""
        return self._retry.attempts > 0

    @property
    def first_attempt_at(self) -> float | None:
        """When the first failed attempt of the next delivery began; None: none has failed."""
        return self._retry.first_attempt_at

    @property
    def blocked(self) -> bool:
        """Whether the lane waits for an operator after a dead letter."""
        return self._blocked

    @property
    def held(self) -> bool:
        """Whether its stream or the event of its next delivery needs a person."""
        return self._is_held or self._retry.is_missing

    def checkpoint(self) -> Progress:
        """The durable progress, for writing a checkpoint."""
        return self._committed

    # ------------------------------------------------------------- commands

    def next(self, now: float, gate: Gate = _OPEN) -> Command:
        """The next command; None when there is none or one is in progress.

        Args:
            gate: what the endpoint's circuit breaker allows; it does not apply to deliveries
                that are dead-lettered unsent.
        """
        if self._busy is not None or self._stopped:
            return None
        buffer = self._buffer
        if buffer.outdated:
            buffer.reset(self._acked, self._floor_batch)
        if now < self._resumes_at:
            return Wait(self._resumes_at)
        if self._position is None:
            return self._next_open(now, gate)
        if self._pending_cut is not None:
            through_seq, reason = self._pending_cut
            self._pending_cut = None
            if through_seq > self._acked:
                return self._dead_letter_range(through_seq, reason)
        if self._blocked:
            return None
        if not buffer.queue:
            return self._next_end(now, gate) if self._is_at_end else self.fetch()
        first = buffer.queue[0]
        if isinstance(first, ErasedEvent):
            return self._next_without_event(first, now)
        if self._retry.is_missing:
            # Its event exists again, and its time begins now.
            requests = self._retry.requests
            self._retry = RetryState(attempts=requests, spent=requests)
        retry = self._retry
        expires_at = inf if first.expires_at is None else first.expires_at
        ends: LaneDeadLetterReason | None = None
        blocks = False
        if first.seq == self._skip_seq:
            ends = "skipped"
        elif expires_at <= now:
            ends = "expired"
        elif self._refused_dead is not None and self._refused_dead[0] == first.seq:
            _, ends, blocks = self._refused_dead
        elif retry.exhausted:
            ends, blocks = "exhausted", retry.blocks
        is_due = retry.is_due(now)
        if ends is None and (gate is _SHUT or (gate is _OPEN and not is_due)):
            due_at = inf if gate is _SHUT else retry.next_attempt_at or now
            # Wake up at the expiry as well: an expired event must not block the lane.
            until = min(due_at, expires_at)
            return None if until == inf else Wait(until)
        if buffer.stub is not None:
            buffer.reset(self._acked, self._floor_batch)
            return self.fetch()
        if ends is not None:
            return self._dead_letter(first, ends, None, blocks=blocks)
        self._busy = _SENDING
        self._is_free_probe = not is_due
        batch = () if buffer.batch_max is None else self._select_batch(buffer.batch_max, gate, now)
        last_seq = batch[-1].seq if batch else first.seq
        return Send(
            first,
            self._delivered,
            retry.attempts + 1,
            maybe_sent_before=self._may_have_been_sent(first),
            lane_ends=self._ended and last_seq == self._last_seq,
            batch=batch,
        )

    def _next_without_event(self, first: ErasedEvent, now: float) -> Command:
        """Dead-letter the next delivery, or hold the lane if its event is missing."""
        if not isinstance(first, MissingEvent):
            return self._dead_letter(first, "erased", None)
        if first.seq == self._skip_seq:
            return self._dead_letter(first, "skipped", None)
        if first is not self._held_event and first.seq != self._missing_seq:
            # It may have been read long ago, and exist again.
            self._missing_seq = first.seq
            self._buffer.reset(self._acked, self._floor_batch)
            return self.fetch()
        return self._hold(first, now) if self.holds_missing else self._dead_letter_missing(first)

    def _hold(self, first: MissingEvent, now: float) -> Command:
        """Wait until the event of the next delivery exists again."""
        retry = self._retry
        if first is self._held_event:
            if not retry.is_due(now):
                return Wait(retry.next_attempt_at or now)
            self._buffer.reset(self._acked, self._floor_batch)
            return self.fetch()
        self._held_event = first
        is_new = not retry.is_missing
        retry.attempts += 1
        retry.record_failure(missing_response(first.outbox_id), now)
        retry.postpone(now + MISSING_POLL_S)
        record = self._record_retry(first, None, stuck=is_new)
        return record._replace(missing=(first.outbox_id,))

    def _next_open(self, now: float, gate: Gate) -> Command:
        """Open the lane before anything is sent or dead-lettered."""
        if self._blocked and self._pending_cut is None:
            return None
        if not self._buffer.queue and not self._is_at_end:
            return self.fetch()
        if (waits := self._begin_attempt(now, gate)) is not None:
            return None if waits == inf else Wait(waits)
        self._openings += 1
        return Open(self._first, self._retry.attempts + 1)

    def _next_end(self, now: float, gate: Gate) -> Command:
        """Append the end entry after the last delivery."""
        if (waits := self._begin_attempt(now, gate)) is not None:
            return None if waits == inf else Wait(waits)
        return End(self._end, self._delivered, self._retry.attempts + 1)

    def _begin_attempt(self, now: float, gate: Gate) -> float | None:
        """Begin to open the lane or to end it, unless it must wait; returns until when."""
        if gate is _SHUT:
            return inf
        is_due = self._retry.is_due(now)
        # A probe cannot show that the endpoint works again while the lane is held, and the circuit
        # breaker would admit the next one at once.
        if (gate is _OPEN or self._is_held) and not is_due:
            return self._retry.next_attempt_at or now
        self._busy = _SENDING
        self._is_free_probe = not is_due
        return None

    @property
    def _is_at_end(self) -> bool:
        """Whether only the end entry is left to append."""
        return self._acked == self._last_seq and self.lacks_end

    @property
    def _end(self) -> LaneEnd:
        return LaneEnd(self._last_seq + 1, self._floor_batch)

    @property
    def _first(self) -> Delivery | ErasedEvent | LaneEnd:
        """What is attempted next."""
        queue = self._buffer.queue
        return queue[0] if queue else self._end

    def peek_next_send(self, known: Send | None = None) -> Send | None:
        """The Send that follows if the request in flight succeeds; None: unknown or none.

        Args:
            known: the result of an earlier call, which is returned if it still holds.
        """
        buffer = self._buffer
        if self._busy is not _SENDING or buffer.batch_max is not None or len(buffer.queue) < 2:
            return None
        head, after = buffer.queue[0], buffer.queue[1]
        if isinstance(after, ErasedEvent):
            return None
        lane_ends = self._ended and after.seq == self._last_seq
        if (
            known is not None
            and known.delivery is after
            and known.previous_seq == head.seq
            and known.lane_ends == lane_ends
        ):
            return known
        sent_before = (
            after.batch <= self._sent_through_batch
            or after.seq <= self._batch_size.sent_through_seq
        )
        # By position: keywords take longer.
        return Send(after, head.seq, 1, sent_before, lane_ends)

    def may_run(self, send: Send) -> bool:
        """Whether a delivery run may begin with this request, which is about to start."""
        return (
            send.attempt == 1
            and not send.batch
            and not self._is_free_probe
            and len(self._buffer.queue) > 1
        )

    def next_in_run(self, now: float, known: Send | None) -> Send | None:
        """The Send that may start at once if the request in flight succeeded; None: none may,
        or `next` has something else to return.

        Args:
            known: see `peek_next_send`.
        """
        if self._stopped or self._pending_cut is not None or self._buffer.outdated:
            return None
        send = self.peek_next_send(known)
        return None if send is None or is_expired(send.delivery, now) else send

    def advance_run(self, now: float) -> None:
        """Record that the request in flight succeeded and that of `next_in_run` has started.

        Equals `record_result` and `next`, but the record is the run's.
        """
        done = self._buffer.pop_first()
        self._acked = self._delivered = done.seq
        self._floor_batch = done.batch
        self._success_at = self._stalled_since = now

    def fetch(self) -> Fetch | None:
        """The next Fetch, if the delivery buffer is low and there is more to read."""
        return None if self._stopped else self._buffer.fetch(self._last_seq)

    def reserve(self, rows_max: int) -> ReadBounds:
        """Reserve room for the result of a Fetch, whose read begins now."""
        return self._buffer.reserve(rows_max)

    # --------------------------------------------------------------- events

    def extend_to(self, last_seq: int, now: float) -> None:
        """Record that deliveries up to this sequence were assigned to the lane."""
        self._last_seq = max(self._last_seq, last_seq)
        if self._stalled_since is None and self.pending:
            self._stalled_since = now

    def append(self, deliveries: Iterable[Delivery]) -> None:
        """Add new deliveries to the buffer without a Fetch.

        Deliveries that do not continue the buffer are ignored and fetched later.
        """
        self._buffer.append(deliveries)
        # These deliveries may be newer than the last `extend_to`.
        self._last_seq = max(self._last_seq, self._buffer.fetched_seq)

    def append_fetched(self, deliveries: Sequence[Delivery | ErasedEvent]) -> None:
        """Add the result of a Fetch to the buffer."""
        if deliveries and deliveries[0].seq == self._acked + 1:
            self._missing_seq = self._acked + 1
        self._buffer.append_fetched(deliveries)
        self._last_seq = max(self._last_seq, self._buffer.fetched_seq)

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
        held: bool = False,
        observed_s: float = 0.0,
    ) -> Record:
        """Record the result of a Send with one delivery, or of an Open or End that failed.

        Args:
            started_at: when the request began, in epoch seconds.
            u: uniform in [0, 1), for the jitter.
            observed_s: observed seconds from the start of the delivery's first attempt to the
                start of this one.
            blocks: whether the lane waits for an operator if this dead-letters the delivery.
            preempted: the request was cancelled by admission control before it got a response.
            endpoint_healthy: the circuit breaker is closed, so the delivery fails and not the
                endpoint.
            held: the stream of its lane needs a person, see `outbox.core.brokers.take_over`.
        """
        if not self._buffer.queue:
            return self._record_end_failed(
                response, policy, started_at=started_at, now=now, u=u, held=held
            )
        first, retry = self._buffer.queue[0], self._retry
        attempt = retry.attempts + 1
        stored = stored_success(response) if outcome is _DELIVERED else stored_response(response)
        row = AttemptRow(
            first.batch,
            first.seq,
            attempt,
            _OUTCOMES[outcome],
            response.status,
            response.detail or (response.failure.value if response.failure else None),
            started_at,
            response.elapsed_s,
            stored,
        )
        if outcome is _DELIVERED:
            self._success_at = now
            self._advance(first.seq, first.batch, delivered=True)
            self._stalled_since = now if self.pending else None
            self._busy = None
            if self._buffer.batch_max is not None:
                self._batch_size.record_accepted(first.seq, 1, of=1)
            return Record(self.id, first.seq, row)
        self._batch_size.record_failed(first.seq)
        retry.attempts = attempt
        is_new_hold = held and self._is_another_failure(response)
        retry.record_failure(stored, started_at)
        if outcome is AttemptOutcome.REFUSED:
            return self._dead_letter(first, "refused", row, blocks=blocks)
        if self._has_position:
            self._postpone(policy, now, u, held=held)
            return self._record_retry(first, row, stuck=is_new_hold)
        if not self._is_free_probe and retry.charge_attempt(
            policy, now=now, u=u, observed_s=observed_s, preempted=preempted
        ):
            return self._dead_letter(first, "exhausted", row, blocks=blocks)
        stuck = endpoint_healthy and retry.should_report_stuck()
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
    ) -> tuple[RunResults, Record | None]:
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
        results = RunResults.of_batch(batch[:count], response, started_at)
        if count:
            self._success_at = now
            self._advance(accepted_seq, self._floor_batch, delivered=True)
            self._stalled_since = now if self.pending else None
        # All may be delivered although the batch as a whole was not: a broker's connection can end
        # just after the last confirm.
        if outcome is AttemptOutcome.DELIVERED or count == len(batch):
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
        wait_s = 0.0 if outcome is AttemptOutcome.REFUSED else policy.delay_s(1, u)
        retry.postpone(now + wait_s)
        row = AttemptRow(
            first.batch,
            first.seq,
            retry.attempts,
            "retry",
            response.status,
            response.detail or (response.failure.value if response.failure else None),
            started_at,
            response.elapsed_s,
            retry.last_response,
        )
        return results, self._record_retry(first, row)

    def revalidate(self, send: Send, now: float) -> Send | None:
        """A Send that waited for a slot, without expired deliveries; None: it is obsolete.

        A batch is cut before its first expired delivery.  Dropping it would waste the slot,
        and in a large backlog the next batch would have an expired delivery as well.
        """
        if self._stopped or self._buffer.outdated or self._pending_cut is not None:
            return None
        if self._position is None:
            return None  # It must be opened first.
        if self._retry.exhausted or send.delivery.seq == self._skip_seq:
            return None
        if is_expired(send.delivery, now):
            return None
        count = next((n for n, d in enumerate(send.batch) if is_expired(d, now)), None)
        return send if count is None else send._replace(batch=send.batch[:count], lane_ends=False)

    def record_position(self, position: int) -> None:
        """Record the result of an Open: where the lane stands in the stream."""
        self._position = position
        self._is_held = False
        self._busy = None

    def record_found(self, seq: int, batch: int, now: float) -> None:
        """Record the result of an Open: the stream has the deliveries up to `seq`, and their
        acknowledgement is durable.

        Args:
            batch: the batch of the delivery `seq`.
        """
        self._success_at = now
        self._position = seq
        self._is_held = False
        self._advance(seq, batch, delivered=True)
        self._floor_batch = batch
        self._committed = Progress(seq, seq, batch, success_at=now)
        self._stalled_since = now if self.pending else None
        self._busy = None

    def record_end(self) -> None:
        """Record that the stream has the lane's end entry, and that this is durable."""
        self._end_written = True
        self._retry = RetryState()
        self._busy = None

    def record_receipt(self, seq: int, receipt: str) -> None:
        """Record the receipt of an append that stored the deliveries up to `seq`."""
        self._receipts.append((seq, receipt))

    def retry_now(self, now: float) -> None:
        """Try again at once, because a person may have acted; for brokers and held lanes only."""
        if (self._has_position or self._retry.is_missing) and not self._retry.is_due(now):
            self._retry.postpone(now)

    def reopen(self) -> bool:
        """Open the lane again before anything more is sent or dead-lettered; for brokers only.

        Returns:
            Whether to do so at once: False the second time without progress in between.
        """
        if self._has_position:
            self._position = None
        is_first = self._reopened_at != self._acked
        self._reopened_at = self._acked
        return is_first

    def cancel_send(self) -> None:
        """Report that a Send or an Open was not executed; `next` decides again."""
        self._busy = None

    def confirm_recorded(self, record: Record) -> None:
        """Report that a record and all earlier records of this lane are durable."""
        seq, row = record.seq, record.attempt
        if record.progress is not None:
            self._committed = record.progress
            self._busy = None
            if record.dead is not None:
                self._refused_wait_s = 0.0
        elif row is not None:
            self._confirm_success(seq, row.batch, row.started_at + row.elapsed_s)

    def refuse_dead_letter(self, record: Record) -> Record:
        """Take back a record whose dead letter the database refused.

        Returns:
            What to record instead: the attempt, with the delivery pending.
        """
        dead = record.dead
        assert dead is not None
        self._acked, self._floor_batch, self._retry, self._stalled_since = self._before_dead
        self._blocked = self._blocked and not record.blocks
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

    def hold_refused(self, now: float) -> float:
        """Wait before the refused dead letter is tried again; returns the seconds."""
        wait_s = min(self._refused_wait_s * 2 or REFUSED_RETRY_S_MIN, REFUSED_RETRY_S_MAX)
        self._refused_wait_s, self._resumes_at = wait_s, now + wait_s
        return wait_s

    def confirm_run(self, results: RunResults) -> None:
        """Report that the successes of a run and all earlier records are durable."""
        self._confirm_success(results.seqs[-1], results.batches[-1], results.ended_at)

    def _confirm_success(self, seq: int, batch: int, at: float) -> None:
        if seq > self._committed.acked_seq:
            # All fields are positional, because filling in defaults is slow on this path.
            self._committed = Progress(seq, seq, batch, None, 0, 0, None, None, None, at)

    def clamp_times(self, policy: RetryPolicy, now: float) -> None:
        """Limit stored times to what is possible at `now`, after the clock was set back."""
        self._retry.clamp_delay(policy, now)
        self._resumes_at = min(self._resumes_at, now + REFUSED_RETRY_S_MAX)
        if self._stalled_since is not None:
            self._stalled_since = min(self._stalled_since, now)

    def apply_policy(self, policy: RetryPolicy, *, blocks: bool) -> None:
        """Apply a changed retry policy: a delivery with as many attempts has exhausted it.

        Args:
            blocks: whether the lane waits for an operator if this dead-letters the delivery.
        """
        self._retry.apply_policy(policy, blocks=blocks)

    def skip(self, seq: int) -> None:
        """Dead-letter this delivery when it is the next one and not in flight.

        It is sent no more.  If its request in flight succeeds, it is delivered.
        """
        self._skip_seq = seq

    def dead_letter_through(self, through_seq: int, reason: LaneDeadLetterReason) -> None:
        """Dead-letter all deliveries up to this sequence as soon as nothing is in flight."""
        through_seq = min(through_seq, self._last_seq)
        if through_seq > (self._acked if self._pending_cut is None else self._pending_cut[0]):
            self._pending_cut = (through_seq, reason)

    def unblock(self) -> None:
        """Let a blocked lane continue."""
        self._blocked = False

    def set_batch_max(self, batch_max: int | None) -> None:
        """Set the deliveries per request, from the next request on; None: no batches."""
        self._buffer.batch_max = batch_max

    def reset_batch_size(self) -> None:
        """Let batches grow from one delivery again, after a failure of the endpoint."""
        self._batch_size.reset()

    def invalidate_buffer(self) -> None:
        """Read the buffered deliveries again before the next Send, because they may be stale."""
        self._buffer.invalidate()

    def release_content(self) -> None:
        """Release the content of the buffered deliveries, because the lane waits long."""
        self._buffer.release()

    def set_share(self, share: BufferShare) -> None:
        """Use the share of another tenant in the buffer budget."""
        self._buffer.set_share(share)

    def close(self) -> None:
        """Give everything back to the buffer budget: the lane is owned no more."""
        self._buffer.reset(self._acked, self._floor_batch)

    def mark_ended(self) -> None:
        """Record that a newer generation replaced the lane, so that no delivery is added."""
        self._ended = True

    def stop(self) -> None:
        """Return no more commands; a request in flight completes as usual."""
        self._stopped = True

    # ------------------------------------------------------------- internal

    def _may_have_been_sent(self, first: Delivery) -> bool:
        """Whether the receiver may have this delivery already, so that 409 means a duplicate."""
        was_tried = self._retry.attempts > 0 and first.seq != self._conflict_seq
        return (
            was_tried
            or first.batch <= self._sent_through_batch
            or first.seq <= self._batch_size.sent_through_seq
        )

    def _select_batch(self, batch_max: int, gate: Gate, now: float) -> tuple[Delivery, ...]:
        """The deliveries of the next request; a retry or probe has only one."""
        is_alone = self._retry.attempts > 0 or gate is Gate.PROBE
        return self._buffer.select_batch(
            1 if is_alone else min(batch_max, self._batch_size.current), now
        )

    def _record_end_failed(
        self,
        response: AttemptResult,
        policy: RetryPolicy,
        *,
        started_at: float,
        now: float,
        u: float,
        held: bool,
    ) -> Record:
        """Record that the end entry could not be appended, or the lane not be opened for it.

        There is no attempt to log: the end entry is no delivery.
        """
        is_new_hold = held and self._is_another_failure(response)
        self._retry.attempts += 1
        self._retry.record_failure(stored_response(response), started_at)
        self._postpone(policy, now, u, held=held)
        return self._record_retry(self._end, None, stuck=is_new_hold)

    def _is_another_failure(self, response: AttemptResult) -> bool:
        return (self._retry.last_response or {}).get("failure") != response.failure

    def _postpone(self, policy: RetryPolicy, now: float, u: float, *, held: bool) -> None:
        """Set the next attempt of a broker's lane, which costs no budget."""
        delay_s = policy.delay_s(self._retry.attempts, u)
        self._retry.postpone(now + min(delay_s, BROKER_RETRY_S_MAX))
        self._is_held = held

    def _record_retry(
        self,
        first: Delivery | ErasedEvent | LaneEnd,
        row: AttemptRow | None,
        *,
        stuck: bool = False,
    ) -> Record:
        """Record a failed attempt; the lane waits until its retry state is durable."""
        self._busy = _Busy.RECORDING
        self._floor_batch = first.batch
        retry = self._retry
        progress = Progress(
            self._acked,
            self._delivered,
            self._floor_batch,
            first.seq,
            retry.attempts,
            retry.spent,
            retry.first_attempt_at,
            retry.next_attempt_at,
            retry.last_response,
            self._success_at,
        )
        return Record(self.id, first.seq, row, progress, stuck=stuck)

    def _advance(self, seq: int, batch: int, *, delivered: bool) -> None:
        last_batch = self._buffer.discard_through(seq)
        self._acked = seq
        self._floor_batch = batch if last_batch is None else last_batch
        if delivered:
            self._delivered = seq
            self._refused_wait_s = 0.0
            if self._has_position and self._position is not None:
                self._position = seq
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

    def _dead_letter_missing(self, first: MissingEvent) -> Record:
        """Dead-letter the missing events at the beginning of the buffer, several as a range."""
        queue = self._buffer.queue
        run = list(takewhile(lambda each: isinstance(each, MissingEvent), queue))
        missing = tuple(each.outbox_id for each in run)
        if len(run) == 1:
            return self._dead_letter(first, "missing", None)._replace(missing=missing)
        return self._dead_letter_range(run[-1].seq, "missing")._replace(missing=missing)

    def _dead_letter_range(self, through_seq: int, reason: LaneDeadLetterReason) -> Record:
        dead = DeadRange(
            self._floor_batch,
            self._acked + 1,
            through_seq,
            reason,
            self._retry.requests,
            self._retry.last_response,
        )
        return self._record_dead(through_seq, self._floor_batch, None, dead, blocks=False)

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
        self._before_dead = (self._acked, self._floor_batch, self._retry, self._stalled_since)
        self._advance(seq, batch, delivered=False)
        if not self.pending:
            self._stalled_since = None
        self._blocked = self._blocked or blocks
        self._busy = _Busy.RECORDING
        progress = Progress(seq, self._delivered, self._floor_batch, success_at=self._success_at)
        return Record(self.id, seq, row, progress, dead, blocks)


_OUTCOMES: dict[AttemptOutcome, Literal["delivered", "retry", "refused"]] = {
    AttemptOutcome.DELIVERED: "delivered",
    AttemptOutcome.RETRY: "retry",
    AttemptOutcome.REFUSED: "refused",
}
