"""A lane's world: what is on disk, a receiver that remembers, and owners that die.

The lane under test is driven as the dispatcher and the recorder do it, step by
step.  Everything that can happen between two steps is a method, so that a
Hypothesis machine and a plain random driver can choose the order.  What the
lane does wrong is a `Violation`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from outbox.core.delivery.batch import classify_batch
from outbox.core.delivery.commands import Fetch, Gate, Gone, Record, Send, Wait
from outbox.core.delivery.lane import Lane
from outbox.core.model.response import RETRYABLE, Answer, Failure, Verdict, classify
from tests.core.invariants import expect
from tests.core.lane_invariants import POLICY, Watch
from tests.core.lane_tables import EPOCH_S, Disk, Receiver, delivery

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.core.delivery.commands import Command

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
    forgets_blocks: bool = False
    """Who takes over does not ask whether an operator has to let it go on."""
    says_so: bool = True
    """The lane's own account of itself is looked at too, not only what it does."""


NO_FAULTS = Faults()


class World(Watch):
    """One lane, its disk, its receiver and, one after the other, its owners."""

    def __init__(self, lane: type[Lane] = Lane, faults: Faults = NO_FAULTS) -> None:
        self.disk = Disk()
        self.receiver = Receiver()
        self.now = EPOCH_S
        self.ghosts: list[Send] = []
        """Requests of dead owners that may still arrive."""
        self._lane_type = lane
        self._faults = faults
        self._says_so = faults.says_so
        self._batch = 0
        self._sent = {}
        self._followed = set()
        self._batch_max: int | None = None
        self._lost = set()
        self._told_erased = set()
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
            owed_since=disk.owed_since,
            blocked=disk.blocked and not faults.forgets_blocks,
            ended=disk.closed,
            batch_max=self._batch_max,
        )
        self.sending: Send | None = None
        self.started_at = 0.0
        self._free = False
        self._new = ()
        self.fetching: Fetch | None = None
        self.pending: list[Record] = []
        self._over = disk.ended
        self._delivered = disk.ended
        self._in_hand = disk.ended
        self._gone = set()
        self._rereads = self._stray = False
        self._known = disk.last_seq
        self._cut = 0
        self._stopped = False
        self._stalled_since = None
        if disk.ended < disk.last_seq:
            self._stalled_since = max(disk.owed_since or 0.0, disk.folded.success_at or 0.0)

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
                self._arrives(self.sending)
            else:
                self.ghosts.append(self.sending)
        self.now += skew_s
        self._take_over()

    def ghost(self, i: int) -> None:
        """A copy that a dead owner sent arrives late."""
        if self.ghosts:
            self._arrives(self.ghosts.pop(i % len(self.ghosts)))

    def _arrives(self, send: Send, count: int | None = None) -> None:
        """The receiver gets what was sent, or so many deliveries of it, in their order."""
        for each in _apart(send)[:count]:
            self.receiver.gets(each)

    def stop(self) -> None:
        self._stopped = True
        self.lane.stop()

    def hand_over(self) -> None:
        """A clean change of hands, once everything is on disk."""
        if self._stopped and self.lane.settled:
            self.checkpoint()
            self._take_over()

    # -------------------------------------------------------- what happens

    def offer(
        self,
        count: int,
        *,
        expires_in_s: float | None = None,
        told: bool = True,
        given: bool = False,
    ) -> None:
        """A batch gives the lane some numbers; its owner may hear of it later.

        `given`: it gets the deliveries together with the news.
        """
        self._batch += 1
        expires_at = None
        if expires_in_s is not None:
            expires_at = datetime.fromtimestamp(self.now + expires_in_s, UTC)
        if self.disk.closed:
            return
        new = [delivery(self.disk.last_seq + 1 + n, self._batch, expires_at) for n in range(count)]
        for each in new:
            self.disk.give_out(each, self.now)
        if told:
            self._tell()
        if told and given:
            self.lane.given(new)
            if new[0].seq == self._in_hand + 1:
                self._in_hand = new[-1].seq

    def _tell(self) -> None:
        self.lane.offered(self.disk.last_seq, self.now)
        self._known = self.disk.last_seq
        if self._stalled_since is None and self._over < self._known:
            self._stalled_since = self.now

    def end(self) -> None:
        """A newer generation of lanes takes its place."""
        self.disk.closed = True
        self._tell()
        self.lane.end()

    def cut(self, count: int) -> None:
        """The owner gives up what there is too much of."""
        through_seq = self._over + count
        self.lane.cut(through_seq, "backlog")
        self._cut = max(self._cut, min(through_seq, self._known))

    def batch_up_to(self, batch_max: int | None) -> None:
        """The endpoint asks for so many together from now on."""
        self._batch_max = batch_max
        self.lane.batch_up_to(batch_max)

    def unblock(self) -> None:
        """An operator lets it go on."""
        self.disk.blocked = False
        if not any(record.blocks for record in self.pending):
            self.lane.unblock()

    def erase(self, i: int) -> None:
        """The event of a number that has not ended is erased; copies in hand are not."""
        if owed := self.disk.last_seq - self.disk.ended:
            self.disk.erased.add(self.disk.ended + 1 + i % owed)

    def reread(self) -> None:
        """The owner is told that events were erased."""
        self.lane.reread()
        self._rereads = True
        self._told_erased |= self.disk.erased

    def tick(self, seconds: float) -> None:
        self.now += seconds

    def proceed(self, gate: Gate = Gate.OPEN) -> Command:
        """Ask the lane what to do, and begin it."""
        before = self.lane.in_flight
        if self._rereads and not before and not self._stopped:
            self._rereads, self._stray = False, self.fetching is not None
            self._in_hand = self._over
        command = self.lane.next(self.now, gate)
        if isinstance(command, Send):
            expect(not before and self.sending is None, "two requests are in flight")
            expect(bool(command.batch) == (self._batch_max is not None), "together or not?")
            parts = _apart(command)
            self._new = tuple(d.seq for each in parts if (d := each.delivery).seq not in self._sent)
            self._expect_rightly_sent(command, gate)
            self._expect_rightly_together(parts, gate, self._batch_max or 1)
        if not before and not self._stopped:
            self._expect_what_needs_no_gate(command)
            if self._over < self._in_hand:
                self._expect_not_idle(command, gate)
        match command:
            case Send() as send:
                self.sending, self.started_at = send, self.now
                self._free = self._retry_at() > self.now
                self._fetch(self.lane.fetch())
            case Record() as record:
                expect(not before, "two things at a time")
                self._passed(record)
                self.pending.append(record)
            case Fetch() as fetch:
                self._fetch(fetch)
            case Wait(until):
                expect(until > self.now, "it waits for the past", until)
        self.expect_consistent()
        return command

    def fetched(self, rows: int) -> None:
        """The answer to a Fetch; it comes whenever it comes."""
        fetch, self.fetching = self.fetching, None
        if fetch is not None:
            read = self.disk.read(fetch, rows)
            self.lane.fetched(read)
            if self._stray:
                self._stray = False
                return
            for each in read:
                if each.seq > self._in_hand:
                    self._in_hand = each.seq
                    if isinstance(each, Gone):
                        self._gone.add(each.seq)
            self._known = max(self._known, self._in_hand)

    def answer(
        self,
        status: int | None,
        *,
        received: bool,
        u: float,
        after_s: float,
        blocks: bool = False,
        part: int | None = None,
    ) -> None:
        """The receiver answers; without a status the relay saw a time-out.

        A receiver that has the number says so with 409 instead of refusing it.
        `blocks`: the endpoint waits for an operator when something is given up.
        `part`: of a batch it takes so many deliveries at most, and says so.
        """
        send, self.sending = self.sending, None
        if send is None:
            return
        if len(send.batch) > 1:
            self._answer_batch(send, status, received=received, u=u, after_s=after_s, part=part)
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
            self._arrives(send)
        self.now += after_s
        verdict = classify(answer, maybe_sent_before=send.maybe_sent_before)
        expect(status != 409 or verdict is Verdict.DELIVERED, f"{seq} is refused as a copy")
        record = self.lane.answered(
            verdict,
            answer,
            POLICY,
            started_at=self.started_at,
            now=self.now,
            u=u,
            blocks=blocks,
        )
        expect(record.seq == seq, "another number was answered", record)
        expect(record.blocks == (blocks and record.dead is not None), "does it block?", record)
        if verdict is Verdict.RETRY:
            self._expect_rightly_charged(record)
        if verdict is Verdict.DELIVERED:
            self._over = self._delivered = seq
            self._stalled_since = self.now if seq < self._known else None
        self._passed(record)
        self.pending.append(record)
        self.expect_consistent()

    def _answer_batch(
        self,
        send: Send,
        status: int | None,
        *,
        received: bool,
        u: float,
        after_s: float,
        part: int | None,
    ) -> None:
        batch = send.batch
        first, last = batch[0].seq, batch[-1].seq
        is_success = status is not None and 200 <= status <= 299
        if status == 409 and not send.maybe_sent_before:
            # A conflict about a new batch refuses at least its last delivery. What a receiver
            # kept of it, it has to say (X-Accepted-Through).
            received = received and part is not None
            part = None if part is None else min(part, len(batch) - 1)
        if is_success or received:
            self._arrives(send, part)
        headers: tuple[tuple[str, str], ...] = ()
        if part is not None and (is_success or received) and status is not None:
            headers = (("X-Accepted-Through", str(first - 1 + part)),)
        self.now += after_s
        if status == 409 and not send.maybe_sent_before:
            # It refuses something new; what it has of it, it says.
            for seq in self._new:
                del self._sent[seq]
        if status is None:
            answer = Answer.failed(Failure.TIMEOUT, "", 0.1)
        else:
            answer = Answer.of(status, 0.1, headers=headers)
        before, retryable = send.maybe_sent_before, RETRYABLE
        verdict, through = classify_batch(
            batch, answer, maybe_sent_before=before, retryable=retryable
        )
        records = self.lane.batch_answered(
            batch, through, verdict, answer, POLICY,
            started_at=self.started_at, now=self.now, u=u,
        )  # fmt: skip
        taken = 0
        if headers:
            taken = min(part or 0, len(batch) - (not is_success))
        elif is_success:
            taken = len(batch)
        passed, rest = records[:taken], records[taken:]
        whole = [(first + n, None) for n in range(taken)]
        expect([(r.seq, r.progress) for r in passed] == whole, "not what was accepted", records)
        if taken:
            self._over = self._delivered = first - 1 + taken
            self._stalled_since = self.now if self._over < self._known else None
        if is_success and taken:
            expect(not rest, "a success is a failure", rest)
        else:
            expect(len(rest) == 1 and rest[0].seq == self._over + 1, "who failed?", rest)
            p = rest[0].progress
            expect(p is not None and rest[0].dead is None, "given up in company", rest)
            assert p is not None
            charged = (p.head_seq, p.attempts, p.spent, (p.next_attempt_at or 0.0) >= self.now)
            expect(charged == (self._over + 1, 1, 0, True), "charged in company", p)
        expect(last >= self._over, "more was accepted than was sent")
        self.pending += records
        self.expect_consistent()

    def _passed(self, record: Record) -> None:
        """What is given up is owed no more."""
        if record.dead is not None:
            self._over = record.seq
            self._in_hand = max(self._in_hand, record.seq)
            if record.seq == self._known:
                self._stalled_since = None

    def unsent(self) -> None:
        """The endpoint changed while the request waited for its place."""
        if self.sending is not None:
            for seq in self._new:
                del self._sent[seq]
            self.sending = None
            self.lane.unsent()
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

    # ---------------------------------------------------------------- the end

    def expect_everything_ends(self) -> None:
        """When crashes and failures end, so does everything that is owed."""
        if self._stopped:
            self.crash(len(self.pending), received=True)
        disk, steps = self.disk, 0
        self._tell()
        while self.lane.owed or not self.lane.settled:
            steps += 1
            expect(steps < 100 + 10 * disk.last_seq, "it does not end", self.lane.owed)
            if isinstance(command := self.proceed(), Wait):
                self.now = command.until
            self.unblock()
            self.fetched(ROWS_PER_FETCH)
            self.answer(200, received=True, u=0.5, after_s=0.1)
            if self.lane.in_flight or steps % 3 == 0:
                self.write_group(len(self.pending))
        self.checkpoint()
        acked = disk.progress.acked_seq
        expect(acked == disk.ended == disk.last_seq, "not everything has ended", disk.progress)
        for row in disk.delivered:
            expect(row.seq in self.receiver.got, f"{row.seq} was delivered to nobody")


def _apart(send: Send) -> list[Send]:
    """What goes together, as if each went by itself."""
    previous, apart = send.previous_seq, []
    for each in send.batch or (send.delivery,):
        apart.append(send._replace(delivery=each, previous_seq=previous, batch=()))
        previous = each.seq
    return apart
