"""Model of an endpoint: lanes with pending deliveries, a receiver, and a step-by-step dispatcher.

The circuit breaker under test is driven as the dispatcher does it, but every task waits until it is
chosen, so that anything may happen between a grant and its use. Every error of the breaker is a
`Violation`.
"""

from __future__ import annotations

from dataclasses import dataclass

from outbox.core.delivery.circuit_breaker import (
    PROBE_MAX_S,
    PROBE_MIN_S,
    REFUSALS_MAX,
    BreakerState,
    CircuitBreaker,
)
from outbox.core.delivery.commands import Gate
from outbox.core.model.response_policy import AttemptOutcome
from tests.core.invariants import expect
from tests.core.lane_tables import EPOCH_S

RETRY_MAX_S = 8.0
OPENED = (BreakerState.FAILING, BreakerState.REJECTING)


@dataclass
class LaneTask:
    """The dispatcher's state of a lane."""

    id: int
    pending: int = 0
    due_at: float = 0.0
    failures: int = 0
    task: bool = False
    """The lane is ready, and the dispatcher has not run it yet."""
    timer: float | None = None
    in_flight: bool = False
    waits: bool = False
    """The breaker made the lane wait, and has not woken it yet."""
    width: int = 0
    """The largest permitted width since the lane was granted its send."""


class Endpoint:
    """One endpoint, its lanes and its successive owners."""

    def __init__(self, lanes: int, health: type[CircuitBreaker] = CircuitBreaker) -> None:
        self._health_type = health
        self.health = health()
        self.lanes = [LaneTask(n) for n in range(lanes)]
        self.now = EPOCH_S
        self.timer: float | None = None
        self._paused = self._disabled = False
        self._held_until = 0.0
        self._refusals = 0
        """Deliveries that ended by a refusal since the last success."""
        self._width, self._results, self._misses = 1, 0, 0
        self._probed: set[int] = set()
        """Lanes that were probed in the current recovery."""
        self._overtaken: set[tuple[int, int]] = set()
        """Pairs (waiting lane, lane that sent meanwhile)."""
        self._probe_after = 0.0

    @property
    def in_flight(self) -> list[LaneTask]:
        return [lane for lane in self.lanes if lane.in_flight]

    @property
    def tasks(self) -> list[LaneTask]:
        """Lanes that will act when they are chosen."""
        return [lane for lane in self.lanes if lane.task]

    # ------------------------------------------------------------------ events

    def offer(self, i: int, count: int) -> None:
        lane = self.lanes[i % len(self.lanes)]
        lane.pending += count
        self._activate(lane)
        self._expect_no_lane_forgotten()

    def expire_pending(self, i: int) -> None:
        """Expire a lane's pending deliveries: it does not need its grant."""
        lane = self.lanes[i % len(self.lanes)]
        if not lane.in_flight:
            lane.pending = lane.failures = 0
            lane.due_at = 0.0

    def work(self, i: int) -> None:
        """Run one task: its lane asks the breaker, then sends, sleeps or ends."""
        if not (tasks := self.tasks):
            return
        lane = tasks[i % len(tasks)]
        gate = self.health.admit(lane.id, self.now)
        is_due = lane.due_at <= self.now
        if lane.pending and (gate is Gate.PROBE or (gate is Gate.OPEN and is_due)):
            self._expect_may_send(lane, free=not is_due)
            self.health.started(lane.id)
            lane.task, lane.in_flight, lane.waits = False, True, False
            lane.width = 0
        else:
            lane.task = False
            lane.width = 0
            if lane.pending and gate is Gate.SHUT:
                lane.waits = True
            elif lane.pending:
                lane.timer = lane.due_at
            if self.health.yielded(lane.id) or self.timer is None:
                self._attend()
        self._expect_no_lane_forgotten()

    def response(
        self,
        i: int,
        outcome: AttemptOutcome,
        u: float = 0.0,
        retry_after_s: float = 0.0,
        *,
        gone: bool = False,
    ) -> None:
        """Complete one of the requests in flight, in any order."""
        if not (out := self.in_flight):
            return
        lane = out[i % len(out)]
        before, others = self.health.state, len(out) - 1
        returned = self.health.record_result(
            outcome, self.now, u, gone=gone, retry_after_s=retry_after_s
        )
        self._disabled = self._disabled or gone
        if retry_after_s:
            self._held_until = max(self._held_until, self.now + retry_after_s)
        self._expect_correct_reports(outcome, returned, before, gone=gone)
        self._follow(outcome, before)
        # A success that was in flight when the receiver sent Retry-After is not a probe.
        if self.health.state in OPENED and not others and outcome is not AttemptOutcome.DELIVERED:
            self._probe_after = self.now + (1.0 - u) * PROBE_MIN_S
        lane.in_flight, lane.task = False, True
        if returned is AttemptOutcome.RETRY:
            if lane.due_at <= self.now:
                lane.failures += 1
                lane.due_at = self.now + min(2.0**lane.failures / 2, RETRY_MAX_S)
        else:
            lane.pending, lane.failures, lane.due_at = lane.pending - 1, 0, 0.0
        if self.health.state is not before:
            self._activate_all()
            self._attend()
        elif self.health.state is not BreakerState.HEALTHY:
            self._attend()
        self._expect_no_lane_forgotten()

    def tick(self, seconds: float, *, late: bool = False) -> None:
        """Advance the clock; timers may be `late`, in any order."""
        self.now += seconds
        if not late:
            self._set_timer()

    def jump(self) -> bool:
        """Advance the clock to the next timer."""
        times = [t for t in (self.timer, *(lane.timer for lane in self.lanes)) if t is not None]
        if times:
            self.now = max(self.now, min(times))
            self._set_timer()
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
        expect(
            self._disabled or self.health.state is BreakerState.RECOVERING, "it does not recover"
        )
        self._changed()

    def take_over(self, *, anew: bool = False) -> None:
        """Crash the owner; `anew`: an operator enabled the endpoint again."""
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

    def _activate(self, lane: LaneTask) -> None:
        if not lane.in_flight:
            lane.task, lane.timer = True, None

    def _activate_all(self) -> None:
        for lane in self.lanes:
            if lane.pending:
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
        self._expect_no_lane_forgotten()

    def _set_timer(self) -> None:
        for lane in self.lanes:
            if lane.timer is not None and lane.timer <= self.now:
                self._activate(lane)
        if self.timer is not None and self.timer <= self.now:
            self._attend()
        self._expect_no_lane_forgotten()

    # -------------------------------------------------------------- invariants

    def _recovers(self) -> None:
        self._width, self._results, self._misses = 1, 0, 0
        self._probed.clear()
        for lane in self.lanes:
            lane.width = 0

    def _follow(self, outcome: AttemptOutcome, before: BreakerState) -> None:
        """Follow the permitted concurrency by the rule of slow start."""
        if self.health.state is BreakerState.HEALTHY:
            self._overtaken.clear()
        if (
            self.health.state is not BreakerState.RECOVERING
            or before is not BreakerState.RECOVERING
        ):
            if self.health.state is not before:
                self._recovers()
        elif outcome is AttemptOutcome.RETRY or (
            outcome is AttemptOutcome.DELIVERED and self.now >= self._held_until
        ):
            self._results += 1
            self._misses += outcome is AttemptOutcome.RETRY
            if self._results >= self._width:
                most_failed = 2 * self._misses > self._results
                self._width = max(self._width // 2, 1) if most_failed else self._width * 2
                self._results = self._misses = 0
                for lane in self.lanes:
                    if lane.width:
                        lane.width = max(lane.width, self._width)

    def _expect_may_send(self, lane: LaneTask, *, free: bool) -> None:
        state, out = self.health.state, len(self.in_flight)
        expect(not self._paused, "it sends while it is paused", lane)
        expect(not self._disabled, "it sends while it is disabled", lane)
        expect(self.now >= self._held_until, "it sends while it is held", lane)
        if state is BreakerState.HEALTHY:
            expect(not free, "a healthy endpoint is probed", lane)
            return
        if state in OPENED:
            expect(out == 0, "it probes while something is in flight", lane)
            expect(self.now >= self._probe_after, "it probes too soon", lane)
        if state is BreakerState.RECOVERING:
            # A grant that is outstanding when the width is halved may still be used.
            width = max(self._width, lane.width)
            expect(out < width, f"more than {width} are in flight", lane)
            expect(not free or lane.id not in self._probed, "one is probed again and again", lane)
            self._probed.add(lane.id)
        for other in self.lanes:
            if other.waits and other is not lane:
                pair = (other.id, lane.id)
                expect(pair not in self._overtaken, "one sends twice while another waits", pair)
                self._overtaken.add(pair)

    def _expect_correct_reports(
        self, outcome: AttemptOutcome, returned: AttemptOutcome, before: BreakerState, *, gone: bool
    ) -> None:
        if outcome is AttemptOutcome.DELIVERED:
            self._refusals = 0
        if outcome is not AttemptOutcome.REFUSED or gone:
            expect(returned is outcome, "a response is turned into another", outcome, returned)
            return
        storm = BreakerState.REJECTING in (before, self.health.state)
        if returned is AttemptOutcome.REFUSED:
            self._refusals += 1
            expect(not storm, "a refusal ends a delivery in a storm")
            expect(self._refusals < REFUSALS_MAX, "too many deliveries end by refusal")
        elif not (self._paused or self._disabled):
            expect(storm, "a refusal does not end its delivery")

    def _expect_no_lane_forgotten(self) -> None:
        if self._paused or self._disabled or self.tasks or self.in_flight:
            return
        waiting = [lane for lane in self.lanes if lane.pending and lane.timer is None]
        if waiting:
            expect(self.timer is not None, "no timer wakes the waiting lanes", waiting)
            latest = max(self.now + PROBE_MAX_S, self._held_until)
            expect((self.timer or 0.0) <= latest, "it sleeps too long", self.timer, self.now)

    def expect_everything_ends(self, poison: int | None = None) -> None:
        """Check that all lanes but one that always fails end when every request succeeds."""
        if self._disabled:
            self.take_over(anew=True)
        if self._paused:
            self.resume()
        good = [lane for lane in self.lanes if lane.id != poison]
        for lane in self.lanes:
            self.offer(lane.id, 3 * len(self.lanes))
        steps, pending = 0, sum(lane.pending for lane in self.lanes)
        latest = max(self.now, self._held_until) + PROBE_MAX_S + RETRY_MAX_S
        while any(lane.pending for lane in good):
            steps += 1
            expect(steps < 200 + 100 * pending, "it does not end", self.lanes)
            if self.tasks:
                self.work(steps)
            elif out := self.in_flight:
                i = steps % len(out)
                fails = out[i].id == poison
                self.response(i, AttemptOutcome.RETRY if fails else AttemptOutcome.DELIVERED)
            else:
                expect(self.jump(), "no timer and no task is left", self.lanes)
        if poison is None:
            expect(self.health.state is BreakerState.HEALTHY, "it does not become healthy")
            expect(self.now <= latest, "it takes too long", self.now - latest)
