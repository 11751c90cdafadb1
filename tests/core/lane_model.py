"""Model of a lane: its tables, a receiver with memory, and owners that crash.

The lane under test is driven step by step, as the dispatcher and the recorder do it. Everything
that can happen between two steps is a method, so that a Hypothesis machine and a random walk can
choose the order. Every error of the lane is a `Violation`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from outbox.core.delivery.commands import (
    AttemptRow,
    ErasedEvent,
    Fetch,
    Gate,
    Record,
    Send,
    Wait,
)
from outbox.core.delivery.lane import Lane
from outbox.core.messages.batch import classify_batch
from outbox.core.model.response import AttemptResult, Failure
from outbox.core.model.response_policy import RETRYABLE, AttemptOutcome, classify
from tests.core.invariants import expect
from tests.core.lane_invariants import POLICY, Watch
from tests.core.lane_tables import EPOCH_S, Disk, Receiver, delivery

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.core.delivery.commands import Command

ROWS_PER_FETCH = 12


@dataclass(frozen=True)
class Faults:
    """Errors of the code around the lane."""

    writes_failure_alone: bool = False
    """Write a failure or dead letter without the successes that wait for their group commit."""
    skips_tail: bool = False
    """Let a new owner read the checkpoint only, without the tail."""
    assumes_no_duplicates: bool = False
    """Let a new owner expect no duplicates."""
    forgets_blocks: bool = False
    """Let a new owner ignore that the lane waits for an operator."""
    checks_lane_state: bool = True
    """Check the state that the lane reports too, not only its commands."""


NO_FAULTS = Faults()


class World(Watch):
    """One lane, its tables, its receiver and its successive owners."""

    def __init__(self, lane: type[Lane] = Lane, faults: Faults = NO_FAULTS) -> None:
        self.disk = Disk()
        self.receiver = Receiver()
        self.now = EPOCH_S
        self.ghosts: list[Send] = []
        """Requests of crashed owners that may still arrive."""
        self._lane_type = lane
        self._faults = faults
        self._checks_lane_state = faults.checks_lane_state
        self._batch = 0
        self._sent = {}
        self._followed = set()
        self._batch_max: int | None = None
        self._lost = set()
        self._reported_erased = set()
        self._take_over()

    # ---------------------------------------------------------------- owners

    def _take_over(self) -> None:
        disk, faults = self.disk, self._faults
        snapshot = disk.snapshot(7)
        if faults.skips_tail:
            snapshot = replace(snapshot, tail=())
        if faults.forgets_blocks:
            snapshot = replace(snapshot, blocked=False)
        sent_through_batch = 0 if faults.assumes_no_duplicates else self._batch
        self.lane = self._lane_type(snapshot, sent_through_batch, batch_max=self._batch_max)
        self._skip_seq = disk.skip_seq
        self.sending: Send | None = None
        self._runs = False
        self._ahead: Send | None = None
        self.started_at = 0.0
        self._free = False
        self._new = ()
        self.fetching: Fetch | None = None
        self.pending: list[Record] = []
        self._over = disk.ended
        self._delivered = disk.ended
        self._buffered = disk.ended
        self._gone = set()
        self._rereads = self._stray = False
        self._known = disk.last_seq
        self._cut = 0
        self._stopped = False
        self._stalled_since = None
        if disk.ended < disk.last_seq:
            self._stalled_since = max(disk.pending_since or 0.0, disk.folded.success_at or 0.0)

    def crash(self, written: int, *, received: bool, skew_s: float = 0.0) -> None:
        """Crash the owner; another one takes over, whose clock may differ.

        `written`: how many of the pending records were written nevertheless; `received`: the
        request in flight arrives now, or may arrive later.
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

    def deliver_late_copy(self, i: int) -> None:
        """Deliver a late copy that a crashed owner sent."""
        if self.ghosts:
            self._arrives(self.ghosts.pop(i % len(self.ghosts)))

    def _arrives(self, send: Send, count: int | None = None) -> None:
        """Give the receiver the whole request, or its first deliveries, in order."""
        for each in _split_batches(send)[:count]:
            self.receiver.gets(each)

    def stop(self) -> None:
        self._stopped = True
        self.lane.stop()

    def hand_over(self) -> None:
        """Hand the lane over cleanly, once everything is written."""
        if self._stopped and self.lane.settled:
            self.checkpoint()
            self._take_over()

    # -------------------------------------------------------------- events

    def offer(
        self,
        count: int,
        *,
        expires_in_s: float | None = None,
        announced: bool = True,
        given: bool = False,
    ) -> None:
        """Sequence a batch with deliveries of this lane; its owner may be notified later.

        `given`: the owner reads them at once, from memory.
        """
        self._batch += 1
        expires_at = None
        if expires_in_s is not None:
            expires_at = self.now + expires_in_s
        if self.disk.closed:
            return
        new = [delivery(self.disk.last_seq + 1 + n, self._batch, expires_at) for n in range(count)]
        for each in new:
            self.disk.give_out(each, self.now)
        if announced:
            self._announce()
        if announced and given and (fetch := self.lane.fetch()) is not None:
            # Its events are in memory only if it has no others to read.
            is_next = fetch.after_seq + 1 == new[0].seq
            self.fetching = fetch
            self.fetched(count if is_next else ROWS_PER_FETCH)

    def _announce(self) -> None:
        self.lane.extend_to(self.disk.last_seq, self.now)
        self._known = self.disk.last_seq
        if self._stalled_since is None and self._over < self._known:
            self._stalled_since = self.now

    def end(self) -> None:
        """Replace the lane's generation with a newer one."""
        self.disk.closed = True
        self._announce()
        self.lane.mark_ended()

    def cut(self, count: int) -> None:
        """Cut the backlog: the owner dead-letters deliveries beyond its limit."""
        through_seq = self._over + count
        self.lane.dead_letter_through(through_seq, "backlog")
        self._cut = max(self._cut, min(through_seq, self._known))

    def batch_up_to(self, batch_max: int | None) -> None:
        """Change the endpoint's batch size limit."""
        self._batch_max = batch_max
        self.lane.set_batch_max(batch_max)

    def unblock(self) -> None:
        """Unblock the lane as an operator does."""
        self.disk.blocked = False
        if not any(record.blocks for record in self.pending):
            self.lane.unblock()

    def skip(self) -> None:
        """Skip the next delivery as an operator sees it: behind what is not written yet."""
        if self.disk.ended < self.disk.last_seq:
            self.disk.skip_seq = self.disk.ended + 1
            self.disk.skipped.add(self.disk.skip_seq)

    def notice_skip(self) -> None:
        """Notify the owner that an operator has skipped a delivery."""
        self._skip_seq = self.disk.skip_seq
        self.lane.skip(self._skip_seq)

    def erase(self, i: int) -> None:
        """Erase the event of a pending number; copies in the delivery buffer remain."""
        if pending := self.disk.last_seq - self.disk.ended:
            self.disk.erased.add(self.disk.ended + 1 + i % pending)

    def reread(self) -> None:
        """Notify the owner that events were erased."""
        self.lane.invalidate_buffer()
        self._rereads = True
        self._reported_erased |= self.disk.erased

    def release(self) -> None:
        """Release the content of a lane that waits."""
        if self.lane.in_flight or self._rereads:
            return
        self._stray = self.fetching is not None and (self._stray or self.lane.is_buffered)
        self._buffered = self._over
        self.lane.release_content()

    def tick(self, seconds: float) -> None:
        self.now += seconds

    def proceed(self, gate: Gate = Gate.OPEN) -> Command:
        """Ask the lane for its next command, and begin it."""
        before = self.lane.in_flight
        if self._rereads and not before and not self._stopped:
            self._rereads, self._stray = False, self.fetching is not None
            self._buffered = self._over
        command = self.lane.next(self.now, gate)
        if isinstance(command, Send):
            expect(not before and self.sending is None, "two requests are in flight")
            expect(bool(command.batch) == (self._batch_max is not None), "together or not?")
            parts = _split_batches(command)
            self._new = tuple(d.seq for each in parts if (d := each.delivery).seq not in self._sent)
            self._expect_valid_send(command, gate)
            self._expect_valid_batch(parts, gate, self._batch_max or 1)
        if not before and not self._stopped:
            self._expect_ungated_commands(command)
            if self._over < self._buffered:
                self._expect_not_idle(command, gate)
        match command:
            case Send() as send:
                self.sending, self.started_at = send, self.now
                self._runs = self.lane.may_run(send)
                self._free = self._retry_at() > self.now
                self._fetch(self.lane.fetch())
            case Record() as record:
                expect(not before, "two things at a time")
                self._record_dead_lettered(record)
                self.pending.append(record)
            case Fetch() as fetch:
                self._fetch(fetch)
            case Wait(until):
                expect(until > self.now, "it waits for the past", until)
        self.expect_consistent()
        return command

    def peek(self) -> None:
        """Prepare what follows the request in flight."""
        self._ahead = self.lane.peek_next_send()

    def follow(self, after_s: float) -> None:
        """Respond with a success, and send what follows at once in a request run."""
        send = self.sending
        if send is None or not self._runs:
            return
        self.now += after_s
        after = self.lane.next_in_run(self.now, self._ahead)
        if after is None:
            self.response(200, received=True, u=0.0, after_s=0.0)
            return
        expect(not self._stopped, "a run goes on after a stop")
        expect(self._cut <= self._over, "a run goes on after a cut", self._cut)
        expect(not self._rereads, "a run goes on with stale deliveries")
        done = send.delivery
        row = AttemptRow(done.batch, done.seq, 1, "delivered", 200, None, self.started_at, 0.1)
        self._arrives(send)
        self.pending.append(Record(self.lane.id, done.seq, row))
        self._over = self._delivered = done.seq
        self._stalled_since = self.now
        self.lane.advance_run(self.now)
        self.sending, self.started_at = after, self.now
        self._new = () if after.delivery.seq in self._sent else (after.delivery.seq,)
        self._expect_valid_send(after, Gate.OPEN)
        self._fetch(self.lane.fetch())
        self.expect_consistent()

    def fetched(self, rows: int) -> None:
        """Complete a Fetch, at any time."""
        fetch, self.fetching = self.fetching, None
        if fetch is not None:
            read = self.disk.read(fetch, rows)
            self.lane.append_fetched(read)
            if self._stray:
                self._stray = False
                return
            for each in read:
                if each.seq > self._buffered:
                    self._buffered = each.seq
                    if isinstance(each, ErasedEvent):
                        self._gone.add(each.seq)
            self._known = max(self._known, self._buffered)

    def response(
        self,
        status: int | None,
        *,
        received: bool,
        u: float,
        after_s: float,
        blocks: bool = False,
        part: int | None = None,
    ) -> None:
        """Respond to the request; without a status, the relay sees a time-out.

        A receiver that already has the number responds with 409 instead of rejecting it. `blocks`:
        a dead letter blocks the lane. `part`: the receiver accepts at most this many deliveries of
        a batch, and reports it.
        """
        send, self.sending = self.sending, None
        if send is None:
            return
        if len(send.batch) > 1:
            self._respond_to_batch(send, status, received=received, u=u, after_s=after_s, part=part)
            return
        seq = send.delivery.seq
        if status is None:
            response = AttemptResult.failed(Failure.TIMEOUT, "", 0.1)
        else:
            if status == 409 and seq not in self.receiver.got:
                status = 400
            received = 200 <= status <= 299
            response = AttemptResult.completed(status, 0.1)
        if received:
            self._arrives(send)
        self.now += after_s
        outcome = classify(response, maybe_sent_before=send.maybe_sent_before)
        expect(status != 409 or outcome is AttemptOutcome.DELIVERED, f"{seq} is refused as a copy")
        record = self.lane.record_result(
            outcome,
            response,
            POLICY,
            started_at=self.started_at,
            now=self.now,
            u=u,
            blocks=blocks,
            observed_s=self.started_at - (self.lane.first_attempt_at or self.started_at),
        )
        expect(record.seq == seq, "another number was completed", record)
        expect(record.blocks == (blocks and record.dead is not None), "does it block?", record)
        if outcome is AttemptOutcome.RETRY:
            self._expect_attempts_counted(record)
        if outcome is AttemptOutcome.DELIVERED:
            self._over = self._delivered = seq
            self._stalled_since = self.now if seq < self._known else None
        self._record_dead_lettered(record)
        self.pending.append(record)
        self.expect_consistent()

    def _respond_to_batch(
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
            # A conflict about a new batch refuses at least its last delivery. The receiver must
            # report what it accepted of the batch (X-Accepted-Through).
            received = received and part is not None
            part = None if part is None else min(part, len(batch) - 1)
        if is_success or received:
            self._arrives(send, part)
        headers: tuple[tuple[str, str], ...] = ()
        if part is not None and (is_success or received) and status is not None:
            headers = (("X-Accepted-Through", str(first - 1 + part)),)
        self.now += after_s
        if status == 409 and not send.maybe_sent_before:
            # The receiver refuses a new delivery, and reports what it accepted.
            for seq in self._new:
                del self._sent[seq]
        if status is None:
            response = AttemptResult.failed(Failure.TIMEOUT, "", 0.1)
        else:
            response = AttemptResult.completed(status, 0.1, headers=headers)
        before, retryable = send.maybe_sent_before, RETRYABLE
        outcome, through = classify_batch(
            batch, response, maybe_sent_before=before, retryable=retryable
        )
        accepted, failed = self.lane.record_batch_result(
            batch, through, outcome, response, POLICY,
            started_at=self.started_at, now=self.now, u=u,
        )  # fmt: skip
        rows = accepted.rows
        records = [Record(self.lane.id, row.seq, row) for row in rows]
        records += [] if failed is None else [failed]
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
            charged = (p.retry_seq, p.attempts, p.spent, (p.next_attempt_at or 0.0) >= self.now)
            expect(charged == (self._over + 1, 1, 0, True), "charged in company", p)
        expect(last >= self._over, "more was accepted than was sent")
        self.pending += records
        self.expect_consistent()

    def _record_dead_lettered(self, record: Record) -> None:
        """Remove dead-lettered numbers from the pending ones."""
        if record.dead is not None:
            self._over = record.seq
            self._buffered = max(self._buffered, record.seq)
            if record.seq == self._known:
                self._stalled_since = None

    def unsent(self) -> None:
        """Cancel the send because the endpoint changed while it waited for a slot."""
        if self.sending is not None:
            for seq in self._new:
                del self._sent[seq]
            self.sending = None
            self.lane.cancel_send()
            self.expect_consistent()

    def write_group(self, records: int) -> None:
        """Write up to this many pending records, in order, as the recorder does."""
        group, self.pending = self.pending[:records], self.pending[records:]
        if self._faults.writes_failure_alone and self.pending and self.pending[-1].urgent:
            group, self.pending = [self.pending[-1]], [*group, *self.pending[:-1]]
        self._write(group)
        for record in group:
            self.lane.confirm_recorded(record)
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

    # --------------------------------------------------------------- liveness

    def expect_everything_ends(self) -> None:
        """Check that everything pending ends when crashes and failures stop."""
        if self._stopped:
            self.crash(len(self.pending), received=True)
        disk, steps = self.disk, 0
        self._announce()
        while self.lane.pending or not self.lane.settled:
            steps += 1
            expect(steps < 100 + 10 * disk.last_seq, "it does not end", self.lane.pending)
            if isinstance(command := self.proceed(), Wait):
                self.now = command.until
            self.unblock()
            self.fetched(ROWS_PER_FETCH)
            self.response(200, received=True, u=0.5, after_s=0.1)
            if self.lane.in_flight or steps % 3 == 0:
                self.write_group(len(self.pending))
        self.checkpoint()
        acked = disk.progress.acked_seq
        expect(acked == disk.ended == disk.last_seq, "not everything has ended", disk.progress)
        for row in disk.delivered:
            expect(row.seq in self.receiver.got, f"{row.seq} was delivered to no receiver")


def _split_batches(send: Send) -> list[Send]:
    """Split batched commands into single ones."""
    previous, apart = send.previous_seq, []
    for each in send.batch or (send.delivery,):
        apart.append(send._replace(delivery=each, previous_seq=previous, batch=()))
        previous = each.seq
    return apart
