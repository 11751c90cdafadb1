"""Simulation of the RequestScheduler with endpoints, lanes and receivers, on virtual seconds."""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING

from outbox.core.admission.endpoint_queue import Slot

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox.core.admission.endpoint_queue import CapacityClass
    from outbox.core.admission.request_scheduler import RequestScheduler


class Endpoint:
    """An endpoint that receives requests.

    Args:
        takes_s: Latency in seconds of the n-th request, given the time at which it begins.
        lanes: Maximum number of concurrent requests.
        every_s: Interval between events in seconds. None: every lane always has one.
    """

    def __init__(
        self,
        simulation: Simulation,
        takes_s: Callable[[int, float], float],
        *,
        lanes: int = 1,
        every_s: float | None = None,
        tenant: str | None = None,
        in_flight_max: int | None = None,
        rate_per_s: float | None = None,
        begins_at: float = 0.0,
    ) -> None:
        self.simulation = simulation
        self.queue = simulation.scheduler.add_endpoint(tenant, in_flight_max, rate_per_s)
        self.rate_per_s = rate_per_s
        self.takes_s = takes_s
        self.every_s = every_s
        self.idle = [Slot(self.queue) for _ in range(lanes)]
        self.pending = lanes if every_s is None else 0
        self.requested_at: dict[Slot, float] = {}
        self._open: set[Slot] = set()
        # The request number of each open slot, per endpoint.
        self._number: dict[Slot, int] = {}
        # When the run of each open slot began.
        self._began_at: dict[Slot, float] = {}
        self.begun_at: list[float] = []
        self.waits_s: list[float] = []
        self.completed = 0
        self.preempted = 0
        simulation.endpoints[self.queue] = self
        simulation.at(begins_at, self.arrive if every_s is not None else self.send)

    @property
    def open(self) -> dict[Slot, CapacityClass]:
        """Open requests per capacity class."""
        return {slot: slot.capacity_class for slot in self._open if not slot.preempted}

    @property
    def open_count(self) -> int:
        """With those that are about to be ended."""
        return len(self._open)

    def arrive(self) -> None:
        assert self.every_s is not None
        if self.simulation.calm:
            return
        self.pending += 1
        self.simulation.at(self.simulation.now + self.every_s, self.arrive)
        self.send()

    def send(self) -> None:
        """Request a slot for every lane that has an event and waits for nothing."""
        while self.pending and self.idle and not self.simulation.calm:
            self.pending -= 1
            slot = self.idle.pop()
            self.requested_at[slot] = self.simulation.now
            self.simulation.begin(self.simulation.scheduler.admit(slot, self.simulation.now))

    def begin(self, slot: Slot) -> None:
        self.waits_s.append(self.simulation.now - self.requested_at.pop(slot))
        self._open.add(slot)
        self._began_at[slot] = self.simulation.now
        self._process(slot)

    def _process(self, slot: Slot) -> None:
        simulation = self.simulation
        self.begun_at.append(simulation.now)
        n = len(self.begun_at)
        latency_s = self.takes_s(n, simulation.now)
        self._number[slot] = n
        simulation.at(simulation.now + latency_s, lambda: self.end(slot, n))

    def end(self, slot: Slot, number: int) -> None:
        """End a request: its receiver responded, or it was preempted."""
        if self._number.get(slot) != number:
            return
        del self._number[slot]
        if self._follow(slot):
            return
        self.completed += not slot.preempted
        self.preempted += slot.preempted
        self._open.remove(slot)
        begun = self.simulation.scheduler.end(
            slot, self.simulation.now, responded=not slot.preempted
        )
        self.idle.append(slot)
        if self.every_s is None:
            self.pending += 1
        self.simulation.begin(begun)
        self.send()

    def _follow(self, slot: Slot) -> bool:
        """After a response send the lane's next event in a request run, if admission allows."""
        now = self.simulation.now
        has_more = self.every_s is None or self.pending > 0
        if not has_more or self.simulation.calm:
            return False
        if not self.simulation.scheduler.continue_run(slot, self._began_at[slot], now):
            return False
        self.completed += 1
        self.pending -= self.every_s is not None
        self.waits_s.append(0.0)
        self._process(slot)
        return True

    def end_preempted(self, slot: Slot) -> None:
        """End a preempted request after a short delay."""
        number = self._number[slot]
        self.simulation.at(
            self.simulation.now + self.simulation.ending_s, lambda: self.end(slot, number)
        )

    def wait_s(self, share: float, since: float = 0.0) -> float:
        """Longest wait for a slot in seconds among this share of the requests."""
        waits = sorted(w for w, at in zip(self.waits_s, self.begun_at, strict=True) if at >= since)
        return waits[min(int(len(waits) * share), len(waits) - 1)]


class Simulation:
    """The endpoints that share one scheduler, and the virtual clock."""

    def __init__(self, scheduler: RequestScheduler) -> None:
        self.scheduler = scheduler
        self.now = 0.0
        self.endpoints: dict[object, Endpoint] = {}
        self.open_max = 0
        self.ending_s = 0.0
        self.tenant_in_flight_max: int | None = None
        self.tenant_rate_per_s: float | None = None
        # No endpoint sends anything new.
        self.calm = False
        self.on_step: list[Callable[[Simulation], object]] = []
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._ticket = itertools.count()

    def at(self, at: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (at, next(self._ticket), what))

    def begin(self, begun: list[Slot]) -> None:
        """Begin the admitted requests."""
        for slot in begun:
            self.endpoints[slot.queue].begin(slot)
        self.end_all_preempted()

    def end_all_preempted(self) -> None:
        """End the preempted requests."""
        for slot in self.scheduler.pop_preempted():
            self.endpoints[slot.queue].end_preempted(slot)

    def run(self, until: float) -> None:
        scheduler = self.scheduler
        while True:
            wake_at = scheduler.wake_at()
            next_at = self._timers[0][0] if self._timers else until
            if wake_at is not None and wake_at <= min(next_at, until):
                self.now = max(wake_at, self.now)
                self.begin(scheduler.wake(self.now))
                self._sample()
                continue
            if next_at >= until:
                self.now = until
                return
            self.now, _, what = heapq.heappop(self._timers)
            what()
            self._sample()

    def _sample(self) -> None:
        self.open_max = max(self.open_max, self.scheduler.open)
        for sample in self.on_step:
            sample(self)
