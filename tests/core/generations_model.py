"""Model of an endpoint whose lane count changes while its owners crash.

Every generation has its own lanes; a key is mapped to a lane by its number modulo the lane count.
The owner works as the dispatcher does: a lane is idle until it is activated, and rests when it has
no work. A broken order of a key is a `Violation`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outbox.core.delivery.commands import Fetch, Gate, Record, Send, Wait
from outbox.core.delivery.lane import Lane
from outbox.core.delivery.lane_generations import LaneGenerations
from outbox.core.model.response import AttemptResult, Failure
from outbox.core.model.response_policy import AttemptOutcome, classify
from tests.core.invariants import expect
from tests.core.lane_invariants import POLICY
from tests.core.lane_tables import EPOCH_S, Disk, Receiver, delivery

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True)
class Faults:
    """Errors of the code around the generations."""

    skips_final_read: bool = False
    """Do not fetch the last numbers of lanes that end."""
    loads_newest_lanes_only: bool = False
    """Let a new owner load the newest lanes only."""
    forgets_blocks: bool = False
    """Let a new owner treat a blocked older lane without pending deliveries as drained."""


NO_FAULTS = Faults()


class OwnerState:
    """The in-memory state of an owner, lost when it crashes."""

    def __init__(self) -> None:
        self.lanes: dict[int, Lane] = {}
        self.generations = LaneGenerations()
        self.ready: dict[int, None] = {}
        self.held: set[int] = set()
        """Lanes that the circuit breaker holds back."""
        self.timers: dict[int, float] = {}
        self.sending: dict[int, Send] = {}
        self.fetching: dict[int, Fetch] = {}
        self.pending: list[Record] = []
        self.delivered: dict[int, int] = {}
        """The last delivered number, by lane."""
        self.ended: set[int] = set()
        """Lanes that are known to belong to an older generation."""


class World:
    """One endpoint: its tables, its receiver and its successive owners."""

    def __init__(
        self,
        lanes: int,
        lane: type[Lane] = Lane,
        generations: type[LaneGenerations] = LaneGenerations,
        faults: Faults = NO_FAULTS,
    ) -> None:
        self._lane_type, self._generations_type, self._faults = lane, generations, faults
        self.now = EPOCH_S
        self.disks: dict[int, Disk] = {}
        """Lanes in order of their generations."""
        self.receivers: dict[int, Receiver] = {}
        self.generation_of: dict[int, int] = {}
        self.slots: list[int] = []
        """Lanes of the newest generation."""
        self._batch = 0
        self._of_key: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self._place: dict[tuple[int, int], tuple[int, int]] = {}
        """The key of each number, and its position within the key."""
        self.change(lanes)
        self._take_over()

    # -------------------------------------------------------------- environment

    def change(self, lanes: int) -> None:
        """Change the lane count; the owner is notified later."""
        generation = 1 + max(self.generation_of.values(), default=0)
        for lane_id in self.slots:
            self.disks[lane_id].closed = True
        first = len(self.disks)
        self.slots = list(range(first, first + lanes))
        for lane_id in self.slots:
            self.disks[lane_id], self.receivers[lane_id] = Disk(), Receiver()
            self.generation_of[lane_id] = generation

    def publish(self, key: int, *, announced: bool) -> None:
        """Publish an event with a key; its owner may be notified later."""
        self._batch += 1
        lane_id = self.slots[key % len(self.slots)]
        disk = self.disks[lane_id]
        disk.give_out(delivery(disk.last_seq + 1, self._batch), self.now)
        self._place[lane_id, disk.last_seq] = key, len(self._of_key[key])
        self._of_key[key].append((lane_id, disk.last_seq))
        if announced and lane_id in self.owner_state.lanes:
            self.owner_state.lanes[lane_id].extend_to(disk.last_seq, self.now)
            self._activate(lane_id)

    def unblock(self, i: int) -> None:
        """Unblock a lane as an operator does."""
        blocked = [lane_id for lane_id, disk in self.disks.items() if disk.blocked]
        if blocked:
            lane_id = blocked[i % len(blocked)]
            self.disks[lane_id].blocked = False
            if lane_id in self.owner_state.lanes:
                self.owner_state.lanes[lane_id].unblock()
                self._activate(lane_id)

    def tick(self, seconds: float) -> None:
        self.now += seconds
        for lane_id, at in list(self.owner_state.timers.items()):
            if at <= self.now:
                self._activate(lane_id)

    # ----------------------------------------------------------------- the owner

    def _load(self, lane_id: int) -> None:
        disk = self.disks[lane_id]
        self.owner_state.lanes[lane_id] = self._lane_type(disk.snapshot(lane_id), self._batch)
        if disk.closed:
            self.owner_state.ended.add(lane_id)

    def _take_over(self) -> None:
        self.owner_state = OwnerState()
        for lane_id, disk in self.disks.items():
            has_pending = (
                disk.last_seq > disk.progress.acked_seq and not self._faults.loads_newest_lanes_only
            )
            holds = disk.blocked and not self._faults.forgets_blocks
            if not disk.closed or has_pending or holds:
                self._load(lane_id)
        self._arrange()

    def notice(self) -> None:
        """Reload all lanes in one snapshot."""
        for lane_id, disk in self.disks.items():
            lane = self.owner_state.lanes.get(lane_id)
            if lane is not None:
                if not (disk.closed and self._faults.skips_final_read):
                    lane.extend_to(disk.last_seq, self.now)
                if disk.closed:
                    lane.mark_ended()
                    self.owner_state.ended.add(lane_id)
            elif not disk.closed or disk.last_seq > disk.progress.acked_seq:
                self._load(lane_id)
        self._arrange()

    def _arrange(self) -> None:
        owner_state = self.owner_state
        owner_state.generations = self._generations_type(
            (lane_id, self.generation_of[lane_id])
            for lane_id in owner_state.ended
            if not owner_state.lanes[lane_id].drained
        )
        self._activate_all()

    def _activate(self, lane_id: int) -> None:
        if lane_id not in self.owner_state.sending:
            self.owner_state.ready[lane_id] = None

    def _activate_all(self) -> None:
        for lane_id, lane in self.owner_state.lanes.items():
            if lane.pending:
                self._activate(lane_id)

    def crash(self, written: int, *, received: bool) -> None:
        """Crash the owner after this many pending records were written."""
        self._write(self.owner_state.pending[:written])
        if received:
            for lane_id, send in self.owner_state.sending.items():
                self._receive(lane_id, send)
        self._take_over()

    def proceed(self, i: int, gate: Gate = Gate.OPEN) -> None:
        """Let one active lane execute its next command."""
        owner_state = self.owner_state
        if not owner_state.ready:
            return
        lane_id = list(owner_state.ready)[i % len(owner_state.ready)]
        lane = owner_state.lanes[lane_id]
        owner_state.timers.pop(lane_id, None)
        may_send = owner_state.generations.may_send(self.generation_of[lane_id])
        command = lane.next(self.now, gate if may_send else Gate.SHUT)
        match command:
            case Send() as send:
                self._expect_key_order(lane_id, send)
                owner_state.sending[lane_id] = send
                self._fetch(lane_id, lane.fetch())
            case Record() as record:
                owner_state.pending.append(record)
            case Fetch() as fetch:
                self._fetch(lane_id, fetch)
            case Wait(until):
                owner_state.timers[lane_id] = until
            case None if gate is Gate.SHUT:
                owner_state.held.add(lane_id)
        del owner_state.ready[lane_id]
        self._rest(lane_id)

    def _rest(self, lane_id: int) -> None:
        owner_state = self.owner_state
        drained = lane_id in owner_state.ended and owner_state.lanes[lane_id].drained
        if drained and owner_state.generations.remove_drained(lane_id, self.generation_of[lane_id]):
            self._activate_all()

    def release(self) -> None:
        """Release the lanes: the endpoint is healthy again."""
        for lane_id in self.owner_state.held:
            self._activate(lane_id)
        self.owner_state.held.clear()

    def _fetch(self, lane_id: int, fetch: Fetch | None) -> None:
        if fetch is not None:
            expect(lane_id not in self.owner_state.fetching, "two reads are under way")
            self.owner_state.fetching[lane_id] = fetch

    def fetched(self, i: int, rows: int) -> None:
        if self.owner_state.fetching:
            lane_id = list(self.owner_state.fetching)[i % len(self.owner_state.fetching)]
            fetch = self.owner_state.fetching.pop(lane_id)
            self.owner_state.lanes[lane_id].append_fetched(self.disks[lane_id].read(fetch, rows))
            self._activate(lane_id)

    def response(self, i: int, status: int | None, *, received: bool, blocks: bool = False) -> None:
        """Complete a request, in any order; without a status it timed out."""
        owner_state = self.owner_state
        if not owner_state.sending:
            return
        lane_id = list(owner_state.sending)[i % len(owner_state.sending)]
        send = owner_state.sending.pop(lane_id)
        if status == 409 and send.delivery.seq not in self.receivers[lane_id].got:
            status = 400
        if status is None:
            response = AttemptResult.failed(Failure.TIMEOUT, "", 0.1)
        else:
            received = 200 <= status <= 299
            response = AttemptResult.completed(status, 0.1)
        if received:
            self._receive(lane_id, send)
        outcome = classify(response, maybe_sent_before=send.maybe_sent_before)
        record = owner_state.lanes[lane_id].record_result(
            outcome, response, POLICY, started_at=self.now, now=self.now, u=0.5, blocks=blocks
        )
        owner_state.pending.append(record)
        if outcome is AttemptOutcome.DELIVERED:
            owner_state.delivered[lane_id] = send.delivery.seq
            self._activate(lane_id)

    def write(self, records: int) -> None:
        """Write pending records in order, as the recorder does, and notify their lanes."""
        group, self.owner_state.pending = (
            self.owner_state.pending[:records],
            self.owner_state.pending[records:],
        )
        self._write(group)
        for record in group:
            self.owner_state.lanes[record.lane_id].confirm_recorded(record)
            if record.urgent:
                self._activate(record.lane_id)

    def _write(self, group: Iterable[Record]) -> None:
        for record in group:
            self.disks[record.lane_id].write([record])

    def checkpoint(self) -> None:
        for lane_id, lane in self.owner_state.lanes.items():
            self.disks[lane_id].checkpoint(lane.checkpoint())

    # ------------------------------------------------------------- invariants

    def _settled_seq(self, lane_id: int) -> int:
        """Return the last number up to which all are delivered, or their outcome is written."""
        return max(self.disks[lane_id].ended, self.owner_state.delivered.get(lane_id, 0))

    def _expect_key_order(self, lane_id: int, send: Send) -> None:
        seq, disk = send.delivery.seq, self.disks[lane_id]
        for other, generation in self.generation_of.items():
            if generation < self.generation_of[lane_id]:
                pending = self.disks[other].last_seq - self._settled_seq(other)
                expect(
                    not pending,
                    "an older generation still has pending deliveries",
                    (lane_id, seq),
                    (other, pending),
                )
                expect(not self.disks[other].blocked, "an older generation waits for an operator")
        key, n = self._place[lane_id, seq]
        for before, number in self._of_key[key][:n]:
            expect(number <= self._settled_seq(before), "a key is turned around", key, n)
        ends = lane_id in self.owner_state.ended and seq == disk.last_seq
        expect(send.lane_ends == ends, "it is wrong about the end of the lane", lane_id, seq)

    def _receive(self, lane_id: int, send: Send) -> None:
        seq = send.delivery.seq
        is_first = seq not in self.receivers[lane_id].got
        self.receivers[lane_id].gets(send)
        if is_first:
            key, n = self._place[lane_id, seq]
            for before, number in self._of_key[key][:n]:
                acquired = number in self.receivers[before].got
                dead = number in self.disks[before].dead
                expect(acquired or dead, "a key comes in another order", key, n)

    def expect_everything_ends(self) -> None:
        """Check that everything pending is sent, in all generations, without further input."""
        self.notice()
        owner_state, steps = self.owner_state, 0
        steps_max = 200 + 20 * sum(disk.last_seq for disk in self.disks.values())
        while any(disk.ended < disk.last_seq for disk in self.disks.values()):
            steps += 1
            expect(steps < steps_max, "it does not end")
            self.unblock(0)
            self.release()
            if owner_state.ready:
                self.proceed(steps)
            elif owner_state.fetching:
                self.fetched(steps, 4)
            elif owner_state.sending:
                self.response(steps, 200, received=True)
            elif owner_state.pending:
                self.write(len(owner_state.pending))
            else:
                has_pending = [
                    lane_id for lane_id, lane in owner_state.lanes.items() if lane.pending
                ]
                expect(bool(owner_state.timers), "what is pending is forgotten", has_pending)
                self.tick(max(min(owner_state.timers.values()) - self.now, 0.0))
        for lane_id, disk in self.disks.items():
            for row in disk.delivered:
                expect(row.seq in self.receivers[lane_id].got, "delivered to no receiver", row)
