"""An endpoint's world while its number of lanes changes, and its owners die.

Every generation has its own lanes; a key has its lane by its number modulo the
number of lanes.  The owner works as the dispatcher does it: a lane does nothing
until it is activated, and rests when it has nothing to do.  What breaks the
order of a key is a `Violation`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outbox.core.delivery.commands import Fetch, Gate, Record, Send, Wait
from outbox.core.delivery.lane import Lane
from outbox.core.delivery.lane_generations import Generations
from outbox.core.model.response import Answer, Failure, Verdict, classify
from tests.core.invariants import expect
from tests.core.lane_invariants import POLICY
from tests.core.lane_tables import EPOCH_S, Disk, Receiver, delivery

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True)
class Faults:
    """What a wrong relay does around the generations."""

    counts_before_the_change: bool = False
    """The last numbers of lanes that end are not read again."""
    forgets_at_take_over: bool = False
    """Who takes over asks for the newest lanes alone."""
    forgets_blocks: bool = False
    """Who takes over takes an older lane that owes nothing for drained."""


NO_FAULTS = Faults()


class Home:
    """What an owner has in memory; gone when it dies."""

    def __init__(self) -> None:
        self.lanes: dict[int, Lane] = {}
        self.generations = Generations()
        self.ready: dict[int, None] = {}
        self.held: set[int] = set()
        """Lanes that the endpoint's health does not let send."""
        self.timers: dict[int, float] = {}
        self.sending: dict[int, Send] = {}
        self.fetching: dict[int, Fetch] = {}
        self.pending: list[Record] = []
        self.delivered: dict[int, int] = {}
        """By lane the last number that was answered with success."""
        self.ended: set[int] = set()
        """Lanes that are known to be of an older generation."""


class World:
    """One endpoint: its tables, its receiver and, one after the other, its owners."""

    def __init__(
        self,
        lanes: int,
        lane: type[Lane] = Lane,
        generations: type[Generations] = Generations,
        faults: Faults = NO_FAULTS,
    ) -> None:
        self._lane_type, self._generations_type, self._faults = lane, generations, faults
        self.now = EPOCH_S
        self.disks: dict[int, Disk] = {}
        """By lane, in the order of the generations."""
        self.receivers: dict[int, Receiver] = {}
        self.generation_of: dict[int, int] = {}
        self.slots: list[int] = []
        """The lanes of the newest generation."""
        self._batch = 0
        self._of_key: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self._place: dict[tuple[int, int], tuple[int, int]] = {}
        """The key of a number, and the how manieth of its key it is."""
        self.change(lanes)
        self._take_over()

    # ---------------------------------------------------------------- the world

    def change(self, lanes: int) -> None:
        """An operator changes the number of lanes; the owner hears of it later."""
        generation = 1 + max(self.generation_of.values(), default=0)
        for lane_id in self.slots:
            self.disks[lane_id].closed = True
        first = len(self.disks)
        self.slots = list(range(first, first + lanes))
        for lane_id in self.slots:
            self.disks[lane_id], self.receivers[lane_id] = Disk(), Receiver()
            self.generation_of[lane_id] = generation

    def publish(self, key: int, *, told: bool) -> None:
        """An event with a key is given its number; its owner may hear of it later."""
        self._batch += 1
        lane_id = self.slots[key % len(self.slots)]
        disk = self.disks[lane_id]
        disk.give_out(delivery(disk.last_seq + 1, self._batch), self.now)
        self._place[lane_id, disk.last_seq] = key, len(self._of_key[key])
        self._of_key[key].append((lane_id, disk.last_seq))
        if told and lane_id in self.home.lanes:
            self.home.lanes[lane_id].offered(disk.last_seq, self.now)
            self._activate(lane_id)

    def unblock(self, i: int) -> None:
        """An operator lets a lane go on."""
        blocked = [lane_id for lane_id, disk in self.disks.items() if disk.blocked]
        if blocked:
            lane_id = blocked[i % len(blocked)]
            self.disks[lane_id].blocked = False
            if lane_id in self.home.lanes:
                self.home.lanes[lane_id].unblock()
                self._activate(lane_id)

    def tick(self, seconds: float) -> None:
        self.now += seconds
        for lane_id, at in list(self.home.timers.items()):
            if at <= self.now:
                self._activate(lane_id)

    # ----------------------------------------------------------------- the owner

    def _load(self, lane_id: int) -> None:
        disk = self.disks[lane_id]
        self.home.lanes[lane_id] = self._lane_type(
            lane_id,
            disk.progress,
            disk.tail(),
            disk.last_seq,
            self._batch,
            owed_since=disk.owed_since,
            blocked=disk.blocked,
            ended=disk.closed,
        )
        if disk.closed:
            self.home.ended.add(lane_id)

    def _take_over(self) -> None:
        self.home = Home()
        for lane_id, disk in self.disks.items():
            owes = disk.last_seq > disk.progress.acked_seq and not self._faults.forgets_at_take_over
            holds = disk.blocked and not self._faults.forgets_blocks
            if not disk.closed or owes or holds:
                self._load(lane_id)
        self._arrange()

    def notice(self) -> None:
        """The owner reads the lanes anew, all of them in one snapshot."""
        for lane_id, disk in self.disks.items():
            lane = self.home.lanes.get(lane_id)
            if lane is not None:
                if not (disk.closed and self._faults.counts_before_the_change):
                    lane.offered(disk.last_seq, self.now)
                if disk.closed:
                    lane.end()
                    self.home.ended.add(lane_id)
            elif not disk.closed or disk.last_seq > disk.progress.acked_seq:
                self._load(lane_id)
        self._arrange()

    def _arrange(self) -> None:
        home = self.home
        home.generations = self._generations_type(
            (lane_id, self.generation_of[lane_id])
            for lane_id in home.ended
            if not home.lanes[lane_id].drained
        )
        self._activate_all()

    def _activate(self, lane_id: int) -> None:
        if lane_id not in self.home.sending:
            self.home.ready[lane_id] = None

    def _activate_all(self) -> None:
        for lane_id, lane in self.home.lanes.items():
            if lane.owed:
                self._activate(lane_id)

    def crash(self, written: int, *, received: bool) -> None:
        """The owner dies; so many of the records that wait reach the disk all the same."""
        self._write(self.home.pending[:written])
        if received:
            for lane_id, send in self.home.sending.items():
                self._receive(lane_id, send)
        self._take_over()

    def proceed(self, i: int, gate: Gate = Gate.OPEN) -> None:
        """One of the lanes that are active does one thing."""
        home = self.home
        if not home.ready:
            return
        lane_id = list(home.ready)[i % len(home.ready)]
        lane = home.lanes[lane_id]
        home.timers.pop(lane_id, None)
        may_send = home.generations.may_send(self.generation_of[lane_id])
        command = lane.next(self.now, gate if may_send else Gate.SHUT)
        match command:
            case Send() as send:
                self._expect_rightly_sent(lane_id, send)
                home.sending[lane_id] = send
                self._fetch(lane_id, lane.fetch())
            case Record() as record:
                home.pending.append(record)
            case Fetch() as fetch:
                self._fetch(lane_id, fetch)
            case Wait(until):
                home.timers[lane_id] = until
            case None if gate is Gate.SHUT:
                home.held.add(lane_id)
        del home.ready[lane_id]
        self._rest(lane_id)

    def _rest(self, lane_id: int) -> None:
        home = self.home
        drained = lane_id in home.ended and home.lanes[lane_id].drained
        if drained and home.generations.drained(lane_id, self.generation_of[lane_id]):
            self._activate_all()

    def release(self) -> None:
        """The endpoint is well again."""
        for lane_id in self.home.held:
            self._activate(lane_id)
        self.home.held.clear()

    def _fetch(self, lane_id: int, fetch: Fetch | None) -> None:
        if fetch is not None:
            expect(lane_id not in self.home.fetching, "two reads are under way")
            self.home.fetching[lane_id] = fetch

    def fetched(self, i: int, rows: int) -> None:
        if self.home.fetching:
            lane_id = list(self.home.fetching)[i % len(self.home.fetching)]
            fetch = self.home.fetching.pop(lane_id)
            self.home.lanes[lane_id].fetched(self.disks[lane_id].read(fetch, rows))
            self._activate(lane_id)

    def answer(self, i: int, status: int | None, *, received: bool, blocks: bool = False) -> None:
        """A request is answered, in any order; without a status it timed out."""
        home = self.home
        if not home.sending:
            return
        lane_id = list(home.sending)[i % len(home.sending)]
        send = home.sending.pop(lane_id)
        if status == 409 and send.delivery.seq not in self.receivers[lane_id].got:
            status = 400
        if status is None:
            answer = Answer.failed(Failure.TIMEOUT, "", 0.1)
        else:
            received = 200 <= status <= 299
            answer = Answer.of(status, 0.1)
        if received:
            self._receive(lane_id, send)
        verdict = classify(answer, maybe_sent_before=send.maybe_sent_before)
        record = home.lanes[lane_id].answered(
            verdict, answer, POLICY, started_at=self.now, now=self.now, u=0.5, blocks=blocks
        )
        home.pending.append(record)
        if verdict is Verdict.DELIVERED:
            home.delivered[lane_id] = send.delivery.seq
            self._activate(lane_id)

    def write(self, records: int) -> None:
        """The recorder writes what waits, in order, and tells its lanes."""
        group, self.home.pending = self.home.pending[:records], self.home.pending[records:]
        self._write(group)
        for record in group:
            self.home.lanes[record.lane_id].recorded(record)
            if record.urgent:
                self._activate(record.lane_id)

    def _write(self, group: Iterable[Record]) -> None:
        for record in group:
            self.disks[record.lane_id].write([record])

    def checkpoint(self) -> None:
        for lane_id, lane in self.home.lanes.items():
            self.disks[lane_id].checkpoint(lane.checkpoint())

    # ----------------------------------------------------------- the promises

    def _over(self, lane_id: int) -> int:
        """Up to here everything was answered with success, or its end is on disk."""
        return max(self.disks[lane_id].ended, self.home.delivered.get(lane_id, 0))

    def _expect_rightly_sent(self, lane_id: int, send: Send) -> None:
        seq, disk = send.delivery.seq, self.disks[lane_id]
        for other, generation in self.generation_of.items():
            if generation < self.generation_of[lane_id]:
                owed = self.disks[other].last_seq - self._over(other)
                expect(not owed, "an older generation still owes", (lane_id, seq), (other, owed))
                expect(not self.disks[other].blocked, "an older generation waits for an operator")
        key, n = self._place[lane_id, seq]
        for before, number in self._of_key[key][:n]:
            expect(number <= self._over(before), "a key is turned around", key, n)
        ends = lane_id in self.home.ended and seq == disk.last_seq
        expect(send.lane_ends == ends, "it is wrong about the end of the lane", lane_id, seq)

    def _receive(self, lane_id: int, send: Send) -> None:
        seq = send.delivery.seq
        is_first = seq not in self.receivers[lane_id].got
        self.receivers[lane_id].gets(send)
        if is_first:
            key, n = self._place[lane_id, seq]
            for before, number in self._of_key[key][:n]:
                came = number in self.receivers[before].got
                dead = number in self.disks[before].dead
                expect(came or dead, "a key comes in another order", key, n)

    def expect_everything_ends(self) -> None:
        """Whatever was owed is sent, in all generations, without another word."""
        self.notice()
        home, steps = self.home, 0
        steps_max = 200 + 20 * sum(disk.last_seq for disk in self.disks.values())
        while any(disk.ended < disk.last_seq for disk in self.disks.values()):
            steps += 1
            expect(steps < steps_max, "it does not end")
            self.unblock(0)
            self.release()
            if home.ready:
                self.proceed(steps)
            elif home.fetching:
                self.fetched(steps, 4)
            elif home.sending:
                self.answer(steps, 200, received=True)
            elif home.pending:
                self.write(len(home.pending))
            else:
                owes = [lane_id for lane_id, lane in home.lanes.items() if lane.owed]
                expect(bool(home.timers), "what is owed is forgotten", owes)
                self.tick(max(min(home.timers.values()) - self.now, 0.0))
        for lane_id, disk in self.disks.items():
            for row in disk.delivered:
                expect(row.seq in self.receivers[lane_id].got, "delivered to nobody", row)
