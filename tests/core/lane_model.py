"""A lane's world: what is on disk, a receiver that remembers, and owners that die.

The lane under test is driven as the dispatcher and the recorder do it, step by
step.  Everything that can happen between two steps is a method, so that a
Hypothesis machine and a plain random driver can choose the order.  What the
lane does wrong is a `Violation`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from math import inf
from typing import TYPE_CHECKING

from outbox.core.answer import Answer, Failure, Verdict, classify
from outbox.core.lane import Lane
from outbox.core.retry import RetryPolicy
from outbox.core.steps import Fetch, Record, Send, Wait
from tests.core.lane_tables import EPOCH_S, Disk, Receiver, delivery
from tests.core.promises import expect

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.core.request import Delivery
    from outbox.core.steps import Command

POLICY = RetryPolicy(base_s=1.0, factor=2.0, cap_s=4.0, attempts_max=4, age_max_s=30.0)
ROWS_PER_FETCH = 12


@dataclass(frozen=True)
class Faults:
    """What a wrong relay does around the lane."""

    gives_up_alone: bool = False
    """A failure or give-up is written without the successes that wait."""
    reads_no_tail: bool = False
    """Who takes over reads the checkpoint alone."""
    trusts_the_receiver: bool = False
    """Who takes over does not expect copies."""
    says_so: bool = True
    """The lane's own account of itself is looked at too, not only what it does."""


NO_FAULTS = Faults()


class World:
    """One lane, its disk, its receiver and, one after the other, its owners."""

    def __init__(self, lane: type[Lane] = Lane, faults: Faults = NO_FAULTS) -> None:
        self.disk = Disk()
        self.receiver = Receiver()
        self.now = EPOCH_S
        self.ghosts: list[Send] = []
        """Requests of dead owners that may still arrive."""
        self._lane_type = lane
        self._faults = faults
        self._batch = 0
        self._sent: dict[int, int] = {}
        """Every number that was ever sent, and the `previous_seq` it had last."""
        self._lost: set[int] = set()
        """Numbers whose acknowledgement was lost in a crash."""
        self._take_over()

    # ---------------------------------------------------------------- owners

    def _take_over(self) -> None:
        disk, faults = self.disk, self._faults
        self.lane = self._lane_type(
            7,
            disk.progress,
            [] if faults.reads_no_tail else disk.tail(),
            disk.last_seq,
            0 if faults.trusts_the_receiver else self._batch,
        )
        self.sending: Send | None = None
        self.started_at = 0.0
        self.fetching: Fetch | None = None
        self.pending: list[Record] = []
        self._ended = disk.ended
        """What this owner believes to have ended, up to here."""
        self._hurried = False
        self._stopped = False

    def crash(self, written: int, *, received: bool, skew_s: float = 0.0) -> None:
        """The owner dies, and another takes over, whose clock may differ.

        `written`: how many of the waiting records reached the disk all the
        same; `received`: a request that is out arrives now, or may later.
        """
        group, lost = self.pending[:written], self.pending[written:]
        self._write(group)
        self._lost.update(r.seq for r in lost if r.progress is None)
        if self.sending is not None:
            if received:
                self.receiver.gets(self.sending)
            else:
                self.ghosts.append(self.sending)
        self.now += skew_s
        self._take_over()

    def ghost(self, i: int) -> None:
        """A copy that a dead owner sent arrives late."""
        if self.ghosts:
            self.receiver.gets(self.ghosts.pop(i % len(self.ghosts)))

    def stop(self) -> None:
        self._stopped = True
        self.lane.stop()

    def hand_over(self) -> None:
        """A clean change of hands, once everything is on disk."""
        if self._stopped and self.lane.settled:
            self.checkpoint()
            self._take_over()

    # -------------------------------------------------------- what happens

    def offer(self, count: int, *, expires_in_s: float | None = None, told: bool = True) -> None:
        """A batch gives the lane some numbers; its owner may hear of it later."""
        self._batch += 1
        expires_at = None
        if expires_in_s is not None:
            expires_at = datetime.fromtimestamp(self.now + expires_in_s, UTC)
        for _ in range(count):
            seq = self.disk.last_seq + 1
            self.disk.deliveries.append(delivery(seq, self._batch, expires_at))
        if told:
            self.lane.offered(self.disk.last_seq)

    def erase(self, i: int) -> None:
        """The event of a number that has not ended is erased; copies in hand are not."""
        if owed := self.disk.last_seq - self.disk.ended:
            self.disk.erased.add(self.disk.ended + 1 + i % owed)

    def tick(self, seconds: float) -> None:
        self.now += seconds

    def retry_now(self) -> None:
        self._hurried = True
        self.lane.retry_now()

    def proceed(self) -> Command:
        """Ask the lane what to do, and begin it."""
        before = self.lane.in_flight
        command = self.lane.next(self.now)
        match command:
            case Send() as send:
                expect(not before and self.sending is None, "two requests are in flight")
                self._expect_rightly_sent(send)
                self.sending, self.started_at = send, self.now
                self._hurried = False
                self._fetch(self.lane.fetch())
            case Record() as record:
                expect(not before, "two things at a time")
                self.pending.append(record)
            case Fetch() as fetch:
                self._fetch(fetch)
            case Wait(until):
                expect(until > self.now, "it waits for the past", until)
                expires_at = _expires_at(self.disk.deliveries[self.lane.acked_seq])
                expect(until <= expires_at, "it waits for what expires", until, expires_at)
        self.expect_consistent()
        return command

    def fetched(self, rows: int) -> None:
        """The answer to a Fetch; it comes whenever it comes."""
        fetch, self.fetching = self.fetching, None
        if fetch is not None:
            self.lane.fetched(self.disk.read(fetch, rows))

    def answer(self, status: int | None, *, received: bool, u: float, after_s: float) -> None:
        """The receiver answers; without a status the relay saw a time-out.

        A receiver that has the number says so with 409 instead of refusing it.
        """
        send, self.sending = self.sending, None
        if send is None:
            return
        seq = send.delivery.seq
        if status is None:
            answer = Answer.failed(Failure.TIMEOUT, "", 0.1)
        else:
            if status == 409 and seq not in self.receiver.got:
                status = 400
            received = 200 <= status <= 299
            answer = Answer.of(status, 0.1)
        if received:
            self.receiver.gets(send)
        self.now += after_s
        verdict = classify(answer, maybe_sent_before=send.maybe_sent_before)
        expect(status != 409 or verdict is Verdict.DELIVERED, f"{seq} is refused as a copy")
        record = self.lane.answered(
            verdict, answer, POLICY, started_at=self.started_at, now=self.now, u=u
        )
        expect(record.seq == seq, "another number was answered", record)
        if record.progress is not None and record.dead is None:
            expect((record.progress.next_attempt_at or 0) >= self.now, "it does not wait", record)
        if verdict is Verdict.DELIVERED:
            self._ended = seq
        self.pending.append(record)
        self.expect_consistent()

    def write_group(self, records: int) -> None:
        """The recorder writes what waits, up to so many; in order."""
        group, self.pending = self.pending[:records], self.pending[records:]
        if self._faults.gives_up_alone and self.pending and self.pending[-1].urgent:
            group, self.pending = [self.pending[-1]], [*group, *self.pending[:-1]]
        self._write(group)
        for record in group:
            self.lane.recorded(record)
        self.expect_consistent()

    def checkpoint(self) -> None:
        self.disk.checkpoint(self.lane.checkpoint())
        self.expect_consistent()

    def _write(self, group: Sequence[Record]) -> None:
        if group:
            self.disk.write(group)

    def _fetch(self, fetch: Fetch | None) -> None:
        if fetch is not None:
            expect(self.fetching is None, "two reads are under way")
            self.fetching = fetch

    # ----------------------------------------------------------- the promises

    def _expect_rightly_sent(self, send: Send) -> None:
        disk, seq = self.disk, send.delivery.seq
        ended = max(disk.ended, self._ended)
        expect(seq > ended, f"{seq} is sent although it has ended")
        expect(seq == ended + 1, f"{seq} is sent before {ended + 1} has ended")
        expect(send.delivery == disk.deliveries[seq - 1], f"{seq} changes its event")
        previous = seq - 1
        while previous in disk.dead:
            previous -= 1
        expect(send.previous_seq == previous, f"{seq} names {send.previous_seq}", previous)
        expect(_expires_at(send.delivery) > self.now, f"{seq} has expired")
        p = disk.folded
        recorded = p.attempts if p.head_seq == seq else 0
        expect(send.attempt == recorded + 1, f"{seq} forgets its attempts", send, p)
        if recorded and not self._hurried:
            expect(self.now >= (p.next_attempt_at or 0), f"{seq} does not wait", p)
        expect(send.maybe_sent_before or seq not in self._sent, f"{seq} was sent before")
        was = self._sent.setdefault(seq, previous)
        if was != previous:
            expect(previous < was, f"{seq} names a later number", was, previous)
            expect(was in self._lost and was in disk.dead, f"{seq} changes its previous", was)
            self._sent[seq] = previous

    def expect_consistent(self) -> None:
        """What the lane says of itself is so."""
        lane, disk = self.lane, self.disk
        if not self._faults.says_so:
            return
        waits = any(r.urgent for r in self.pending)
        expect(lane.in_flight == (waits or self.sending is not None), "in flight or not?")
        expect(lane.settled == (not self.pending and self.sending is None), "settled or not?")
        expect(lane.checkpoint() == disk.folded, "not what is on disk", lane.checkpoint())
        expect(lane.committed_seq == disk.folded.acked_seq, "not what is on disk")
        ended = max([lane.committed_seq, *(r.seq for r in self.pending if _ends(r))])
        expect(lane.acked_seq == ended, "acknowledged or not?", lane.acked_seq, ended)
        expect(lane.owed <= disk.last_seq - ended, "it owes what there is not")

    def expect_everything_ends(self) -> None:
        """When crashes and failures end, so does everything that is owed."""
        if self._stopped:
            self.crash(len(self.pending), received=True)
        disk, steps = self.disk, 0
        self.lane.offered(disk.last_seq)
        while self.lane.owed or not self.lane.settled:
            steps += 1
            expect(steps < 100 + 10 * disk.last_seq, "it does not end", self.lane.owed)
            if isinstance(command := self.proceed(), Wait):
                self.now = command.until
            self.fetched(ROWS_PER_FETCH)
            self.answer(200, received=True, u=0.5, after_s=0.1)
            if self.lane.in_flight or steps % 3 == 0:
                self.write_group(len(self.pending))
        self.checkpoint()
        acked = disk.progress.acked_seq
        expect(acked == disk.ended == disk.last_seq, "not everything has ended", disk.progress)
        for row in disk.delivered:
            expect(row.seq in self.receiver.got, f"{row.seq} was delivered to nobody")


def _expires_at(delivery: Delivery) -> float:
    return inf if delivery.expires_at is None else delivery.expires_at.timestamp()


def _ends(record: Record) -> bool:
    return record.progress is None or record.dead is not None
