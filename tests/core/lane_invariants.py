"""The invariants of a lane, checked from outside while the model runs."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from outbox.core.delivery.commands import DeadRange, Gate, Record, Send, Wait
from outbox.core.model.retry_policy import RetryPolicy
from tests.core.invariants import expect

if TYPE_CHECKING:
    from outbox.core.delivery.commands import Command
    from outbox.core.delivery.lane import Lane
    from outbox.core.model.delivery import Delivery
    from tests.core.lane_tables import Disk

POLICY = RetryPolicy(base_s=1.0, factor=2.0, cap_s=4.0, attempts_max=4, age_max_s=30.0)


class Watch:
    """The state that `lane_model.World` keeps, and the invariants on it."""

    disk: Disk
    lane: Lane
    now: float
    sending: Send | None
    started_at: float
    pending: list[Record]
    _checks_lane_state: bool
    """Check the state that the lane reports too, not only its commands."""
    _free: bool
    """The request in flight was sent before its delivery was due."""
    _over: int
    """The last number that this owner considers ended."""
    _delivered: int
    """The last number after which it may go on before the write completes."""
    _buffered: int
    """The last number that this owner has fetched."""
    _gone: set[int]
    """The fetched numbers whose event was erased."""
    _reported_erased: set[int]
    """The erased numbers that some owner was notified of."""
    _known: int
    """The last number that this owner knows to be sequenced, by notification or by fetching."""
    _cut: int
    _skip_seq: int
    """The skipped number that this owner knows."""
    _stalled_since: float | None
    _sent: dict[int, int]
    """Every number that was ever sent, with its last `previous_seq`."""
    _followed: set[int]
    """The sent numbers that followed deliveries which could still fail."""
    _lost: set[int]
    """Numbers whose acknowledgement was lost in a crash."""

    def _retry_at(self) -> float:
        """Time of the next attempt for the head."""
        p = self.disk.folded
        return (p.next_attempt_at or 0.0) if p.retry_seq == self._over + 1 else 0.0

    def _expect_ungated_commands(self, command: Command) -> None:
        """Check commands that ignore the gate: a cut comes first, then a block stops the lane."""
        if (cut := self._cut) > self._over:
            expect(
                isinstance(command, Record)
                and isinstance(command.dead, DeadRange)
                and (command.dead.seq, command.dead.to_seq) == (self._over + 1, cut),
                f"what lies before {cut + 1} is not cut",
                command,
            )
        elif self.disk.blocked:
            expect(command is None, "it does not wait for an operator", command)
        self._cut = 0

    def _expect_not_idle(self, command: Command, gate: Gate) -> None:
        """Check that the head is sent, ended, or waited for no longer than necessary."""
        if self.disk.blocked or isinstance(command, Record):
            return
        seq = self._over + 1
        expires_at = _expires_at(self.disk.deliveries[seq - 1])
        expect(seq not in self._gone, f"{seq} is gone and not given up", command)
        expect(expires_at > self.now, f"{seq} has expired and is not given up", command)
        expect(seq != self._skip_seq, f"{seq} was skipped and is not given up", command)
        due_at = inf if gate is Gate.SHUT else self._retry_at() if gate is Gate.OPEN else 0.0
        if due_at <= self.now:
            expect(isinstance(command, Send), f"{seq} is due and not sent", command)
        else:
            until = min(due_at, expires_at)
            expected = None if until == inf else Wait(until)
            expect(command == expected, f"{seq} has to wait until {until}", command)

    def _expect_attempts_counted(self, record: Record) -> None:
        """Check that free probes do not count, and every other attempt does."""
        was, p = self.disk.folded, record.progress
        expect(p is not None, "a failure may wait", record)
        assert p is not None
        spent = was.spent if was.retry_seq == record.seq else 0
        if self._free:
            expect(record.dead is None, "a free attempt ends its delivery", record)
            expect(p.spent == spent, "a free attempt is charged", record)
            expect(p.next_attempt_at == was.next_attempt_at, "a free attempt moves the time")
            return
        at = was.first_attempt_at if was.retry_seq == record.seq else None
        age_s = 0.0 if at is None else self.started_at - at
        exhausted = spent + 1 >= POLICY.attempts_max or age_s >= POLICY.age_max_s
        expect((record.dead is not None) == exhausted, "the budget ends at another time", record)
        if record.dead is None:
            expect(p.spent == spent + 1, "an attempt is not charged", record)
            expect((p.next_attempt_at or 0) >= self.now, "it does not wait", record)

    def _expect_valid_send(self, send: Send, gate: Gate) -> None:
        disk, seq = self.disk, send.delivery.seq
        expect(gate is not Gate.SHUT, f"{seq} is sent through a shut gate")
        expect(not disk.blocked, f"{seq} does not wait for an operator")
        expect(seq not in self._reported_erased, f"{seq} is sent although it was erased")
        expect(seq != self._skip_seq, f"{seq} is sent although it was skipped")
        last_seq = send.batch[-1].seq if send.batch else seq
        ends = disk.closed and last_seq == disk.last_seq
        expect(send.lane_ends == ends, f"{seq} is wrong about the end of the lane", send)
        ended = max(disk.ended, self._delivered)
        expect(seq > ended, f"{seq} is sent although it has ended")
        expect(seq == ended + 1, f"{seq} is sent before {ended + 1} has ended")
        expect(send.delivery == disk.deliveries[seq - 1], f"{seq} changes its event")
        previous = seq - 1
        while previous in disk.dead:
            previous -= 1
        expect(send.previous_seq == previous, f"{seq} names {send.previous_seq}", previous)
        expect(_expires_at(send.delivery) > self.now, f"{seq} has expired")
        p = disk.folded
        recorded = p.attempts if p.retry_seq == seq else 0
        expect(send.attempt == recorded + 1, f"{seq} forgets its attempts", send, p)
        if recorded and gate is Gate.OPEN:
            expect(self.now >= (p.next_attempt_at or 0), f"{seq} does not wait", p)
        expect(send.maybe_sent_before or seq not in self._sent, f"{seq} was sent before")
        was = self._sent.setdefault(seq, previous)
        if was != previous:
            expect(previous < was, f"{seq} names a later number", was, previous)
            is_known = was in self._lost or seq in self._followed
            expect(is_known and was in disk.dead, f"{seq} changes its previous", was)
            self._sent[seq] = previous

    def _expect_valid_batch(self, parts: list[Send], gate: Gate, batch_max: int) -> None:
        """Check that a batch has consecutive sendable numbers, and that its head has not failed."""
        disk, first = self.disk, parts[0].delivery.seq
        expect(len(parts) <= batch_max, "too many together", parts)
        p = disk.folded
        is_alone = gate is Gate.PROBE or (p.retry_seq == first and p.attempts > 0)
        expect(len(parts) == 1 or not is_alone, "its head is to go alone", parts)
        for n, each in enumerate(parts[1:], 1):
            seq = each.delivery.seq
            expect(seq == first + n, f"{seq} follows {first + n - 1}", parts)
            expect(each.delivery == disk.deliveries[seq - 1], f"{seq} changes its event")
            expect(seq not in self._reported_erased, f"{seq} is sent although it was erased")
            expect(_expires_at(each.delivery) > self.now, f"{seq} has expired")
            self._sent.setdefault(seq, seq - 1)
            self._followed.add(seq)

    def expect_consistent(self) -> None:
        """Check the state that the lane reports."""
        lane, disk = self.lane, self.disk
        if not self._checks_lane_state:
            return
        waits = any(r.urgent for r in self.pending)
        expect(lane.in_flight == (waits or self.sending is not None), "in flight or not?")
        expect(lane.settled == (not self.pending and self.sending is None), "settled or not?")
        expect(lane.checkpoint() == disk.folded, "not what is on disk", lane.checkpoint())
        expect(lane.committed_seq == disk.folded.acked_seq, "not what is on disk")
        ended = max([lane.committed_seq, *(r.seq for r in self.pending if _ends(r))])
        expect(lane.acked_seq == ended, "acknowledged or not?", lane.acked_seq, ended)
        expect(
            lane.pending == self._known - ended, "wrong number of pending deliveries", lane.pending
        )
        waits = disk.blocked or any(r.blocks for r in self.pending)
        idle = not lane.pending and not lane.in_flight and not waits
        expect(lane.drained == idle, "drained or not?", lane.drained)
        expect(lane.blocked == waits, "blocked or not?", lane.blocked)
        expect(lane.stalled_since == self._stalled_since, "stalled for another time", lane)


def _expires_at(delivery: Delivery) -> float:
    return inf if delivery.expires_at is None else delivery.expires_at


def _ends(record: Record) -> bool:
    return record.progress is None or record.dead is not None
