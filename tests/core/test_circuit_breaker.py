"""An endpoint's health against any answers in any order, and against wrong rules.

`HealthMachine` lets Hypothesis choose what happens; the mutants are found by
the random histories that the health survives, so the model has teeth.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from outbox.core.delivery.circuit_breaker import FAILURES_MAX, Health, State
from outbox.core.delivery.commands import Gate
from outbox.core.model.response import Verdict
from tests.core.circuit_breaker_model import Endpoint
from tests.core.invariants import Violation
from tests.core.random_walk import hunt_health

lanes = st.integers(0, 5)
bad = st.sampled_from([Verdict.RETRY, Verdict.REFUSED])
uniforms = st.sampled_from([0.0, 0.5, 0.99])


class HealthMachine(RuleBasedStateMachine):
    """Debts, answers, operators and new owners in any order."""

    @initialize(lanes=st.integers(1, 6), owed=st.integers(1, 9))
    def begin(self, lanes: int, owed: int) -> None:
        self.endpoint = Endpoint(lanes)
        for i in range(lanes):
            self.endpoint.offer(i, owed)

    @rule(i=lanes, count=st.integers(1, 5))
    def offer(self, i: int, count: int) -> None:
        self.endpoint.offer(i, count)

    @rule(i=lanes)
    def give_up(self, i: int) -> None:
        self.endpoint.give_up(i)

    @rule(i=lanes)
    def work(self, i: int) -> None:
        self.endpoint.work(i)

    @rule(count=st.integers(2, 6))
    def work_all(self, count: int) -> None:
        for _ in range(count):
            self.endpoint.work(0)

    @rule(i=lanes, u=uniforms)
    def succeed(self, i: int, u: float) -> None:
        self.endpoint.answer(i, Verdict.DELIVERED, u)

    @rule(i=lanes, verdict=bad, u=uniforms)
    def fail(self, i: int, verdict: Verdict, u: float) -> None:
        self.endpoint.answer(i, verdict, u)

    @rule(verdict=bad, times=st.integers(2, 10))
    def storm(self, verdict: Verdict, times: int) -> None:
        for _ in range(times):
            if not self.endpoint.tasks and not self.endpoint.in_flight:
                self.endpoint.jump()
            self.endpoint.work(0)
            self.endpoint.answer(0, verdict)

    @rule(i=lanes, u=uniforms, seconds=st.sampled_from([0.5, 30.0, 3600.0]))
    def retry_after(self, i: int, u: float, seconds: float) -> None:
        self.endpoint.answer(i, Verdict.RETRY, u, seconds)

    @rule(i=lanes)
    def gone(self, i: int) -> None:
        self.endpoint.answer(i, Verdict.REFUSED, gone=True)

    @rule(seconds=st.sampled_from([0.1, 2.0, 20.0]), late=st.booleans())
    def tick(self, seconds: float, late: bool) -> None:
        self.endpoint.tick(seconds, late=late)

    @rule()
    def jump(self) -> None:
        self.endpoint.jump()

    @rule()
    def pause(self) -> None:
        self.endpoint.pause()

    @rule()
    def resume(self) -> None:
        self.endpoint.resume()

    @rule(anew=st.booleans())
    def take_over(self, anew: bool) -> None:
        self.endpoint.take_over(anew=anew)

    @rule(poison=st.none() | lanes)
    def everything_ends(self, poison: int | None) -> None:
        self.endpoint.expect_everything_ends(poison)


TestHealth = HealthMachine.TestCase
TestHealth.settings = settings(max_examples=40)


def test_a_success_that_was_on_its_way_puts_off_no_probe() -> None:
    machine = HealthMachine()
    machine.begin(lanes=2, owed=1)
    machine.work_all(2)
    machine.retry_after(i=0, u=0.5, seconds=0.5)
    machine.everything_ends(None)


def test_trouble_lasts_until_it_is_well_or_somebody_lets_it_go_on() -> None:
    def fail(health: Health, now: float, times: int = FAILURES_MAX) -> None:
        for _ in range(times):
            health.began(1)
            health.answered(Verdict.RETRY, now, 0.5)

    health = Health()
    assert health.troubled_since is None
    fail(health, 10.0)
    assert (health.state, health.troubled_since) == (State.FAILING, 10.0)
    health.began(1)
    health.answered(Verdict.DELIVERED, 20.0, 0.5)
    health.ask(2, 20.0)
    assert (health.state, health.record().since) == (State.RECOVERING, 20.0)
    assert health.troubled_since == 10.0, "it is not well yet"
    health.resume(30.0)
    assert health.troubled_since == 30.0
    taken_over = Health(health.record())
    assert taken_over.troubled_since == 30.0
    taken_over.hold_to(25.0)
    assert taken_over.troubled_since == 25.0


def test_random_histories(seed: int) -> None:
    hunt_health(150, first_seed=seed)


# --------------------------------------------------------------------- mutants


class ProbesTwoAtATime(Health):
    """While it is failing, two heads are probed."""

    def _places(self, now: float) -> int:
        more = self._state is not State.RECOVERING and now >= self._probe_at
        return super()._places(now) + more


class ProbesAllTheTime(Health):
    """It does not wait between probes."""

    def _places(self, now: float) -> int:
        return super()._places(max(now, self._probe_at))


class RecoversAtOnce(Health):
    """After a success everybody may send."""

    def _recover(self, now: float) -> None:
        super()._recover(now)
        self._width = 99


class SlowsDownForNothing(Health):
    """Rounds in which most fail widen it like others."""

    def _answered_in_recovery(self, now: float, *, failed: bool) -> None:
        super()._answered_in_recovery(now, failed=False)


class ProbesOneAgainAndAgain(Health):
    """While it recovers, a head that fails is tried as often as there is a place."""

    def began(self, lane_id: int) -> None:
        super().began(lane_id)
        self._tried.clear()


class KeepsTurns(Health):
    """Who has a turn may send, though it was paused or disabled since."""

    def ask(self, lane_id: int, now: float) -> Gate:
        if self._shut and lane_id in self._turns:
            return Gate.PROBE
        return super().ask(lane_id, now)


class LastComeFirstServed(Health):
    """Lanes do not take turns."""

    def wake(self, now: float) -> list[int]:
        self._waiting = dict.fromkeys(reversed(self._waiting))
        woken = super().wake(now)
        self._waiting = dict.fromkeys(reversed(self._waiting))
        return woken


class SleepsForEver(Health):
    """When to probe next is not told."""

    def wake_at(self) -> float | None:
        at = super().wake_at()
        return None if at == self._probe_at else at


class LosesWhoPasses(Health):
    """A turn that is not used is never given on."""

    def passed(self, lane_id: int) -> bool:
        return False


class EndsEveryRefusal(Health):
    """In a storm, deliveries end as ever."""

    def _refused(self, *what: Any) -> Verdict:
        super()._refused(*what)
        return Verdict.REFUSED


class CountsNoRefusals(Health):
    """A storm is not recognised."""

    def _refused(self, *what: Any) -> Verdict:
        self._refusals = 0
        return super()._refused(*what)


class ForgetsRetryAfter(Health):
    """A success that was in flight ends it."""

    def _succeeded(self, now: float) -> None:
        self._held_until = 0.0
        super()._succeeded(now)


class ForgetsRetryAfterWithItsOwner(Health):
    """A new owner does not know of it."""

    def __init__(self, *what: Any) -> None:
        super().__init__(*what)
        self._held_until = 0.0


class NeverHealthy(Health):
    """It recovers for ever."""

    def _enter(self, state: State, *what: Any) -> None:
        super()._enter(State.RECOVERING if state is State.HEALTHY else state, *what)


@pytest.mark.parametrize(
    ("health", "violation"),
    [
        (ProbesTwoAtATime, "while something is in flight"),
        (ProbesAllTheTime, "too soon"),
        (RecoversAtOnce, "are in flight"),
        (SlowsDownForNothing, "are in flight"),
        (ProbesOneAgainAndAgain, "again and again"),
        (KeepsTurns, "while it is (paused|disabled)"),
        (LastComeFirstServed, "twice while another waits"),
        (SleepsForEver, "nobody wakes"),
        (LosesWhoPasses, "nobody wakes"),
        (EndsEveryRefusal, "in a storm"),
        (CountsNoRefusals, "too many deliveries"),
        (ForgetsRetryAfter, "while it is held"),
        (ForgetsRetryAfterWithItsOwner, "while it is held"),
        (NeverHealthy, "become healthy"),
    ],
)
def test_without_this_rule(health: type[Health], violation: str) -> None:
    with pytest.raises(Violation, match=violation):
        hunt_health(300, health)
