"""The state of a lane in its owner's memory, and what others change about it.

A lane's progress is ahead of what is durable: the record of a success may wait for a group commit.
The attempts of the next delivery, `acked_seq + 1`, are its `RetryState`.  Its content, and that of
the deliveries after it, is in the `DeliveryBuffer`.  Only a broker's lane has a `StreamPosition`.
"""

from __future__ import annotations

from enum import Enum, auto
from math import inf
from typing import TYPE_CHECKING

from outbox.core.delivery.commands import Progress
from outbox.core.delivery.delivery_buffer import DeliveryBuffer
from outbox.core.delivery.retry_state import RetryState
from outbox.core.messages.batch import BatchSize
from outbox.core.model.delivery import Delivery

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.core.delivery.buffer_budget import BufferShare, ReadBounds
    from outbox.core.delivery.commands import (
        ErasedEvent,
        Fetch,
        LaneSnapshot,
        MissingEvent,
        Record,
        Successes,
    )
    from outbox.core.delivery.stream_position import StreamPosition
    from outbox.core.model.dead_letter_reason import LaneDeadLetterReason
    from outbox.core.model.retry_policy import RetryPolicy

REFUSED_RETRY_S_MIN, REFUSED_RETRY_S_MAX = 10.0, 600.0
"""Seconds for which a lane waits after its dead letter was refused, doubled each time in a row."""


class Busy(Enum):
    """What a lane waits for before its next command."""

    SENDING = auto()
    RECORDING = auto()


class OwnedLane:
    """The state of one lane; times are epoch seconds.

    Args:
        snapshot: the lane as it was read.
        sent_through_batch: deliveries up to this batch may have been sent by an earlier owner.
        batch_max: deliveries per request; None: requests are not batches.
        stream: its position in the stream of a broker; None: the destination is no broker.
        share: the share of its tenant in the buffer budget; None: there is no budget.
    """

    __slots__ = (
        "_batch_size",
        "_before_dead",
        "_buffer",
        "_busy",
        "_committed",
        "_conflict_seq",
        "_held_event",
        "_is_free_probe",
        "_missing_seq",
        "_pending_cut",
        "_refused_dead",
        "_refused_wait_s",
        "_resumes_at",
        "_retry",
        "_sent_through_batch",
        "_skip_seq",
        "_stopped",
        "_success_at",
        "acked_seq",
        "blocked",
        "delivered_seq",
        "ended",
        "floor_batch",
        "holds_missing",
        "id",
        "last_seq",
        "probes",
        "stalled_since",
        "stream",
    )

    def __init__(
        self,
        snapshot: LaneSnapshot,
        sent_through_batch: int,
        *,
        batch_max: int | None = None,
        stream: StreamPosition | None = None,
        share: BufferShare | None = None,
    ) -> None:
        progress = snapshot.progress
        for seq, batch, at in sorted(set(snapshot.tail)):
            # Records are written in order, so the tail has no holes.  If it had one, resending
            # would be safe and skipping would not.
            if seq == progress.acked_seq + 1:
                progress = Progress(seq, seq, batch, success_at=at)
        self.id = snapshot.id
        self.stream = stream
        self.acked_seq = progress.acked_seq
        """The last sequence that was delivered or dead-lettered, in memory."""
        self.delivered_seq = progress.delivered_seq
        """The last sequence that was delivered, in memory; 0: none."""
        self.floor_batch = progress.floor_batch
        """No pending delivery has a batch below this one."""
        self.last_seq = snapshot.last_seq
        """The last assigned sequence."""
        self.blocked = snapshot.blocked
        """Whether the lane waits for an operator after a dead letter."""
        self.ended = snapshot.ended
        """Whether a newer generation replaced the lane."""
        self.stalled_since: float | None = None
        """Since when deliveries are pending without a success; None: no delivery is pending."""
        self._success_at = progress.success_at
        if self.pending:
            known = [at for at in (snapshot.pending_since, self._success_at) if at is not None]
            self.stalled_since = max(known, default=None)
        # Durable progress; retry state of another sequence than the next one is stale.
        self._committed = progress
        self._retry = RetryState.from_progress(progress)
        self._batch_size = BatchSize()
        self._buffer = DeliveryBuffer(self.acked_seq, self.floor_batch, batch_max, share)
        self._busy: Busy | None = None
        self._stopped = False
        # Whether the request in flight is a probe that does not count against the budget.
        self._is_free_probe = False
        self._sent_through_batch = sent_through_batch
        # A delivery whose batch got 409 although it was not sent before: its next 409 is a
        # refusal, not a duplicate.
        self._conflict_seq = 0
        self._skip_seq = snapshot.skip_seq
        self._pending_cut: tuple[int, LaneDeadLetterReason] | None = None
        self.holds_missing = False
        """Whether a delivery holds the lane if its event is gone."""
        self.probes = True
        """Whether deliveries are probed between their own attempts."""
        # The row that holds the lane, as it was read last.
        self._held_event: MissingEvent | None = None
        # The sequence whose event was missing in a read that was made when it was the next one.
        self._missing_seq = 0
        # What the last dead letter changed, until it is durable.
        self._before_dead = (self.acked_seq, self.floor_batch, self._retry, self.stalled_since)
        # The last dead letter after a response that the database refused: sequence, reason, and
        # whether it blocks.
        self._refused_dead: tuple[int, LaneDeadLetterReason, bool] | None = None
        # The last wait for a dead letter that the database refused, and until when it lasts; 0: the
        # last delivery that ended was not refused.
        self._refused_wait_s = 0.0
        self._resumes_at = -inf

    # ---------------------------------------------------------------- state

    @property
    def committed_seq(self) -> int:
        """The last sequence whose delivery or dead letter is durable."""
        return self._committed.acked_seq

    @property
    def unwritten(self) -> int:
        """The number of deliveries whose end is not durable yet."""
        return self.acked_seq - self._committed.acked_seq

    @property
    def pending(self) -> int:
        """The number of pending deliveries."""
        return self.last_seq - self.acked_seq

    @property
    def lacks_end(self) -> bool:
        """Whether its end entry is missing in its broker's stream."""
        return self.ended and self.stream is not None and not self.stream.end_written

    @property
    def has_work(self) -> bool:
        """Whether there are pending deliveries, or an end entry to append."""
        return self.acked_seq != self.last_seq or self.lacks_end

    @property
    def in_flight(self) -> bool:
        """Whether a request is in flight or its result is being written."""
        return self._busy is not None

    @property
    def is_buffered(self) -> bool:
        """Whether the next delivery is in memory."""
        return bool(self._buffer.queue)

    @property
    def drained(self) -> bool:
        """Whether nothing is pending or being written, and the lane is not blocked."""
        return not self.has_work and self._busy is None and not self.blocked

    @property
    def settled(self) -> bool:
        """Whether nothing is in flight and all progress is durable."""
        return self._busy is None and self._committed.acked_seq == self.acked_seq

    @property
    def head_since(self) -> float | None:
        """Since when the next delivery is pending; None: no delivery is pending."""
        first = self._buffer.queue[0] if self._buffer.queue else None
        since = first.waits_since if isinstance(first, Delivery) else None
        return self.stalled_since if since is None else since

    @property
    def failing(self) -> bool:
        """Whether the next delivery was attempted and is still pending."""
        return self._retry.attempts > 0

    @property
    def first_attempt_at(self) -> float | None:
        """When the first failed attempt of the next delivery began; None: none has failed."""
        return self._retry.first_attempt_at

    @property
    def held(self) -> bool:
        """Whether its stream or the event of its next delivery needs a person."""
        return (self.stream is not None and self.stream.held) or self._retry.is_missing

    def checkpoint(self) -> Progress:
        """The durable progress, for writing a checkpoint."""
        return self._committed

    # ----------------------------------------------------------- durability

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

    def confirm_run(self, results: Successes) -> None:
        """Report that the successes of a run and all earlier records are durable."""
        row = results.rows[-1]
        self._confirm_success(row.seq, row.batch, row.started_at + row.elapsed_s)

    def _confirm_success(self, seq: int, batch: int, at: float) -> None:
        if seq > self._committed.acked_seq:
            # All fields are positional, because filling in defaults is slow on this path.
            self._committed = Progress(seq, seq, batch, None, 0, 0, None, None, None, at)

    def hold_refused(self, now: float) -> float:
        """Wait before the refused dead letter is tried again; returns the seconds."""
        wait_s = min(self._refused_wait_s * 2 or REFUSED_RETRY_S_MIN, REFUSED_RETRY_S_MAX)
        self._refused_wait_s, self._resumes_at = wait_s, now + wait_s
        return wait_s

    # -------------------------------------------------------------- changes

    def extend_to(self, last_seq: int, now: float) -> None:
        """Record that deliveries up to this sequence were assigned to the lane."""
        self.last_seq = max(self.last_seq, last_seq)
        if self.stalled_since is None and self.pending:
            self.stalled_since = now

    def fetch(self) -> Fetch | None:
        """The next Fetch, if the delivery buffer is low and there is more to read."""
        return None if self._stopped else self._buffer.fetch(self.last_seq)

    def reserve(self, rows_max: int) -> ReadBounds:
        """Reserve room for the result of a Fetch, whose read begins now."""
        return self._buffer.reserve(rows_max)

    def append_fetched(self, deliveries: Sequence[Delivery | ErasedEvent]) -> None:
        """Add the result of a Fetch to the buffer."""
        if deliveries and deliveries[0].seq == self.acked_seq + 1:
            self._missing_seq = self.acked_seq + 1
        self._buffer.append_fetched(deliveries)
        self.last_seq = max(self.last_seq, self._buffer.fetched_seq)

    def retry_now(self, now: float) -> None:
        """Try again at once, because a person may have acted.

        The next attempt of a delivery keeps its time where a probe is sent before it.
        """
        self.probe_now()
        is_probed = self.probes and self.stream is None and not self._retry.is_missing
        if not is_probed and not self._retry.is_due(now):
            self._retry.postpone(now)

    def probe_now(self) -> None:
        """Let the next probe be at once: the receiver may process the delivery by now."""
        self._retry.next_probe_at = -inf

    def reopen(self) -> bool:
        """Open the lane again before anything more is sent or dead-lettered; for brokers only.

        Returns:
            Whether to do so at once: False the second time without progress in between.
        """
        return self.stream is not None and self.stream.reopen(self.acked_seq)

    def clamp_times(self, policy: RetryPolicy, now: float) -> None:
        """Limit stored times to what is possible at `now`, after the clock was set back."""
        self._retry.clamp_delay(policy, now)
        self._resumes_at = min(self._resumes_at, now + REFUSED_RETRY_S_MAX)
        if self.stalled_since is not None:
            self.stalled_since = min(self.stalled_since, now)

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
        through_seq = min(through_seq, self.last_seq)
        if through_seq > (self.acked_seq if self._pending_cut is None else self._pending_cut[0]):
            self._pending_cut = (through_seq, reason)

    def unblock(self) -> None:
        """Let a blocked lane continue."""
        self.blocked = False

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
        self._buffer.reset(self.acked_seq, self.floor_batch)

    def mark_ended(self) -> None:
        """Record that a newer generation replaced the lane, so that no delivery is added."""
        self.ended = True

    def stop(self) -> None:
        """Return no more commands; a request in flight completes as usual."""
        self._stopped = True
