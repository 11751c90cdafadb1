"""Who tries to take the relay from the others, and what a quiet endpoint notices of it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from outbox.core.admission.endpoint_queue import Turn, Why
from outbox.core.admission.request_scheduler import CUT_MAX, HOLD_S, Turns
from outbox.core.admission.request_scheduler import SLOW_S as QUICK_MAX_S
from tests.core.request_scheduler_model import Endpoint, Town

PLACES = 64
QUICK_S, SLOW_S = 0.02, 15.0
WARM_UP_S = 2.0

Attack = Callable[[Town], object]


RNG = random.Random(1)


def quick(_: int, __: float) -> float:
    return QUICK_S * (0.5 + RNG.random())


def slow(_: int, __: float) -> float:
    return SLOW_S


def by_turns(n: int, now: float) -> float:
    """Ten quick answers, then a slow one."""
    return SLOW_S if n % 11 == 0 else quick(n, now)


def all_at_once(n: int, now: float) -> float:
    """Quick, and then all slow together."""
    return quick(n, now) if now < 5.0 else SLOW_S


def just_quick(_: int, __: float) -> float:
    """Never slow enough to be called slow."""
    return 0.9 + 0.09 * RNG.random()


def three_hundred_slow_ones(town: Town) -> None:
    for _ in range(300):
        Endpoint(town, slow, begins_at=WARM_UP_S)


def one_with_a_thousand_lanes(town: Town) -> None:
    Endpoint(town, slow, lanes=1024, begins_at=WARM_UP_S)


def one_with_a_thousand_lanes_quick_and_slow_by_turns(town: Town) -> None:
    Endpoint(town, by_turns, lanes=1024, begins_at=WARM_UP_S)


def a_thousand_of_one_tenant_quick_and_slow_by_turns(town: Town) -> None:
    for n in range(1000):
        begins_at = WARM_UP_S + n / 1000
        Endpoint(town, by_turns, every_s=0.5, tenant="flood", begins_at=begins_at)


def two_hundred_that_have_always_something_to_send(town: Town) -> None:
    """Each gets eight turns in a second, and a quiet one wants five."""
    for _ in range(200):
        Endpoint(town, quick, begins_at=WARM_UP_S)


def a_thousand_of_one_tenant(town: Town) -> None:
    for _ in range(1000):
        Endpoint(town, slow, lanes=4, tenant="flood", begins_at=WARM_UP_S)


def a_thousand_of_one_tenant_that_become_slow_together(town: Town) -> None:
    for _ in range(1000):
        Endpoint(town, all_at_once, lanes=4, tenant="flood")


def fresh_ones_all_the_time(town: Town) -> None:
    for n in range(3000):
        Endpoint(town, slow, begins_at=WARM_UP_S + n / 100)


def fresh_ones_of_one_tenant_all_the_time(town: Town) -> None:
    for n in range(3000):
        Endpoint(town, slow, tenant="flood", begins_at=WARM_UP_S + n / 100)


def floods_that_are_quick(town: Town) -> None:
    for tenant in ("a", "b", "c"):
        Endpoint(town, quick, lanes=1024, tenant=tenant, begins_at=WARM_UP_S)


def one_that_is_never_quite_slow(town: Town) -> None:
    Endpoint(town, just_quick, lanes=1024, begins_at=WARM_UP_S)


def half_of_all_become_slow_together(town: Town) -> None:
    for _ in range(PLACES // 2):
        Endpoint(town, all_at_once)


ATTACKS = (
    three_hundred_slow_ones,
    one_with_a_thousand_lanes,
    one_with_a_thousand_lanes_quick_and_slow_by_turns,
    a_thousand_of_one_tenant_quick_and_slow_by_turns,
    two_hundred_that_have_always_something_to_send,
    a_thousand_of_one_tenant,
    a_thousand_of_one_tenant_that_become_slow_together,
    fresh_ones_all_the_time,
    fresh_ones_of_one_tenant_all_the_time,
    floods_that_are_quick,
    one_that_is_never_quite_slow,
)


@pytest.mark.parametrize("tenant", [None, "quiet"])
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_a_quiet_endpoint_notices_nothing(attack: Attack, tenant: str | None) -> None:
    RNG.seed(1)
    town = Town(Turns(PLACES))
    quiet = Endpoint(town, quick, tenant=tenant, lanes=4, every_s=0.2)
    attack(town)
    town.run(10.0)
    # Its own latency is QUICK_S: what it waits for is to be less than that.
    assert quiet.wait_s(0.99) < QUICK_S / 2
    assert len(quiet.waits_s) > 45
    assert town.open_max <= PLACES


def test_what_became_slow_together_is_over_in_a_second() -> None:
    town = Town(Turns(PLACES))
    quiet = Endpoint(town, quick, lanes=4, every_s=0.05)
    half_of_all_become_slow_together(town)
    town.run(60.0)
    assert max(quiet.waits_s) <= 1.0
    assert quiet.wait_s(0.99, since=6.1) < QUICK_S / 2


def test_one_endpoint_alone_has_half_of_the_quick_part() -> None:
    town = Town(Turns(PLACES))
    Endpoint(town, quick, lanes=1024)
    town.run(3.0)
    assert town.turns.quick == PLACES // 4


def test_a_slow_endpoint_goes_on_beside_a_thousand_that_hang() -> None:
    town = Town(Turns(PLACES))
    other = Endpoint(town, lambda _, __: 1.5, every_s=5.0)
    for _ in range(1000):
        Endpoint(town, slow, lanes=8, tenant="flood", begins_at=5.0)
    town.run(120.0)
    assert other.wait_s(0.99, since=20.0) < 1.5


def test_a_new_endpoint_begins_beside_a_thousand_new_ones_of_a_tenant_that_hang() -> None:
    town = Town(Turns(PLACES))
    for _ in range(1000):
        Endpoint(town, slow, tenant="flood")
    new = Endpoint(town, quick, every_s=0.1, begins_at=10.0)
    town.run(30.0)
    assert max(new.waits_s) < QUICK_S


@pytest.mark.parametrize("tenant", [None, "flood"])
def test_a_new_endpoint_of_a_busy_tenant_begins_beside_many_new_ones_that_hang(
    tenant: str | None,
) -> None:
    """What is open to the tenant's other endpoints does not count among the new ones."""
    town = Town(Turns(PLACES))
    Endpoint(town, lambda _, __: 0.2, lanes=10, tenant="busy")
    new = Endpoint(town, quick, tenant="busy", every_s=0.5, begins_at=20.0)
    for n in range(300):
        begins_at = 5.0 + n / 10
        Endpoint(town, lambda _, __: 1.01, every_s=1.0, tenant=tenant, begins_at=begins_at)
    town.run(50.0)
    assert len(new.waits_s) >= 58
    assert max(new.waits_s) <= QUICK_MAX_S * (1 + 1 / town.turns.new_max)


FOR_EVER_S = 3600.0


def well_behaved_until(at: float, then_s: float) -> Callable[[int, float], float]:
    return lambda n, now: quick(n, now) if now < at else then_s


@pytest.mark.parametrize(
    ("tenants", "endpoints"), [(0, 80), (5, 20), (6, 16), (20, 4)], ids=lambda each: str(each)
)
@pytest.mark.parametrize("owner", [None, "quiet"])
def test_endpoints_that_hang_one_request_each_for_an_hour_take_nothing_from_quick_ones(
    tenants: int, endpoints: int, owner: str | None
) -> None:
    """More endpoints than places; they have answered quickly, and then all hang together."""
    town = Town(Turns(PLACES))
    quiet = Endpoint(town, quick, tenant=owner, lanes=4, every_s=0.2)
    hanging = well_behaved_until(5.0, FOR_EVER_S)
    for n in range(max(tenants, 1) * endpoints):
        tenant = f"t{n % tenants}" if tenants else None
        Endpoint(town, hanging, tenant=tenant, every_s=1.0, begins_at=n / 100)
    town.run(60.0)
    assert len(quiet.waits_s) == 300
    others = max(tenants, 1) * endpoints if owner is None else tenants
    places = town.turns.quick_max - town.turns.new_max
    assert max(quiet.waits_s) <= QUICK_MAX_S * (1 + others / places)
    assert quiet.wait_s(0.99, since=10.0) < QUICK_S
    assert not quiet.called_off


@pytest.mark.parametrize("tenant", [None, "flood"])
def test_many_requests_of_one_that_hang_together_leave_the_slow_part_to_slow_ones(
    tenant: str | None,
) -> None:
    town = Town(Turns(PLACES))
    honest = Endpoint(town, lambda _, __: 1.5, every_s=5.0)
    Endpoint(town, well_behaved_until(3.0, FOR_EVER_S), lanes=PLACES, tenant=tenant)
    town.run(120.0)
    assert max(honest.waits_s) < QUICK_S
    assert len(honest.waits_s) == 24
    assert not honest.called_off


def test_a_slow_endpoint_is_served_beside_more_that_hang_for_an_hour_than_there_are_places() -> (
    None
):
    town = Town(Turns(PLACES))
    # Too long to be done before it is called off as one that was moved.
    honest = Endpoint(town, lambda _, __: 20.0, every_s=30.0, begins_at=50.0)
    others = 3 * PLACES
    for n in range(others):
        Endpoint(town, lambda _, __: FOR_EVER_S, begins_at=n / 100)
    town.run(2000.0)
    promised_s = HOLD_S * (1 + others / town.turns.slow_max)
    assert max(honest.waits_s) <= promised_s
    assert all(town.now - at <= promised_s for at in honest.asked_at.values())
    assert honest.answered >= 2000.0 / (promised_s + 20.0) - 1


def test_who_takes_its_time_gets_it_however_often_others_have_it_called_off() -> None:
    """It is slow for a time after each, and would wait for a slow place for longer than that."""
    town = Town(Turns(PLACES))
    for n in range(400):
        Endpoint(town, lambda _, __: 5.0, every_s=100.0, begins_at=n / 4)
    for n in range(160):
        Endpoint(town, lambda _, __: FOR_EVER_S, begins_at=n / 10)
    honest = Endpoint(town, lambda _, __: 10.0, begins_at=100.0)
    town.run(1500.0)
    assert honest.answered >= 2
    assert honest.called_off <= CUT_MAX * (honest.answered + 1)


def test_who_is_dismissed_does_not_keep_its_endpoint_slow() -> None:
    turns = Turns(4)
    line, other = (turns.join(None, None, None) for _ in range(2))
    cut = Turn(line)
    cut.cut = CUT_MAX
    other.slow_until = 1000.0
    assert turns.ask(Turn(other), 0.0)
    assert not turns.ask(cut, 0.0)
    assert turns.why(line, 0.0) is Why.SLOW
    assert turns.withdraw([cut], 1.0) == []
    assert turns.ask(Turn(line), 1.0), "there is room for a new one"


def test_who_has_one_less_now_does_not_keep_the_other_for_that() -> None:
    """What was open before others began is called off before theirs."""
    town = Town(Turns(PLACES))

    def slow_one(tenant: str, takes_s: float, at: float, lanes: int = 1) -> Endpoint:
        one = Endpoint(
            town, lambda _, __: takes_s, tenant=tenant, lanes=lanes, every_s=1e6, begins_at=at
        )
        one.line.slow_until = 1e6
        one.owed = lanes - 1
        return one

    for n in range(7):
        slow_one(f"two{n}", FOR_EVER_S, n / 1000, lanes=2)
    slow_one("one", FOR_EVER_S, 0.5)
    slow_one("quicker", HOLD_S - 1.5, 0.5)
    for n in range(9):
        slow_one(f"other{n}", FOR_EVER_S, 0.6)
    honest = slow_one("honest", 5.0, 0.7)
    town.run(100.0)
    assert honest.waits_s
    assert honest.waits_s[0] <= HOLD_S * (1 + 9 / town.turns.slow_max)


@pytest.mark.parametrize("seed", range(12))
def test_whatever_they_do_together_a_quick_endpoint_waits_no_longer_than_is_promised(
    seed: int,
) -> None:
    """Tenants with many endpoints each, that are quick and slow as they like."""
    rng = random.Random(seed)
    town = Town(Turns(PLACES))
    town.ending_s = 0.001
    tenants = rng.choice((1, 3, 10, 40))
    quiet = Endpoint(town, quick, tenant="quiet", lanes=2, every_s=0.25)
    new = Endpoint(town, quick, tenant="new", every_s=0.25, begins_at=20.0)
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
            town,
            takes_s,
            tenant=f"t{n % tenants}",
            lanes=rng.choice((1, 1, 1, 30)),
            every_s=rng.choice((None, 0.5)),
            begins_at=rng.choice((0.0, 5.0 * rng.random())),
        )
    town.run(40.0)
    places = town.turns.quick_max - town.turns.new_max
    promised_s = QUICK_MAX_S * (1 + (tenants + 1) / places) + town.ending_s
    for each, at_least in ((quiet, 160), (new, 75)):
        assert max(each.waits_s) <= promised_s
        assert len(each.waits_s) + len(each.asked_at) >= at_least / promised_s
        assert all(town.now - at <= promised_s for at in each.asked_at.values())
