"""The open requests of a relay: capacity classes, and which requests are preempted.

See `request_scheduler` for the rules.
"""

from __future__ import annotations

from collections import OrderedDict
from math import inf

from outbox.core.admission.endpoint_queue import (
    OVERDUE,
    PROBATION,
    SLOW,
    CapacityClass,
    EndpointQueue,
    Slot,
    Tenant,
)
from outbox.core.admission.rate_limit import RESOLUTION_S
from outbox.core.admission.usage_index import UsageIndex
from outbox.core.admission.waiting_requests import WaitingRequests

FAST_LATENCY_MAX_S = 1.0
"""Latency above which a response counts as slow."""
SLOW_MIN_S, SLOW_MAX_S = 10.0, 600.0
"""Bounds of the time in the slow class after a slow request."""
SLOW_CLASS_FACTOR = 10.0
"""Seconds in the slow class per second over the limit.  Ten keeps an endpoint's share of fast
slots below 10 %."""
PREEMPT_GRACE_S = 30.0
"""A slow request is not preempted before this time, regardless of waiting requests."""

RECOVERY_S = 0.5
"""Seconds without a failure of our own until more requests may be open, or one again."""


class OpenRequests(WaitingRequests):
    """The open requests of a relay.

    Args:
        in_flight_max: open requests.
        tenant_in_flight_max: open requests of one tenant; None: no limit.
        tenant_rate_per_s: requests of one tenant started per second; None: no limit.
    """

    def __init__(
        self,
        in_flight_max: int,
        tenant_in_flight_max: int | None = None,
        tenant_rate_per_s: float | None = None,
    ) -> None:
        super().__init__(tenant_in_flight_max, tenant_rate_per_s)
        self.in_flight_max = in_flight_max
        self.open_max = in_flight_max
        """Limit of open requests, which is lower while this process lacks resources."""
        self._lowered_at, self._recovers_at = -inf, 0.0
        self.fast_max = in_flight_max - in_flight_max // 2
        self.probation_max = max(self.fast_max // 2, 1)
        self.slow_max = max(in_flight_max // 4, 1)
        self.share_max = self.fast_max
        """Limit of fast requests per holder, regardless of free slots."""
        # Slow and overdue requests together.
        self.long_max = in_flight_max - self.fast_max
        # Fast requests, the oldest first; `_age` removes those over FAST_LATENCY_MAX_S.
        self._by_age: OrderedDict[Slot, None] = OrderedDict()
        # By holder: tenant, or endpoint without one.
        self._slow = UsageIndex[Tenant | EndpointQueue, Slot]()
        self._overdue = UsageIndex[Tenant | EndpointQueue, Slot]()
        self.preempted: list[Slot] = []
        """Requests to be ended; they stay open until then."""

    def record_exhausted(self, slot: Slot, now: float) -> None:
        """Record that an open request failed, because this process lacks resources; before `end`.

        Others that were open at that time lower the limit no further.
        """
        assert slot.open
        if slot.started_at > self._lowered_at:
            self._lowered_at = now
            self.open_max = min(self.open_max, self.open - 1) // 2
        self._recovers_at = now + RECOVERY_S

    def _recover(self, now: float) -> None:
        """Let more requests be open, some time after the last failure of our own."""
        while self.open_max < self.in_flight_max and now + RESOLUTION_S >= self._recovers_at:
            more = self.open_max + max(self.open_max // 4, 1)
            self.open_max = min(more, self.in_flight_max)
            self._recovers_at += RECOVERY_S

    def pop_preempted(self) -> list[Slot]:
        """Return and clear the requests to be ended."""
        preempted, self.preempted = self.preempted, []
        return preempted

    def _begin(self, slot: Slot, capacity_class: CapacityClass, now: float) -> None:
        queue = slot.queue
        tenant = queue.tenant
        slot.open = True
        slot.preempted = False
        slot.capacity_class = capacity_class
        slot.started_at = queue.served_at = tenant.served_at = now
        # Level by level, not in a loop: the interpreter's inline caches expect one type at a place,
        # and a loop over three types takes about a fifth longer.
        queue.open += 1
        tenant.open += 1
        self.open += 1
        if capacity_class is SLOW:
            for usage in (queue, tenant, self):
                usage.slow += 1
            self._slow.add(queue.holder, slot)
            self._enforce_overdue_limit(now)
        else:
            queue.fast += 1
            tenant.fast += 1
            self.fast += 1
            self._by_age[slot] = None
            if capacity_class is PROBATION:
                for usage in (queue, tenant, self):
                    usage.probation += 1
        if queue.rate is not None:
            queue.rate.consume(now)
        if tenant.rate is not None:
            tenant.rate.consume(now)

    def _leave_class(self, slot: Slot) -> None:
        queue, capacity_class = slot.queue, slot.capacity_class
        if capacity_class is OVERDUE:
            self._overdue.remove(queue.holder, slot)
            return
        tenant = queue.tenant
        if capacity_class is SLOW:
            for usage in (queue, tenant, self):
                usage.slow -= 1
            self._slow.remove(queue.holder, slot)
            return
        queue.fast -= 1
        tenant.fast -= 1
        self.fast -= 1
        del self._by_age[slot]
        if capacity_class is PROBATION:
            for usage in (queue, tenant, self):
                usage.probation -= 1

    def _age(self, now: float) -> None:
        """Move fast requests over `FAST_LATENCY_MAX_S` to the overdue class."""
        while self._by_age:
            slot = next(iter(self._by_age))
            if slot.started_at + FAST_LATENCY_MAX_S > now + RESOLUTION_S:
                return
            queue = slot.queue
            self._leave_class(slot)
            slot.capacity_class = OVERDUE
            self._overdue.add(queue.holder, slot)
            self._mark_slow(queue, now, 0.0)
            if queue.tenant.waiting:
                self._place(queue, now)
            self._enforce_overdue_limit(now)

    def _enforce_overdue_limit(self, now: float) -> None:
        """Preempt overdue requests beyond their limit."""
        while self.slow + len(self._overdue) > self.long_max and (
            heaviest := self._overdue.heaviest()
        ):
            self._preempt(heaviest[1], now)

    def _preemptable_slow(self) -> Slot | None:
        """The slow request to preempt for a waiting holder, once its grace time is over."""
        found, heaviest = self._next_waiting(SLOW), self._slow.heaviest()
        if found is None or heaviest is None:
            return None
        usage, _ = found
        if usage < self.slow_max - self.slow:
            return None  # A preempted request has not ended yet.
        return heaviest[1] if 2 * usage < heaviest[0] else None

    def _preempt(self, slot: Slot, now: float) -> None:
        self._leave_class(slot)
        slot.preempted = True
        self.preempted.append(slot)
        if slot.queue.tenant.waiting:
            self._place(slot.queue, now)

    @staticmethod
    def _mark_slow(queue: EndpointQueue, now: float, extra_s: float) -> None:
        until = max(queue.slow_until, now) + extra_s
        queue.slow_until = min(max(until, now + SLOW_MIN_S), now + SLOW_MAX_S)
        queue.known_fast = False

    def _capacity(self, capacity_class: CapacityClass) -> int:
        """Usage of a class from which a holder has to wait."""
        # Preempted requests take slots until they end.
        left = self.open_max - self.open
        if capacity_class is SLOW:
            return min(self.slow_max - self.slow, left)
        if capacity_class is PROBATION:
            left = min(self.probation_max - self.probation, left)
        return min(self.fast_max - self.fast, self.share_max, left)

    def _has_capacity(self, queue: EndpointQueue, capacity_class: CapacityClass) -> bool:
        tenants, no_tenant = self._tenant_queues[capacity_class], self._no_tenant
        # Endpoints without a tenant are bounded individually, and together while tenants wait.
        together = queue.tenant is not no_tenant or (
            self.waiting and tenants.peek(no_tenant) is not None
        )
        usage = queue.tenant if together else queue
        return usage.of_class(capacity_class) < self._capacity(capacity_class)

    def _next_admissible(self, capacity_class: CapacityClass) -> EndpointQueue | None:
        """The endpoint that gets the next slot of a class; None: no free slot."""
        capacity = self._capacity(capacity_class)
        if capacity <= 0:
            return None
        waiting = self._next_waiting(capacity_class)
        return None if waiting is None or waiting[0] >= capacity else waiting[1]
