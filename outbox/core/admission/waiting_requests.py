"""The requests that wait for a slot, and in which queue: see `request_scheduler` for their order.

Requests that wait for a limit of their own endpoint or tenant are in no queue, and delay no others.
"""

from __future__ import annotations

from outbox.core.admission.endpoint_queue import (
    CLASSES,
    FAST,
    CapacityClass,
    EndpointQueue,
    Slot,
    Tenant,
    Usage,
)
from outbox.core.admission.fair_queue import FairQueue
from outbox.core.admission.rate_limit import RESOLUTION_S
from outbox.core.admission.timer_queue import TimerQueue

PREEMPTED_MAX = 2
"""Preemptions in a row after which a lane needs a slow slot."""


class WaitingRequests(Usage):
    """The usage of a relay and its waiting requests.

    Args:
        tenant_in_flight_max: open requests of one tenant; None: no limit.
        tenant_rate_per_s: requests of one tenant started per second; None: no limit.
    """

    def __init__(self, tenant_in_flight_max: int | None, tenant_rate_per_s: float | None) -> None:
        super().__init__()
        self._tenant_limits = tenant_in_flight_max, tenant_rate_per_s
        self._tenants: dict[str, Tenant] = {}
        self._no_tenant = Tenant(None, None, None)
        # By class, the tenants with requests that wait for a slot.
        self._tenant_queues = (FairQueue[Tenant](), FairQueue[Tenant](), FairQueue[Tenant]())
        self.waiting = 0
        # When rate limits admit the next request, and slow times end.
        self._timers = TimerQueue[EndpointQueue | Tenant]()

    def _queue(self, slot: Slot, now: float) -> None:
        """Let a request wait."""
        queue = slot.queue
        slot.waiting = True
        queue.waiting[slot] = None
        queue.slow_waiting += slot.preempted_count >= PREEMPTED_MAX
        queue.tenant.waiting += 1
        self.waiting += 1
        # If its endpoint already waits for a fast slot, its place does not change.
        if queue.capacity_class is not FAST or queue.slow_waiting:
            self._place(queue, now)

    def _stop_waiting(self, slot: Slot) -> None:
        slot.waiting = False
        slot.queue.slow_waiting -= slot.preempted_count >= PREEMPTED_MAX
        slot.queue.tenant.waiting -= 1
        self.waiting -= 1

    def _place(self, queue: EndpointQueue, now: float) -> None:
        """Move an endpoint to the queue of the class that it waits for, or out of all queues."""
        tenant = queue.tenant
        capacity_class: CapacityClass | None = None
        if queue.waiting and not self._awaits_limit(queue, now):
            capacity_class = queue.class_at(now)
            if now + RESOLUTION_S < queue.slow_until:
                self._timers.set(queue, queue.slow_until)
        if queue.capacity_class is not None and queue.capacity_class is not capacity_class:
            tenant.queues[queue.capacity_class].discard(queue)
        queue.capacity_class = capacity_class
        if capacity_class is not None:
            tenant.queues[capacity_class].put(
                queue, queue.of_class(capacity_class), queue.served_at
            )
        self._place_tenant(tenant, now)

    def _awaits_limit(self, holder: EndpointQueue | Tenant, now: float) -> bool:
        """Whether a holder has reached a limit of its own; a timer is set for a rate."""
        limit = holder.limit_reached(now)
        if limit is holder.rate_reason and holder.rate is not None:
            self._timers.set(holder, holder.rate.ready_at)
        return limit is not None

    def _place_tenant(self, tenant: Tenant, now: float) -> None:
        """Move a tenant to the queues its endpoints wait in, unless it has reached a limit."""
        held = bool(tenant.waiting) and self._awaits_limit(tenant, now)
        for capacity_class, tenants, queues in zip(
            CLASSES, self._tenant_queues, tenant.queues, strict=True
        ):
            if queues.usage and not held:
                tenants.put(tenant, tenant.of_class(capacity_class), tenant.served_at)
            elif tenant in tenants.usage:
                tenants.discard(tenant)

    def _next_waiting(self, capacity_class: CapacityClass) -> tuple[int, EndpointQueue] | None:
        """The endpoint that is next in a class, and the usage that bounds it."""
        tenants, no_tenant = self._tenant_queues[capacity_class], self._no_tenant
        if tenants.peek(no_tenant) is None:
            return no_tenant.queues[capacity_class].peek()
        waiting = tenants.peek()
        assert waiting is not None
        usage, tenant = waiting
        first = tenant.queues[capacity_class].peek()
        assert first is not None
        return usage, first[1]

    def _join_tenant(self, name: str | None) -> Tenant:
        if name is None:
            return self._no_tenant
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant(name, *self._tenant_limits)
        tenant.members += 1
        return tenant

    def _leave_tenant(self, tenant: Tenant) -> None:
        if tenant.name is None:
            return
        tenant.members -= 1
        if not tenant.members:
            del self._tenants[tenant.name]
