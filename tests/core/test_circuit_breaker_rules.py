"""The rules of `outbox.core.delivery.circuit_breaker`, one test each."""

from __future__ import annotations

from itertools import pairwise

import pytest

from outbox.core.delivery.circuit_breaker import (
    FAILURES_MAX,
    PROBE_MAX_S,
    REFUSALS_MAX,
    BreakerRecord,
    BreakerState,
    CircuitBreaker,
)
from outbox.core.delivery.commands import Gate
from outbox.core.model.response_policy import AttemptOutcome

NOW = 1_700_000_000.0
OK, FAILED, REFUSED = AttemptOutcome.DELIVERED, AttemptOutcome.RETRY, AttemptOutcome.REFUSED
SHUT, OPEN, PROBE = Gate.SHUT, Gate.OPEN, Gate.PROBE
HEALTHY, FAILING, REJECTING, RECOVERING = (
    BreakerState.HEALTHY,
    BreakerState.FAILING,
    BreakerState.REJECTING,
    BreakerState.RECOVERING,
)


def responses(
    health: CircuitBreaker, *outcomes: AttemptOutcome, now: float = NOW, u: float = 0.0
) -> list[AttemptOutcome]:
    """Record responses to consecutive requests of one lane, whatever the gate is."""
    got = []
    for outcome in outcomes:
        health.started(0)
        got.append(health.record_result(outcome, now, u, last_response={"status": outcome.value}))
    return got


def in_state(state: BreakerState, u: float = 0.0) -> CircuitBreaker:
    """Return a breaker that has just entered its state, with nothing in flight."""
    health = CircuitBreaker()
    if state is REJECTING:
        responses(health, *[REFUSED] * REFUSALS_MAX, u=u)
    elif state is not HEALTHY:
        responses(health, *[FAILED] * FAILURES_MAX, u=u)
    if state is RECOVERING:
        responses(health, OK)
    assert health.state is state
    return health


def gates(health: CircuitBreaker, lanes: int, now: float = NOW) -> list[Gate]:
    """Return the gates of the lanes; lanes that may send do."""
    allowed = []
    for lane_id in range(1, lanes + 1):
        allowed.append(health.admit(lane_id, now))
        if allowed[-1] is not SHUT:
            health.started(lane_id)
    return allowed


def sent(health: CircuitBreaker, now: float) -> list[int]:
    """Return the woken lanes, which immediately ask and send."""
    woken = health.wake(now)
    for lane_id in woken:
        assert health.admit(lane_id, now) is not SHUT
        health.started(lane_id)
    return woken


# ------------------------------------------------------------------- opening


def test_all_lanes_of_a_healthy_endpoint_may_send() -> None:
    assert gates(CircuitBreaker(), 20) == [OPEN] * 20


@pytest.mark.parametrize(
    ("outcomes", "state"),
    [
        ([FAILED] * 4, HEALTHY),
        ([FAILED] * 5, FAILING),
        ([FAILED] * 4 + [OK] + [FAILED] * 4, HEALTHY),
        ([FAILED] * 4 + [REFUSED] + [FAILED] * 4, HEALTHY),
        ([FAILED] * 4 + [REFUSED] + [FAILED] * 5, FAILING),
        ([REFUSED] * 9, HEALTHY),
        ([REFUSED] * 10, REJECTING),
        ([REFUSED] * 9 + [OK] + [REFUSED] * 9, HEALTHY),
        ([REFUSED] * 9 + [OK] + [REFUSED] * 10, REJECTING),
    ],
)
def test_only_consecutive_failures_open_the_breaker(
    outcomes: list[AttemptOutcome], state: BreakerState
) -> None:
    health = CircuitBreaker()
    responses(health, *outcomes)
    assert health.state is state


def test_the_record_contains_the_time_and_the_last_response() -> None:
    health = CircuitBreaker()
    responses(health, *[FAILED] * 4)
    assert health.record() == BreakerRecord()
    responses(health, FAILED, now=NOW + 5)
    assert health.record() == BreakerRecord(FAILING, NOW + 5, None, {"status": "retry"})
    responses(health, FAILED, now=NOW + 9)
    assert health.record().since == NOW + 5
    responses(health, OK, OK, now=NOW + 10)
    assert health.record() == BreakerRecord(HEALTHY, NOW + 10)


# -------------------------------------------------------------------- probes


def probes(health: CircuitBreaker, bad: AttemptOutcome, u: float, seconds: float) -> list[float]:
    """Return the times of probes in this period in seconds, if every probe fails immediately."""
    now, at = NOW, []
    assert health.admit(1, now) is SHUT
    while True:
        due = health.wake_at()
        assert due is not None
        if due > NOW + seconds:
            return at
        assert health.wake(due - 1e-6) == []
        now = due
        assert sent(health, now) == [1]
        health.record_result(bad, now, u)
        assert health.admit(1, now) is SHUT
        at.append(now)


@pytest.mark.parametrize("state", [FAILING, REJECTING])
@pytest.mark.parametrize("u", [0.0, 0.25, 0.9])
def test_recovery_is_detected_within_a_tenth_of_the_outage(state: BreakerState, u: float) -> None:
    """Never earlier than the jitter allows, within a second at first, and later within a minute."""
    at = [NOW, *probes(in_state(state, u), FAILED if state is FAILING else REFUSED, u, 3600)]
    for before, after in pairwise(at):
        longest = min(max(1.0, (before - NOW) / 10), PROBE_MAX_S)
        assert after - before == pytest.approx((1 - u) * longest, rel=0.01)


def test_a_long_outage_is_probed_rarely() -> None:
    assert len(probes(in_state(FAILING, 0.5), FAILED, 0.5, 60)) < 70
    assert len(probes(in_state(FAILING, 0.5), FAILED, 0.5, 3600)) < 250


def test_a_probe_is_never_immediate() -> None:
    at = [NOW, *probes(in_state(FAILING, 0.999_999), FAILED, 0.999_999, 0.0001)]
    assert len(at) > 2
    assert all(after > before for before, after in pairwise(at))


def test_a_new_owner_keeps_the_probe_interval_of_a_long_outage() -> None:
    health = CircuitBreaker(BreakerRecord(FAILING, NOW - 100))
    assert gates(health, 1) == [PROBE]
    health.record_result(FAILED, NOW, 0.0)
    assert health.admit(1, NOW) is SHUT
    assert health.wake_at() == NOW + 10


@pytest.mark.parametrize("state", [FAILING, REJECTING])
def test_one_head_at_a_time_is_probed(state: BreakerState) -> None:
    health = in_state(state)
    assert gates(health, 3) == [SHUT] * 3
    assert sent(health, NOW + 1) == [1]
    assert health.wake(NOW + 99) == []
    assert health.admit(4, NOW + 99) is SHUT
    assert health.wake_at() is None


def test_requests_in_flight_at_opening_end_before_a_probe() -> None:
    health = CircuitBreaker()
    assert gates(health, 7) == [OPEN] * 7
    for _ in range(5):
        health.record_result(FAILED, NOW, 0.0)
    assert health.admit(1, NOW) is SHUT
    assert health.wake(NOW + 99) == []
    health.record_result(FAILED, NOW, 0.0)
    assert health.wake(NOW + 99) == []
    health.record_result(FAILED, NOW, 0.0)
    assert sent(health, NOW + 99) == [1]


@pytest.mark.parametrize("state", [FAILING, REJECTING])
def test_lanes_are_probed_in_rotation(state: BreakerState) -> None:
    health = in_state(state)
    assert gates(health, 3) == [SHUT] * 3
    now, turns = NOW, []
    for _ in range(7):
        now = health.wake_at() or 0.0
        [lane_id] = sent(health, now)
        turns.append(lane_id)
        health.record_result(FAILED, now, 0.0)
        assert health.admit(lane_id, now + 99) is SHUT  # The other lanes came first.
    assert turns == [1, 2, 3, 1, 2, 3, 1]


def test_a_lane_is_admitted_when_a_probe_is_due_and_no_lane_waits() -> None:
    health = in_state(FAILING)
    assert health.admit(1, NOW + 1) is PROBE
    assert health.admit(1, NOW + 1) is PROBE
    assert health.admit(2, NOW + 1) is SHUT


def test_an_unused_grant_passes_to_the_next_lane() -> None:
    health = in_state(FAILING)
    gates(health, 2)
    assert health.wake(NOW + 1) == [1]
    assert health.wake(NOW + 1) == []
    assert health.wake_at() is None
    assert health.yielded(1)
    assert not health.yielded(1)
    assert health.wake(NOW + 1) == [2]


# ------------------------------------------------------------------ refusals


def test_nine_refusals_are_dead_lettered_and_the_tenth_is_retained() -> None:
    assert responses(CircuitBreaker(), *[REFUSED] * 12) == [REFUSED] * 9 + [FAILED] * 3


def test_a_success_ends_a_refusal_storm() -> None:
    health = in_state(REJECTING)
    assert responses(health, FAILED, REFUSED, FAILED) == [FAILED] * 3
    assert health.state is REJECTING
    assert responses(health, OK, *[REFUSED] * 10) == [OK] + [REFUSED] * 9 + [FAILED]


def test_failures_become_a_refusal_storm() -> None:
    health = in_state(FAILING)
    assert responses(health, *[REFUSED] * 10) == [REFUSED] * 9 + [FAILED]
    assert health.state is REJECTING


# ---------------------------------------------------------------- recovering


@pytest.mark.parametrize(
    ("state", "outcome", "then"),
    [
        (FAILING, OK, RECOVERING),
        (FAILING, REFUSED, RECOVERING),
        (FAILING, FAILED, FAILING),
        (REJECTING, OK, RECOVERING),
        (REJECTING, REFUSED, REJECTING),
        (REJECTING, FAILED, REJECTING),
        (RECOVERING, OK, HEALTHY),
        (RECOVERING, REFUSED, RECOVERING),
        (RECOVERING, FAILED, RECOVERING),
    ],
)
def test_transitions_after_one_response(
    state: BreakerState, outcome: AttemptOutcome, then: BreakerState
) -> None:
    health = in_state(state)
    responses(health, outcome)
    assert health.state is then


def test_every_successful_round_doubles_the_width() -> None:
    health = in_state(RECOVERING)
    assert gates(health, 20) == [PROBE] + [SHUT] * 19
    widths = [1]
    for _ in range(3):
        for _ in range(widths[-1]):
            health.record_result(OK, NOW, 0.0)
        widths.append(len(sent(health, NOW)))
    assert widths == [1, 2, 4, 8]
    assert health.state is RECOVERING


def test_a_round_without_waiting_lanes_closes_the_breaker() -> None:
    health = in_state(RECOVERING)
    assert gates(health, 2) == [PROBE, SHUT]
    health.record_result(OK, NOW, 0.0)
    assert sent(health, NOW) == [2]
    health.record_result(OK, NOW, 0.0)
    assert health.state is RECOVERING
    health.started(1)
    health.record_result(OK, NOW, 0.0)
    assert health.state is HEALTHY


def test_a_round_in_which_most_fail_halves_the_width() -> None:
    health = in_state(RECOVERING)
    gates(health, 20)
    health.record_result(OK, NOW, 0.0)
    for _ in sent(health, NOW):
        health.record_result(OK, NOW, 0.0)
    assert len(sent(health, NOW)) == 4
    for outcome in (OK, FAILED, FAILED, FAILED):
        health.record_result(outcome, NOW, 0.0)
    assert len(sent(health, NOW)) == 2


def test_occasional_failures_do_not_prevent_recovery() -> None:
    health = in_state(RECOVERING)
    gates(health, 20)
    health.record_result(OK, NOW, 0.0)
    for _ in sent(health, NOW):
        health.record_result(OK, NOW, 0.0)
    assert len(sent(health, NOW)) == 4
    for outcome in (OK, FAILED, FAILED, OK):
        health.record_result(outcome, NOW, 0.0)
    assert len(sent(health, NOW)) == 8


def test_five_failures_while_recovering_reopen_the_breaker() -> None:
    health = in_state(RECOVERING)
    responses(health, *[FAILED] * 4)
    assert health.state is RECOVERING
    responses(health, FAILED)
    assert health.state is FAILING


def test_a_lane_is_probed_once_while_recovering_and_then_follows_its_retry_schedule() -> None:
    health = in_state(RECOVERING)
    assert health.admit(1, NOW) is PROBE
    health.started(1)
    health.record_result(FAILED, NOW, 0.0)
    assert health.admit(1, NOW) is OPEN
    assert health.yielded(1)
    assert health.admit(2, NOW) is PROBE


@pytest.mark.parametrize("outcome", [FAILED, REFUSED])
def test_outstanding_grants_are_void_when_the_breaker_opens(outcome: AttemptOutcome) -> None:
    health = in_state(RECOVERING)
    gates(health, 4)
    health.record_result(OK, NOW, 0.0)
    assert health.wake(NOW) == [2, 3]
    responses(health, *[outcome] * 10)
    assert health.state is (FAILING if outcome is FAILED else REJECTING)
    assert health.admit(2, NOW) is SHUT
    assert sent(health, NOW + 99) == [4]


# --------------------------------------------------------------- Retry-After


@pytest.mark.parametrize("state", [HEALTHY, FAILING, REJECTING, RECOVERING])
def test_retry_after_holds_the_endpoint(state: BreakerState) -> None:
    health = in_state(state)
    health.started(0)
    health.record_result(FAILED, NOW, 0.0, retry_after_s=1000)
    assert health.state is (REJECTING if state is REJECTING else FAILING)
    assert health.record().held_until == NOW + 1000
    assert gates(health, 3, NOW + 999) == [SHUT] * 3
    assert health.wake(NOW + 999) == []
    assert health.wake_at() == NOW + 1000
    assert sent(health, NOW + 1000) == [1]


def test_successes_in_flight_do_not_end_a_retry_after() -> None:
    health = CircuitBreaker()
    assert gates(health, 3) == [OPEN] * 3
    health.record_result(FAILED, NOW, 0.0, retry_after_s=1000)
    for _ in range(2):
        health.record_result(OK, NOW + 1, 0.0)
    assert health.state is FAILING
    assert gates(health, 3, NOW + 999) == [SHUT] * 3
    assert sent(health, NOW + 1000) == [1]
    health.record_result(OK, NOW + 1000, 0.0)
    assert sent(health, NOW + 1000) == [2]


def test_refusals_in_flight_do_not_end_a_retry_after() -> None:
    health = CircuitBreaker()
    assert gates(health, 2) == [OPEN] * 2
    health.record_result(FAILED, NOW, 0.0, retry_after_s=1000)
    health.record_result(REFUSED, NOW + 1, 0.0)
    assert gates(health, 3, NOW + 999) == [SHUT] * 3
    assert health.wake_at() == NOW + 1000
    assert sent(health, NOW + 1000) == [1]


def test_the_longest_retry_after_applies() -> None:
    health = CircuitBreaker()
    assert gates(health, 2) == [OPEN] * 2
    health.record_result(FAILED, NOW, 0.0, retry_after_s=1000)
    health.record_result(FAILED, NOW + 1, 0.0, retry_after_s=5)
    assert health.record().held_until == NOW + 1000


def test_an_expired_hold_off_does_not_return_when_the_clock_is_set_back() -> None:
    health = CircuitBreaker()
    responses(health, FAILED)
    health.started(0)
    health.record_result(FAILED, NOW, 0.0, retry_after_s=10)
    responses(health, OK, now=NOW + 20)
    assert health.record().held_until is None


# ----------------------------------------------------------------- operators


def test_a_410_disables_the_endpoint() -> None:
    health = CircuitBreaker()
    assert health.admit(1, NOW) is OPEN
    health.started(1)
    assert (
        health.record_result(REFUSED, NOW, 0.0, gone=True, last_response={"status": 410}) is REFUSED
    )
    assert health.state is BreakerState.DISABLED
    assert gates(health, 3, NOW + 1e6) == [SHUT] * 3
    assert health.wake(NOW + 1e6) == []
    assert health.wake_at() is None
    assert health.record().last_response == {"status": 410}


@pytest.mark.parametrize("state", [HEALTHY, FAILING, REJECTING, RECOVERING])
def test_a_paused_endpoint_recovers_after_it_is_resumed(state: BreakerState) -> None:
    health = in_state(state)
    health.started(0)
    health.record_result(FAILED, NOW, 0.0, retry_after_s=1000)
    health.pause()
    assert health.state is BreakerState.PAUSED
    assert gates(health, 3, NOW + 1e6) == [SHUT] * 3
    assert health.wake(NOW + 1e6) == []
    assert health.wake_at() is None
    health.resume(NOW + 1)
    assert health.state is RECOVERING
    assert health.record().held_until is None
    assert sent(health, NOW + 1) == [1]


def test_responses_count_while_the_endpoint_is_paused() -> None:
    health = CircuitBreaker()
    assert gates(health, 2) == [OPEN] * 2
    health.pause()
    assert health.record_result(OK, NOW, 0.0) is OK
    health.resume(NOW)
    assert health.admit(1, NOW) is SHUT
    assert health.record_result(OK, NOW, 0.0) is OK
    assert sent(health, NOW) == [1]


def test_the_first_failure_after_a_resume_ends_the_recovery() -> None:
    health = CircuitBreaker()
    responses(health, *[FAILED] * 4)
    health.resume(NOW)
    responses(health, FAILED)
    assert health.state is FAILING


@pytest.mark.parametrize("state", [FAILING, REJECTING])
def test_an_outage_lasts_since_before_a_resume_that_fails(state: BreakerState) -> None:
    health = in_state(state)
    for resumed_at in (NOW + 100, NOW + 200):
        health.resume(resumed_at)
        assert health.record().since == resumed_at
        responses(health, FAILED, now=resumed_at + 1)
        assert (health.state, health.record().since) == (FAILING, NOW)


def test_an_outage_after_a_proven_recovery_is_another_one() -> None:
    health = in_state(FAILING)
    health.resume(NOW + 100)
    responses(health, OK, now=NOW + 101)
    responses(health, *[FAILED] * FAILURES_MAX, now=NOW + 300)
    assert (health.state, health.record().since) == (FAILING, NOW + 300)
    # Nor is it remembered when a later resume meets only failures that opened nothing.
    responses(health, OK, OK, now=NOW + 400)
    assert health.state is not FAILING
    responses(health, FAILED, now=NOW + 500)
    health.resume(NOW + 500)
    responses(health, FAILED, now=NOW + 501)
    assert (health.state, health.record().since) == (FAILING, NOW + 501)


def test_probes_are_frequent_again_after_a_resume_that_fails() -> None:
    health = in_state(FAILING)
    health.resume(NOW + 10_000)
    responses(health, FAILED, now=NOW + 10_001)
    health.admit(1, NOW + 10_001)
    assert (health.wake_at() or 0) <= NOW + 10_002


def test_a_failure_after_a_resume_of_a_healthy_endpoint_does_not_hold_it() -> None:
    health = CircuitBreaker()
    health.pause()
    health.resume(NOW)
    responses(health, FAILED)
    assert health.state is RECOVERING


def test_a_request_from_before_a_resume_does_not_end_the_recovery() -> None:
    health = in_state(FAILING)
    health.started(1)
    health.resume(NOW)
    health.record_result(FAILED, NOW, 0.0)
    assert health.state is RECOVERING
    responses(health, FAILED)
    assert health.state is FAILING


def test_a_preempted_request_does_not_end_the_recovery() -> None:
    health = in_state(FAILING)
    health.resume(NOW)
    health.started(1)
    health.record_result(FAILED, NOW, 0.0, preempted=True)
    assert health.state is RECOVERING


def test_a_failure_after_a_success_does_not_end_the_recovery() -> None:
    health = CircuitBreaker()
    health.resume(NOW)
    assert gates(health, 2) == [PROBE, SHUT]
    responses(health, OK, *[FAILED] * 4)
    assert health.state is RECOVERING


def test_resuming_resets_the_refusal_count() -> None:
    health = CircuitBreaker()
    responses(health, *[REFUSED] * 9)
    health.resume(NOW)
    assert responses(health, *[REFUSED] * 9) == [REFUSED] * 9


# ------------------------------------------------------------------ new owners


@pytest.mark.parametrize("state", [FAILING, REJECTING])
def test_a_new_owner_probes_immediately(state: BreakerState) -> None:
    health = in_state(state)
    for _ in range(10):
        responses(health, FAILED)
    record = health.record()
    health = CircuitBreaker(record)
    assert health.record() == record
    assert gates(health, 3) == [PROBE, SHUT, SHUT]


def test_a_new_owner_honours_the_retry_after() -> None:
    health = CircuitBreaker()
    health.started(0)
    health.record_result(FAILED, NOW, 0.0, retry_after_s=1000)
    health = CircuitBreaker(health.record())
    assert gates(health, 2, NOW + 999) == [SHUT] * 2
    assert health.wake_at() == NOW + 1000
    assert sent(health, NOW + 1000) == [1]


def test_a_new_owner_retains_refused_deliveries_in_a_storm() -> None:
    assert responses(CircuitBreaker(in_state(REJECTING).record()), REFUSED) == [FAILED]


def test_a_new_owner_recovers_by_slow_start() -> None:
    assert gates(CircuitBreaker(in_state(RECOVERING).record()), 3) == [PROBE, SHUT, SHUT]


# ------------------------------------------------- a grant does not open a gate


def test_a_grant_is_not_honoured_after_a_410() -> None:
    health = in_state(RECOVERING)
    gates(health, 4)
    health.record_result(OK, NOW, 0.0)
    assert sorted(health.wake(NOW)) == [2, 3]
    assert health.admit(2, NOW) is PROBE
    health.started(2)
    health.record_result(REFUSED, NOW, 0.0, gone=True)
    assert health.admit(3, NOW) is SHUT


def test_a_grant_is_not_honoured_while_paused() -> None:
    health = in_state(FAILING)
    gates(health, 2)
    assert health.wake(NOW + 1) == [1]
    health.pause()
    assert health.admit(1, NOW + 1) is SHUT
    health.resume(NOW + 2)
    # The lane lost its grant, but keeps its place in the queue.
    assert sent(health, NOW + 2) == [2]
    health.record_result(OK, NOW + 2, 0.0)
    assert sent(health, NOW + 2) == [1]


def test_outstanding_grants_are_void_after_a_resume() -> None:
    health = in_state(RECOVERING)
    gates(health, 4)
    health.record_result(OK, NOW, 0.0)
    assert health.wake(NOW) == [2, 3]
    health.resume(NOW)
    assert [health.admit(2, NOW), health.admit(3, NOW)] == [SHUT, SHUT]
    assert sent(health, NOW) == [4]
