"""Admission of the requests of a request run: each in the slot of the one before."""

from __future__ import annotations

import pytest

from outbox.core.admission.adaptive_scheduler import AdaptiveRequestScheduler
from outbox.core.admission.endpoint_queue import CapacityClass, EndpointQueue, Slot
from outbox.core.admission.open_requests import FAST_LATENCY_MAX_S
from outbox.core.admission.request_scheduler import ROTATION_S, RUN_S, RequestScheduler


def fast_endpoint(
    scheduler: RequestScheduler,
    tenant: str | None = None,
    in_flight_max: int | None = None,
    rate_per_s: float | None = None,
) -> EndpointQueue:
    queue = scheduler.add_endpoint(tenant, in_flight_max, rate_per_s)
    queue.known_fast = True
    return queue


def started(scheduler: RequestScheduler, queue: EndpointQueue, now: float = 0.0) -> Slot:
    slot = Slot(queue)
    assert scheduler.admit(slot, now) == [slot]
    return slot


def waiting(scheduler: RequestScheduler, queue: EndpointQueue, now: float = 0.0) -> Slot:
    slot = Slot(queue)
    assert scheduler.admit(slot, now) == []
    return slot


def test_a_run_lasts_while_no_request_waits() -> None:
    scheduler = RequestScheduler(16)
    queue = fast_endpoint(scheduler, in_flight_max=1)
    slot = started(scheduler, queue)
    for n in range(1, 10):
        assert scheduler.continue_run(slot, 0.0, 0.9 * RUN_S * n)
    waiting(scheduler, queue)
    assert not scheduler.continue_run(slot, 0.0, 0.9 * RUN_S * 9)
    assert scheduler.open == 1


def test_a_request_that_takes_long_ends_a_run() -> None:
    """`end` classifies its endpoint."""
    scheduler = RequestScheduler(16)
    slot = started(scheduler, fast_endpoint(scheduler))
    assert scheduler.continue_run(slot, 0.0, 0.9 * RUN_S)
    assert not scheduler.continue_run(slot, 0.0, 2 * RUN_S)
    assert scheduler.end(slot, 2 * RUN_S) == []


def test_a_run_ends_at_once_when_another_endpoint_waits_for_capacity() -> None:
    scheduler = RequestScheduler(8)
    queue, other = fast_endpoint(scheduler), fast_endpoint(scheduler)
    # Two endpoints get a third of the four fast slots each, and one slot stays free.
    slots = [started(scheduler, queue) for _ in range(2)]
    started(scheduler, other)
    assert scheduler.continue_run(slots[0], 0.0, 0.0)
    waiting(scheduler, other)
    assert not scheduler.continue_run(slots[0], 0.0, 0.0)


@pytest.mark.parametrize("tenant", [None, "acme"])
def test_a_run_ends_when_its_holder_exceeds_its_share(tenant: str | None) -> None:
    """The share shrinks while the event loop lags, although no request waits."""
    scheduler = AdaptiveRequestScheduler(64)
    queues = [fast_endpoint(scheduler, tenant) for _ in range(2 if tenant else 1)]
    slots = [started(scheduler, queues[n % len(queues)]) for n in range(8)]
    scheduler.share_max = 7
    assert not scheduler.waiting
    assert not scheduler.continue_run(slots[0], 0.0, 0.0)
    scheduler.end(slots[0], 0.0)
    assert scheduler.continue_run(slots[1], 0.0, 0.0)


def test_a_run_is_shorter_while_other_lanes_wait() -> None:
    scheduler = RequestScheduler(8)
    queue = fast_endpoint(scheduler, in_flight_max=1)
    slot = started(scheduler, queue)
    for _ in range(3):
        waiting(scheduler, queue)
    assert scheduler.continue_run(slot, 0.0, 0.9 * ROTATION_S / 4)
    assert not scheduler.continue_run(slot, 0.0, ROTATION_S / 4)


def test_lanes_that_wait_for_limits_of_other_endpoints_do_not_end_it() -> None:
    scheduler = AdaptiveRequestScheduler(64)
    slot = started(scheduler, fast_endpoint(scheduler))
    limited = fast_endpoint(scheduler, in_flight_max=1)
    started(scheduler, limited)
    waiting(scheduler, limited)
    rated = fast_endpoint(scheduler, rate_per_s=0.5)
    started(scheduler, rated)
    waiting(scheduler, rated)
    assert scheduler.waiting == 2
    for n in range(1, 10):
        assert scheduler.continue_run(slot, 0.0, 0.9 * RUN_S * n)


@pytest.mark.parametrize("tenant", [None, "acme"])
def test_a_run_uses_up_the_rate(tenant: str | None) -> None:
    scheduler = RequestScheduler(16, tenant_rate_per_s=100.0)
    queue = fast_endpoint(scheduler, tenant, rate_per_s=None if tenant else 100.0)
    slot, now, sent = started(scheduler, queue), 0.0, 1
    while now < 1.0:
        sent += scheduler.continue_run(slot, now, now)
        now += 0.001
    assert 100 <= sent <= 112
    while scheduler.continue_run(slot, now, now):
        pass
    waiting(scheduler, queue, now)
    # The rate has room again by now, but it is for the one that waits.
    later = now + 0.6 * RUN_S
    assert not scheduler.continue_run(slot, later, later)
    assert scheduler.wake(later)


def test_a_lowered_limit_ends_it() -> None:
    scheduler = RequestScheduler(16)
    queue = fast_endpoint(scheduler)
    slots = [started(scheduler, queue) for _ in range(2)]
    scheduler.change_endpoint(queue, None, 1, None, 0.0)
    assert not scheduler.continue_run(slots[0], 0.0, 0.0)
    scheduler.end(slots[1], 0.0)
    assert scheduler.continue_run(slots[0], 0.0, 0.0)


def test_only_fast_endpoints_have_runs() -> None:
    scheduler = RequestScheduler(16)
    queue = scheduler.add_endpoint(None, None, None)
    slot = started(scheduler, queue)
    assert slot.capacity_class is CapacityClass.PROBATION
    assert not scheduler.continue_run(slot, 0.0, 0.0)
    scheduler.end(slot, 0.01)
    slot = started(scheduler, queue, 0.01)
    other = started(scheduler, queue, 0.01)
    now, step_s = 0.01, 0.4 * RUN_S
    while now < 0.01 + 2 * FAST_LATENCY_MAX_S:
        now += step_s
        assert scheduler.continue_run(slot, 0.01, now)
    # Another lane's request took too long.
    scheduler.end(other, now)
    assert not scheduler.continue_run(slot, 0.01, now + step_s)


def test_each_request_of_a_run_has_an_age_of_its_own() -> None:
    scheduler = RequestScheduler(16)
    queue = fast_endpoint(scheduler)
    slot, old = started(scheduler, queue), started(scheduler, queue)
    at, steps = 0.9 * FAST_LATENCY_MAX_S, 200
    for n in range(1, steps + 1):
        assert scheduler.continue_run(slot, 0.0, at * n / steps)
    scheduler.wake(1.5 * FAST_LATENCY_MAX_S)
    assert old.capacity_class is CapacityClass.OVERDUE
    assert slot.capacity_class is CapacityClass.FAST
    scheduler.wake(at + FAST_LATENCY_MAX_S)
    assert slot.capacity_class is CapacityClass.OVERDUE


def test_a_preempted_request_ends_its_run() -> None:
    scheduler = RequestScheduler(4)
    queue = fast_endpoint(scheduler)
    slot = started(scheduler, queue)
    scheduler._preempt(slot, 0.0)
    assert not scheduler.continue_run(slot, 0.0, 0.0)


def test_the_requests_of_a_run_count_for_the_latency_of_receivers() -> None:
    """Or a receiver would seem slow, and the share of its endpoint would never be lowered."""
    scheduler = AdaptiveRequestScheduler(64)
    queue = fast_endpoint(scheduler)
    slots = [started(scheduler, queue) for _ in range(8)]
    share = scheduler.share_max
    for n in range(100):
        for slot in slots:
            assert scheduler.continue_run(slot, n / 1e6, n / 1e6)
    scheduler.observe_lag(0.03, 0.05)
    assert scheduler.share_max < share
