"""One lane: an ordered stream of deliveries, one request in flight at a time.

The lane is driven by its owner: `next` says what to do, the other methods
tell it what happened.

    next ──▶ Send ────▶ answered ──▶ Record(delivered) ──▶ next     (need not wait)
      │                     └──────▶ Record(failed, given up) ──▶ recorded ──▶ next
      ├────▶ Record(given up unsent: expired, erased) ──▶ recorded ──▶ next
      ├────▶ Fetch ───▶ fetched ──▶ next
      ├────▶ Wait(until) … next
      └────▶ None     … offered ──▶ next

**Why nothing is lost and nothing is turned around.**  Number n+1 is sent only
after n was answered with success or its end is durable.  A success may wait
for its group: if the owner dies first, the next owner finds n without a
record and sends it again, with the same number and `X-Delivery`, before n+1 is
ever repeated.  A failure or the end of a delivery may not wait: its retry
state must be on disk before anything else happens, and everything that waits
in the lane is written in the same statement, so that the log never passes a
number without its outcome.

Retry state belongs to one number, `acked + 1`, and names it; a stale one is
recognised by that.
"""

from __future__ import annotations

from collections import deque
from enum import Enum, auto
from math import inf
from typing import TYPE_CHECKING, Any, Literal

from outbox.core.answer import Verdict, summary
from outbox.core.steps import AttemptRow, DeadLetter, Fetch, Gone, Progress, Record, Send, Wait

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from outbox.core.answer import Answer
    from outbox.core.request import Delivery
    from outbox.core.retry import RetryPolicy
    from outbox.core.steps import Command, Reason

FETCH_LOW = 8
"""A lane asks for more when it has no more than this many deliveries in hand."""


class _Busy(Enum):
    SENDING = auto()
    RECORDING = auto()


class Lane:
    """The state of one lane in its owner's memory.

    Args:
        progress: the checkpoint.
        tail: (seq, batch) of the delivered rows of the attempt log behind the
            checkpoint.
        last_seq: the last number given out.
        sent_through_batch: deliveries up to this batch may have been sent by
            an earlier owner.
    """

    __slots__ = (
        "_acked",
        "_attempts",
        "_busy",
        "_committed",
        "_delivered",
        "_fetched",
        "_fetching",
        "_first_attempt_at",
        "_last_answer",
        "_last_seq",
        "_next_attempt_at",
        "_queue",
        "_read_from_batch",
        "_sent_through_batch",
        "_stopped",
        "id",
    )

    _first_attempt_at: float | None
    _next_attempt_at: float | None
    _last_answer: dict[str, Any] | None

    def __init__(
        self,
        lane_id: int,
        progress: Progress,
        tail: Iterable[tuple[int, int]],
        last_seq: int,
        sent_through_batch: int,
    ) -> None:
        self.id = lane_id
        for seq, batch in sorted(set(tail)):
            # Records are written in order, so the tail has no holes; were
            # there one, sending again is right and skipping would not be.
            if seq == progress.acked_seq + 1:
                progress = Progress(seq, seq, batch)
        self._acked = progress.acked_seq
        self._delivered = progress.delivered_seq
        # What is on disk; retry state that is not of the next number is stale.
        self._committed = progress
        self._last_seq = last_seq
        self._sent_through_batch = sent_through_batch
        self._queue: deque[Delivery | Gone] = deque()
        self._fetched = progress.acked_seq
        self._fetching = False
        self._read_from_batch = progress.floor_batch
        self._busy: _Busy | None = None
        self._stopped = False
        self._reset_retry()
        if progress.head_seq == progress.acked_seq + 1:
            self._attempts = progress.attempts
            self._first_attempt_at = progress.first_attempt_at
            self._next_attempt_at = progress.next_attempt_at
            self._last_answer = progress.last_answer

    def _reset_retry(self) -> None:
        self._attempts = 0
        self._first_attempt_at = None
        self._next_attempt_at = None
        self._last_answer = None

    # ------------------------------------------------------------ questions

    @property
    def acked_seq(self) -> int:
        """Delivered or given up up to here, in memory."""
        return self._acked

    @property
    def committed_seq(self) -> int:
        """The same, on disk."""
        return self._committed.acked_seq

    @property
    def owed(self) -> int:
        """How many deliveries are still to be made."""
        return self._last_seq - self._acked

    @property
    def in_flight(self) -> bool:
        """A request is out, or its outcome is being written."""
        return self._busy is not None

    @property
    def settled(self) -> bool:
        """Nothing is out, and everything that happened is on disk."""
        return self._busy is None and self._committed.acked_seq == self._acked

    def checkpoint(self) -> Progress:
        """What may be written down as progress: committed records only."""
        return self._committed

    # ------------------------------------------------------- what to do next

    def next(self, now: float) -> Command:
        """The next thing to do; None when there is nothing, or it is under way."""
        if self._busy is not None or self._stopped:
            return None
        if not self._queue:
            return self.fetch()
        head = self._queue[0]
        if isinstance(head, Gone):
            return self._give_up(head, "erased", None)
        if head.expires_at is not None and head.expires_at.timestamp() <= now:
            return self._give_up(head, "expired", None)
        if self._next_attempt_at is not None and now < self._next_attempt_at:
            # An event that expires meanwhile must not hold up the lane.
            expires_at = head.expires_at.timestamp() if head.expires_at else inf
            return Wait(min(self._next_attempt_at, expires_at))
        self._busy = _Busy.SENDING
        return Send(
            head,
            self._delivered,
            self._attempts + 1,
            maybe_sent_before=self._attempts > 0 or head.batch <= self._sent_through_batch,
        )

    def fetch(self) -> Fetch | None:
        """What to read, if the lane runs low and there is more."""
        if (
            self._stopped
            or self._fetching
            or len(self._queue) > FETCH_LOW
            or self._fetched >= self._last_seq
        ):
            return None
        self._fetching = True
        return Fetch(self._fetched, self._read_from_batch)

    # --------------------------------------------------------- what happened

    def offered(self, last_seq: int) -> None:
        """The lane was given deliveries up to this number."""
        self._last_seq = max(self._last_seq, last_seq)

    def fetched(self, deliveries: Sequence[Delivery | Gone]) -> None:
        """The answer to a Fetch."""
        self._fetching = False
        for delivery in deliveries:
            if delivery.seq != self._fetched + 1:
                raise AssertionError(
                    f"lane {self.id}: number {delivery.seq} follows {self._fetched}"
                )
            self._queue.append(delivery)
            self._fetched = delivery.seq
            self._read_from_batch = delivery.batch

    def answered(
        self,
        verdict: Verdict,
        answer: Answer,
        policy: RetryPolicy,
        *,
        started_at: float,
        now: float,
        u: float,
        retry_after_s: float | None = None,
    ) -> Record:
        """A Send was answered.

        Args:
            started_at, now: epoch seconds.
            u: uniform in [0, 1), for the jitter.
            retry_after_s: the least time the receiver asked to be left alone.
        """
        head = self._queue[0]
        self._attempts += 1
        row = AttemptRow(
            head.batch,
            head.seq,
            self._attempts,
            _OUTCOMES[verdict],
            answer.status,
            answer.detail or (answer.failure.value if answer.failure else None),
            started_at,
            answer.elapsed_s,
        )
        if verdict is Verdict.DELIVERED:
            self._pass(delivered=True)
            self._busy = None
            return Record(self.id, head.seq, row)
        if self._first_attempt_at is None:
            self._first_attempt_at = started_at
        self._last_answer = summary(answer)
        if verdict is Verdict.REFUSED:
            return self._give_up(head, "refused", row)
        if policy.exhausted(self._attempts, started_at - self._first_attempt_at):
            return self._give_up(head, "exhausted", row)
        delay_s = max(policy.delay_s(self._attempts, u), retry_after_s or 0.0)
        self._next_attempt_at = now + delay_s
        self._busy = _Busy.RECORDING
        return Record(
            self.id,
            head.seq,
            row,
            Progress(
                self._acked,
                self._delivered,
                head.batch,
                head.seq,
                self._attempts,
                self._first_attempt_at,
                self._next_attempt_at,
                self._last_answer,
            ),
        )

    def recorded(self, record: Record) -> None:
        """A record is durable."""
        seq, row = record.seq, record.attempt
        if record.progress is not None:
            self._committed = record.progress
            self._busy = None
        elif row is not None and seq > self._committed.acked_seq:
            self._committed = Progress(seq, seq, row.batch)

    def retry_now(self) -> None:
        """Forget the wait before the next attempt."""
        self._next_attempt_at = None

    def stop(self) -> None:
        """Send nothing more; what is in flight still ends as usual."""
        self._stopped = True

    # ---------------------------------------------------------------- inside

    def _pass(self, *, delivered: bool) -> None:
        head = self._queue.popleft()
        self._acked = head.seq
        if delivered:
            self._delivered = head.seq
        self._reset_retry()

    def _give_up(self, head: Delivery | Gone, reason: Reason, row: AttemptRow | None) -> Record:
        dead = DeadLetter(head, reason, self._attempts, self._last_answer)
        self._pass(delivered=False)
        self._busy = _Busy.RECORDING
        return Record(self.id, head.seq, row, Progress(head.seq, self._delivered, head.batch), dead)


_OUTCOMES: dict[Verdict, Literal["delivered", "retry", "refused"]] = {
    Verdict.DELIVERED: "delivered",
    Verdict.RETRY: "retry",
    Verdict.REFUSED: "refused",
}
