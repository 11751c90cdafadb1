"""An endpoint's world: lanes that owe, a receiver, and a dispatcher in slow motion.

The health under test is driven as the dispatcher does it, but every task waits
until it is chosen, so that anything may happen between a turn and its use.
What the health does wrong is a `Violation`.
"""

from __future__ import annotations

from dataclasses import dataclass

from outbox.core.delivery.circuit_breaker import (
    PROBE_MAX_S,
    PROBE_MIN_S,
    REFUSALS_MAX,
    Health,
    State,
)
from outbox.core.delivery.commands import Gate
from outbox.core.model.response import Verdict
from tests.core.invariants import expect
from tests.core.lane_tables import EPOCH_S

RETRY_MAX_S = 8.0
OPENED = (State.FAILING, State.REFUSING)


@dataclass
class LaneOf:
    """What the dispatcher knows of a lane."""

    id: int
    owed: int = 0
    due_at: float = 0.0
    failures: int = 0
    task: bool = False
    """It will ask; the dispatcher has not come to it."""
    timer: float | None = None
    in_flight: bool = False
    waits: bool = False
    """It was told to wait, and not yet woken."""
    width: int = 0
    """The most that might send since it was given its turn."""


class Endpoint:
    """One endpoint, its lanes and, one after the other, its owners."""

    def __init__(self, lanes: int, health: type[Health] = Health) -> None:
        self._health_type = health
        self.health = health()
        self.lanes = [LaneOf(n) for n in range(lanes)]
        self.now = EPOCH_S
        self.timer: float | None = None
        self._paused = self._disabled = False
        self._held_until = 0.0
        self._refusals = 0
        """Deliveries that ended by a refusal since the last success."""
        self._width, self._answers, self._misses = 1, 0, 0
        self._tried: set[int] = set()
        """Lanes that were probed since it recovers."""
        self._overtaken: set[tuple[int, int]] = set()
        """(who waits, who sent meanwhile)."""
        self._probe_after = 0.0

    @property
    def in_flight(self) -> list[LaneOf]:
        return [lane for lane in self.lanes if lane.in_flight]

    @property
    def tasks(self) -> list[LaneOf]:
        """Those that will do something when they are chosen."""
        return [lane for lane in self.lanes if lane.task]

    # ------------------------------------------------------------ what happens

    def offer(self, i: int, count: int) -> None:
        lane = self.lanes[i % len(self.lanes)]
        lane.owed += count
        self._activate(lane)
        self._expect_nobody_forgotten()

    def give_up(self, i: int) -> None:
        """What a lane owes expires: it has nothing to do with its turn."""
        lane = self.lanes[i % len(self.lanes)]
        if not lane.in_flight:
            lane.owed = lane.failures = 0
            lane.due_at = 0.0

    def work(self, i: int) -> None:
        """One task goes on: it asks, and sends, sleeps or ends."""
        if not (tasks := self.tasks):
            return
        lane = tasks[i % len(tasks)]
        gate = self.health.ask(lane.id, self.now)
        is_due = lane.due_at <= self.now
        if lane.owed and (gate is Gate.PROBE or (gate is Gate.OPEN and is_due)):
            self._expect_may_send(lane, free=not is_due)
            self.health.began(lane.id)
            lane.task, lane.in_flight, lane.waits = False, True, False
            lane.width = 0
        else:
            lane.task = False
            lane.width = 0
            if lane.owed and gate is Gate.SHUT:
                lane.waits = True
            elif lane.owed:
                lane.timer = lane.due_at
            if self.health.passed(lane.id) or self.timer is None:
                self._attend()
        self._expect_nobody_forgotten()

    def answer(
        self,
        i: int,
        verdict: Verdict,
        u: float = 0.0,
        retry_after_s: float = 0.0,
        *,
        gone: bool = False,
    ) -> None:
        """One of the requests that are out is answered, in any order."""
        if not (out := self.in_flight):
            return
        lane = out[i % len(out)]
        before, others = self.health.state, len(out) - 1
        told = self.health.answered(verdict, self.now, u, gone=gone, retry_after_s=retry_after_s)
        self._disabled = self._disabled or gone
        if retry_after_s:
            self._held_until = max(self._held_until, self.now + retry_after_s)
        self._expect_rightly_told(verdict, told, before, gone=gone)
        self._follow(verdict, before)
        # A success that was on its way when the receiver asked to be left alone is no probe.
        if self.health.state in OPENED and not others and verdict is not Verdict.DELIVERED:
            self._probe_after = self.now + (1.0 - u) * PROBE_MIN_S
        lane.in_flight, lane.task = False, True
        if told is Verdict.RETRY:
            if lane.due_at <= self.now:
                lane.failures += 1
                lane.due_at = self.now + min(2.0**lane.failures / 2, RETRY_MAX_S)
        else:
            lane.owed, lane.failures, lane.due_at = lane.owed - 1, 0, 0.0
        if self.health.state is not before:
            self._activate_all()
            self._attend()
        elif self.health.state is not State.HEALTHY:
            self._attend()
        self._expect_nobody_forgotten()

    def tick(self, seconds: float, *, late: bool = False) -> None:
        """Time goes by; timers may be `late`, and others come first."""
        self.now += seconds
        if not late:
            self._ring()

    def jump(self) -> bool:
        """To the next time that somebody waits for."""
        times = [t for t in (self.timer, *(lane.timer for lane in self.lanes)) if t is not None]
        if times:
            self.now = max(self.now, min(times))
            self._ring()
        return bool(times)

    def pause(self) -> None:
        self._paused = True
        self.health.pause()
        self._changed()

    def resume(self) -> None:
        self._paused = False
        self._held_until = 0.0
        self._refusals = 0
        self._recovers()
        self.health.resume(self.now)
        expect(self._disabled or self.health.state is State.RECOVERING, "it does not recover")
        self._changed()

    def take_over(self, *, anew: bool = False) -> None:
        """The owner dies; `anew`: an operator enabled the endpoint again."""
        for lane in self.lanes:
            lane.in_flight = lane.waits = False
            lane.timer = None
        self.timer = None
        if self._disabled and not anew:
            return
        self.health = self._health_type(None if self._disabled else self.health.record())
        self._held_until = 0.0 if self._disabled else self._held_until
        self._disabled = False
        if self._paused:
            self.health.pause()
        self._overtaken.clear()
        self._refusals = 0
        self._recovers()
        self._probe_after = 0.0
        self._activate_all()

    # ---------------------------------------------------------- the dispatcher

    def _activate(self, lane: LaneOf) -> None:
        if not lane.in_flight:
            lane.task, lane.timer = True, None

    def _activate_all(self) -> None:
        for lane in self.lanes:
            if lane.owed:
                self._activate(lane)

    def _attend(self) -> None:
        while woken := self.health.wake(self.now):
            for lane_id in woken:
                lane = self.lanes[lane_id]
                lane.waits, lane.width = False, self._width
                self._overtaken = {pair for pair in self._overtaken if pair[0] != lane_id}
                self._activate(lane)
        self.timer = self.health.wake_at()

    def _changed(self) -> None:
        self._activate_all()
        self._attend()
        self._expect_nobody_forgotten()

    def _ring(self) -> None:
        for lane in self.lanes:
            if lane.timer is not None and lane.timer <= self.now:
                self._activate(lane)
        if self.timer is not None and self.timer <= self.now:
            self._attend()
        self._expect_nobody_forgotten()

    # ------------------------------------------------------------ the promises

    def _recovers(self) -> None:
        self._width, self._answers, self._misses = 1, 0, 0
        self._tried.clear()
        for lane in self.lanes:
            lane.width = 0

    def _follow(self, verdict: Verdict, before: State) -> None:
        """How many may send at once, by the rule of slow start."""
        if self.health.state is State.HEALTHY:
            self._overtaken.clear()
        if self.health.state is not State.RECOVERING or before is not State.RECOVERING:
            if self.health.state is not before:
                self._recovers()
        elif verdict is Verdict.RETRY or (
            verdict is Verdict.DELIVERED and self.now >= self._held_until
        ):
            self._answers += 1
            self._misses += verdict is Verdict.RETRY
            if self._answers >= self._width:
                most_failed = 2 * self._misses > self._answers
                self._width = max(self._width // 2, 1) if most_failed else self._width * 2
                self._answers = self._misses = 0
                for lane in self.lanes:
                    if lane.width:
                        lane.width = max(lane.width, self._width)

    def _expect_may_send(self, lane: LaneOf, *, free: bool) -> None:
        state, out = self.health.state, len(self.in_flight)
        expect(not self._paused, "it sends while it is paused", lane)
        expect(not self._disabled, "it sends while it is disabled", lane)
        expect(self.now >= self._held_until, "it sends while it is held", lane)
        if state is State.HEALTHY:
            expect(not free, "a healthy endpoint is probed", lane)
            return
        if state in OPENED:
            expect(out == 0, "it probes while something is in flight", lane)
            expect(self.now >= self._probe_after, "it probes too soon", lane)
        if state is State.RECOVERING:
            # A turn that is out when the width is halved may still be used.
            width = max(self._width, lane.width)
            expect(out < width, f"more than {width} are in flight", lane)
            expect(not free or lane.id not in self._tried, "one is probed again and again", lane)
            self._tried.add(lane.id)
        for other in self.lanes:
            if other.waits and other is not lane:
                pair = (other.id, lane.id)
                expect(pair not in self._overtaken, "one sends twice while another waits", pair)
                self._overtaken.add(pair)

    def _expect_rightly_told(
        self, verdict: Verdict, told: Verdict, before: State, *, gone: bool
    ) -> None:
        if verdict is Verdict.DELIVERED:
            self._refusals = 0
        if verdict is not Verdict.REFUSED or gone:
            expect(told is verdict, "an answer is turned into another", verdict, told)
            return
        storm = State.REFUSING in (before, self.health.state)
        if told is Verdict.REFUSED:
            self._refusals += 1
            expect(not storm, "a refusal ends a delivery in a storm")
            expect(self._refusals < REFUSALS_MAX, "too many deliveries end by refusal")
        elif not (self._paused or self._disabled):
            expect(storm, "a refusal does not end its delivery")

    def _expect_nobody_forgotten(self) -> None:
        if self._paused or self._disabled or self.tasks or self.in_flight:
            return
        waiting = [lane for lane in self.lanes if lane.owed and lane.timer is None]
        if waiting:
            expect(self.timer is not None, "nobody wakes those who wait", waiting)
            latest = max(self.now + PROBE_MAX_S, self._held_until)
            expect((self.timer or 0.0) <= latest, "it sleeps too long", self.timer, self.now)

    def expect_everything_ends(self, poison: int | None = None) -> None:
        """From now on all goes well, but for one lane that always fails: the others end."""
        if self._disabled:
            self.take_over(anew=True)
        if self._paused:
            self.resume()
        good = [lane for lane in self.lanes if lane.id != poison]
        for lane in self.lanes:
            self.offer(lane.id, 3 * len(self.lanes))
        steps, owed = 0, sum(lane.owed for lane in self.lanes)
        latest = max(self.now, self._held_until) + PROBE_MAX_S + RETRY_MAX_S
        while any(lane.owed for lane in good):
            steps += 1
            expect(steps < 200 + 100 * owed, "it does not end", self.lanes)
            if self.tasks:
                self.work(steps)
            elif out := self.in_flight:
                i = steps % len(out)
                fails = out[i].id == poison
                self.answer(i, Verdict.RETRY if fails else Verdict.DELIVERED)
            else:
                expect(self.jump(), "nobody waits for anything", self.lanes)
        if poison is None:
            expect(self.health.state is State.HEALTHY, "it does not become healthy")
            expect(self.now <= latest, "it takes too long", self.now - latest)
