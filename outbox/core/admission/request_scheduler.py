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

from typing import TYPE_CHECKING

from outbox.core.admission.endpoint_queue import (
    CLASSES,
    FAST,
    OVERDUE,
    PROBATION,
    SLOW,
    EndpointQueue,
    Slot,
    WaitReason,
)
from outbox.core.admission.open_requests import (
    FAST_LATENCY_MAX_S,
    PREEMPT_GRACE_S,
    SLOW_CLASS_FACTOR,
    OpenRequests,
)
from outbox.core.admission.rate_limit import RESOLUTION_S, RateLimit
from outbox.core.admission.waiting_requests import PREEMPTED_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable

RUN_S, ROTATION_S = 0.05, 0.1
"""Duration of a request run, and of one run of each lane that waits for the same slots: see
`RequestScheduler.continue_run`."""


_NEXT_CLASS = (PROBATION, SLOW, FAST)
_CAPACITY_REASONS = (WaitReason.FAST, WaitReason.PROBATION, WaitReason.SLOW)


class RequestScheduler(OpenRequests):
    """Admission control of one relay; see `OpenRequests` for its arguments."""

    # The class that is served first when a single slot is free.
    _next = FAST

    # ------------------------------------------------------------- endpoints

    def add_endpoint(
        self, tenant: str | None, in_flight_max: int | None, rate_per_s: float | None
    ) -> EndpointQueue:
        """Add an endpoint; return its queue."""
        return EndpointQueue(self._join_tenant(tenant), in_flight_max, rate_per_s)

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
            held = [
                (holders, slot)
                for holders in (self._slow, self._overdue)
                for slot in holders.items_of(queue.holder)
                if slot.queue is queue
            ]
            for holders, slot in held:
                holders.remove(queue.holder, slot)
            queue.set_tenant(tenant_queue)
            for holders, slot in held:
                holders.add(queue.holder, slot)
            for each, sign in ((was, -1), (tenant_queue, 1)):
                each.add(queue, sign)
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
        queue = slot.queue
        tenant = queue.tenant
        # A request never overtakes waiting ones of its endpoint, nor those that wait for the
        # rate limit of its tenant, even if that would admit one now.
        if not queue.waiting and tenant.wake_at is None:
            capacity_class = SLOW if slot.preempted_count >= PREEMPTED_MAX else queue.class_at(now)
            if not (queue.limit_reached(now) or tenant.limit_reached(now)) and self._has_capacity(
                queue, capacity_class
            ):
                self._begin(slot, capacity_class, now)
                if not tenant.waiting:
                    return [slot]
                self._place(queue, now)
                # It may have reached its own limit now, which changes how endpoints without a
                # tenant are bounded.
                return [slot, *self._grant(now)]
        self._queue(slot, now)
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
        elif slot.preempted and slot.capacity_class is OVERDUE:
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
        if queue.capacity_class is FAST and self.waiting == len(queue.waiting) and responded:
            successor = self._start_successor(queue, now)
            if successor is not None:
                return [successor]
        if queue.tenant.waiting:
            self._place(queue, now)
        return self._grant(now)

    def continue_run(self, slot: Slot, began_at: float, now: float) -> bool:
        """Start the lane's next request in the slot that it has, if the limits have room and no
        other holder waits for the capacity.

        Lanes and endpoints of the same holder may wait meanwhile, but each of them starts within
        about `ROTATION_S`: a run is the shorter, the more of them wait for each open request, and
        ends after `RUN_S` at the latest, without its last request.  While none of them waits, it
        goes on as long as the holder does not exceed `share_max`.  A request that takes `RUN_S`
        ends it in any case, so that `end` classifies its endpoint.  This takes two fifths of
        the time of `end` and `admit`, and less than a tenth of it while several endpoints wait.

        Args:
            began_at: when the run began.

        Returns:
            False: nothing has changed; the lane must release the slot and ask again.
        """
        queue = slot.queue
        tenant = queue.tenant
        if (
            slot.preempted
            or slot.capacity_class is not FAST
            or now - slot.started_at >= RUN_S
            or now + RESOLUTION_S < queue.slow_until
            # Those that wait for a rate come first.
            or (queue.rate is not None and queue.waiting)
            or (tenant.rate is not None and tenant.waiting)
            or queue.limit_reached(now, 1)
            or tenant.limit_reached(now, 1)
        ):
            return False
        if tenant.bounded:
            waiting, in_use, fast = tenant.waiting, tenant.open, tenant.fast
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
        of `_grant`, in fewer steps.  `end` and `admit` take a quarter of the time with it.
        None: `_grant` must decide.
        """
        tenant = queue.tenant
        if (
            len(queue.waiting) == 1
            or queue.class_at(now) is not FAST
            or queue.is_limited
            or tenant.is_limited
            # Exactly one slot is free for it.
            or queue.holder.fast != self._capacity(FAST) - 1
        ):
            return None
        slot, _ = queue.waiting.popitem(last=False)
        self._stop_waiting(slot)
        self._begin(slot, FAST, now)
        # Both have the same usage as before, but were served now.
        tenant.queues[FAST].served(queue, now)
        self._tenant_queues[FAST].served(tenant, now)
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
        return (
            queue.limit_reached(now)
            or queue.tenant.limit_reached(now)
            or _CAPACITY_REASONS[queue.class_at(now)]
        )

    def _grant(self, now: float) -> list[Slot]:
        """Start admissible requests, round robin over the classes, which share the free slots."""
        started: list[Slot] = []
        capacity_class, misses = self._next, 0
        while self.waiting and misses < len(CLASSES):
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
