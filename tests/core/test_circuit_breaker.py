"""The circuit breaker against random responses, and against mutants of its rules.

`CircuitBreakerMachine` lets Hypothesis choose the events; the mutants are found by the random
histories that the breaker passes, so these tests prove that the model detects violations.
"""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from outbox.core.delivery.circuit_breaker import (
    FAILURES_MAX,
    PROBE_SHARE,
    BreakerState,
    CircuitBreaker,
)
from outbox.core.delivery.commands import Gate
from outbox.core.model.response_policy import AttemptOutcome
from tests.core import circuit_breaker_model
from tests.core.circuit_breaker_model import Endpoint
from tests.core.invariants import Violation
from tests.core.random_walk import hunt_health

lanes = st.integers(0, 5)
bad = st.sampled_from([AttemptOutcome.RETRY, AttemptOutcome.REFUSED])
uniforms = st.sampled_from([0.0, 0.5, 0.99])


class CircuitBreakerMachine(RuleBasedStateMachine):
    """Pending deliveries, responses, operator actions and new owners in any order."""

    @initialize(lanes=st.integers(1, 6), pending=st.integers(1, 9))
    def begin(self, lanes: int, pending: int) -> None:
        self.endpoint = Endpoint(lanes)
        for i in range(lanes):
            self.endpoint.offer(i, pending)

    @rule(i=lanes, count=st.integers(1, 5))
    def offer(self, i: int, count: int) -> None:
        self.endpoint.offer(i, count)

    @rule(i=lanes)
    def expire_pending(self, i: int) -> None:
        self.endpoint.expire_pending(i)

    @rule(i=lanes)
    def work(self, i: int) -> None:
        self.endpoint.work(i)

    @rule(count=st.integers(2, 6))
    def work_all(self, count: int) -> None:
        for _ in range(count):
            self.endpoint.work(0)

    @rule(i=lanes, u=uniforms)
    def succeed(self, i: int, u: float) -> None:
        self.endpoint.response(i, AttemptOutcome.DELIVERED, u)

    @rule(i=lanes, outcome=bad, u=uniforms)
    def fail(self, i: int, outcome: AttemptOutcome, u: float) -> None:
        self.endpoint.response(i, outcome, u)

    @rule(outcome=bad, times=st.integers(2, 10))
    def storm(self, outcome: AttemptOutcome, times: int) -> None:
        for _ in range(times):
            if not self.endpoint.tasks and not self.endpoint.in_flight:
                self.endpoint.jump()
            self.endpoint.work(0)
            self.endpoint.response(0, outcome)

    @rule(i=lanes, u=uniforms, seconds=st.sampled_from([0.5, 30.0, 3600.0]))
    def retry_after(self, i: int, u: float, seconds: float) -> None:
        self.endpoint.response(i, AttemptOutcome.RETRY, u, seconds)

    @rule(i=lanes)
    def gone(self, i: int) -> None:
        self.endpoint.response(i, AttemptOutcome.REFUSED, gone=True)

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


TestHealth = CircuitBreakerMachine.TestCase


def test_a_success_in_flight_does_not_delay_a_probe() -> None:
    machine = CircuitBreakerMachine()
    machine.begin(lanes=2, pending=1)
    machine.work_all(2)
    machine.retry_after(i=0, u=0.5, seconds=0.5)
    machine.everything_ends(None)


def test_unhealthy_since_is_reset_by_health_or_resume() -> None:
    def fail(health: CircuitBreaker, now: float, times: int = FAILURES_MAX) -> None:
        for _ in range(times):
            health.started(1)
            health.record_result(AttemptOutcome.RETRY, now, 0.5)

    health = CircuitBreaker()
    assert health.unhealthy_since is None
    fail(health, 10.0)
    assert (health.state, health.unhealthy_since) == (BreakerState.FAILING, 10.0)
    health.started(1)
    health.record_result(AttemptOutcome.DELIVERED, 20.0, 0.5)
    health.admit(2, 20.0)
    assert (health.state, health.record().since) == (BreakerState.RECOVERING, 20.0)
    assert health.unhealthy_since == 10.0, "it is not well yet"
    health.resume(30.0)
    assert health.unhealthy_since == 30.0
    taken_over = CircuitBreaker(health.record())
    assert taken_over.unhealthy_since == 30.0
    taken_over.clamp_times(25.0)
    assert taken_over.unhealthy_since == 25.0


OUTAGE_S = 65.0


@pytest.fixture
def _far_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The deliveries' own retries may be an hour away; only probes find the end of an outage."""
    monkeypatch.setattr(circuit_breaker_model, "RETRY_MAX_S", 3600.0)


def recovery_s(
    lanes: int, resumed_after_s: float, health: type[CircuitBreaker] = CircuitBreaker
) -> float:
    """Time from the end of an outage until all lanes are drained, in seconds.

    Args:
        resumed_after_s: when an operator pauses and resumes the endpoint.
    """
    endpoint = Endpoint(lanes, health)
    ends_at, resumes_at = endpoint.now + OUTAGE_S, endpoint.now + resumed_after_s
    for i in range(lanes):
        endpoint.offer(i, 3)
    while any(lane.pending for lane in endpoint.lanes):
        if endpoint.now >= resumes_at:
            resumes_at = inf
            endpoint.pause()
            endpoint.resume()
        if endpoint.tasks:
            endpoint.work(0)
        elif endpoint.in_flight:
            is_down = endpoint.now < ends_at
            endpoint.response(0, AttemptOutcome.RETRY if is_down else AttemptOutcome.DELIVERED)
        else:
            assert endpoint.jump(), "no timer is left"
    return endpoint.now - ends_at


@pytest.mark.usefixtures("_far_retries")
@pytest.mark.parametrize("lanes", [1, 2, 8])
@pytest.mark.parametrize("resumed_after_s", [inf, 5.0, 20.0, 64.0])
def test_a_resume_during_an_outage_does_not_delay_its_end(
    lanes: int, resumed_after_s: float
) -> None:
    assert recovery_s(lanes, resumed_after_s) <= PROBE_SHARE * OUTAGE_S


def test_random_histories(seed: int) -> None:
    hunt_health(2 * settings().max_examples, first_seed=seed)


# --------------------------------------------------------------------- mutants


class ProbesConcurrently(CircuitBreaker):
    """Probes two heads while it is failing."""

    def _free_slots(self, now: float) -> int:
        more = self._state is not BreakerState.RECOVERING and now >= self._probe_at
        return super()._free_slots(now) + more


class ProbesWithoutDelay(CircuitBreaker):
    """Does not wait between probes."""

    def _free_slots(self, now: float) -> int:
        return super()._free_slots(max(now, self._probe_at))


class RecoversImmediately(CircuitBreaker):
    """Lets every lane send after one success."""

    def _recover(self, now: float) -> None:
        super()._recover(now)
        self._width = 99


class WidensAfterFailedRounds(CircuitBreaker):
    """Doubles the width after a round in which most requests fail."""

    def _record_recovery(self, now: float, *, failed: bool) -> None:
        super()._record_recovery(now, failed=False)


class ProbesFailingHeadRepeatedly(CircuitBreaker):
    """Probes a failing head as often as a slot is free while it recovers."""

    def started(self, lane_id: int) -> None:
        super().started(lane_id)
        self._tried_lanes.clear()


class KeepsStaleGrants(CircuitBreaker):
    """Admits a lane with a grant although the endpoint was paused or disabled since."""

    def admit(self, lane_id: int, now: float) -> Gate:
        if self._is_shut and lane_id in self._admitted:
            return Gate.PROBE
        return super().admit(lane_id, now)


class ServesLastInFirstOut(CircuitBreaker):
    """Serves waiting lanes last in, first out."""

    def wake(self, now: float) -> list[int]:
        self.waiting = dict.fromkeys(reversed(self.waiting))
        woken = super().wake(now)
        self.waiting = dict.fromkeys(reversed(self.waiting))
        return woken


class HidesWakeTime(CircuitBreaker):
    """Does not report the time of the next probe."""

    def wake_at(self) -> float | None:
        at = super().wake_at()
        return None if at == self._probe_at else at


class LosesUnusedGrants(CircuitBreaker):
    """Never passes on an unused grant."""

    def yielded(self, lane_id: int) -> bool:
        return False


class DeadLettersEveryRefusal(CircuitBreaker):
    """Dead-letters refused deliveries during a refusal storm."""

    def _record_refusal(self, *args: Any) -> AttemptOutcome:
        super()._record_refusal(*args)
        return AttemptOutcome.REFUSED


class IgnoresRefusalStorm(CircuitBreaker):
    """Does not detect a refusal storm."""

    def _record_refusal(self, *args: Any) -> AttemptOutcome:
        self._refusals = 0
        return super()._record_refusal(*args)


class ForgetsRetryAfter(CircuitBreaker):
    """Ends a Retry-After hold-off at a success that was in flight."""

    def _record_success(self, now: float) -> None:
        self._held_until = 0.0
        super()._record_success(now)


class ForgetsRetryAfterOnTakeover(CircuitBreaker):
    """Does not pass the Retry-After hold-off to a new owner."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._held_until = 0.0


class TrustsResume(CircuitBreaker):
    """Leaves probing to the lanes' own retries after a resume."""

    def resume(self, now: float) -> None:
        super().resume(now)
        self._unproven = False


class NeverCloses(CircuitBreaker):
    """Never leaves the recovering state."""

    def _enter(self, state: BreakerState, *args: Any) -> None:
        super()._enter(BreakerState.RECOVERING if state is BreakerState.HEALTHY else state, *args)


@pytest.mark.parametrize(
    ("health", "violation"),
    [
        (ProbesConcurrently, "while something is in flight"),
        (ProbesWithoutDelay, "too soon"),
        (RecoversImmediately, "are in flight"),
        (WidensAfterFailedRounds, "are in flight"),
        (ProbesFailingHeadRepeatedly, "again and again"),
        (KeepsStaleGrants, "while it is (paused|disabled)"),
        (ServesLastInFirstOut, "twice while another waits"),
        (HidesWakeTime, "no timer wakes"),
        (LosesUnusedGrants, "no timer wakes"),
        (DeadLettersEveryRefusal, "in a storm"),
        (IgnoresRefusalStorm, "too many deliveries"),
        (ForgetsRetryAfter, "while it is held"),
        (ForgetsRetryAfterOnTakeover, "while it is held"),
        (NeverCloses, "become healthy"),
    ],
)
def test_a_breaker_without_this_rule_violates_the_model(
    health: type[CircuitBreaker], violation: str
) -> None:
    with pytest.raises(Violation, match=violation):
        hunt_health(300, health)


@pytest.mark.usefixtures("_far_retries")
def test_a_breaker_that_trusts_a_resume_delays_the_end_of_an_outage() -> None:
    assert recovery_s(1, 20.0, TrustsResume) > PROBE_SHARE * OUTAGE_S
