"""One lane: an ordered stream of deliveries, one request in flight at a time.

The lane is driven by its owner: `next` says what to do, the other methods
tell it what happened.

    next ──▶ Send ────▶ answered ──▶ Record(delivered) ──▶ next     (need not wait)
      │                     └──────▶ Record(failed, given up) ──▶ recorded ──▶ next
      ├────▶ Record(given up unsent: expired, erased, backlog) ──▶ recorded ──▶ next
      ├────▶ Fetch ───▶ fetched ──▶ next
      ├────▶ Wait(until) … next
      └────▶ None     … offered, unblocked, or the gate opens ──▶ next

**Why nothing is lost and nothing is turned around.**  Number n+1 is sent only
after n was answered with success or its end is durable.  A success may wait
for its group: if the owner dies first, the next owner finds n without a
record and sends it again, with the same number and `X-Delivery`, before n+1 is
ever repeated.  A failure or the end of a delivery may not wait: its retry
state must be on disk before anything else happens, and everything that waits
in the lane is written in the same statement, so that the log never passes a
number without its outcome.

What was tried for the next number, `acked + 1`, is its `Head`.
"""

from __future__ import annotations

from enum import Enum, auto
from math import inf
from typing import TYPE_CHECKING, Literal

from outbox.core.delivery.batch import BatchSize
from outbox.core.delivery.commands import (
    AttemptRow,
    DeadLetter,
    DeadRange,
    Fetch,
    Gate,
    Gone,
    Progress,
    Record,
    Send,
    Wait,
)
from outbox.core.delivery.delivery_buffer import InHand, is_expired
from outbox.core.delivery.message import Delivery
from outbox.core.delivery.retry_state import Head
from outbox.core.model.http_status import CONFLICT
from outbox.core.model.response import Verdict, of_several, receipt, summary

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from outbox.core.delivery.commands import Command, Reason
    from outbox.core.model.response import Answer
    from outbox.core.model.retry_policy import RetryPolicy


class _Busy(Enum):
    SENDING = auto()
    RECORDING = auto()


# By name: Python 3.11 takes far longer to find the members of an enumeration.
_SENDING = _Busy.SENDING
_OPEN, _SHUT, _DELIVERED = Gate.OPEN, Gate.SHUT, Verdict.DELIVERED


class Lane:
    """The state of one lane in its owner's memory; times are epoch seconds.

    Args:
        progress: the checkpoint.
        tail: (seq, batch, time) of the delivered rows of the attempt log
            behind the checkpoint.
        last_seq: the last number given out.
        sent_through_batch: deliveries up to this batch may have been sent by
            an earlier owner.
        owed_since: when the first delivery that is owed was given out.
        blocked: an operator has to let it go on.
        ended: it belongs to an older generation; nothing is added any more.
        batch_max: so many deliveries may go together; None: each goes by itself.
    """

    __slots__ = (
        "_acked",
        "_batch_size",
        "_blocked",
        "_busy",
        "_committed",
        "_cut",
        "_delivered",
        "_ended",
        "_floor_batch",
        "_free",
        "_hand",
        "_head",
        "_last_seq",
        "_refused_seq",
        "_sent_through_batch",
        "_stalled_since",
        "_stopped",
        "_success_at",
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
        owed_since: float | None = None,
        blocked: bool = False,
        ended: bool = False,
        batch_max: int | None = None,
    ) -> None:
        self.id = lane_id
        self._batch_size = BatchSize()
        # Tried only together with others, which was answered like something new.
        self._refused_seq = 0
        for seq, batch, at in sorted(set(tail)):
            # Records are written in order, so the tail has no holes; were
            # there one, sending again is right and skipping would not be.
            if seq == progress.acked_seq + 1:
                progress = Progress(seq, seq, batch, success_at=at)
        self._acked = progress.acked_seq
        self._delivered = progress.delivered_seq
        self._floor_batch = progress.floor_batch
        self._success_at = progress.success_at
        # What is on disk; retry state that is not of the next number is stale.
        self._committed = progress
        self._last_seq = last_seq
        self._sent_through_batch = sent_through_batch
        self._blocked = blocked
        self._ended = ended
        self._hand = InHand(self._acked, self._floor_batch, batch_max)
        self._busy: _Busy | None = None
        self._free = False
        self._stopped = False
        self._cut: tuple[int, Reason] | None = None
        self._stalled_since: float | None = None
        if self.owed:
            known = [at for at in (owed_since, self._success_at) if at is not None]
            self._stalled_since = max(known, default=None)
        self._head = Head.of(progress)

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
    def floor_batch(self) -> int:
        """Nothing that is owed lies below this batch."""
        return self._floor_batch

    @property
    def owed(self) -> int:
        """How many deliveries are still to be made."""
        return self._last_seq - self._acked

    @property
    def in_flight(self) -> bool:
        """A request is out, or its outcome is being written."""
        return self._busy is not None

    @property
    def runs_dry(self) -> bool:
        """Hardly anything is left of what it had in hand, and there is no more to read."""
        hand = self._hand
        return not self._stopped and hand.fetched_seq >= self._last_seq and hand.is_low

    @property
    def drained(self) -> bool:
        """Nothing is owed or on its way to the disk, and no operator is waited for."""
        return self._acked == self._last_seq and self._busy is None and not self._blocked

    @property
    def settled(self) -> bool:
        """Nothing is out, and everything that happened is on disk."""
        return self._busy is None and self._committed.acked_seq == self._acked

    @property
    def stalled_since(self) -> float | None:
        """Since when it has owed something without a success; None: it owes nothing."""
        return self._stalled_since

    @property
    def head_since(self) -> float | None:
        """Since when its next delivery has been there to be made; None: it owes nothing."""
        first = self._hand.queue[0] if self._hand.queue else None
        since = first.waits_since if isinstance(first, Delivery) else None
        return self._stalled_since if since is None else since

    @property
    def failing(self) -> bool:
        """Its head was tried, and is owed still."""
        return self._head.attempts > 0

    @property
    def blocked(self) -> bool:
        """An operator has to let it go on."""
        return self._blocked

    def checkpoint(self) -> Progress:
        """What may be written down as progress: committed records only."""
        return self._committed

    # ------------------------------------------------------- what to do next

    def next(self, now: float, gate: Gate = _OPEN) -> Command:
        """The next thing to do; None when there is nothing, or it is under way.

        `gate` is what the endpoint's health allows; what is given up unsent
        does not ask for it.
        """
        if self._busy is not None or self._stopped:
            return None
        hand = self._hand
        if hand.outdated:
            hand.drop(self._acked, self._floor_batch)
        if self._cut is not None:
            through_seq, reason = self._cut
            self._cut = None
            if through_seq > self._acked:
                return self._give_up_range(through_seq, reason)
        if self._blocked:
            return None
        if not hand.queue:
            return self.fetch()
        first, head = hand.queue[0], self._head
        if isinstance(first, Gone):
            return self._give_up(first, "erased", None)
        expires_at = inf if first.expires_at is None else first.expires_at.timestamp()
        if expires_at <= now:
            return self._give_up(first, "expired", None)
        is_due = head.is_due(now)
        if gate is _SHUT or (gate is _OPEN and not is_due):
            due_at = inf if gate is _SHUT else head.next_attempt_at or now
            # An event that expires meanwhile must not hold up the lane.
            until = min(due_at, expires_at)
            return None if until == inf else Wait(until)
        self._busy = _SENDING
        self._free = not is_due
        batch = () if hand.batch_max is None else self._together(hand.batch_max, gate, now)
        last_seq = batch[-1].seq if batch else first.seq
        return Send(
            first,
            self._delivered,
            head.attempts + 1,
            maybe_sent_before=self._maybe_sent(first),
            lane_ends=self._ended and last_seq == self._last_seq,
            batch=batch,
        )

    def ahead(self) -> Send | None:
        """What comes next if what is out is delivered; None: nothing, or it is not known yet."""
        hand = self._hand
        if self._busy is not _SENDING or hand.batch_max is not None or len(hand.queue) < 2:
            return None
        head, after = hand.queue[0], hand.queue[1]
        if isinstance(after, Gone):
            return None
        return Send(
            after,
            head.seq,
            attempt=1,
            maybe_sent_before=after.batch <= self._sent_through_batch,
            lane_ends=self._ended and after.seq == self._last_seq,
        )

    def fetch(self) -> Fetch | None:
        """What to read, if the lane runs low and there is more."""
        return None if self._stopped else self._hand.fetch(self._last_seq)

    # --------------------------------------------------------- what happened

    def offered(self, last_seq: int, now: float) -> None:
        """The lane was given deliveries up to this number."""
        self._last_seq = max(self._last_seq, last_seq)
        if self._stalled_since is None and self.owed:
            self._stalled_since = now

    def given(self, deliveries: Iterable[Delivery]) -> None:
        """Deliveries that were just given out, and need not be read.

        What does not follow what is in hand is left to be read.
        """
        self._hand.given(deliveries)
        # It may be newer than what was offered.
        self._last_seq = max(self._last_seq, self._hand.fetched_seq)

    def fetched(self, deliveries: Sequence[Delivery | Gone]) -> None:
        """The answer to a Fetch."""
        self._hand.fetched(deliveries)
        self._last_seq = max(self._last_seq, self._hand.fetched_seq)

    def answered(
        self,
        verdict: Verdict,
        answer: Answer,
        policy: RetryPolicy,
        *,
        started_at: float,
        now: float,
        u: float,
        blocks: bool = False,
        called_off: bool = False,
    ) -> Record:
        """A Send was answered.

        Args:
            u: uniform in [0, 1), for the jitter.
            called_off: there was no answer yet when it was ended to make room for others.
            blocks: when this ends the delivery, the lane waits for an operator.
        """
        first, head = self._hand.queue[0], self._head
        attempt = head.attempts + 1
        told = receipt(answer) if verdict is _DELIVERED else summary(answer)
        row = AttemptRow(
            first.batch,
            first.seq,
            attempt,
            _OUTCOMES[verdict],
            answer.status,
            answer.detail or (answer.failure.value if answer.failure else None),
            started_at,
            answer.elapsed_s,
            told,
        )
        if verdict is _DELIVERED:
            self._success_at = now
            self._pass(first.seq, first.batch, delivered=True)
            self._stalled_since = now if self.owed else None
            self._busy = None
            if self._hand.batch_max is not None:
                self._batch_size.accepted(first.seq, 1, of=1)
            return Record(self.id, first.seq, row)
        self._batch_size.failed(first.seq)
        head.attempts = attempt
        head.answered(told, started_at)
        if verdict is Verdict.REFUSED:
            return self._give_up(first, "refused", row, blocks=blocks)
        if not self._free and head.spend(
            policy, started_at=started_at, now=now, u=u, called_off=called_off
        ):
            return self._give_up(first, "exhausted", row, blocks=blocks)
        return self._failed(first, row)

    def batch_answered(
        self,
        batch: Sequence[Delivery],
        accepted_seq: int,
        verdict: Verdict,
        answer: Answer,
        policy: RetryPolicy,
        *,
        started_at: float,
        now: float,
        u: float,
    ) -> list[Record]:
        """A Send of several deliveries was answered; of one: see `answered`.

        The records are in order; but for the last, each is a success.

        Args:
            accepted_seq: everything up to here is delivered.
            verdict: of the batch; what it is other than a success, the first that was not
                accepted will be, alone, if it is to blame.
            u: uniform in [0, 1), for the jitter.
        """
        # Of what nobody can have been sent before, a conflict is about something else.
        is_refusal = answer.status == CONFLICT and not self._maybe_sent(batch[0])
        answer = of_several(answer)
        told = receipt(answer)
        records: list[Record] = []
        for each in batch:
            if each.seq > accepted_seq:
                break
            row = AttemptRow(
                each.batch, each.seq, 1, "delivered", answer.status, answer.detail or None,
                started_at, answer.elapsed_s, told,
            )  # fmt: skip
            records.append(Record(self.id, each.seq, row))
        if records:
            self._success_at = now
            self._pass(accepted_seq, self._floor_batch, delivered=True)
            self._stalled_since = now if self.owed else None
        if verdict is Verdict.DELIVERED:
            self._batch_size.accepted(batch[-1].seq, len(records), of=len(batch))
            self._busy = None
            return records
        first, head = batch[len(records)], self._head
        self._refused_seq = first.seq if is_refusal else 0
        self._batch_size.failed(first.seq - 1 if is_refusal else batch[-1].seq, len(batch))
        head.attempts += 1
        # Its time begins with the attempt that is its own.
        head.last_answer = summary(answer)
        # Alone it is to be asked about at once, unless the receiver is in trouble.
        wait_s = 0.0 if verdict is Verdict.REFUSED else policy.delay_s(1, u)
        head.put_off(now + wait_s)
        row = AttemptRow(
            first.batch,
            first.seq,
            head.attempts,
            "retry",
            answer.status,
            answer.detail or (answer.failure.value if answer.failure else None),
            started_at,
            answer.elapsed_s,
            head.last_answer,
        )
        records.append(self._failed(first, row))
        return records

    def still(self, send: Send, now: float) -> Send | None:
        """What there is to do of a Send that waited for its turn; None: nothing.

        A batch goes up to the first that expired meanwhile, or the turn would be lost, and
        the next one again: of many there is always one.
        """
        if self._stopped or self._hand.outdated or self._cut is not None:
            return None
        if is_expired(send.delivery, now):
            return None
        count = next((n for n, d in enumerate(send.batch) if is_expired(d, now)), None)
        return send if count is None else send._replace(batch=send.batch[:count], lane_ends=False)

    def unsent(self) -> None:
        """A Send was not carried out; it comes again when it may."""
        self._busy = None

    def recorded(self, record: Record) -> None:
        """A record is durable, and so are those of this lane that came before it."""
        seq, row = record.seq, record.attempt
        if record.progress is not None:
            self._committed = record.progress
            self._busy = None
        elif row is not None and seq > self._committed.acked_seq:
            # All of it: a default that is filled in costs as much as all that are said.
            self._committed = Progress(
                seq, seq, row.batch, None, 0, 0, None, None, None, row.started_at + row.elapsed_s
            )

    def hold_to(self, policy: RetryPolicy, now: float) -> None:
        """Forget times that a clock can only have told before it was set back."""
        self._head.hold_to(policy, now)
        if self._stalled_since is not None:
            self._stalled_since = min(self._stalled_since, now)

    def cut(self, through_seq: int, reason: Reason) -> None:
        """Give up everything up to this number, as soon as nothing is in flight."""
        through_seq = min(through_seq, self._last_seq)
        if through_seq > (self._acked if self._cut is None else self._cut[0]):
            self._cut = (through_seq, reason)

    def unblock(self) -> None:
        """An operator lets it go on."""
        self._blocked = False

    def batch_up_to(self, batch_max: int | None) -> None:
        """From the next request on, so many deliveries may go together."""
        self._hand.batch_up_to(batch_max)

    def start_small(self) -> None:
        """The endpoint is out of order: when it is back, batches grow from one."""
        self._batch_size.start_small()

    def reread(self) -> None:
        """What is in hand may not be what is stored any more: read it again."""
        self._hand.reread()

    def end(self) -> None:
        """A newer generation took its place: what it owes now is the last of it."""
        self._ended = True

    def stop(self) -> None:
        """Send nothing more; what is in flight still ends as usual."""
        self._stopped = True

    # ---------------------------------------------------------------- inside

    def _maybe_sent(self, first: Delivery) -> bool:
        """Whether a receiver may have the next one already, by which it explains a conflict."""
        was_tried = self._head.attempts > 0 and first.seq != self._refused_seq
        return (
            was_tried
            or first.batch <= self._sent_through_batch
            or first.seq <= self._batch_size.sent_through_seq
        )

    def _together(self, batch_max: int, gate: Gate, now: float) -> tuple[Delivery, ...]:
        """What goes in one request: the head, and what may follow it."""
        is_alone = self._head.attempts > 0 or gate is Gate.PROBE
        return self._hand.together(1 if is_alone else min(batch_max, self._batch_size.now), now)

    def _failed(self, first: Delivery | Gone, row: AttemptRow) -> Record:
        """The head was tried, and is to be tried again."""
        self._busy = _Busy.RECORDING
        self._floor_batch = first.batch
        head = self._head
        progress = Progress(
            self._acked,
            self._delivered,
            self._floor_batch,
            first.seq,
            head.attempts,
            head.spent,
            head.first_attempt_at,
            head.next_attempt_at,
            head.last_answer,
            self._success_at,
        )
        return Record(self.id, first.seq, row, progress)

    def _pass(self, seq: int, batch: int, *, delivered: bool) -> None:
        last_batch = self._hand.passed(seq)
        self._acked = seq
        self._floor_batch = batch if last_batch is None else last_batch
        if delivered:
            self._delivered = seq
        if self._head.attempts:
            self._head = Head()

    def _give_up(
        self,
        first: Delivery | Gone,
        reason: Reason,
        row: AttemptRow | None,
        *,
        blocks: bool = False,
    ) -> Record:
        # Of an event that was erased, what receivers said of it is not kept either.
        told = None if isinstance(first, Gone) else self._head.last_answer
        dead = DeadLetter(first, reason, self._head.attempts, told)
        return self._end_of(first.seq, first.batch, row, dead, blocks=blocks)

    def _give_up_range(self, through_seq: int, reason: Reason) -> Record:
        dead = DeadRange(
            self._floor_batch,
            self._acked + 1,
            through_seq,
            reason,
            self._head.attempts,
            self._head.last_answer,
        )
        return self._end_of(through_seq, self._floor_batch, None, dead, blocks=False)

    def _end_of(
        self,
        seq: int,
        batch: int,
        row: AttemptRow | None,
        dead: DeadLetter | DeadRange,
        *,
        blocks: bool,
    ) -> Record:
        """Pass what is given up; the lane goes on when that is on disk."""
        self._pass(seq, batch, delivered=False)
        if not self.owed:
            self._stalled_since = None
        self._blocked = self._blocked or blocks
        self._busy = _Busy.RECORDING
        progress = Progress(seq, self._delivered, self._floor_batch, success_at=self._success_at)
        return Record(self.id, seq, row, progress, dead, blocks)


_OUTCOMES: dict[Verdict, Literal["delivered", "retry", "refused"]] = {
    Verdict.DELIVERED: "delivered",
    Verdict.RETRY: "retry",
    Verdict.REFUSED: "refused",
}
