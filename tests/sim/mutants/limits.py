"""Mistakes with limits of requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.core.admission import rate_limit, request_scheduler
from outbox.relay.delivery import admission
from tests.sim.mutants.catalogue import mutant, swap

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation


@mutant
def rate_limit_never_charged(sim: Simulation) -> None:
    """Requests do not use up the rate."""
    swap(rate_limit.RateLimit, "consume", lambda self, now: None)


@mutant
def concurrency_limit_exceeded_by_one(sim: Simulation) -> None:
    """A limit counts as reached when it is exceeded."""

    admit = request_scheduler.RequestScheduler.admit

    def patched(self: Any, slot: Any, now: float, **rest: Any) -> Any:
        queue = slot.queue
        limit, queue.in_flight_max = (
            queue.in_flight_max,
            queue.in_flight_max and queue.in_flight_max + 1,
        )
        try:
            return admit(self, slot, now, **rest)
        finally:
            queue.in_flight_max = limit

    swap(request_scheduler.RequestScheduler, "admit", patched)


@mutant
def timed_wait_never_woken(sim: Simulation) -> None:
    """A request that waits for a time alone is never sent."""
    swap(admission.AdmissionQueue, "_set_timer", lambda self: None)


@mutant
def unsent_slot_not_released(sim: Simulation) -> None:
    """A request that is not sent after all does not release its slot."""
    end = admission.AdmissionQueue.end

    def patched(self: Any, slot: Any, *, responded: bool) -> None:
        if responded:
            end(self, slot, responded=responded)

    swap(admission.AdmissionQueue, "end", patched)
