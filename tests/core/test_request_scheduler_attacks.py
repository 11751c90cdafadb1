"""Attacks on shared capacity, and how little an idle endpoint notices of them."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from outbox.core.admission.endpoint_queue import Slot, WaitReason
from outbox.core.admission.open_requests import FAST_LATENCY_MAX_S as QUICK_MAX_S
from outbox.core.admission.open_requests import PREEMPT_GRACE_S
from outbox.core.admission.request_scheduler import RequestScheduler
from outbox.core.admission.waiting_requests import PREEMPTED_MAX
from tests.core.request_scheduler_model import Endpoint, Simulation
from tests.support.tiers import sampled

PLACES = 64
QUICK_S, SLOW_S = 0.02, 15.0
WARM_UP_S = 2.0

Attack = Callable[[Simulation], object]


RNG = random.Random(1)


def quick(_: int, __: float) -> float:
    return QUICK_S * (0.5 + RNG.random())


def slow(_: int, __: float) -> float:
    return SLOW_S


def mostly_quick(n: int, now: float) -> float:
    """Return ten fast responses, then a slow one."""
    return SLOW_S if n % 11 == 0 else quick(n, now)


def slow_together(n: int, now: float) -> float:
    """Respond fast, and then slow on all endpoints at once."""
    return quick(n, now) if now < 5.0 else SLOW_S


def just_quick(_: int, __: float) -> float:
    """Respond just fast enough not to count as slow."""
    return 0.9 + 0.09 * RNG.random()


def three_hundred_slow_endpoints(simulation: Simulation) -> None:
    for _ in range(300):
        Endpoint(simulation, slow, begins_at=WARM_UP_S)


def one_endpoint_with_a_thousand_lanes(simulation: Simulation) -> None:
    Endpoint(simulation, slow, lanes=1024, begins_at=WARM_UP_S)


def one_endpoint_with_a_thousand_lanes_mostly_quick(simulation: Simulation) -> None:
    Endpoint(simulation, mostly_quick, lanes=1024, begins_at=WARM_UP_S)


def a_thousand_mostly_quick_endpoints_of_one_tenant(simulation: Simulation) -> None:
    for n in range(1000):
        begins_at = WARM_UP_S + n / 1000
        Endpoint(simulation, mostly_quick, every_s=0.5, tenant="flood", begins_at=begins_at)


def two_hundred_endpoints_with_a_permanent_backlog(simulation: Simulation) -> None:
    """Each gets eight slots per second, and one idle endpoint needs five."""
    for _ in range(200):
        Endpoint(simulation, quick, begins_at=WARM_UP_S)


def a_thousand_slow_endpoints_of_one_tenant(simulation: Simulation) -> None:
    for _ in range(1000):
        Endpoint(simulation, slow, lanes=4, tenant="flood", begins_at=WARM_UP_S)


def a_thousand_endpoints_of_one_tenant_that_become_slow_together(simulation: Simulation) -> None:
    for _ in range(1000):
        Endpoint(simulation, slow_together, lanes=4, tenant="flood")


def a_steady_stream_of_new_endpoints(simulation: Simulation) -> None:
    for n in range(3000):
        Endpoint(simulation, slow, begins_at=WARM_UP_S + n / 100)


def a_steady_stream_of_new_endpoints_of_one_tenant(simulation: Simulation) -> None:
    for n in range(3000):
        Endpoint(simulation, slow, tenant="flood", begins_at=WARM_UP_S + n / 100)


def quick_floods(simulation: Simulation) -> None:
    for tenant in ("a", "b", "c"):
        Endpoint(simulation, quick, lanes=1024, tenant=tenant, begins_at=WARM_UP_S)


def one_endpoint_just_below_the_slow_limit(simulation: Simulation) -> None:
    Endpoint(simulation, just_quick, lanes=1024, begins_at=WARM_UP_S)


def half_of_the_endpoints_become_slow_together(simulation: Simulation) -> None:
    for _ in range(PLACES // 2):
        Endpoint(simulation, slow_together)


ATTACKS = (
    three_hundred_slow_endpoints,
    one_endpoint_with_a_thousand_lanes,
    one_endpoint_with_a_thousand_lanes_mostly_quick,
    a_thousand_mostly_quick_endpoints_of_one_tenant,
    two_hundred_endpoints_with_a_permanent_backlog,
    a_thousand_slow_endpoints_of_one_tenant,
    a_thousand_endpoints_of_one_tenant_that_become_slow_together,
    a_steady_stream_of_new_endpoints,
    a_steady_stream_of_new_endpoints_of_one_tenant,
    quick_floods,
    one_endpoint_just_below_the_slow_limit,
)


@pytest.mark.slow
@pytest.mark.parametrize("tenant", sampled([None, "idle"]))
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_an_idle_endpoint_is_not_delayed(attack: Attack, tenant: str | None) -> None:
    RNG.seed(1)
    simulation = Simulation(RequestScheduler(PLACES))
    idle = Endpoint(simulation, quick, tenant=tenant, lanes=4, every_s=0.2)
    attack(simulation)
    simulation.run(10.0)
    # Its own latency is QUICK_S: the wait for a slot must be shorter than that.
    assert idle.wait_s(0.99) < QUICK_S / 2
    assert len(idle.waits_s) > 45
    assert simulation.open_max <= PLACES


def test_a_simultaneous_slowdown_is_contained_within_a_second() -> None:
    simulation = Simulation(RequestScheduler(PLACES))
    idle = Endpoint(simulation, quick, lanes=4, every_s=0.05)
    half_of_the_endpoints_become_slow_together(simulation)
    simulation.run(60.0)
    assert max(idle.waits_s) <= 1.0
    assert idle.wait_s(0.99, since=6.1) < QUICK_S / 2


def test_a_single_endpoint_gets_half_of_the_fast_slots() -> None:
    simulation = Simulation(RequestScheduler(PLACES))
    Endpoint(simulation, quick, lanes=1024)
    simulation.run(3.0)
    assert simulation.scheduler.fast == PLACES // 4


def test_a_slow_endpoint_is_served_beside_a_thousand_that_hang() -> None:
    simulation = Simulation(RequestScheduler(PLACES))
    other = Endpoint(simulation, lambda _, __: 1.5, every_s=5.0)
    for _ in range(1000):
        Endpoint(simulation, slow, lanes=8, tenant="flood", begins_at=5.0)
    simulation.run(120.0)
    assert other.wait_s(0.99, since=20.0) < 1.5


def test_a_new_endpoint_is_served_beside_a_thousand_hanging_new_endpoints_of_one_tenant() -> None:
    simulation = Simulation(RequestScheduler(PLACES))
    for _ in range(1000):
        Endpoint(simulation, slow, tenant="flood")
    new = Endpoint(simulation, quick, every_s=0.1, begins_at=10.0)
    simulation.run(30.0)
    assert max(new.waits_s) < QUICK_S


@pytest.mark.parametrize("tenant", [None, "flood"])
def test_a_new_endpoint_of_a_busy_tenant_is_served_beside_many_hanging_new_endpoints(
    tenant: str | None,
) -> None:
    """Requests of the tenant's other endpoints do not count against new endpoints."""
    simulation = Simulation(RequestScheduler(PLACES))
    Endpoint(simulation, lambda _, __: 0.2, lanes=10, tenant="busy")
    new = Endpoint(simulation, quick, tenant="busy", every_s=0.5, begins_at=20.0)
    for n in range(300):
        begins_at = 5.0 + n / 10
        Endpoint(simulation, lambda _, __: 1.01, every_s=1.0, tenant=tenant, begins_at=begins_at)
    simulation.run(50.0)
    assert len(new.waits_s) >= 58
    assert max(new.waits_s) <= QUICK_MAX_S * (1 + 1 / simulation.scheduler.probation_max)


FOR_EVER_S = 3600.0


def quick_until(at: float, then_s: float) -> Callable[[int, float], float]:
    return lambda n, now: quick(n, now) if now < at else then_s


@pytest.mark.parametrize(
    ("tenants", "endpoints"), [(0, 80), (5, 20), (6, 16), (20, 4)], ids=lambda each: str(each)
)
@pytest.mark.parametrize("owner", [None, "idle"])
def test_endpoints_that_hang_one_request_each_for_an_hour_delay_no_fast_endpoint(
    tenants: int, endpoints: int, owner: str | None
) -> None:
    """More endpoints than slots: all completed fast, and then all hang together."""
    simulation = Simulation(RequestScheduler(PLACES))
    idle = Endpoint(simulation, quick, tenant=owner, lanes=4, every_s=0.2)
    hanging = quick_until(5.0, FOR_EVER_S)
    for n in range(max(tenants, 1) * endpoints):
        tenant = f"t{n % tenants}" if tenants else None
        Endpoint(simulation, hanging, tenant=tenant, every_s=1.0, begins_at=n / 100)
    simulation.run(60.0)
    assert len(idle.waits_s) == 300
    others = max(tenants, 1) * endpoints if owner is None else tenants
    places = simulation.scheduler.fast_max - simulation.scheduler.probation_max
    assert max(idle.waits_s) <= QUICK_MAX_S * (1 + others / places)
    assert idle.wait_s(0.99, since=10.0) < QUICK_S
    assert not idle.preempted


@pytest.mark.parametrize("tenant", [None, "flood"])
def test_many_hanging_requests_of_one_endpoint_leave_the_slow_slots_to_others(
    tenant: str | None,
) -> None:
    simulation = Simulation(RequestScheduler(PLACES))
    honest = Endpoint(simulation, lambda _, __: 1.5, every_s=5.0)
    Endpoint(simulation, quick_until(3.0, FOR_EVER_S), lanes=PLACES, tenant=tenant)
    simulation.run(120.0)
    assert max(honest.waits_s) < QUICK_S
    assert len(honest.waits_s) == 24
    assert not honest.preempted


def test_a_slow_endpoint_is_served_beside_more_hanging_endpoints_than_slots() -> None:
    simulation = Simulation(RequestScheduler(PLACES))
    # Too long to complete before it is preempted after a reclassification.
    honest = Endpoint(simulation, lambda _, __: 20.0, every_s=30.0, begins_at=50.0)
    others = 3 * PLACES
    for n in range(others):
        Endpoint(simulation, lambda _, __: FOR_EVER_S, begins_at=n / 100)
    simulation.run(2000.0)
    bound_s = PREEMPT_GRACE_S * (1 + others / simulation.scheduler.slow_max)
    assert max(honest.waits_s) <= bound_s
    assert all(simulation.now - at <= bound_s for at in honest.requested_at.values())
    assert honest.completed >= 2000.0 / (bound_s + 20.0) - 1


@pytest.mark.slow
def test_a_slow_endpoint_completes_despite_repeated_preemption() -> None:
    """The endpoint stays slow after each preemption, and would wait longer for a slow slot."""
    simulation = Simulation(RequestScheduler(PLACES))
    for n in range(400):
        Endpoint(simulation, lambda _, __: 5.0, every_s=100.0, begins_at=n / 4)
    for n in range(160):
        Endpoint(simulation, lambda _, __: FOR_EVER_S, begins_at=n / 10)
    honest = Endpoint(simulation, lambda _, __: 10.0, begins_at=100.0)
    simulation.run(1500.0)
    assert honest.completed >= 2
    assert honest.preempted <= PREEMPTED_MAX * (honest.completed + 1)


def test_a_preempted_request_does_not_keep_its_endpoint_slow() -> None:
    scheduler = RequestScheduler(4)
    queue, other = (scheduler.add_endpoint(None, None, None) for _ in range(2))
    cut = Slot(queue)
    cut.preempted_count = PREEMPTED_MAX
    other.slow_until = 1000.0
    assert scheduler.admit(Slot(other), 0.0)
    assert not scheduler.admit(cut, 0.0)
    assert scheduler.wait_reason(queue, 0.0) is WaitReason.SLOW
    assert scheduler.cancel_waiting([cut], 1.0) == []
    assert scheduler.admit(Slot(queue), 1.0), "there is room for a new one"


def test_a_holder_that_lost_a_slot_does_not_protect_older_requests_of_another() -> None:
    """Requests that were open before others began are preempted before theirs."""
    simulation = Simulation(RequestScheduler(PLACES))

    def slow_endpoint(tenant: str, takes_s: float, at: float, lanes: int = 1) -> Endpoint:
        one = Endpoint(
            simulation, lambda _, __: takes_s, tenant=tenant, lanes=lanes, every_s=1e6, begins_at=at
        )
        one.queue.slow_until = 1e6
        one.pending = lanes - 1
        return one

    for n in range(7):
        slow_endpoint(f"two{n}", FOR_EVER_S, n / 1000, lanes=2)
    slow_endpoint("one", FOR_EVER_S, 0.5)
    slow_endpoint("quicker", PREEMPT_GRACE_S - 1.5, 0.5)
    for n in range(9):
        slow_endpoint(f"other{n}", FOR_EVER_S, 0.6)
    honest = slow_endpoint("honest", 5.0, 0.7)
    simulation.run(100.0)
    assert honest.waits_s
    assert honest.waits_s[0] <= PREEMPT_GRACE_S * (1 + 9 / simulation.scheduler.slow_max)


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed",
    [seed if seed < 4 else pytest.param(seed, marks=pytest.mark.full) for seed in range(12)],
)
def test_a_fast_endpoint_waits_within_the_bound_under_random_load(
    seed: int,
) -> None:
    """Tenants with many endpoints each, which are fast and slow at random."""
    rng = random.Random(seed)
    simulation = Simulation(RequestScheduler(PLACES))
    simulation.ending_s = 0.001
    tenants = rng.choice((1, 3, 10, 40))
    idle = Endpoint(simulation, quick, tenant="idle", lanes=2, every_s=0.25)
    new = Endpoint(simulation, quick, tenant="new", every_s=0.25, begins_at=20.0)
    for n in range(rng.choice((100, 1000))):
        hang_s = rng.choice((1.01, 3.0, 100.0, FOR_EVER_S))
        share, storm_s = rng.choice((0.0, 0.3, 1.0)), rng.choice((2.0, 15.0))

        def takes_s(
            _: int, now: float, hang: float = hang_s, share: float = share, storm: float = storm_s
        ) -> float:
            if now % (2 * storm) > storm or rng.random() < share:
                return hang
            return rng.choice((0.01, 0.99))

        Endpoint(
            simulation,
            takes_s,
            tenant=f"t{n % tenants}",
            lanes=rng.choice((1, 1, 1, 30)),
            every_s=rng.choice((None, 0.5)),
            begins_at=rng.choice((0.0, 5.0 * rng.random())),
        )
    simulation.run(40.0)
    places = simulation.scheduler.fast_max - simulation.scheduler.probation_max
    bound_s = QUICK_MAX_S * (1 + (tenants + 1) / places) + simulation.ending_s
    for each, at_least in ((idle, 160), (new, 75)):
        assert max(each.waits_s) <= bound_s
        assert len(each.waits_s) + len(each.requested_at) >= at_least / bound_s
        assert all(simulation.now - at <= bound_s for at in each.requested_at.values())
