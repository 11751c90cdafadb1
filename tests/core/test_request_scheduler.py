"""Turns: no limit is exceeded, no room is left lying, nobody starves, and shares are fair."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outbox.core.admission.endpoint_queue import Part, Turn, Why
from outbox.core.admission.rate_limit import RESOLUTION_S, SLACK_S, Rate
from outbox.core.admission.request_scheduler import CUT_MAX, HOLD_S, SLOW_MIN_S, SLOW_S, Turns
from outbox.core.admission.timer_queue import SPARE
from tests.core.request_scheduler_model import Endpoint, Town

PLACES = 64


def checked(town: Town) -> None:
    """What holds at any moment."""
    turns = town.turns
    open_ = Counter(part for e in town.endpoints.values() for part in e.open.values())
    quick = open_[Part.QUICK] + open_[Part.NEW]
    assert (turns.quick, turns.new, turns.slow) == (quick, open_[Part.NEW], open_[Part.SLOW])
    assert turns.open == sum(e.open_count for e in town.endpoints.values())
    assert turns.quick <= turns.quick_max
    assert turns.new <= turns.new_max
    assert turns.slow <= turns.slow_max
    assert not open_[Part.MOVED] or turns.slow + open_[Part.MOVED] <= turns.long_max
    assert turns.open <= turns.in_flight_max
    of_tenant: Counter[str | None] = Counter()
    for endpoint in town.endpoints.values():
        line = endpoint.line
        most = line.in_flight_max
        assert most is None or endpoint.open_count <= most
        of_tenant[line.tenant.name] += endpoint.open_count
    limit = town.tenant_in_flight_max
    assert limit is None or all(n <= limit for name, n in of_tenant.items() if name is not None)
    assert turns.waiting == sum(len(e.line.waiting) for e in town.endpoints.values())


def nothing_is_left_lying(town: Town) -> None:
    """Whoever waits has a reason that is true now."""
    turns = town.turns
    wake_at = turns.wake_at()
    if wake_at is not None and wake_at <= town.now + 2 * RESOLUTION_S:
        return  # It is about to be looked at.
    for endpoint in town.endpoints.values():
        line = endpoint.line
        if line.waiting:
            part = turns._part(line, town.now)
            held = turns._held(line, town.now)
            assert held is not None or not turns._has_room(line, part)


def rates_are_kept(begun_at: list[float], per_s: float) -> None:
    for i, since in enumerate(begun_at):
        for n, at in enumerate(begun_at[i:], 1):
            assert n <= (at - since + SLACK_S) * per_s + 1 + 1e-3


def some_town(rng: Random, places: int) -> Town:
    tenant_limit = rng.choice((None, None, 1, 7))
    tenant_rate = rng.choice((None, None, 5.0))
    town = Town(Turns(places, tenant_limit, tenant_rate))
    town.tenant_in_flight_max, town.tenant_rate_per_s = tenant_limit, tenant_rate
    for _ in range(rng.randrange(1, 12)):
        usual_s = rng.choice((0.01, 0.1, 0.9, 1.5, 5.0))
        slow_share = rng.choice((0.0, 0.0, 0.05, 0.5))

        def takes_s(
            _: int, __: float, usual_s: float = usual_s, share: float = slow_share
        ) -> float:
            return 5.0 * rng.random() if rng.random() < share else usual_s * rng.random()

        Endpoint(
            town,
            takes_s,
            lanes=rng.choice((1, 3, 40)),
            every_s=rng.choice((None, 0.05, 1.0)),
            tenant=rng.choice((None, "a", "b", "c")),
            in_flight_max=rng.choice((None, None, 1, 5)),
            rate_per_s=rng.choice((None, None, 0.5, 20.0)),
            begins_at=rng.choice((0.0, 3.0)),
        )
    return town


def meddle(town: Town, rng: Random) -> None:
    """Somebody gives up waiting, or changes settings."""
    endpoint = rng.choice(list(town.endpoints.values()))
    line = endpoint.line
    if line.waiting and rng.random() < 0.5:
        turn = rng.choice(list(line.waiting))
        begun = town.turns.withdraw([turn], town.now)
        del endpoint.asked_at[turn]
        endpoint.idle.append(turn)
        endpoint.owed += 1
        town.begin(begun)
    elif endpoint.rate_per_s is None:  # What is kept of a rate is checked over the whole run.
        limits = (rng.choice((None, endpoint.open_count + 1)), None)
        town.begin(town.turns.change(line, rng.choice((None, line.tenant.name)), *limits, town.now))
    town.at(town.now + rng.random(), lambda: meddle(town, rng))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from((1, 2, 3, 5, PLACES)), st.booleans())
def test_limits_hold_room_is_used_and_everybody_is_served(
    seed: int, places: int, meddled: bool
) -> None:
    rng = Random(seed)
    town = some_town(rng, places)
    town.ending_s = rng.choice((0.0, 0.0, 0.1))
    if meddled:
        town.tenant_in_flight_max = None  # Who moves in brings along what is open.
        town.at(0.5, lambda: meddle(town, rng))
    town.on_step.append(checked)
    town.on_step.append(nothing_is_left_lying)
    town.run(8.0)
    for endpoint in town.endpoints.values():
        if endpoint.rate_per_s is not None:
            rates_are_kept(endpoint.begun_at, endpoint.rate_per_s)
    if town.tenant_rate_per_s is not None and not meddled:
        for name in ("a", "b", "c"):
            its = [e for e in town.endpoints.values() if e.line.tenant.name == name]
            begun = sorted(at for e in its for at in e.begun_at)
            rates_are_kept(begun, town.tenant_rate_per_s)
    # Nothing more comes: all that waits is served, and nothing is left of it.
    town.calm = True
    town.run(4000.0)
    assert all(not e.asked_at and not e.open_count for e in town.endpoints.values())
    turns = town.turns
    assert (turns.open, turns.quick, turns.new, turns.slow, turns.waiting) == (0, 0, 0, 0, 0)
    assert not turns._slow
    assert not turns._moved
    for endpoint in town.endpoints.values():
        tenant = endpoint.line.tenant
        its = (tenant.open, tenant.quick, tenant.new, tenant.slow, tenant.waiting)
        assert its == (0, 0, 0, 0, 0)
    assert not any(ring.amounts for ring in turns._rings)


class Thorough(Turns):
    """Asks everything of everybody."""

    def _is_plain(self, turn: Turn, now: float) -> bool:
        return False


def easy_town(rng: Random, kind: type[Turns]) -> Town:
    """One in which hardly anybody waits."""
    limits = rng.choice((None, None, 3)), rng.choice((None, None, 9.0))
    town = Town(kind(rng.choice((4, 12, PLACES)), *limits))
    town.ending_s = 0.5
    for n in range(6):
        slow_share = rng.choice((0.0, 0.02, 0.1))

        def takes_s(_: int, __: float, share: float = slow_share) -> float:
            return 30.0 * rng.random() if rng.random() < share else 0.2 * rng.random()

        Endpoint(
            town,
            takes_s,
            lanes=rng.choice((1, 3, 12)),
            every_s=rng.choice((0.04, 0.3)),
            tenant=rng.choice((None, None, "a", "b")),
            in_flight_max=rng.choice((None, None, None, 2)),
            rate_per_s=rng.choice((None, None, None, 10.0)),
            begins_at=0.01 * n,
        )
    return town


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_the_short_way_leads_where_the_long_one_does(seed: int) -> None:
    ways = []
    for kind in (Turns, Thorough):
        town = easy_town(Random(seed), kind)
        way: list[tuple[float, ...]] = []

        def look(town: Town, way: list[tuple[float, ...]] = way) -> None:
            turns = town.turns
            way.append((town.now, turns.open, turns.quick, turns.new, turns.slow, turns.waiting))

        town.on_step.append(look)
        town.run(20.0)
        ways.append(way)
    assert ways[0] == ways[1]


def proven(turns: Turns) -> Turn:
    """Of an endpoint whose last answer was quick."""
    line = turns.join(None, None, None)
    line.proven = True
    return Turn(line)


def test_whose_request_was_cut_too_often_waits_for_a_slow_place_however_quick_it_was() -> None:
    turns = Turns(PLACES)
    turn = proven(turns)
    turn.cut = CUT_MAX
    assert turns.ask(turn, 0.0)
    assert turn.part is Part.SLOW


def test_nothing_is_quick_of_whom_a_request_is_open_for_long() -> None:
    turns = Turns(PLACES)
    long_open = proven(turns)
    other = Turn(long_open.line)
    assert turns.ask(long_open, 0.0)
    turns.wake(SLOW_S)
    later = long_open.line.slow_until + 1.0
    long_open.line.proven = True
    assert turns.ask(other, later)
    assert (long_open.part, other.part) == (Part.MOVED, Part.SLOW)


def test_what_was_called_off_has_to_end_before_another_one_begins() -> None:
    turns = Turns(2)
    first, second, third = (proven(turns) for _ in range(3))
    assert turns.ask(first, 0.0)
    assert turns.ask(second, SLOW_S)
    turns.wake(2 * SLOW_S)
    assert turns.take_called_off() == [first]
    assert turns.ask(third, 2 * SLOW_S) == []
    assert turns.end(first, 2 * SLOW_S, answered=False) == [third]


def test_tenants_share_alike_whatever_they_have() -> None:
    town = Town(Turns(PLACES))
    many = [Endpoint(town, lambda _, __: 0.1, lanes=40, tenant="many") for _ in range(50)]
    one = Endpoint(town, lambda _, __: 0.1, lanes=40, tenant="one")
    unowned = [Endpoint(town, lambda _, __: 0.1, lanes=40) for _ in range(20)]
    town.run(20.0)
    shares = [sum(len(e.begun_at) for e in each) for each in (many, [one], unowned)]
    assert max(shares) < 1.1 * min(shares)


def test_endpoints_of_a_tenant_share_alike_whatever_they_take() -> None:
    town = Town(Turns(PLACES))
    quick, slower = (
        Endpoint(town, lambda _, __, s=takes_s: s, lanes=40, tenant="t") for takes_s in (0.1, 0.4)
    )
    busy: list[tuple[int, int]] = []
    town.on_step.append(lambda _: busy.append((len(quick.open), len(slower.open))))
    town.run(20.0)
    # Each had a turn in which it was last, so they may differ by one, and by one that ended.
    assert max(abs(a - b) for a, b in busy[200:]) <= 2


def test_lanes_of_an_endpoint_have_their_turns_in_the_order_in_which_they_asked() -> None:
    town = Town(Turns(PLACES))
    endpoint = Endpoint(town, lambda _, __: 0.1, lanes=100, rate_per_s=10.0)
    town.run(30.0)
    waited = endpoint.waits_s[100:]
    assert max(waited) - min(waited) <= 0.21


def test_who_waits_for_its_rate_is_in_nobodys_way() -> None:
    town = Town(Turns(1))
    Endpoint(town, lambda _, __: 0.01, lanes=100, rate_per_s=0.5)
    other = Endpoint(town, lambda _, __: 0.01, every_s=0.1)
    town.run(20.0)
    assert max(other.waits_s) <= 0.011


@pytest.mark.parametrize("per_s", [0.5, 1.0, 7.0, 1000.0])
def test_a_rate_is_kept_and_used(per_s: float) -> None:
    town = Town(Turns(PLACES))
    endpoint = Endpoint(town, lambda _, __: 0.001, lanes=50, rate_per_s=per_s)
    town.run(20.0)
    rates_are_kept(endpoint.begun_at[:200], per_s)
    assert len(endpoint.begun_at) == pytest.approx(20 * per_s, rel=0.05, abs=1.1)


def test_a_rate_that_is_raised_counts_at_once() -> None:
    rate = Rate(0.001)
    rate.take(100.0)
    assert not rate.ready(200.0)
    rate.change(1000.0, 200.0)
    assert rate.ready(200.0)


def test_a_limit_that_is_lifted_lets_those_begin_that_waited() -> None:
    turns = Turns(PLACES)
    line = turns.join(None, 1, None)
    first, second, third = (Turn(line) for _ in range(3))
    assert turns.ask(first, 0.0)
    assert not turns.ask(second, 0.0)
    assert not turns.ask(third, 0.0)
    assert turns.why(line, 0.0) is Why.IN_FLIGHT
    assert turns.change(line, None, 2, None, 0.0) == [second]
    assert turns.change(line, None, None, None, 0.0) == [third]
    assert turns.why(line, 0.0) is None


def test_a_tenant_that_waits_no_longer_lets_those_begin_that_have_none() -> None:
    turns = Turns(16)
    tenants, first, second = (turns.join(name, None, None) for name in ("t", None, None))
    for line in (tenants, first, second):
        line.slow_until = 1000.0
    assert all(turns.ask(Turn(line), 0.0) for line in (tenants, tenants, first))
    third, other = Turn(tenants), Turn(second)
    assert not turns.ask(third, 0.0)
    assert not turns.ask(other, 0.0), "all of them have as many as there is room for"
    assert turns.withdraw([third], 1.0) == [other]


def test_a_tenant_that_comes_to_its_limit_lets_those_begin_that_have_none() -> None:
    turns = Turns(16, tenant_in_flight_max=3)
    slow, quick, first, second = (turns.join(name, None, None) for name in ("t", "t", None, None))
    for line in (slow, first, second):
        line.slow_until = 1000.0
    assert all(turns.ask(Turn(line), 0.0) for line in (slow, slow, first))
    assert not turns.ask(Turn(slow), 0.0)
    other, last = Turn(second), Turn(quick)
    assert not turns.ask(other, 0.0)
    assert turns.ask(last, 1.0) == [last, other]


def test_a_request_that_is_open_for_long_makes_room_in_the_quick_part() -> None:
    turns = Turns(4)
    line = turns.join("t", None, None)
    other = turns.join(None, None, None)
    first, second, third = Turn(line), Turn(line), Turn(other)
    assert turns.ask(first, 0.0)
    assert not turns.ask(second, 0.0), "one has half of what is there"
    assert not turns.ask(third, 0.0)
    assert turns.wake_at() == SLOW_S
    # What its endpoint begins from now on is slow.
    assert turns.wake(SLOW_S) == [third, second]
    assert (turns.open, turns.quick, turns.slow) == (3, 1, 1)
    assert turns.end(first, 1.5) == []
    assert turns.end(second, 1.6, answered=False) == []
    # It is slow for some time after that.
    assert turns._part(line, 1.6 + SLOW_MIN_S - 1) is Part.SLOW
    assert turns._part(line, 100.0) is Part.NEW


def test_what_was_moved_and_has_no_place_is_called_off_the_oldest_of_whoever_has_most() -> None:
    turns = Turns(16)
    few, many = (turns.join(name, None, None) for name in ("few", "many"))
    few.proven = many.proven = True
    its = [Turn(few) for _ in range(2)]
    theirs = [Turn(many) for _ in range(7)]
    assert all(turns.ask(turn, 0.0) for turn in its)
    # Quick by turns with hanging, each time with all that it gets.
    for n, turn in enumerate(theirs):
        many.slow_until, many.proven = 0.0, True
        turns._age(n + 1.0)
        turns._begin(turn, Part.QUICK, n + 1.0)
    assert turns.take_called_off() == []
    turns._age(8.0)
    assert turns.take_called_off() == theirs[:1]
    assert turns.open == 9, "it is open until it has ended"
    # What ends meanwhile is not called off any more, and what was is not again.
    turns.end(theirs[2], 9.0)
    turns.end(theirs[0], 9.0)
    turns._age(10.0)
    assert turns.take_called_off() == []
    assert turns.open == 7


def test_a_slow_request_keeps_its_place_until_somebody_with_less_has_waited_for_it() -> None:
    turns = Turns(4)
    first, second = (turns.join(name, None, None) for name in ("first", "second"))
    first.slow_until = second.slow_until = 1000.0
    hanging, other, more = Turn(first), Turn(second), Turn(first)
    assert turns.ask(hanging, 0.0)
    assert not turns.ask(more, 1.0)
    assert turns.wake(2 * HOLD_S) == []
    assert turns.take_called_off() == [], "its own do not want its place"
    assert not turns.ask(other, 2 * HOLD_S)
    assert turns.wake_at() == HOLD_S
    assert turns.wake(2 * HOLD_S) == [other]
    assert turns.take_called_off() == [hanging]
    assert turns.end(hanging, 2 * HOLD_S) == []
    assert turns.wake_at() == 3 * HOLD_S, "now it is the other way round"


def test_nothing_is_called_off_for_one_who_does_not_get_the_place() -> None:
    """While tenants wait, those without one have together as many as a tenant may have."""
    turns = Turns(64)
    names = ("t", "u", "v", *[None] * 6)
    lines = [turns.join(name, None, None) for name in names]
    for line in lines:
        line.slow_until = 1000.0
    tenant, second, third, *without, last = lines
    for line, count in ((tenant, 8), *((each, 1) for each in without), (second, 2), (third, 1)):
        assert all(turns.ask(Turn(line), 0.0) for _ in range(count))
    assert turns.slow == turns.slow_max
    waiting = [Turn(tenant), Turn(last)]
    assert not any(turns.ask(turn, 1.0) for turn in waiting)
    assert turns.wake(HOLD_S + 1.0) == []
    assert turns.take_called_off() == []


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from((0.0, 1e-9, RESOLUTION_S / 2, RESOLUTION_S, 1.5 * RESOLUTION_S, 1e-3)),
    st.sampled_from((1, 4, 64)),
)
def test_a_timer_that_fires_a_little_too_soon_ends_and_comes_again(
    seed: int, early_s: float, places: int
) -> None:
    rng = Random(seed)
    turns = Turns(places, None, rng.choice((None, 3.0)))
    # Timers that are set for ever run out of these.
    turns._timers._ticket = iter(range(5000))  # type: ignore[assignment]
    lines = [
        turns.join(rng.choice((None, "a", "b")), rng.choice((None, 1)), rng.choice((None, 2.0)))
        for _ in range(6)
    ]
    for line in lines:
        line.slow_until = rng.choice((0.0, 3.0, 10.0 * rng.random()))
    open_: list[Turn] = []
    for line in lines:
        for _ in range(4):
            open_ += turns.ask(Turn(line), 1.0)
    asleep = 0
    now = 1.0
    for _ in range(300):
        if (at := turns.wake_at()) is None:
            break
        before, now = now, max(now, at - early_s)
        open_ += turns.wake(now)
        # A clock cannot tell times apart that are closer than this.
        asleep = 0 if now > before else asleep + 1
        if asleep > 2:
            now += 2 * RESOLUTION_S
            asleep = 0
        for turn in turns.take_called_off():
            open_.remove(turn)
            open_ += turns.end(turn, now)
        if open_ and rng.random() < 0.3:
            open_ += turns.end(open_.pop(rng.randrange(len(open_))), now)
    # Every receiver answers, and time goes on.
    for _ in range(100):
        open_ = [each for turn in open_ for each in turns.end(turn, now)]
        now += 1000.0
        open_ += turns.wake(now)
    assert turns.waiting == turns.open == 0


def test_what_was_abandoned_says_nothing_about_its_endpoint() -> None:
    turns = Turns(8)
    line = turns.join(None, None, None)
    turn = Turn(line)
    assert turns.ask(turn, 0.0)
    turns.end(turn, 0.1, answered=False)
    assert turns._part(line, 0.2) is Part.NEW


def test_timers_that_nobody_waits_for_are_put_away() -> None:
    """It waits for its rate again and again, and each time would become new later than that."""
    turns = Turns(PLACES)
    line = turns.join(None, None, 100.0)
    line.slow_until = 600.0
    open_ = [each for _ in range(20) for each in turns.ask(Turn(line), 0.0)]
    now, begun = 0.0, 0
    while now < 50.0:
        for turn in open_:
            open_ = [*turns.end(turn, now), *turns.ask(turn, now)]
        now = turns.wake_at() or 0.0
        open_ += turns.wake(now)
        begun += len(open_)
        assert len(turns._timers) <= 2 + SPARE
    assert begun > 4900


def test_no_step_costs_more_with_more_endpoints() -> None:
    """Counted, not timed: how many amounts are told apart depends on the places alone."""
    turns = Turns(PLACES)
    lines = [turns.join(f"t{n}", None, None) for n in range(5000)]
    for line in lines:
        turns.ask(Turn(line), 0.0)
        turns.ask(Turn(line), 0.0)
    assert all(len(ring._levels) <= 2 for ring in turns._rings)
    assert turns.waiting == 2 * len(lines) - turns.quick
