"""One lane: an ordered stream of deliveries, one request in flight at a time.

The lane does no I/O.  Its owner calls `next` for a command, executes it, and reports the
result with the other methods.

    next ──▶ Send ──▶ record_result ──▶ Record(delivered) ──▶ next     (may be group-committed)
      │                     └─────────▶ Record(retry, dead letter) ──▶ confirm_recorded ──▶ next
      ├────▶ Record(dead letter unsent: erased, missing, skipped, expired, exhausted by a new
      │             policy, backlog) ──▶ confirm_recorded ──▶ next
      ├────▶ Open ──▶ record_position, record_found or record_stream_failed ──▶ next (brokers)
      ├────▶ End ──▶ record_end or record_stream_failed ──▶ next                     (brokers)
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

**Brokers.**  The lane of a broker's endpoint has a position in the stream, and is opened to learn
it: at the start, and after a response was lost.  Until then it neither sends nor dead-letters,
because the stream may have the next deliveries already.  A lane of an older generation ends with an
entry of its own, also if nothing was delivered: readers need it to know that the newer lanes may
begin.

**Missing events.**  The event of the next delivery may be gone without a record.  The delivery is
dead-lettered, or, with `holds_missing`, holds the lane: it is read again every `MISSING_POLL_S`,
until its event exists again, or the delivery is skipped or dead-lettered by a limit, or the
setting changes.  Both are written only with the proof that the event is gone.

The state of a lane is in `owned_lane`, the results of its commands in `lane_outcomes`.
"""

from __future__ import annotations

from itertools import takewhile
from math import inf
from typing import TYPE_CHECKING

from outbox.core.delivery.commands import (
    End,
    ErasedEvent,
    Gate,
    MissingEvent,
    Open,
    Record,
    Send,
    Wait,
)
from outbox.core.delivery.delivery_buffer import is_expired
from outbox.core.delivery.lane_outcomes import LaneOutcomes
from outbox.core.delivery.owned_lane import Busy
from outbox.core.delivery.retry_state import RetryState
from outbox.core.model.stored_response import missing_response

if TYPE_CHECKING:
    from outbox.core.delivery.commands import Command
    from outbox.core.delivery.stream_position import StreamPosition
    from outbox.core.model.dead_letter_reason import LaneDeadLetterReason
    from outbox.core.model.delivery import Delivery

# Bound once: enum member access is slow in Python 3.11.
_SENDING, _OPEN, _SHUT = Busy.SENDING, Gate.OPEN, Gate.SHUT

MISSING_POLL_S = 10.0
"""Seconds after which a delivery whose event is gone is read again, while it holds its lane."""


class Lane(LaneOutcomes):
    """One lane in its owner's memory, and what it does next; see `OwnedLane` for its arguments."""

    __slots__ = ()

    def next(self, now: float, gate: Gate = _OPEN) -> Command:
        """The next command; None when there is none or one is in progress.

        What keeps a delivery from being sent here does so in `next_in_run` and `revalidate`, too.

        Args:
            gate: what the endpoint's circuit breaker allows; it does not apply to deliveries
                that are dead-lettered unsent.
        """
        if self._busy is not None or self._stopped:
            return None
        buffer = self._buffer
        if buffer.outdated:
            buffer.reset(self.acked_seq, self.floor_batch)
        if now < self._resumes_at:
            return Wait(self._resumes_at)
        if self.stream is not None and self.stream.seq is None:
            return self._next_open(self.stream, now, gate)
        if self._pending_cut is not None:
            through_seq, reason = self._pending_cut
            self._pending_cut = None
            if through_seq > self.acked_seq:
                return self._dead_letter_range(through_seq, reason)
        if self.blocked:
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
        if ends is None and (gate is _SHUT or not is_due) and (at := self._send_at(gate)) > now:
            # Wake up at the expiry as well: an expired event must not block the lane.
            until = min(at, expires_at)
            return None if until == inf else Wait(until)
        if buffer.stub is not None:
            buffer.reset(self.acked_seq, self.floor_batch)
            return self.fetch()
        if ends is not None:
            return self._dead_letter(first, ends, None, blocks=blocks)
        self._busy = _SENDING
        self._is_free_probe = not is_due
        batch = () if buffer.batch_max is None else self._select_batch(buffer.batch_max, gate, now)
        last_seq = batch[-1].seq if batch else first.seq
        return Send(
            first,
            self.delivered_seq,
            retry.attempts + 1,
            maybe_sent_before=self._may_have_been_sent(first),
            lane_ends=self.ended and last_seq == self.last_seq,
            batch=batch,
        )

    def _send_at(self, gate: Gate) -> float:
        """When the next delivery may be sent again; inf: not before the gate opens."""
        if gate is _SHUT:
            return inf
        retry = self._retry
        due_at = -inf if retry.next_attempt_at is None else retry.next_attempt_at
        return min(due_at, retry.next_probe_at) if gate is Gate.PROBE and self.probes else due_at

    def _next_without_event(self, first: ErasedEvent, now: float) -> Command:
        """Dead-letter the next delivery, or hold the lane if its event is missing."""
        if not isinstance(first, MissingEvent):
            return self._dead_letter(first, "erased", None)
        if first.seq == self._skip_seq:
            return self._dead_letter(first, "skipped", None)
        if first is not self._held_event and first.seq != self._missing_seq:
            # It may have been read long ago, and exist again.
            self._missing_seq = first.seq
            self._buffer.reset(self.acked_seq, self.floor_batch)
            return self.fetch()
        return self._hold(first, now) if self.holds_missing else self._dead_letter_missing(first)

    def _hold(self, first: MissingEvent, now: float) -> Command:
        """Wait until the event of the next delivery exists again."""
        retry = self._retry
        if first is self._held_event:
            if not retry.is_due(now):
                return Wait(retry.next_attempt_at or now)
            self._buffer.reset(self.acked_seq, self.floor_batch)
            return self.fetch()
        self._held_event = first
        is_new = not retry.is_missing
        retry.attempts += 1
        retry.record_failure(missing_response(first.outbox_id), now)
        retry.postpone(now + MISSING_POLL_S)
        record = self._record_retry(first, None, stuck=is_new)
        return record._replace(missing=(first.outbox_id,))

    def _next_open(self, stream: StreamPosition, now: float, gate: Gate) -> Command:
        """Open the lane before anything is sent or dead-lettered."""
        if self.blocked and self._pending_cut is None:
            return None
        if not self._buffer.queue and not self._is_at_end:
            return self.fetch()
        open_ = Open(self._first, self._retry.attempts + 1)
        command = self._begin_attempt(open_, now, gate, held=stream.held)
        stream.openings += command is open_
        return command

    def _next_end(self, now: float, gate: Gate) -> Command:
        """Append the end entry after the last delivery."""
        end = End(self._end, self.delivered_seq, self._retry.attempts + 1)
        return self._begin_attempt(end, now, gate)

    def _begin_attempt(
        self, command: Open | End, now: float, gate: Gate, *, held: bool = False
    ) -> Command:
        """Begin to open the lane or to end it, unless it must wait."""
        if gate is _SHUT:
            return None
        is_due = self._retry.is_due(now)
        # A probe cannot show that the endpoint works again while the lane is held, and the circuit
        # breaker would admit the next one at once.
        if (gate is _OPEN or held or not self.probes) and not is_due:
            return Wait(self._retry.next_attempt_at or now)
        self._busy = _SENDING
        self._is_free_probe = not is_due
        return command

    @property
    def _is_at_end(self) -> bool:
        """Whether only the end entry is left to append."""
        return self.acked_seq == self.last_seq and self.lacks_end

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
        lane_ends = self.ended and after.seq == self.last_seq
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
        """Whether a request run may begin with this request, which is about to start."""
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
        self.acked_seq = self.delivered_seq = done.seq
        self.floor_batch = done.batch
        self._success_at = self.stalled_since = now

    def revalidate(self, send: Send | Open | End, now: float) -> Send | Open | End | None:
        """A command that waited for a slot, without expired deliveries; None: it is obsolete.

        A batch is cut before its first expired delivery.  Dropping it would waste the slot,
        and in a large backlog the next batch would have an expired delivery as well.
        """
        if isinstance(send, Open):
            return send
        if self.stream is not None and self.stream.seq is None:
            return None  # It must be opened first.
        if isinstance(send, End):
            return send
        if self._stopped or self._buffer.outdated or self._pending_cut is not None:
            return None
        if self._retry.exhausted or send.delivery.seq == self._skip_seq:
            return None
        if is_expired(send.delivery, now):
            return None
        count = next((n for n, d in enumerate(send.batch) if is_expired(d, now)), None)
        return send if count is None else send._replace(batch=send.batch[:count], lane_ends=False)

    def cancel_send(self) -> None:
        """Report that a Send, an Open or an End was not executed; `next` decides again."""
        self._busy = None

    def _select_batch(self, batch_max: int, gate: Gate, now: float) -> tuple[Delivery, ...]:
        """The deliveries of the next request; a retry or probe has only one."""
        is_alone = self._retry.attempts > 0 or gate is Gate.PROBE
        return self._buffer.select_batch(
            1 if is_alone else min(batch_max, self._batch_size.current), now
        )

    def _dead_letter_missing(self, first: MissingEvent) -> Record:
        """Dead-letter the missing events at the beginning of the buffer, several as a range."""
        queue = self._buffer.queue
        run = list(takewhile(lambda each: isinstance(each, MissingEvent), queue))
        missing = tuple(each.outbox_id for each in run)
        if len(run) == 1:
            return self._dead_letter(first, "missing", None)._replace(missing=missing)
        return self._dead_letter_range(run[-1].seq, "missing")._replace(missing=missing)
