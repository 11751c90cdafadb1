"""The rules of `outbox.core.delivery.circuit_breaker`, one by one."""

from __future__ import annotations

from itertools import pairwise

import pytest

from outbox.core.delivery.circuit_breaker import (
    FAILURES_MAX,
    PROBE_MAX_S,
    REFUSALS_MAX,
    Health,
    HealthRecord,
    State,
)
from outbox.core.delivery.commands import Gate
from outbox.core.model.response import Verdict

NOW = 1_700_000_000.0
OK, FAILED, REFUSED = Verdict.DELIVERED, Verdict.RETRY, Verdict.REFUSED
SHUT, OPEN, PROBE = Gate.SHUT, Gate.OPEN, Gate.PROBE
HEALTHY, FAILING, REFUSING, RECOVERING = (
    State.HEALTHY,
    State.FAILING,
    State.REFUSING,
    State.RECOVERING,
)


def answers(health: Health, *verdicts: Verdict, now: float = NOW, u: float = 0.0) -> list[Verdict]:
    """Requests of one lane, one after the other, whatever the gate says."""
    got = []
    for verdict in verdicts:
        health.began(0)
        got.append(health.answered(verdict, now, u, last_answer={"status": verdict.value}))
    return got


def in_state(state: State, u: float = 0.0) -> Health:
    """One that came to its state a moment ago, with nothing in flight."""
    health = Health()
    if state is REFUSING:
        answers(health, *[REFUSED] * REFUSALS_MAX, u=u)
    elif state is not HEALTHY:
        answers(health, *[FAILED] * FAILURES_MAX, u=u)
    if state is RECOVERING:
        answers(health, OK)
    assert health.state is state
    return health


def gates(health: Health, lanes: int, now: float = NOW) -> list[Gate]:
    """What the lanes are allowed; those that may send do."""
    allowed = []
    for lane_id in range(1, lanes + 1):
        allowed.append(health.ask(lane_id, now))
        if allowed[-1] is not SHUT:
            health.began(lane_id)
    return allowed


def sent(health: Health, now: float) -> list[int]:
    """The lanes that are woken, which ask and send at once."""
    woken = health.wake(now)
    for lane_id in woken:
        assert health.ask(lane_id, now) is not SHUT
        health.began(lane_id)
    return woken


# ------------------------------------------------------------------- opening


def test_all_lanes_of_a_healthy_endpoint_may_send() -> None:
    assert gates(Health(), 20) == [OPEN] * 20


@pytest.mark.parametrize(
    ("verdicts", "state"),
    [
        ([FAILED] * 4, HEALTHY),
        ([FAILED] * 5, FAILING),
        ([FAILED] * 4 + [OK] + [FAILED] * 4, HEALTHY),
        ([FAILED] * 4 + [REFUSED] + [FAILED] * 4, HEALTHY),
        ([FAILED] * 4 + [REFUSED] + [FAILED] * 5, FAILING),
        ([REFUSED] * 9, HEALTHY),
        ([REFUSED] * 10, REFUSING),
        ([REFUSED] * 9 + [OK] + [REFUSED] * 9, HEALTHY),
        ([REFUSED] * 9 + [OK] + [REFUSED] * 10, REFUSING),
    ],
)
def test_only_answers_in_a_row_open_it(verdicts: list[Verdict], state: State) -> None:
    health = Health()
    answers(health, *verdicts)
    assert health.state is state


def test_who_looks_sees_since_when_and_by_which_answer() -> None:
    health = Health()
    answers(health, *[FAILED] * 4)
    assert health.record() == HealthRecord()
    answers(health, FAILED, now=NOW + 5)
    assert health.record() == HealthRecord(FAILING, NOW + 5, None, {"status": "retry"})
    answers(health, FAILED, now=NOW + 9)
    assert health.record().since == NOW + 5
    answers(health, OK, OK, now=NOW + 10)
    assert health.record() == HealthRecord(HEALTHY, NOW + 10)


# -------------------------------------------------------------------- probes


def probes(health: Health, bad: Verdict, u: float, seconds: float) -> list[float]:
    """When it is probed in so many seconds, if every probe is answered badly at once."""
    now, at = NOW, []
    assert health.ask(1, now) is SHUT
    while True:
        due = health.wake_at()
        assert due is not None
        if due > NOW + seconds:
            return at
        assert health.wake(due - 1e-6) == []
        now = due
        assert sent(health, now) == [1]
        health.answered(bad, now, u)
        assert health.ask(1, now) is SHUT
        at.append(now)


@pytest.mark.parametrize("state", [FAILING, REFUSING])
@pytest.mark.parametrize("u", [0.0, 0.25, 0.9])
def test_the_end_of_an_outage_is_noticed_within_a_tenth_of_its_length(
    state: State, u: float
) -> None:
    """Never sooner than its jitter says, within a second at first, and within a minute at last."""
    at = [NOW, *probes(in_state(state, u), FAILED if state is FAILING else REFUSED, u, 3600)]
    for before, after in pairwise(at):
        longest = min(max(1.0, (before - NOW) / 10), PROBE_MAX_S)
        assert after - before == pytest.approx((1 - u) * longest, rel=0.01)


def test_a_long_outage_is_probed_no_more_often_than_it_needs() -> None:
    assert len(probes(in_state(FAILING, 0.5), FAILED, 0.5, 60)) < 70
    assert len(probes(in_state(FAILING, 0.5), FAILED, 0.5, 3600)) < 250


def test_a_probe_is_never_at_once() -> None:
    at = [NOW, *probes(in_state(FAILING, 0.999_999), FAILED, 0.999_999, 0.0001)]
    assert len(at) > 2
    assert all(after > before for before, after in pairwise(at))


def test_a_new_owner_goes_on_with_probes_as_rare_as_the_outage_is_long() -> None:
    health = Health(HealthRecord(FAILING, NOW - 100))
    assert gates(health, 1) == [PROBE]
    health.answered(FAILED, NOW, 0.0)
    assert health.ask(1, NOW) is SHUT
    assert health.wake_at() == NOW + 10


@pytest.mark.parametrize("state", [FAILING, REFUSING])
def test_one_head_at_a_time_is_probed(state: State) -> None:
    health = in_state(state)
    assert gates(health, 3) == [SHUT] * 3
    assert sent(health, NOW + 1) == [1]
    assert health.wake(NOW + 99) == []
    assert health.ask(4, NOW + 99) is SHUT
    assert health.wake_at() is None


def test_what_was_in_flight_when_it_opened_is_awaited_before_a_probe() -> None:
    health = Health()
    assert gates(health, 7) == [OPEN] * 7
    for _ in range(5):
        health.answered(FAILED, NOW, 0.0)
    assert health.ask(1, NOW) is SHUT
    assert health.wake(NOW + 99) == []
    health.answered(FAILED, NOW, 0.0)
    assert health.wake(NOW + 99) == []
    health.answered(FAILED, NOW, 0.0)
    assert sent(health, NOW + 99) == [1]


@pytest.mark.parametrize("state", [FAILING, REFUSING])
def test_lanes_take_turns(state: State) -> None:
    health = in_state(state)
    assert gates(health, 3) == [SHUT] * 3
    now, turns = NOW, []
    for _ in range(7):
        now = health.wake_at() or 0.0
        [lane_id] = sent(health, now)
        turns.append(lane_id)
        health.answered(FAILED, now, 0.0)
        assert health.ask(lane_id, now + 99) is SHUT  # The others were first.
    assert turns == [1, 2, 3, 1, 2, 3, 1]


def test_a_lane_that_asks_when_a_probe_is_due_and_nobody_waits_has_its_turn() -> None:
    health = in_state(FAILING)
    assert health.ask(1, NOW + 1) is PROBE
    assert health.ask(1, NOW + 1) is PROBE
    assert health.ask(2, NOW + 1) is SHUT


def test_a_turn_that_is_passed_goes_to_the_next() -> None:
    health = in_state(FAILING)
    gates(health, 2)
    assert health.wake(NOW + 1) == [1]
    assert health.wake(NOW + 1) == []
    assert health.wake_at() is None
    assert health.passed(1)
    assert not health.passed(1)
    assert health.wake(NOW + 1) == [2]


# ------------------------------------------------------------------ refusals


def test_nine_refusals_end_their_deliveries_and_the_tenth_is_held() -> None:
    assert answers(Health(), *[REFUSED] * 12) == [REFUSED] * 9 + [FAILED] * 3


def test_a_refusal_storm_ends_by_a_success() -> None:
    health = in_state(REFUSING)
    assert answers(health, FAILED, REFUSED, FAILED) == [FAILED] * 3
    assert health.state is REFUSING
    assert answers(health, OK, *[REFUSED] * 10) == [OK] + [REFUSED] * 9 + [FAILED]


def test_failures_become_a_refusal_storm() -> None:
    health = in_state(FAILING)
    assert answers(health, *[REFUSED] * 10) == [REFUSED] * 9 + [FAILED]
    assert health.state is REFUSING


# ---------------------------------------------------------------- recovering


@pytest.mark.parametrize(
    ("state", "verdict", "then"),
    [
        (FAILING, OK, RECOVERING),
        (FAILING, REFUSED, RECOVERING),
        (FAILING, FAILED, FAILING),
        (REFUSING, OK, RECOVERING),
        (REFUSING, REFUSED, REFUSING),
        (REFUSING, FAILED, REFUSING),
        (RECOVERING, OK, HEALTHY),
        (RECOVERING, REFUSED, RECOVERING),
        (RECOVERING, FAILED, RECOVERING),
    ],
)
def test_what_one_answer_changes(state: State, verdict: Verdict, then: State) -> None:
    health = in_state(state)
    answers(health, verdict)
    assert health.state is then


def test_every_round_of_successes_doubles_the_width() -> None:
    health = in_state(RECOVERING)
    assert gates(health, 20) == [PROBE] + [SHUT] * 19
    widths = [1]
    for _ in range(3):
        for _ in range(widths[-1]):
            health.answered(OK, NOW, 0.0)
        widths.append(len(sent(health, NOW)))
    assert widths == [1, 2, 4, 8]
    assert health.state is RECOVERING


def test_a_round_with_nobody_waiting_is_the_end_of_it() -> None:
    health = in_state(RECOVERING)
    assert gates(health, 2) == [PROBE, SHUT]
    health.answered(OK, NOW, 0.0)
    assert sent(health, NOW) == [2]
    health.answered(OK, NOW, 0.0)
    assert health.state is RECOVERING
    health.began(1)
    health.answered(OK, NOW, 0.0)
    assert health.state is HEALTHY


def test_a_round_in_which_most_fail_halves_the_width() -> None:
    health = in_state(RECOVERING)
    gates(health, 20)
    health.answered(OK, NOW, 0.0)
    for _ in sent(health, NOW):
        health.answered(OK, NOW, 0.0)
    assert len(sent(health, NOW)) == 4
    for verdict in (OK, FAILED, FAILED, FAILED):
        health.answered(verdict, NOW, 0.0)
    assert len(sent(health, NOW)) == 2


def test_a_failure_now_and_then_does_not_keep_it_from_recovering() -> None:
    health = in_state(RECOVERING)
    gates(health, 20)
    health.answered(OK, NOW, 0.0)
    for _ in sent(health, NOW):
        health.answered(OK, NOW, 0.0)
    assert len(sent(health, NOW)) == 4
    for verdict in (OK, FAILED, FAILED, OK):
        health.answered(verdict, NOW, 0.0)
    assert len(sent(health, NOW)) == 8


def test_five_failures_while_recovering_open_it_again() -> None:
    health = in_state(RECOVERING)
    answers(health, *[FAILED] * 4)
    assert health.state is RECOVERING
    answers(health, FAILED)
    assert health.state is FAILING


def test_a_lane_is_probed_once_while_recovering_and_then_keeps_its_own_times() -> None:
    health = in_state(RECOVERING)
    assert health.ask(1, NOW) is PROBE
    health.began(1)
    health.answered(FAILED, NOW, 0.0)
    assert health.ask(1, NOW) is OPEN
    assert health.passed(1)
    assert health.ask(2, NOW) is PROBE


@pytest.mark.parametrize("verdict", [FAILED, REFUSED])
def test_turns_that_are_out_when_it_opens_are_void(verdict: Verdict) -> None:
    health = in_state(RECOVERING)
    gates(health, 4)
    health.answered(OK, NOW, 0.0)
    assert health.wake(NOW) == [2, 3]
    answers(health, *[verdict] * 10)
    assert health.state is (FAILING if verdict is FAILED else REFUSING)
    assert health.ask(2, NOW) is SHUT
    assert sent(health, NOW + 99) == [4]


# --------------------------------------------------------------- Retry-After


@pytest.mark.parametrize("state", [HEALTHY, FAILING, REFUSING, RECOVERING])
def test_retry_after_holds_the_endpoint(state: State) -> None:
    health = in_state(state)
    health.began(0)
    health.answered(FAILED, NOW, 0.0, retry_after_s=1000)
    assert health.state is (REFUSING if state is REFUSING else FAILING)
    assert health.record().held_until == NOW + 1000
    assert gates(health, 3, NOW + 999) == [SHUT] * 3
    assert health.wake(NOW + 999) == []
    assert health.wake_at() == NOW + 1000
    assert sent(health, NOW + 1000) == [1]


def test_successes_that_were_in_flight_do_not_end_a_retry_after() -> None:
    health = Health()
    assert gates(health, 3) == [OPEN] * 3
    health.answered(FAILED, NOW, 0.0, retry_after_s=1000)
    for _ in range(2):
        health.answered(OK, NOW + 1, 0.0)
    assert health.state is FAILING
    assert gates(health, 3, NOW + 999) == [SHUT] * 3
    assert sent(health, NOW + 1000) == [1]
    health.answered(OK, NOW + 1000, 0.0)
    assert sent(health, NOW + 1000) == [2]


def test_refusals_that_were_in_flight_do_not_end_a_retry_after() -> None:
    health = Health()
    assert gates(health, 2) == [OPEN] * 2
    health.answered(FAILED, NOW, 0.0, retry_after_s=1000)
    health.answered(REFUSED, NOW + 1, 0.0)
    assert gates(health, 3, NOW + 999) == [SHUT] * 3
    assert health.wake_at() == NOW + 1000
    assert sent(health, NOW + 1000) == [1]


def test_the_longest_retry_after_counts() -> None:
    health = Health()
    assert gates(health, 2) == [OPEN] * 2
    health.answered(FAILED, NOW, 0.0, retry_after_s=1000)
    health.answered(FAILED, NOW + 1, 0.0, retry_after_s=5)
    assert health.record().held_until == NOW + 1000


def test_a_hold_that_has_passed_does_not_come_back_with_the_clock() -> None:
    health = Health()
    answers(health, FAILED)
    health.began(0)
    health.answered(FAILED, NOW, 0.0, retry_after_s=10)
    answers(health, OK, now=NOW + 20)
    assert health.record().held_until is None


# ----------------------------------------------------------------- operators


def test_a_410_disables_it() -> None:
    health = Health()
    assert health.ask(1, NOW) is OPEN
    health.began(1)
    assert health.answered(REFUSED, NOW, 0.0, gone=True, last_answer={"status": 410}) is REFUSED
    assert health.state is State.DISABLED
    assert gates(health, 3, NOW + 1e6) == [SHUT] * 3
    assert health.wake(NOW + 1e6) == []
    assert health.wake_at() is None
    assert health.record().last_answer == {"status": 410}


@pytest.mark.parametrize("state", [HEALTHY, FAILING, REFUSING, RECOVERING])
def test_a_pause_lasts_until_it_is_resumed_and_then_it_recovers(state: State) -> None:
    health = in_state(state)
    health.began(0)
    health.answered(FAILED, NOW, 0.0, retry_after_s=1000)
    health.pause()
    assert health.state is State.PAUSED
    assert gates(health, 3, NOW + 1e6) == [SHUT] * 3
    assert health.wake(NOW + 1e6) == []
    assert health.wake_at() is None
    health.resume(NOW + 1)
    assert health.state is RECOVERING
    assert health.record().held_until is None
    assert sent(health, NOW + 1) == [1]


def test_what_is_in_flight_counts_while_it_is_paused() -> None:
    health = Health()
    assert gates(health, 2) == [OPEN] * 2
    health.pause()
    assert health.answered(OK, NOW, 0.0) is OK
    health.resume(NOW)
    assert health.ask(1, NOW) is SHUT
    assert health.answered(OK, NOW, 0.0) is OK
    assert sent(health, NOW) == [1]


def test_resuming_forgives() -> None:
    health = Health()
    answers(health, *[FAILED] * 4)
    health.resume(NOW)
    answers(health, *[FAILED] * 4)
    assert health.state is RECOVERING
    health = Health()
    answers(health, *[REFUSED] * 9)
    health.resume(NOW)
    assert answers(health, *[REFUSED] * 9) == [REFUSED] * 9


# ------------------------------------------------------------------ new owners


@pytest.mark.parametrize("state", [FAILING, REFUSING])
def test_a_new_owner_probes_at_once(state: State) -> None:
    health = in_state(state)
    for _ in range(10):
        answers(health, FAILED)
    record = health.record()
    health = Health(record)
    assert health.record() == record
    assert gates(health, 3) == [PROBE, SHUT, SHUT]


def test_a_new_owner_keeps_to_the_retry_after() -> None:
    health = Health()
    health.began(0)
    health.answered(FAILED, NOW, 0.0, retry_after_s=1000)
    health = Health(health.record())
    assert gates(health, 2, NOW + 999) == [SHUT] * 2
    assert health.wake_at() == NOW + 1000
    assert sent(health, NOW + 1000) == [1]


def test_a_new_owner_holds_what_is_refused_in_a_storm() -> None:
    assert answers(Health(in_state(REFUSING).record()), REFUSED) == [FAILED]


def test_a_new_owner_recovers_slowly() -> None:
    assert gates(Health(in_state(RECOVERING).record()), 3) == [PROBE, SHUT, SHUT]


# ------------------------------------------------- a turn does not open a gate


def test_a_turn_is_not_had_after_a_410() -> None:
    health = in_state(RECOVERING)
    gates(health, 4)
    health.answered(OK, NOW, 0.0)
    assert sorted(health.wake(NOW)) == [2, 3]
    assert health.ask(2, NOW) is PROBE
    health.began(2)
    health.answered(REFUSED, NOW, 0.0, gone=True)
    assert health.ask(3, NOW) is SHUT


def test_a_turn_is_not_had_while_it_is_paused() -> None:
    health = in_state(FAILING)
    gates(health, 2)
    assert health.wake(NOW + 1) == [1]
    health.pause()
    assert health.ask(1, NOW + 1) is SHUT
    health.resume(NOW + 2)
    # It lost its turn, and is not forgotten.
    assert sent(health, NOW + 2) == [2]
    health.answered(OK, NOW + 2, 0.0)
    assert sent(health, NOW + 2) == [1]


def test_turns_that_are_out_when_it_is_resumed_are_void() -> None:
    health = in_state(RECOVERING)
    gates(health, 4)
    health.answered(OK, NOW, 0.0)
    assert health.wake(NOW) == [2, 3]
    health.resume(NOW)
    assert [health.ask(2, NOW), health.ask(3, NOW)] == [SHUT, SHUT]
    assert sent(health, NOW) == [4]
