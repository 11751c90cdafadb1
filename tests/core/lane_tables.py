"""What a lane's successive owners share: the tables, and a receiver with memory.

Both check what they receive; an error is a `Violation`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from typing import TYPE_CHECKING
from uuid import UUID

from outbox.core.delivery.commands import DeadRange, ErasedEvent, LaneSnapshot, Progress
from outbox.core.model.delivery import Delivery
from outbox.receiver.lane_order import LaneOrder, SequenceState
from tests.core.invariants import expect

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.core.delivery.commands import AttemptRow, DeadLetter, Fetch, Record, Send

ENDPOINT = UUID(int=1)
EPOCH_S = 1_700_000_000.0


def delivery(seq: int, batch: int = 1, expires_at: float | None = None) -> Delivery:
    """Return the delivery of a sequence number."""
    return Delivery(
        endpoint_id=ENDPOINT,
        lane="lane",
        seq=seq,
        batch=batch,
        outbox_id=100 + seq,
        event_id=UUID(int=1000 + seq),
        type="order.paid",
        tenant=None,
        key=None,
        published_at=EPOCH_S,
        expires_at=expires_at,
        payload=b"{}",
        headers=None,
        waits_since=EPOCH_S,
    )


class Disk:
    """The tables, written in one message per group, as the recorder does it."""

    def __init__(self) -> None:
        self.deliveries: list[Delivery] = []
        self.erased: set[int] = set()
        """Numbers whose event was erased."""
        self.progress = Progress()
        self.delivered: list[AttemptRow] = []
        """The successful rows of the attempt log, in order of their numbers."""
        self.failed: Counter[int] = Counter()
        """The number of failed attempts in the attempt log, by sequence number."""
        self.dead: dict[int, DeadLetter | DeadRange] = {}
        """Dead letters by number."""
        self.given_out_at: list[float] = []
        self.blocked = False
        self.skip_seq = 0
        """The number that an operator skipped last."""
        self.skipped: set[int] = set()
        """All numbers that operators skipped."""
        self.closed = False
        """The lane belongs to an older generation."""
        self.folded = Progress()
        """The checkpoint and tail, as a new owner must read them."""

    @property
    def last_seq(self) -> int:
        return len(self.deliveries)

    @property
    def ended(self) -> int:
        """The last number up to which every number has an outcome."""
        return len(self.delivered) + len(self.dead)

    @property
    def pending_since(self) -> float | None:
        """Time at which the first number without an outcome was sequenced."""
        return self.given_out_at[self.ended] if self.ended < self.last_seq else None

    def give_out(self, delivery: Delivery, now: float) -> None:
        expect(not self.closed, f"{delivery.seq} comes after the end of its lane")
        self.deliveries.append(delivery)
        self.given_out_at.append(now)

    def read(self, fetch: Fetch, rows: int) -> list[Delivery | ErasedEvent]:
        """Return the next deliveries, as `READ_DELIVERIES` does."""
        found = [
            d
            for d in self.deliveries[fetch.after_seq :]
            if d.batch >= fetch.floor_batch and d.seq > fetch.after_seq
        ]
        return [
            ErasedEvent(ENDPOINT, d.seq, d.batch, d.outbox_id) if d.seq in self.erased else d
            for d in found[:rows]
        ]

    def snapshot(self, lane_id: int) -> LaneSnapshot:
        """Return the lane as a new owner reads it."""
        return LaneSnapshot(
            lane_id,
            self.last_seq,
            self.progress,
            self.tail(),
            self.pending_since,
            self.blocked,
            self.closed,
            self.skip_seq,
        )

    def tail(self) -> list[tuple[int, int, float]]:
        """Return the numbers that were delivered after the checkpoint."""
        p = self.progress
        first = bisect_right(self.delivered, p.acked_seq, key=lambda row: row.seq)
        return [
            (r.seq, r.batch, r.started_at + r.elapsed_s)
            for r in self.delivered[first:]
            if r.batch >= p.floor_batch
        ]

    def write(self, group: Sequence[Record]) -> None:
        """Write attempts, dead letters and progress of a group in one transaction."""
        for record in group:
            row = record.attempt
            if row is not None:
                batch = self.deliveries[row.seq - 1].batch
                expect(row.batch == batch, "an attempt is logged in another batch", row)
                self.failed[row.seq] += row.outcome != "delivered"
            if isinstance(record.dead, DeadRange):
                self._dead_letter(record.dead)
                expect(record.seq == record.dead.to_seq, "a range ends elsewhere", record)
            elif record.dead is not None:
                self._expect_next(record.seq)
                if record.dead.reason == "skipped":
                    expect(record.seq in self.skipped, "no operator skipped it", record)
                self.dead[record.seq] = record.dead
            elif row is not None and row.outcome == "delivered":
                self._expect_next(record.seq)
                self.delivered.append(row)
            if record.progress is not None:
                self._move(record.progress)
            self.blocked = self.blocked or record.blocks
        self._fold()

    def _dead_letter(self, dead: DeadRange) -> None:
        self._expect_next(dead.seq)
        expect(dead.seq <= dead.to_seq <= self.last_seq, "a range of what there is not", dead)
        first = self.deliveries[dead.seq - 1]
        expect(dead.batch <= first.batch, "reading a range begins too late", dead, first)
        expect(dead.attempts == self.failed[dead.seq], "attempts are not what is logged", dead)
        self.dead.update(dict.fromkeys(range(dead.seq, dead.to_seq + 1), dead))

    def checkpoint(self, progress: Progress) -> None:
        """Check that checkpoints only move forward."""
        if progress.acked_seq > self.progress.acked_seq:
            self._move(progress)
            self._fold()

    def _fold(self) -> None:
        self.folded = self.progress
        for seq, batch, at in self.tail():
            expect(seq == self.folded.acked_seq + 1, "the log has a hole", seq, self.folded)
            self.folded = Progress(seq, seq, batch, success_at=at)

    def _expect_next(self, seq: int) -> None:
        expect(seq > self.ended, f"{seq} has two outcomes")
        expect(seq == self.ended + 1, f"{seq} ends, and {self.ended + 1} has no outcome")

    def _move(self, p: Progress) -> None:
        was, self.progress = self.progress, p
        expect(p.acked_seq <= self.ended, f"{self.ended + 1} is passed without an outcome", p)
        alive = bisect_right(self.delivered, p.acked_seq, key=lambda row: row.seq)
        last = self.delivered[alive - 1].seq if alive else 0
        expect(p.delivered_seq == last, "the last one delivered is another", p)
        expect(p.acked_seq >= was.acked_seq, "progress moves back", was, p)
        expect(p.floor_batch >= was.floor_batch, "the floor sinks", was, p)
        pending = self.deliveries[p.acked_seq :]
        expect(
            not pending or p.floor_batch <= pending[0].batch,
            "something pending lies below the floor",
            p,
        )
        expect((p.success_at is None) == (last == 0), "when did it last succeed?", p)
        if p.retry_seq is not None:
            expect(p.attempts == self.failed[p.retry_seq], "attempts are not what is logged", p)
            if p.retry_seq == was.retry_seq and was.first_attempt_at is not None:
                expect(p.first_attempt_at == was.first_attempt_at, "a budget begins anew", p)


class Receiver:
    """A receiver that remembers its deliveries, and checks their order by the delivery headers."""

    def __init__(self) -> None:
        self.got: dict[int, UUID] = {}
        self._order = LaneOrder(from_start=True)

    def gets(self, send: Send) -> None:
        d = send.delivery
        known = self.got.setdefault(d.seq, d.event_id)
        expect(known == d.event_id, f"{d.seq} changes its event")
        seen = self._order.observe(d.seq, send.previous_seq)
        expect(not seen.missing, f"{d.seq} comes, and these are missing", seen)
        expect(not self._order.ranges(SequenceState.MISSING), "something is missing", seen)
