"""RequestScheduler: limits hold, no slot stays idle, no endpoint starves, and shares are fair."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outbox.core.admission.endpoint_queue import CapacityClass, EndpointQueue, Slot, WaitReason
from outbox.core.admission.open_requests import FAST_LATENCY_MAX_S, PREEMPT_GRACE_S, SLOW_MIN_S
from outbox.core.admission.rate_limit import RATE_SLACK_S, RESOLUTION_S, RateLimit
from outbox.core.admission.request_scheduler import RequestScheduler
from outbox.core.admission.timer_queue import SPARE
from outbox.core.admission.waiting_requests import PREEMPTED_MAX
from tests.core.request_scheduler_model import Endpoint, Simulation

PLACES = 64


def invariant_check(simulation: Simulation) -> None:
    """Return a check of the invariants that hold at every step."""
    scheduler = simulation.scheduler
    open_ = Counter(part for e in simulation.endpoints.values() for part in e.open.values())
    quick = open_[CapacityClass.FAST] + open_[CapacityClass.PROBATION]
    assert (scheduler.fast, scheduler.probation, scheduler.slow) == (
        quick,
        open_[CapacityClass.PROBATION],
        open_[CapacityClass.SLOW],
    )
    assert scheduler.open == sum(e.open_count for e in simulation.endpoints.values())
    assert scheduler.fast <= scheduler.fast_max
    assert scheduler.probation <= scheduler.probation_max
    assert scheduler.slow <= scheduler.slow_max
    assert (
        not open_[CapacityClass.OVERDUE]
        or scheduler.slow + open_[CapacityClass.OVERDUE] <= scheduler.long_max
    )
    assert scheduler.open <= scheduler.in_flight_max
    of_tenant: Counter[str | None] = Counter()
    for endpoint in simulation.endpoints.values():
        queue = endpoint.queue
        most = queue.in_flight_max
        assert most is None or endpoint.open_count <= most
        of_tenant[queue.tenant.name] += endpoint.open_count
    limit = simulation.tenant_in_flight_max
    assert limit is None or all(n <= limit for name, n in of_tenant.items() if name is not None)
    assert scheduler.waiting == sum(len(e.queue.waiting) for e in simulation.endpoints.values())


def assert_no_idle_capacity(simulation: Simulation) -> None:
    """Check that the wait reason of every waiting endpoint is true now."""
    scheduler = simulation.scheduler
    wake_at = scheduler.wake_at()
    if wake_at is not None and wake_at <= simulation.now + 2 * RESOLUTION_S:
        return  # The scheduler examines this endpoint in its next step.
    for endpoint in simulation.endpoints.values():
        queue = endpoint.queue
        if queue.waiting:
            part, now = queue.class_at(simulation.now), simulation.now
            held = queue.limit_reached(now) or queue.tenant.limit_reached(now)
            assert held is not None or not scheduler._has_capacity(queue, part)


def assert_rate_kept(begun_at: list[float], per_s: float) -> None:
    for i, since in enumerate(begun_at):
        for n, at in enumerate(begun_at[i:], 1):
            assert n <= (at - since + RATE_SLACK_S) * per_s + 1 + 1e-3


def random_simulation(rng: Random, places: int) -> Simulation:
    tenant_limit = rng.choice((None, None, 1, 7))
    tenant_rate = rng.choice((None, None, 5.0))
    simulation = Simulation(RequestScheduler(places, tenant_limit, tenant_rate))
    simulation.tenant_in_flight_max, simulation.tenant_rate_per_s = tenant_limit, tenant_rate
    for _ in range(rng.randrange(1, 12)):
        usual_s = rng.choice((0.01, 0.1, 0.9, 1.5, 5.0))
        slow_share = rng.choice((0.0, 0.0, 0.05, 0.5))

        def takes_s(
            _: int, __: float, usual_s: float = usual_s, share: float = slow_share
        ) -> float:
            return 5.0 * rng.random() if rng.random() < share else usual_s * rng.random()

        Endpoint(
            simulation,
            takes_s,
            lanes=rng.choice((1, 3, 40)),
            every_s=rng.choice((None, 0.05, 1.0)),
            tenant=rng.choice((None, "a", "b", "c")),
            in_flight_max=rng.choice((None, None, 1, 5)),
            rate_per_s=rng.choice((None, None, 0.5, 20.0)),
            begins_at=rng.choice((0.0, 3.0)),
        )
    return simulation


def change_at_random(simulation: Simulation, rng: Random) -> None:
    """Cancel waiting requests or change settings at random."""
    endpoint = rng.choice(list(simulation.endpoints.values()))
    queue = endpoint.queue
    if queue.waiting and rng.random() < 0.5:
        slot = rng.choice(list(queue.waiting))
        begun = simulation.scheduler.cancel_waiting([slot], simulation.now)
        del endpoint.requested_at[slot]
        endpoint.idle.append(slot)
        endpoint.pending += 1
        simulation.begin(begun)
    elif (
        endpoint.rate_per_s is None
    ):  # The whole run is checked against the rates that do not change.
        limits = (rng.choice((None, endpoint.open_count + 1)), None)
        simulation.begin(
            simulation.scheduler.change_endpoint(
                queue, rng.choice((None, queue.tenant.name)), *limits, simulation.now
            )
        )
    simulation.at(simulation.now + rng.random(), lambda: change_at_random(simulation, rng))


@pytest.mark.slow
@settings(max_examples=settings().max_examples * 2 // 5)
@given(st.integers(0, 2**32), st.sampled_from((1, 2, 3, 5, PLACES)), st.booleans())
def test_limits_hold_slots_are_used_and_every_endpoint_is_served(
    seed: int, places: int, meddled: bool
) -> None:
    rng = Random(seed)
    simulation = random_simulation(rng, places)
    simulation.ending_s = rng.choice((0.0, 0.0, 0.1))
    if meddled:
        simulation.tenant_in_flight_max = (
            None  # Endpoints that join bring their open requests with them.
        )
        simulation.at(0.5, lambda: change_at_random(simulation, rng))
    simulation.on_step.append(invariant_check)
    simulation.on_step.append(assert_no_idle_capacity)
    simulation.run(8.0)
    for endpoint in simulation.endpoints.values():
        if endpoint.rate_per_s is not None:
            assert_rate_kept(endpoint.begun_at, endpoint.rate_per_s)
    if simulation.tenant_rate_per_s is not None and not meddled:
        for name in ("a", "b", "c"):
            of_tenant = [e for e in simulation.endpoints.values() if e.queue.tenant.name == name]
            begun = sorted(at for e in of_tenant for at in e.begun_at)
            assert_rate_kept(begun, simulation.tenant_rate_per_s)
    # No new events: everything that waits is served, and no usage remains.
    simulation.calm = True
    simulation.run(4000.0)
    assert all(not e.requested_at and not e.open_count for e in simulation.endpoints.values())
    scheduler = simulation.scheduler
    assert (
        scheduler.open,
        scheduler.fast,
        scheduler.probation,
        scheduler.slow,
        scheduler.waiting,
    ) == (0, 0, 0, 0, 0)
    assert not scheduler._slow
    assert not scheduler._overdue
    for endpoint in simulation.endpoints.values():
        tenant = endpoint.queue.tenant
        counts = (tenant.open, tenant.fast, tenant.probation, tenant.slow, tenant.waiting)
        assert counts == (0, 0, 0, 0, 0)
    assert not any(ring.usage for ring in scheduler._tenant_queues)


class SchedulerWithoutRuns(RequestScheduler):
    """Let every request ask for a slot."""

    def continue_run(self, slot: Slot, began_at: float, now: float) -> bool:
        return False


class SchedulerWithoutShortcut(SchedulerWithoutRuns):
    """Grant every slot by all rules."""

    def _start_successor(self, queue: EndpointQueue, now: float) -> None:
        return None


def saturated_simulation(rng: Random, kind: type[RequestScheduler]) -> Simulation:
    """Return a simulation in which mostly the lanes of one endpoint wait."""
    limits = rng.choice((None, None, 3)), rng.choice((None, None, 9.0))
    simulation = Simulation(kind(rng.choice((4, 12, PLACES)), *limits))
    simulation.ending_s = 0.5
    for n in range(rng.choice((1, 2, 4))):
        slow_share = rng.choice((0.0, 0.02, 0.1) if n else (0.0, 0.0, 0.002))

        def takes_s(_: int, __: float, share: float = slow_share) -> float:
            return 30.0 * rng.random() if rng.random() < share else 0.2 * rng.random()

        Endpoint(
            simulation,
            takes_s,
            lanes=rng.choice((12, 40)) if n == 0 else 1,
            every_s=None if n == 0 else 0.3,
            tenant=rng.choice((None, None, "a", "b")),
            in_flight_max=rng.choice((None, None, None, 2)),
            rate_per_s=rng.choice((None, None, None, 10.0)),
            begins_at=0.01 * n,
        )
    return simulation


@pytest.mark.slow
@settings(max_examples=settings().max_examples * 3 // 5)
@given(st.integers(0, 2**32))
def test_the_shortcut_decides_like_all_rules(seed: int) -> None:
    runs = []
    for kind in (SchedulerWithoutRuns, SchedulerWithoutShortcut):
        simulation = saturated_simulation(Random(seed), kind)
        samples: list[tuple[float, ...]] = []

        def sample(simulation: Simulation, samples: list[tuple[float, ...]] = samples) -> None:
            scheduler = simulation.scheduler
            samples.append(
                (
                    simulation.now,
                    scheduler.open,
                    scheduler.fast,
                    scheduler.probation,
                    scheduler.slow,
                    scheduler.waiting,
                    *(each.open_count for each in simulation.endpoints.values()),
                )
            )

        simulation.on_step.append(sample)
        simulation.run(10.0)
        runs.append(samples)
    assert runs[0] == runs[1]


def fast_slot(scheduler: RequestScheduler) -> Slot:
    """Return a slot of an endpoint whose last response was fast."""
    queue = scheduler.add_endpoint(None, None, None)
    queue.known_fast = True
    return Slot(queue)


def test_a_lane_preempted_too_often_waits_for_a_slow_slot() -> None:
    scheduler = RequestScheduler(PLACES)
    slot = fast_slot(scheduler)
    slot.preempted_count = PREEMPTED_MAX
    assert scheduler.admit(slot, 0.0)
    assert slot.capacity_class is CapacityClass.SLOW


def test_an_endpoint_with_an_overdue_request_gets_no_fast_slot() -> None:
    scheduler = RequestScheduler(PLACES)
    long_open = fast_slot(scheduler)
    other = Slot(long_open.queue)
    assert scheduler.admit(long_open, 0.0)
    scheduler.wake(FAST_LATENCY_MAX_S)
    later = long_open.queue.slow_until + 1.0
    long_open.queue.known_fast = True
    assert scheduler.admit(other, later)
    assert (long_open.capacity_class, other.capacity_class) == (
        CapacityClass.OVERDUE,
        CapacityClass.SLOW,
    )


def test_a_preempted_request_keeps_its_slot_until_it_ends() -> None:
    scheduler = RequestScheduler(2)
    first, second, third = (fast_slot(scheduler) for _ in range(3))
    assert scheduler.admit(first, 0.0)
    assert scheduler.admit(second, FAST_LATENCY_MAX_S)
    scheduler.wake(2 * FAST_LATENCY_MAX_S)
    assert scheduler.pop_preempted() == [first]
    assert scheduler.admit(third, 2 * FAST_LATENCY_MAX_S) == []
    assert scheduler.end(first, 2 * FAST_LATENCY_MAX_S, responded=False) == [third]


def test_tenants_get_equal_shares_regardless_of_their_endpoints() -> None:
    simulation = Simulation(RequestScheduler(PLACES))
    many = [Endpoint(simulation, lambda _, __: 0.1, lanes=40, tenant="many") for _ in range(50)]
    one = Endpoint(simulation, lambda _, __: 0.1, lanes=40, tenant="one")
    unowned = [Endpoint(simulation, lambda _, __: 0.1, lanes=40) for _ in range(20)]
    simulation.run(20.0)
    shares = [sum(len(e.begun_at) for e in each) for each in (many, [one], unowned)]
    assert max(shares) < 1.1 * min(shares)


def test_endpoints_of_a_tenant_get_equal_shares_regardless_of_latency() -> None:
    simulation = Simulation(RequestScheduler(PLACES))
    quick, slower = (
        Endpoint(simulation, lambda _, __, s=takes_s: s, lanes=40, tenant="t")
        for takes_s in (0.1, 0.4)
    )
    busy: list[tuple[int, int]] = []
    simulation.on_step.append(lambda _: busy.append((len(quick.open), len(slower.open))))
    simulation.run(20.0)
    # Each holder had one slot in which it was last, so they may differ by one, plus one that ended.
    assert max(abs(a - b) for a, b in busy[200:]) <= 2


def test_lanes_of_an_endpoint_are_admitted_in_request_order() -> None:
    simulation = Simulation(RequestScheduler(PLACES))
    endpoint = Endpoint(simulation, lambda _, __: 0.1, lanes=100, rate_per_s=10.0)
    simulation.run(30.0)
    waited = endpoint.waits_s[100:]
    assert max(waited) - min(waited) <= 0.21


def test_an_endpoint_that_waits_for_its_rate_delays_no_other() -> None:
    simulation = Simulation(RequestScheduler(1))
    Endpoint(simulation, lambda _, __: 0.01, lanes=100, rate_per_s=0.5)
    other = Endpoint(simulation, lambda _, __: 0.01, every_s=0.1)
    simulation.run(20.0)
    assert max(other.waits_s) <= 0.011


@pytest.mark.parametrize("per_s", [0.5, 1.0, 7.0, 1000.0])
def test_a_rate_limit_is_kept_and_fully_used(per_s: float) -> None:
    simulation = Simulation(RequestScheduler(PLACES))
    endpoint = Endpoint(simulation, lambda _, __: 0.001, lanes=50, rate_per_s=per_s)
    run_s = min(20.0, 3000.0 / per_s)
    simulation.run(run_s)
    assert_rate_kept(endpoint.begun_at[:200], per_s)
    assert len(endpoint.begun_at) == pytest.approx(run_s * per_s, rel=0.05, abs=1.1)


def test_a_raised_rate_applies_immediately() -> None:
    rate = RateLimit(0.001)
    rate.consume(100.0)
    assert not rate.ready(200.0)
    rate.change_rate(1000.0, 200.0)
    assert rate.ready(200.0)


def test_a_raised_in_flight_limit_admits_waiting_requests() -> None:
    scheduler = RequestScheduler(PLACES)
    queue = scheduler.add_endpoint(None, 1, None)
    first, second, third = (Slot(queue) for _ in range(3))
    assert scheduler.admit(first, 0.0)
    assert not scheduler.admit(second, 0.0)
    assert not scheduler.admit(third, 0.0)
    assert scheduler.wait_reason(queue, 0.0) is WaitReason.IN_FLIGHT
    assert scheduler.change_endpoint(queue, None, 2, None, 0.0) == [second]
    assert scheduler.change_endpoint(queue, None, None, None, 0.0) == [third]
    assert scheduler.wait_reason(queue, 0.0) is None


def test_a_tenant_that_stops_waiting_frees_slots_for_endpoints_without_a_tenant() -> None:
    scheduler = RequestScheduler(16)
    tenants, first, second = (
        scheduler.add_endpoint(name, None, None) for name in ("t", None, None)
    )
    for queue in (tenants, first, second):
        queue.slow_until = 1000.0
    assert all(scheduler.admit(Slot(queue), 0.0) for queue in (tenants, tenants, first))
    third, other = Slot(tenants), Slot(second)
    assert not scheduler.admit(third, 0.0)
    assert not scheduler.admit(other, 0.0), "all of them have as many as there is room for"
    assert scheduler.cancel_waiting([third], 1.0) == [other]


def test_a_tenant_at_its_limit_frees_slots_for_endpoints_without_a_tenant() -> None:
    scheduler = RequestScheduler(16, tenant_in_flight_max=3)
    slow, quick, first, second = (
        scheduler.add_endpoint(name, None, None) for name in ("t", "t", None, None)
    )
    for queue in (slow, first, second):
        queue.slow_until = 1000.0
    assert all(scheduler.admit(Slot(queue), 0.0) for queue in (slow, slow, first))
    assert not scheduler.admit(Slot(slow), 0.0)
    other, last = Slot(second), Slot(quick)
    assert not scheduler.admit(other, 0.0)
    assert scheduler.admit(last, 1.0) == [last, other]


def test_an_overdue_request_frees_a_fast_slot() -> None:
    scheduler = RequestScheduler(4)
    queue = scheduler.add_endpoint("t", None, None)
    other = scheduler.add_endpoint(None, None, None)
    first, second, third = Slot(queue), Slot(queue), Slot(other)
    assert scheduler.admit(first, 0.0)
    assert not scheduler.admit(second, 0.0), "one has half of what is there"
    assert not scheduler.admit(third, 0.0)
    assert scheduler.wake_at() == FAST_LATENCY_MAX_S
    # Requests that this endpoint begins from now on are slow.
    assert scheduler.wake(FAST_LATENCY_MAX_S) == [third, second]
    assert (scheduler.open, scheduler.fast, scheduler.slow) == (3, 1, 1)
    assert scheduler.end(first, 1.5) == []
    assert scheduler.end(second, 1.6, responded=False) == []
    # The endpoint stays slow for a while after that.
    assert queue.class_at(1.6 + SLOW_MIN_S - 1) is CapacityClass.SLOW
    assert queue.class_at(100.0) is CapacityClass.PROBATION


def test_overdue_requests_beyond_the_limit_are_preempted_oldest_of_the_largest_holder_first() -> (
    None
):
    scheduler = RequestScheduler(16)
    few, many = (scheduler.add_endpoint(name, None, None) for name in ("few", "many"))
    few.known_fast = many.known_fast = True
    few_slots = [Slot(few) for _ in range(2)]
    many_slots = [Slot(many) for _ in range(7)]
    assert all(scheduler.admit(slot, 0.0) for slot in few_slots)
    # Each endpoint becomes fast by alternating with hanging requests, and fills its share each
    # time.
    for n, slot in enumerate(many_slots):
        many.slow_until, many.known_fast = 0.0, True
        scheduler._age(n + 1.0)
        scheduler._begin(slot, CapacityClass.FAST, n + 1.0)
    assert scheduler.pop_preempted() == []
    scheduler._age(8.0)
    assert scheduler.pop_preempted() == many_slots[:1]
    assert scheduler.open == 9, "it is open until it has ended"
    # A request that ends meanwhile is not preempted, and a preempted one is not preempted again.
    scheduler.end(many_slots[2], 9.0)
    scheduler.end(many_slots[0], 9.0)
    scheduler._age(10.0)
    assert scheduler.pop_preempted() == []
    assert scheduler.open == 7


def test_a_slow_request_is_preempted_only_for_a_waiting_holder_with_less() -> None:
    scheduler = RequestScheduler(4)
    first, second = (scheduler.add_endpoint(name, None, None) for name in ("first", "second"))
    first.slow_until = second.slow_until = 1000.0
    hanging, other, more = Slot(first), Slot(second), Slot(first)
    assert scheduler.admit(hanging, 0.0)
    assert not scheduler.admit(more, 1.0)
    assert scheduler.wake(2 * PREEMPT_GRACE_S) == []
    assert scheduler.pop_preempted() == [], "its own do not want its place"
    assert not scheduler.admit(other, 2 * PREEMPT_GRACE_S)
    assert scheduler.wake_at() == PREEMPT_GRACE_S
    assert scheduler.wake(2 * PREEMPT_GRACE_S) == [other]
    assert scheduler.pop_preempted() == [hanging]
    assert scheduler.end(hanging, 2 * PREEMPT_GRACE_S) == []
    assert scheduler.wake_at() == 3 * PREEMPT_GRACE_S, "now it is the other way round"


def test_no_request_is_preempted_for_a_holder_that_would_not_get_the_slot() -> None:
    """While tenants wait, all endpoints without a tenant share the limit of one tenant."""
    scheduler = RequestScheduler(64)
    names = ("t", "u", "v", *[None] * 6)
    queues = [scheduler.add_endpoint(name, None, None) for name in names]
    for queue in queues:
        queue.slow_until = 1000.0
    tenant, second, third, *without, last = queues
    for queue, count in ((tenant, 8), *((each, 1) for each in without), (second, 2), (third, 1)):
        assert all(scheduler.admit(Slot(queue), 0.0) for _ in range(count))
    assert scheduler.slow == scheduler.slow_max
    waiting = [Slot(tenant), Slot(last)]
    assert not any(scheduler.admit(slot, 1.0) for slot in waiting)
    assert scheduler.wake(PREEMPT_GRACE_S + 1.0) == []
    assert scheduler.pop_preempted() == []


@given(
    st.integers(0, 2**32),
    st.sampled_from((0.0, 1e-9, RESOLUTION_S / 2, RESOLUTION_S, 1.5 * RESOLUTION_S, 1e-3)),
    st.sampled_from((1, 4, 64)),
)
def test_a_timer_that_fires_too_early_is_rearmed_without_a_busy_loop(
    seed: int, early_s: float, places: int
) -> None:
    rng = Random(seed)
    scheduler = RequestScheduler(places, None, rng.choice((None, 3.0)))
    # Timers that are rearmed without end run out of tickets.
    scheduler._timers._ticket = iter(range(5000))  # type: ignore[assignment]
    queues = [
        scheduler.add_endpoint(
            rng.choice((None, "a", "b")), rng.choice((None, 1)), rng.choice((None, 2.0))
        )
        for _ in range(6)
    ]
    for queue in queues:
        queue.slow_until = rng.choice((0.0, 3.0, 10.0 * rng.random()))
    open_: list[Slot] = []
    for queue in queues:
        for _ in range(4):
            open_ += scheduler.admit(Slot(queue), 1.0)
    asleep = 0
    now = 1.0
    for _ in range(300):
        if (at := scheduler.wake_at()) is None:
            break
        before, now = now, max(now, at - early_s)
        open_ += scheduler.wake(now)
        # A clock cannot distinguish times that are closer than its resolution.
        asleep = 0 if now > before else asleep + 1
        if asleep > 2:
            now += 2 * RESOLUTION_S
            asleep = 0
        for slot in scheduler.pop_preempted():
            open_.remove(slot)
            open_ += scheduler.end(slot, now)
        if open_ and rng.random() < 0.3:
            open_ += scheduler.end(open_.pop(rng.randrange(len(open_))), now)
    # Every receiver responds, and time advances.
    for _ in range(100):
        open_ = [each for slot in open_ for each in scheduler.end(slot, now)]
        now += 1000.0
        open_ += scheduler.wake(now)
    assert scheduler.waiting == scheduler.open == 0


def test_an_abandoned_request_does_not_classify_its_endpoint() -> None:
    scheduler = RequestScheduler(8)
    queue = scheduler.add_endpoint(None, None, None)
    slot = Slot(queue)
    assert scheduler.admit(slot, 0.0)
    scheduler.end(slot, 0.1, responded=False)
    assert queue.class_at(0.2) is CapacityClass.PROBATION


def test_stale_timers_are_removed() -> None:
    """An endpoint that waits for its rate limit again and again would rearm its timer each time."""
    scheduler = RequestScheduler(PLACES)
    queue = scheduler.add_endpoint(None, None, 100.0)
    queue.slow_until = 600.0
    open_ = [each for _ in range(20) for each in scheduler.admit(Slot(queue), 0.0)]
    now, begun = 0.0, 0
    while now < 50.0:
        for slot in open_:
            open_ = [*scheduler.end(slot, now), *scheduler.admit(slot, now)]
        now = scheduler.wake_at() or 0.0
        open_ += scheduler.wake(now)
        begun += len(open_)
        assert len(scheduler._timers) <= 2 + SPARE
    assert begun > 4900


@pytest.mark.slow
def test_the_cost_of_a_step_does_not_depend_on_the_number_of_endpoints() -> None:
    """Counted, not timed: the number of distinct usage levels depends on the slots alone."""
    scheduler = RequestScheduler(PLACES)
    queues = [scheduler.add_endpoint(f"t{n}", None, None) for n in range(5000)]
    for queue in queues:
        scheduler.admit(Slot(queue), 0.0)
        scheduler.admit(Slot(queue), 0.0)
    assert all(len(ring._levels) <= 2 for ring in scheduler._tenant_queues)
    assert scheduler.waiting == 2 * len(queues) - scheduler.fast
