"""Observed time: marks, additions, and the grace period of an owner."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from outbox.core.cluster.observed_time import (
    GRACE_PERIOD_S_MAX,
    GRACE_RESPONSES,
    MARK_EVERY_S,
    GracePeriod,
    Odometer,
    OdometerAdder,
)
from outbox.core.model.retry_policy import PRESETS, RetryPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

DAY_S = 86400.0
NOON = 1_700_000_000.0


class Hours:
    """The database's clock and the odometer of some hours, second by second."""

    def __init__(self) -> None:
        self.odometer = Odometer()
        self.now = NOON
        self.observed_s = 0.0
        self._marked = (0.0, NOON)
        self._stopped = False
        self.odometer.update(0.0, [self._marked])

    def run(self, seconds: int) -> None:
        """A relay runs, which renews its lease each second."""
        if self._stopped:
            self._mark()
        self._stopped = False
        for _ in range(seconds):
            self.now += 1
            self.observed_s += 1
            is_back = self._marked[1] + self.observed_s - self._marked[0] - 1 > self.now
            if is_back or self.observed_s >= self._marked[0] + MARK_EVERY_S:
                self._mark()
            else:
                self.odometer.update(self.observed_s, [])

    def step(self, seconds: float) -> None:
        """No relay runs, and maybe the clock is set."""
        self.set(seconds)
        self._stopped = True

    def set(self, seconds: float) -> None:
        """The clock is set while a relay runs."""
        self.now += seconds

    def _mark(self) -> None:
        self._marked = (self.observed_s, self.now)
        self.odometer.update(self.observed_s, [self._marked])


def test_time_in_which_no_relay_ran_does_not_count() -> None:
    hours = Hours()
    hours.run(100)
    failed_at = hours.now
    hours.run(30)
    assert hours.odometer.since(failed_at) == 30
    hours.step(4 * DAY_S)
    assert hours.odometer.since(failed_at) == 30
    hours.run(45)
    assert hours.odometer.since(failed_at) == 75
    assert hours.odometer.since(hours.now - 45) == 45
    assert hours.odometer.since(hours.now) == hours.odometer.since(hours.now + DAY_S) == 0


def test_times_before_the_first_mark_count_from_it() -> None:
    assert Odometer().since(NOON) == 0
    hours = Hours()
    hours.run(200)
    assert hours.odometer.since(NOON - 4 * DAY_S) == 200
    assert hours.odometer.between(NOON - 4 * DAY_S, hours.now) == 200


def test_a_clock_that_is_set_back_counts_too_little_and_never_too_much() -> None:
    hours = Hours()
    hours.run(3600)
    before = hours.now - 10
    hours.step(-DAY_S)
    hours.run(3600)
    assert hours.odometer.since(hours.now - 600) == 600
    assert hours.odometer.since(before) == 0, "its hour comes again"
    hours.step(DAY_S)
    hours.run(60)
    assert 0 <= hours.odometer.since(before) <= 3670


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("run"), st.integers(0, 400)),
        st.tuples(
            st.sampled_from(["step", "set"]),
            st.sampled_from([-DAY_S, -3600.0, -30.0, 30.0, 5000.0, DAY_S]),
        ),
    ),
    max_size=12,
)


def _observed_too_much(steps: Sequence[tuple[str, float]], odometer: type[Odometer]) -> float:
    """By how much the odometer exceeds what was observed since any stored time."""
    hours = Hours()
    hours.odometer = odometer()
    hours.odometer.update(0.0, [(0.0, NOON)])
    stored: list[tuple[float, float]] = []
    for kind, seconds in steps:
        if kind != "run":
            getattr(hours, kind)(seconds)
            continue
        for _ in range(int(seconds) // 20):
            hours.run(20)
            stored.append((hours.now, hours.observed_s))
    return max(
        (hours.odometer.since(at) - (hours.observed_s - was) for at, was in stored), default=0.0
    )


@given(STEPS)
@example([("run", 80), ("set", -15.0), ("run", 400)])
def test_no_step_of_the_clock_makes_a_time_older(steps: list[tuple[str, float]]) -> None:
    # A mark shows a step back in the next renewal, a second later.
    assert _observed_too_much(steps, Odometer) <= 1


class FirstPass(Odometer):
    """Keeps the earlier marks of hours that are repeated."""

    def update(self, observed_s: float, marks: Sequence[tuple[float, float]]) -> None:  # type: ignore[override]
        self.observed_s = observed_s
        for reading, at in marks:
            if not self._times or at > self._times[-1]:
                self._readings.append(reading)
                self._times.append(at)


class WallClock(Odometer):
    """Counts the wall clock since a stored time."""

    def since(self, at: float) -> float:
        return self._times[-1] - at


@pytest.mark.parametrize("mutant", [FirstPass, WallClock])
def test_a_wrong_lookup_counts_too_much(mutant: type[Odometer]) -> None:
    steps = [("run", 400), ("step", -3600.0), ("run", 400), ("step", DAY_S), ("run", 100)]
    assert _observed_too_much(steps, Odometer) <= 0
    assert _observed_too_much(steps, mutant) > 0


# ---------------------------------------------------------------------- additions


class Row:
    """The odometer's row: only its adder adds, and another one replaces it when it has ended."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.adder: int | None = None
        self.ended: set[int] = set()

    def renew(self, me: int, addition_s: float | None) -> bool:
        free = self.adder is None or self.adder in self.ended
        if self.adder != me and not (addition_s is None and free):
            return False
        self.adder = me
        self.seconds += addition_s or 0.0
        return True


def _alternating(adder: Callable[[], OdometerAdder]) -> tuple[float, float]:
    """Two replicas, of which one ends a moment after each renewal; (counted, real seconds)."""
    row, now, replicas = Row(), 0.0, {1: adder(), 2: adder()}
    for n in range(40):
        for me, counter in replicas.items():
            now += 0.5
            started_at = now
            added = row.renew(me, counter.addition_s(started_at))
            counter.renewed(started_at, started_at + 0.01, adds=added)
        if n % 3 == 2:
            ended = row.adder
            assert ended is not None
            row.ended.add(ended)
            replicas.pop(ended)
            replicas[ended + 2] = adder()
    return row.seconds, now


class CountsFromItsLastRenewal(OdometerAdder):
    """A new adder counts from its last renewal."""

    __slots__ = ("_renewed_at",)

    def renewed(self, started_at: float, responded_at: float, *, adds: bool) -> None:
        last = getattr(self, "_renewed_at", started_at)
        counts = self._counted_until is not None
        self._counted_until = (started_at if counts else last) if adds else None
        self._renewed_at = started_at


def test_two_replicas_that_alternate_never_count_more_than_real_time() -> None:
    seconds, real_s = _alternating(lambda: OdometerAdder(2.0))
    assert 0.3 * real_s < seconds <= real_s - 40 / 3 * 0.5
    overlapping, _ = _alternating(lambda: CountsFromItsLastRenewal(2.0))
    assert overlapping > seconds + 5


def test_a_frozen_adder_adds_no_more_than_two_intervals() -> None:
    adder = OdometerAdder(2.0)
    assert adder.addition_s(5.0) is None
    adder.renewed(5.0, 5.5, adds=True)
    assert adder.addition_s(6.0) == 0.5
    adder.renewed(6.0, 6.9, adds=True)
    assert adder.addition_s(7.0) == 1.0, "from start to start"
    assert adder.addition_s(66.0) == 2.0
    assert adder.addition_s(1.0) == 0.0
    adder.renewed(66.0, 66.1, adds=False)
    assert adder.addition_s(67.0) is None


# ------------------------------------------------------------------- grace period


def _grace(responses: int, began_s: float = 100.0) -> GracePeriod:
    grace = GracePeriod(began_s)
    for _ in range(responses):
        grace.responses += 1
    return grace


def test_nothing_ends_before_an_owner_has_tried_for_a_while() -> None:
    policy, limit_s = PRESETS["standard"], 3 * DAY_S
    assert policy.longest_delay_s > GRACE_PERIOD_S_MAX
    assert not _grace(GRACE_RESPONSES - 1).is_over(policy, limit_s, 1e9)
    assert not _grace(GRACE_RESPONSES).is_over(policy, limit_s, 699.0)
    assert _grace(GRACE_RESPONSES).is_over(policy, limit_s, 700.0)
    # As long as the longest back-off step, or the limit itself, if that is shorter.
    assert _grace(GRACE_RESPONSES).is_over(PRESETS["fast"], limit_s, 160.0)
    assert not _grace(GRACE_RESPONSES).is_over(PRESETS["fast"], limit_s, 159.0)
    assert _grace(GRACE_RESPONSES).is_over(policy, 5.0, 105.0)
    # A delivery of one attempt is not tried five times.
    once = RetryPolicy(base_s=0.0, attempts_max=1)
    assert _grace(1).is_over(once, limit_s, 100.0)
    # Without probes, an owner may get no second response for hours.
    assert _grace(1).is_over(policy, limit_s, 700.0, probes=False)
    assert not _grace(0).is_over(policy, limit_s, 700.0, probes=False)
    assert not _grace(0).is_over(once, limit_s, 100.0)
