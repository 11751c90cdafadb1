"""Admission control: which requests start now, which wait, and which are preempted.

A relay has at most `in_flight_max` open requests.  They are shared so that no endpoint or
tenant can take capacity from all others.  Each capacity class has slots of its own:

    class      requests                                            at most (of 1,024)
    fast       of endpoints that respond within                    1/2 (512)
               FAST_LATENCY_MAX_S
    probation  of endpoints without such a response yet            1/4 (256), of the fast slots
    slow       of endpoints that took longer                       1/4 (256)
    overdue    fast requests that are open for longer than         1/4 (256), and the free slow
               FAST_LATENCY_MAX_S                                  slots

A fast request that is open for longer than `FAST_LATENCY_MAX_S` becomes **overdue**, which
frees a fast slot.  Its endpoint is slow from then on: for `SLOW_MIN_S`, and for
`SLOW_CLASS_FACTOR` seconds per second over the limit.  After that it is on probation until it
responds in time.

**Preemption** ends a request as if it had timed out: the oldest one of the holder with the
most requests in a class,
- of overdue requests, as soon as they exceed their limit;
- of slow requests, after `PREEMPT_GRACE_S`, and only if the holder that waits for the slot has
  less than half as many.
A lane that was preempted while overdue `PREEMPTED_MAX` times in a row waits for a slow slot,
regardless of the time since then, together with the waiting lanes of its endpoint; only there
is it safe from preemption for `PREEMPT_GRACE_S`.

**No holder can fill a class.**  A holder that has as many requests of a class as the class has
free slots has to wait, even without competition: one endpoint gets half of the slots, two get a
third each, so that the next holder always finds a free slot.  The holder is the tenant, or the
endpoint if it has no tenant; endpoints without a tenant are also bounded together while tenants
wait.

**Order of waiting requests**: first the tenant with the fewest requests in the class, then its
endpoint with the fewest, then the lane that has waited longest.  Ties go to the one served
longest ago (see `fair_queue`).  All endpoints without a tenant count as one tenant here.

**Guarantee**, with at least three slots, for a tenant without open requests in a class (and,
without tenants, for such an endpoint): while `others` like it wait, a fast one waits at most
`FAST_LATENCY_MAX_S · (1 + others / slots)`, and a slow one the same with `PREEMPT_GRACE_S`.
`slots` are those of the class, of the fast class without those on probation; preempted requests
must end at once.  The bound depends neither on the receivers' latency nor on time-outs.

**Own resources.**  A request may fail because this process has no descriptors, ports or buffers
left.  Then fewer requests are open at a time, at first half as many, and a quarter more for each
`RECOVERY_S` without such a failure (AIMD).

Endpoints and tenants also have limits of their own, on open requests and on requests started
per second.  Requests that wait for these limits delay no others.

Cost is independent of the number of endpoints; an uncontended request takes O(1).  Times are
seconds of any monotonic clock.
"""

from __future__ import annotations

from collections import OrderedDict
from math import inf
from typing import TYPE_CHECKING

from outbox.core.admission.endpoint_queue import (
    CapacityClass,
    EndpointQueue,
    Slot,
    Tenant,
    WaitReason,
)
from outbox.core.admission.fair_queue import FairQueue
from outbox.core.admission.rate_limit import RESOLUTION_S, RateLimit
from outbox.core.admission.timer_queue import TimerQueue
from outbox.core.admission.usage_index import UsageIndex

if TYPE_CHECKING:
    from collections.abc import Iterable

FAST_LATENCY_MAX_S = 1.0
"""Latency above which a response counts as slow."""
SLOW_MIN_S, SLOW_MAX_S = 10.0, 600.0
"""Bounds of the time in the slow class after a slow request."""
SLOW_CLASS_FACTOR = 10.0
"""Seconds in the slow class per second over the limit.  Ten keeps an endpoint's share of fast
slots below 10 %."""
PREEMPT_GRACE_S = 30.0
"""A slow request is not preempted before this time, regardless of waiting requests."""
PREEMPTED_MAX = 2
"""Preemptions in a row after which a lane needs a slow slot."""

RECOVERY_S = 0.5
"""Seconds without a failure of our own until more requests may be open, or one again."""

RUN_S, ROTATION_S = 0.05, 0.1
"""Duration of a delivery run, and of one run of each lane that waits for the same slots: see
`RequestScheduler.continue_run`."""


# By name: Python 3.11 takes far longer to find the members of an enumeration.
_FAST, _PROBATION, _SLOW, _OVERDUE = CapacityClass

_CLASSES = (_FAST, _PROBATION, _SLOW)
_NEXT_CLASS = (_PROBATION, _SLOW, _FAST)


_CAPACITY_REASONS = (WaitReason.FAST, WaitReason.PROBATION, WaitReason.SLOW)


class RequestScheduler:
    """Admission control of one relay.

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
        self._tenant_in_flight_max = tenant_in_flight_max
        self._tenant_rate_per_s = tenant_rate_per_s
        self._limits_tenants = tenant_in_flight_max is not None or tenant_rate_per_s is not None
        self._tenants: dict[str, Tenant] = {}
        self._no_tenant = Tenant(None, None)
        # By class, the tenants with requests that wait for a slot.
        self._tenant_queues = (FairQueue[Tenant](), FairQueue[Tenant](), FairQueue[Tenant]())
        # Fast requests, the oldest first; `_age` removes those over FAST_LATENCY_MAX_S.
        self._by_age: OrderedDict[Slot, None] = OrderedDict()
        self.open = self.fast = self.probation = self.slow = 0
        # By holder: tenant, or endpoint without one.
        self._slow = UsageIndex[Tenant | EndpointQueue, Slot]()
        self._overdue = UsageIndex[Tenant | EndpointQueue, Slot]()
        self.preempted: list[Slot] = []
        """Requests to be ended; they stay open until then."""
        self.waiting = 0
        # The class that is served first when a single slot is free.
        self._next = _FAST
        # When rate limits admit the next request, and slow times end.
        self._timers = TimerQueue[EndpointQueue | Tenant]()

    # ------------------------------------------------------------- endpoints

    def add_endpoint(
        self, tenant: str | None, in_flight_max: int | None, rate_per_s: float | None
    ) -> EndpointQueue:
        """Add an endpoint; return its queue."""
        queue = EndpointQueue(self._join_tenant(tenant))
        queue.in_flight_max = in_flight_max
        queue.rate = None if rate_per_s is None else RateLimit(rate_per_s)
        return queue

    def remove_endpoint(self, queue: EndpointQueue) -> None:
        """Remove an endpoint that has no open or waiting requests."""
        self._leave_tenant(queue.tenant)

    def change_endpoint(
        self,
        queue: EndpointQueue,
        tenant: str | None,
        in_flight_max: int | None,
        rate_per_s: float | None,
        now: float,
    ) -> list[Slot]:
        """Change an endpoint's limits or tenant; return the requests that start now."""
        queue.in_flight_max = in_flight_max
        if rate_per_s is None:
            queue.rate = None
        elif queue.rate is None:
            queue.rate = RateLimit(rate_per_s)
        else:
            queue.rate.change_rate(rate_per_s, now)
        was = queue.tenant
        if was.name != tenant:
            if queue.capacity_class is not None:
                was.queues[queue.capacity_class].discard(queue)
                queue.capacity_class = None
            tenant_queue = self._join_tenant(tenant)
            holder = queue.holder
            held = [
                (holders, slot)
                for holders in (self._slow, self._overdue)
                for slot in holders.items_of(holder)
                if slot.queue is queue
            ]
            for holders, slot in held:
                holders.remove(holder, slot)
            queue.set_tenant(tenant_queue)
            for holders, slot in held:
                holders.add(queue.holder, slot)
            for each, sign in ((was, -1), (tenant_queue, 1)):
                each.open += sign * queue.open
                each.fast += sign * queue.fast
                each.probation += sign * queue.probation
                each.slow += sign * queue.slow
                each.waiting += sign * len(queue.waiting)
            self._place_tenant(was, now)
            self._leave_tenant(was)
        self._place(queue, now)
        return self._grant(now)

    # ----------------------------------------------------------------- slots

    def admit(self, slot: Slot, now: float) -> list[Slot]:
        """Start a request, or queue it.

        Returns:
            The slots of the requests that start now: this one and maybe others, or none.
        """
        if self.open_max < self.in_flight_max:
            self._recover(now)
        if not self.waiting:
            self._age(now)
            if self._is_fast_path(slot, now):
                self._begin(slot, _FAST, now)
                return [slot]
        queue = slot.queue
        tenant = queue.tenant
        # A request never overtakes waiting ones of its endpoint, nor those that wait for the
        # rate limit of its tenant, even if that would admit one now.
        if not queue.waiting and tenant.wake_at is None:
            capacity_class = (
                _SLOW if slot.preempted_count >= PREEMPTED_MAX else self._class_for(queue, now)
            )
            if self._limit_reached(queue, now) is None and self._has_capacity(
                queue, capacity_class
            ):
                self._begin(slot, capacity_class, now)
                if not tenant.waiting:
                    return [slot]
                self._place(queue, now)
                # It may have reached its own limit now, which changes how endpoints without a
                # tenant are bounded.
                return [slot, *self._grant(now)]
        slot.waiting = True
        queue.waiting[slot] = None
        queue.slow_waiting += slot.preempted_count >= PREEMPTED_MAX
        tenant.waiting += 1
        self.waiting += 1
        # If its endpoint already waits for a fast slot, its place does not change.
        if queue.capacity_class is not _FAST or queue.slow_waiting:
            self._place(queue, now)
        return []

    def end(self, slot: Slot, now: float, *, responded: bool = True) -> list[Slot]:
        """Release a slot; return the slots of the requests that start now.

        Args:
            responded: the receiver responded, so that the duration classifies its endpoint.
        """
        queue = slot.queue
        took_s = now - slot.started_at
        if not slot.preempted:
            self._leave_class(slot)
        if responded:
            slot.preempted_count = 0
        elif slot.preempted and slot.capacity_class is _OVERDUE:
            slot.preempted_count += 1
        slot.open = False
        queue.open -= 1
        queue.tenant.open -= 1
        self.open -= 1
        if took_s > FAST_LATENCY_MAX_S:
            self._mark_slow(queue, now, SLOW_CLASS_FACTOR * (took_s - FAST_LATENCY_MAX_S))
        elif responded:
            queue.known_fast = True
        if not self.waiting:
            return []
        if queue.capacity_class is _FAST and self.waiting == len(queue.waiting) and responded:
            successor = self._start_successor(queue, now)
            if successor is not None:
                return [successor]
        if queue.tenant.waiting:
            self._place(queue, now)
        return self._grant(now)

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

    def continue_run(self, slot: Slot, began_at: float, now: float) -> bool:
        """Start the lane's next request in the slot that it has, if the limits have room and no
        other holder waits for the capacity.

        Lanes and endpoints of the same holder may wait meanwhile, but each of them starts within
        about `ROTATION_S`: a run is the shorter, the more of them wait for each open request, and
        ends after `RUN_S` at the latest, without its last request.  While none of them waits, it
        goes on as long as the holder does not exceed `share_max`.  A request that takes `RUN_S`
        ends it in any case, so that `end` classifies its endpoint.

        Args:
            began_at: when the run began.

        Returns:
            False: nothing has changed; the lane must release the slot and ask again.
        """
        queue = slot.queue
        tenant = queue.tenant
        if (
            slot.preempted
            or slot.capacity_class is not _FAST
            or now - slot.started_at >= RUN_S
            or now + RESOLUTION_S < queue.slow_until
            or (queue.in_flight_max is not None and queue.open > queue.in_flight_max)
            or not _rate_has_room(queue.rate, len(queue.waiting), now)
        ):
            return False
        if tenant.bounded:
            waiting, in_use, fast = tenant.waiting, tenant.open, tenant.fast
            most = self._tenant_in_flight_max
            if (most is not None and in_use > most) or not _rate_has_room(
                tenant.rate, waiting, now
            ):
                return False
        else:
            waiting, in_use, fast = len(queue.waiting), queue.open, queue.fast
        if fast > self.share_max:
            return False
        if waiting and now - began_at >= min(RUN_S, ROTATION_S * in_use / (in_use + waiting)):
            return False
        if self.waiting > waiting and self.share_max > min(
            self.fast_max - self.fast, self.in_flight_max - self.open
        ):
            return False
        slot.started_at = now
        self._by_age.move_to_end(slot)
        if queue.rate is not None:
            queue.rate.consume(now)
        if tenant.rate is not None:
            tenant.rate.consume(now)
        return True

    def _start_successor(self, queue: EndpointQueue, now: float) -> Slot | None:
        """Start the next request of an endpoint after one of its requests completed.

        A shortcut for the most frequent case, a single saturated endpoint: the result is that
        of `_grant`, in fewer steps.  None: `_grant` must decide.
        """
        tenant = queue.tenant
        if (
            len(queue.waiting) == 1
            or queue.slow_waiting
            or queue.open != queue.fast
            or now + RESOLUTION_S < queue.slow_until
            or queue.rate is not None
            or queue.in_flight_max is not None
            or (tenant.bounded and self._limits_tenants)
            # Exactly one slot is free for it.
            or (tenant.fast if tenant.bounded else queue.fast) != self._capacity(_FAST) - 1
        ):
            return None
        slot, _ = queue.waiting.popitem(last=False)
        self._stop_waiting(slot)
        self._begin(slot, _FAST, now)
        # Both have the same usage as before, but were served now.
        tenant.queues[_FAST].served(queue, now)
        self._tenant_queues[_FAST].served(tenant, now)
        return slot

    def cancel_waiting(self, slots: Iterable[Slot], now: float) -> list[Slot]:
        """Remove waiting requests; return the slots of the requests that start now."""
        for slot in slots:
            del slot.queue.waiting[slot]
            self._stop_waiting(slot)
            self._place(slot.queue, now)
        # Waiting tenants bound the endpoints without a tenant, so others may start now.
        return self._grant(now)

    def wake(self, now: float) -> list[Slot]:
        """Process expired timers; return the slots of the requests that start now."""
        self._recover(now)
        self._age(now)
        due = self._timers.pop_due(now + RESOLUTION_S)
        # All are removed before any is added again, so the loop ends for any new times.
        for holder in due:
            if isinstance(holder, EndpointQueue):
                self._place(holder, now)
            else:
                self._place_tenant(holder, now)
        started = self._grant(now)
        while (
            slot := self._preemptable_slow()
        ) and slot.started_at + PREEMPT_GRACE_S <= now + RESOLUTION_S:
            self._preempt(slot, now)
            started += self._grant(now)
        return started

    def pop_preempted(self) -> list[Slot]:
        """Return and clear the requests to be ended."""
        preempted, self.preempted = self.preempted, []
        return preempted

    def wake_at(self) -> float | None:
        """When to call `wake`; None: no timer is needed."""
        if not self.waiting:
            return None
        at = self._timers.next_at()
        if self.open_max < self.in_flight_max:
            at = self._recovers_at if at is None else min(at, self._recovers_at)
        if self._by_age:
            old_at = next(iter(self._by_age)).started_at + FAST_LATENCY_MAX_S
            at = old_at if at is None else min(at, old_at)
        if self.slow and (slot := self._preemptable_slow()) is not None:
            held_at = slot.started_at + PREEMPT_GRACE_S
            at = held_at if at is None else min(at, held_at)
        return at

    def wait_reason(self, queue: EndpointQueue, now: float) -> WaitReason | None:
        """Why the lanes of an endpoint wait; None: none waits."""
        if not queue.waiting:
            return None
        return self._limit_reached(queue, now) or _CAPACITY_REASONS[self._class_for(queue, now)]

    # ---------------------------------------------------------- open requests

    def _is_fast_path(self, slot: Slot, now: float) -> bool:
        """Whether a request may start as a fast one, if none waits and no limit applies.

        A shortcut for the most frequent case: the result is that of `admit`, in fewer steps.
        """
        queue = slot.queue
        tenant = queue.tenant
        if (
            not queue.known_fast
            or queue.open != queue.fast
            or now + RESOLUTION_S < queue.slow_until
            or slot.preempted_count >= PREEMPTED_MAX
            or queue.rate is not None
            or queue.in_flight_max is not None
            or (tenant.bounded and self._limits_tenants)
        ):
            return False
        usage = tenant.fast if tenant.bounded else queue.fast
        return (
            usage < self.share_max
            and usage < self.fast_max - self.fast
            and usage < self.open_max - self.open
        )

    def _begin(self, slot: Slot, capacity_class: CapacityClass, now: float) -> None:
        queue = slot.queue
        tenant = queue.tenant
        slot.open = True
        slot.preempted = False
        slot.started_at = queue.served_at = tenant.served_at = now
        slot.capacity_class = capacity_class
        queue.open += 1
        tenant.open += 1
        self.open += 1
        if capacity_class is _SLOW:
            queue.slow += 1
            tenant.slow += 1
            self.slow += 1
            self._slow.add(queue.holder, slot)
            self._enforce_overdue_limit(now)
        else:
            queue.fast += 1
            tenant.fast += 1
            self.fast += 1
            self._by_age[slot] = None
            if capacity_class is _PROBATION:
                queue.probation += 1
                tenant.probation += 1
                self.probation += 1
        if queue.rate is not None:
            queue.rate.consume(now)
        if tenant.rate is not None:
            tenant.rate.consume(now)

    def _leave_class(self, slot: Slot) -> None:
        queue, capacity_class = slot.queue, slot.capacity_class
        if capacity_class is _OVERDUE:
            self._overdue.remove(queue.holder, slot)
            return
        tenant = queue.tenant
        if capacity_class is _SLOW:
            queue.slow -= 1
            tenant.slow -= 1
            self.slow -= 1
            self._slow.remove(queue.holder, slot)
            return
        queue.fast -= 1
        tenant.fast -= 1
        self.fast -= 1
        del self._by_age[slot]
        if capacity_class is _PROBATION:
            queue.probation -= 1
            tenant.probation -= 1
            self.probation -= 1

    def _age(self, now: float) -> None:
        """Move fast requests over `FAST_LATENCY_MAX_S` to the overdue class."""
        while self._by_age:
            slot = next(iter(self._by_age))
            if slot.started_at + FAST_LATENCY_MAX_S > now + RESOLUTION_S:
                return
            queue = slot.queue
            self._leave_class(slot)
            slot.capacity_class = _OVERDUE
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
        found, heaviest = self._next_waiting(_SLOW), self._slow.heaviest()
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

    @staticmethod
    def _class_for(queue: EndpointQueue, now: float) -> CapacityClass:
        if queue.open > queue.fast or queue.slow_waiting or now + RESOLUTION_S < queue.slow_until:
            return _SLOW
        return _FAST if queue.known_fast else _PROBATION

    # -------------------------------------------------------------- capacity

    def _limit_reached(self, queue: EndpointQueue, now: float) -> WaitReason | None:
        """The limit of the endpoint or its tenant that is reached; None: none."""
        if queue.in_flight_max is not None and queue.open >= queue.in_flight_max:
            return WaitReason.IN_FLIGHT
        if queue.rate is not None and not queue.rate.ready(now):
            return WaitReason.RATE
        return self._tenant_limit_reached(queue.tenant, now)

    def _tenant_limit_reached(self, tenant: Tenant, now: float) -> WaitReason | None:
        if not tenant.bounded:
            return None
        in_flight_max = self._tenant_in_flight_max
        if in_flight_max is not None and tenant.open >= in_flight_max:
            return WaitReason.TENANT_IN_FLIGHT
        if tenant.rate is not None and not tenant.rate.ready(now):
            return WaitReason.TENANT_RATE
        return None

    def _capacity(self, capacity_class: CapacityClass) -> int:
        """Usage of a class from which a holder has to wait."""
        if capacity_class is _SLOW:
            capacity = self.slow_max - self.slow
        else:
            capacity = min(self.fast_max - self.fast, self.share_max)
            if capacity_class is _PROBATION:
                capacity = min(capacity, self.probation_max - self.probation)
        # Preempted requests take slots until they end.
        return min(capacity, self.open_max - self.open)

    def _has_capacity(self, queue: EndpointQueue, capacity_class: CapacityClass) -> bool:
        tenants, no_tenant = self._tenant_queues[capacity_class], self._no_tenant
        # Endpoints without a tenant are bounded individually, and together while tenants wait.
        together = queue.tenant is not no_tenant or tenants.peek(no_tenant) is not None
        return _usage(queue.tenant if together else queue, capacity_class) < self._capacity(
            capacity_class
        )

    # -------------------------------------------------------- waiting requests

    def _place(self, queue: EndpointQueue, now: float) -> None:
        """Move an endpoint to the queue of the class that it waits for, or out of all queues."""
        tenant = queue.tenant
        capacity_class: CapacityClass | None = None
        if queue.waiting:
            if queue.rate is not None and not queue.rate.ready(now):
                self._timers.set(queue, queue.rate.ready_at)
            elif queue.in_flight_max is None or queue.open < queue.in_flight_max:
                capacity_class = self._class_for(queue, now)
                if now + RESOLUTION_S < queue.slow_until:
                    self._timers.set(queue, queue.slow_until)
        if queue.capacity_class is not None and queue.capacity_class is not capacity_class:
            tenant.queues[queue.capacity_class].discard(queue)
        queue.capacity_class = capacity_class
        if capacity_class is not None:
            tenant.queues[capacity_class].put(queue, _usage(queue, capacity_class), queue.served_at)
        self._place_tenant(tenant, now)

    def _place_tenant(self, tenant: Tenant, now: float) -> None:
        """Move a tenant to the queues its endpoints wait in, unless it has reached a limit."""
        held = None
        if tenant.waiting:
            held = self._tenant_limit_reached(tenant, now)
            if held is WaitReason.TENANT_RATE:
                assert tenant.rate is not None
                self._timers.set(tenant, tenant.rate.ready_at)
        for capacity_class, tenants, queues in zip(
            _CLASSES, self._tenant_queues, tenant.queues, strict=True
        ):
            if queues.usage and held is None:
                tenants.put(tenant, _usage(tenant, capacity_class), tenant.served_at)
            elif tenant in tenants.usage:
                tenants.discard(tenant)

    def _stop_waiting(self, slot: Slot) -> None:
        slot.waiting = False
        slot.queue.slow_waiting -= slot.preempted_count >= PREEMPTED_MAX
        slot.queue.tenant.waiting -= 1
        self.waiting -= 1

    def _grant(self, now: float) -> list[Slot]:
        """Start admissible requests, round robin over the classes, which share the free slots."""
        started: list[Slot] = []
        capacity_class, misses = self._next, 0
        while self.waiting and misses < len(_CLASSES):
            queue = (
                self._next_admissible(capacity_class)
                if self._tenant_queues[capacity_class].usage
                else None
            )
            if queue is None:
                misses += 1
            else:
                misses = 0
                slot, _ = queue.waiting.popitem(last=False)
                self._stop_waiting(slot)
                self._begin(slot, capacity_class, now)
                self._place(queue, now)
                started.append(slot)
            capacity_class = _NEXT_CLASS[capacity_class]
        self._next = capacity_class
        return started

    def _next_admissible(self, capacity_class: CapacityClass) -> EndpointQueue | None:
        """The endpoint that gets the next slot of a class; None: no free slot."""
        capacity = self._capacity(capacity_class)
        if capacity <= 0:
            return None
        waiting = self._next_waiting(capacity_class)
        return None if waiting is None or waiting[0] >= capacity else waiting[1]

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

    # --------------------------------------------------------------- tenants

    def _join_tenant(self, name: str | None) -> Tenant:
        if name is None:
            return self._no_tenant
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant(name, self._tenant_rate_per_s)
        tenant.members += 1
        return tenant

    def _leave_tenant(self, tenant: Tenant) -> None:
        if tenant.name is None:
            return
        tenant.members -= 1
        if not tenant.members:
            del self._tenants[tenant.name]


def _rate_has_room(rate: RateLimit | None, waiting: int, now: float) -> bool:
    """Whether a request may start now without delaying those that wait for the rate."""
    return rate is None or (not waiting and rate.ready(now))


def _usage(holder: Tenant | EndpointQueue, capacity_class: CapacityClass) -> int:
    """A holder's usage of a class.  Fast requests do not count as probation ones, or a tenant that
    is always busy could never start a new endpoint."""
    if capacity_class is _FAST:
        return holder.fast
    return holder.probation if capacity_class is _PROBATION else holder.slow
