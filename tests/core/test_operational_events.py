"""Which changes are told, and what keeps operational events from causing more of themselves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.core.delivery import operational_events
from outbox.core.delivery.circuit_breaker import State
from outbox.core.delivery.operational_events import (
    LAG_LOOK_EVERY_S,
    LAGGING_S,
    WARN_AFTER_S,
    Lag,
    Next,
    Told,
)

NOW = 1_000_000.0
OPEN = (State.FAILING, State.REFUSING)

answers = st.tuples(st.sampled_from(State), st.booleans())


@pytest.mark.parametrize(
    ("event_type", "expected"),
    [("outbox.lane.blocked", True), ("outbox.x", True), ("outbox", False), ("outboxes.x", False)],
)
def test_what_is_operational(event_type: str, expected: bool) -> None:
    assert operational_events.is_operational(event_type) is expected


@given(st.lists(answers))
def test_a_hold_takes_an_ordinary_failure_and_its_end_takes_a_hold(
    script: list[tuple[State, bool]],
) -> None:
    told, failures, holds, ends = Told(), 0, 0, 0
    for n, (state, ordinary) in enumerate(script):
        if state is State.HEALTHY:
            after = told.changed(state)
        else:
            after = told.answered(state, NOW + n, ordinary=ordinary).changed(state)
            failures += ordinary
        holds += told.held_since is None and after.held_since is not None
        ends += told.held_since is not None and after.held_since is None
        assert after.held_since is None or state is not State.HEALTHY
        if ordinary and state in OPEN:
            assert after.held_since is not None
        told = after
    assert ends <= holds <= ends + 1
    assert holds <= failures


def test_a_hold_lasts_until_its_endpoint_is_healthy() -> None:
    told = Told().answered(State.FAILING, NOW, ordinary=True)
    assert told.held_since == NOW
    for state in (State.RECOVERING, State.FAILING, State.PAUSED, State.DISABLED):
        told = told.changed(state)
        assert told.answered(State.REFUSING, NOW + 9, ordinary=True).held_since == NOW
    assert told.changed(State.HEALTHY) == Told()


def test_a_hold_that_was_silent_is_told_when_an_ordinary_attempt_fails_in_it() -> None:
    told = Told().answered(State.FAILING, NOW, ordinary=False)
    assert told == Told()
    assert told.answered(State.FAILING, NOW + 1, ordinary=True).held_since == NOW + 1
    # While it recovers nothing is held.
    assert told.answered(State.RECOVERING, NOW + 1, ordinary=True) == Told()


DAYS_3 = 3 * 86400.0


@pytest.mark.parametrize(
    ("stalled_s", "disable_after_s", "expected"),
    [
        (WARN_AFTER_S - 1, DAYS_3, False),
        (WARN_AFTER_S, DAYS_3, True),
        (DAYS_3 - 1, DAYS_3, True),
        (DAYS_3, DAYS_3, False),
        (WARN_AFTER_S, WARN_AFTER_S, False),
        (WARN_AFTER_S, WARN_AFTER_S / 2, False),
    ],
)
def test_a_stall_is_news_after_a_day_unless_it_is_the_end(
    stalled_s: float, disable_after_s: float, expected: bool
) -> None:
    assert Told().may_tell_stall(stalled_s, disable_after_s) is expected
    assert not Told(stalled_at=NOW).may_tell_stall(stalled_s, disable_after_s)


def test_a_stall_lasts_until_every_lane_that_was_in_it_has_had_a_success() -> None:
    told = Told(stalled_at=NOW)
    assert told.looked([NOW - WARN_AFTER_S, NOW + 5]) == told
    assert told.looked([NOW + 1, NOW + 5]) == Told()
    assert told.looked([]) == Told()
    assert Told().looked([]) == Told()


def test_times_from_before_the_clock_was_set_back_are_forgotten() -> None:
    assert Told(NOW + 9, NOW + 9).hold_to(NOW) == Told(NOW, NOW)
    assert Told(NOW - 9).hold_to(NOW) == Told(NOW - 9)
    assert Told().hold_to(NOW) == Told()


class Leader:
    """A leader whose batches take a tenth of a second."""

    def __init__(self) -> None:
        self.lag = Lag()
        self.now = 50.0

    def turns(self, seconds: float, *, full: bool) -> list[Next]:
        found = []
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            found.append(self.lag.turned(self.now, full=full))
        return found


def test_only_batches_that_go_on_being_full_are_looked_into() -> None:
    leader = Leader()
    assert Next.LOOK not in leader.turns(LAGGING_S - 0.5, full=True)
    leader.turns(0.1, full=False)
    assert Next.LOOK not in leader.turns(LAGGING_S - 0.5, full=True)
    looks = leader.turns(5 * LAG_LOOK_EVERY_S, full=True).count(Next.LOOK)
    assert 4 <= looks <= 5


def test_what_was_told_is_over_with_the_first_batch_that_leaves_nothing() -> None:
    leader = Leader()
    # One that led before may have told it.
    assert leader.turns(0.1, full=False) == [Next.END]
    leader.lag.ended()
    assert leader.turns(1, full=False) == [Next.NOTHING] * 10
    assert Next.LOOK in leader.turns(LAGGING_S + 1, full=True)
    leader.lag.told()
    assert set(leader.turns(5, full=True)) == {Next.NOTHING}
    # Until it is written down.
    assert leader.turns(0.2, full=False) == [Next.END, Next.END]
    leader.lag.ended()
    assert Next.LOOK in leader.turns(LAGGING_S + 1, full=True)


def test_who_leads_anew_knows_nothing_of_what_another_one_told() -> None:
    leader = Leader()
    leader.turns(LAGGING_S - 1, full=True)
    leader.lag.ended()
    leader.lag.forget()
    assert Next.LOOK not in leader.turns(LAGGING_S - 1, full=True)
    assert leader.turns(0.1, full=False) == [Next.END]
