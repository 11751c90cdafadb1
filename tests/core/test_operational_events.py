"""Which changes are reported, and how operational events avoid causing more of themselves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.core.delivery import operational_events
from outbox.core.delivery.circuit_breaker import BreakerState
from outbox.core.delivery.operational_events import (
    FAILING_EVERY_S,
    LAG_CHECK_EVERY_S,
    LAGGING_S,
    WARN_AFTER_S,
    LagAction,
    LagDetector,
    ReportedState,
)

NOW = 1_000_000.0
OPEN = (BreakerState.FAILING, BreakerState.REJECTING)

responses = st.tuples(st.sampled_from(BreakerState), st.booleans())


@pytest.mark.parametrize(
    ("event_type", "expected"),
    [("outbox.lane.blocked", True), ("outbox.x", True), ("outbox", False), ("outboxes.x", False)],
)
def test_operational_event_types_are_recognised(event_type: str, expected: bool) -> None:
    assert operational_events.is_operational(event_type) is expected


@given(st.lists(responses))
def test_a_hold_requires_an_ordinary_failure_and_its_end_requires_a_hold(
    script: list[tuple[BreakerState, bool]],
) -> None:
    reported, failures, holds, ends = ReportedState(), 0, 0, 0
    for n, (state, ordinary) in enumerate(script):
        if state is BreakerState.HEALTHY:
            after = reported.record_state(state)
        else:
            after = reported.record_failure(state, NOW + n, ordinary=ordinary).record_state(state)
            failures += ordinary
        holds += reported.held_since is None and after.held_since is not None
        ends += reported.held_since is not None and after.held_since is None
        assert after.held_since is None or state is not BreakerState.HEALTHY
        if ordinary and state in OPEN and holds == ends:
            assert after.failing_at is not None
            assert NOW + n - after.failing_at < FAILING_EVERY_S
        reported = after
    assert ends <= holds <= ends + 1
    assert holds <= failures


def test_a_hold_lasts_until_its_endpoint_is_healthy() -> None:
    reported = ReportedState().record_failure(BreakerState.FAILING, NOW, ordinary=True)
    assert reported.held_since == NOW
    for state in (
        BreakerState.RECOVERING,
        BreakerState.FAILING,
        BreakerState.PAUSED,
        BreakerState.DISABLED,
    ):
        reported = reported.record_state(state)
        assert (
            reported.record_failure(BreakerState.REJECTING, NOW + 9, ordinary=True).held_since
            == NOW
        )
    assert reported.record_state(BreakerState.HEALTHY) == ReportedState(failing_at=NOW)


def test_an_open_breaker_is_reported_at_the_first_ordinary_failure() -> None:
    reported = ReportedState().record_failure(BreakerState.FAILING, NOW, ordinary=False)
    assert reported == ReportedState()
    assert (
        reported.record_failure(BreakerState.FAILING, NOW + 1, ordinary=True).held_since == NOW + 1
    )
    # While the breaker recovers, no hold-off is open.
    assert (
        reported.record_failure(BreakerState.RECOVERING, NOW + 1, ordinary=True) == ReportedState()
    )


def test_an_endpoint_that_fails_again_is_reported_once_an_hour() -> None:
    reported = ReportedState().record_failure(BreakerState.FAILING, NOW, ordinary=True)
    reported = reported.record_state(BreakerState.HEALTHY)
    early = reported.record_failure(BreakerState.FAILING, NOW + 3599, ordinary=True)
    assert early.held_since is None
    # It has not recovered meanwhile, so this is when it is reported.
    late = early.record_failure(BreakerState.REJECTING, NOW + 3600, ordinary=True)
    assert (late.held_since, late.failing_at) == (NOW + 3600, NOW + 3600)
    # A clock that was set back does not keep it from being reported.
    back = reported.record_failure(BreakerState.FAILING, NOW - 1, ordinary=True)
    assert back.held_since == NOW - 1


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
def test_a_stall_is_reported_after_a_day_unless_the_endpoint_is_disabled(
    stalled_s: float, disable_after_s: float, expected: bool
) -> None:
    assert ReportedState().should_report_stall(stalled_s, disable_after_s) is expected
    assert not ReportedState(stalled_at=NOW).should_report_stall(stalled_s, disable_after_s)


def test_a_stall_lasts_until_every_stalled_lane_has_a_success() -> None:
    reported = ReportedState(stalled_at=NOW)
    assert reported.record_stalls([NOW - WARN_AFTER_S, NOW + 5]) == reported
    assert reported.record_stalls([NOW + 1, NOW + 5]) == ReportedState()
    assert reported.record_stalls([]) == ReportedState()
    assert ReportedState().record_stalls([]) == ReportedState()


def test_times_from_before_the_clock_was_set_back_are_forgotten() -> None:
    late = ReportedState(NOW + 9, NOW + 9, NOW + 9)
    assert late.clamp_times(NOW) == ReportedState(NOW, NOW, NOW)
    assert ReportedState(NOW - 9).clamp_times(NOW) == ReportedState(NOW - 9)
    assert ReportedState().clamp_times(NOW) == ReportedState()


class Leader:
    """A leader whose batches take a tenth of a second each."""

    def __init__(self) -> None:
        self.lag = LagDetector()
        self.now = 50.0

    def turns(self, seconds: float, *, full: bool) -> list[LagAction]:
        found = []
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            found.append(self.lag.record_batch(self.now, full=full))
        return found


def test_lag_is_checked_only_after_consecutive_full_batches() -> None:
    leader = Leader()
    assert LagAction.CHECK not in leader.turns(LAGGING_S - 0.5, full=True)
    leader.turns(0.1, full=False)
    assert LagAction.CHECK not in leader.turns(LAGGING_S - 0.5, full=True)
    checks = leader.turns(5 * LAG_CHECK_EVERY_S, full=True).count(LagAction.CHECK)
    assert 4 <= checks <= 5


def test_reported_lag_ends_with_the_first_batch_that_is_not_full() -> None:
    leader = Leader()
    # An earlier leader may have reported it.
    assert leader.turns(0.1, full=False) == [LagAction.CLOSE]
    leader.lag.mark_ended()
    assert leader.turns(1, full=False) == [LagAction.NOTHING] * 10
    assert LagAction.CHECK in leader.turns(LAGGING_S + 1, full=True)
    leader.lag.mark_reported()
    assert set(leader.turns(5, full=True)) == {LagAction.NOTHING}
    # Until the report is written.
    assert leader.turns(0.2, full=False) == [LagAction.CLOSE, LagAction.CLOSE]
    leader.lag.mark_ended()
    assert LagAction.CHECK in leader.turns(LAGGING_S + 1, full=True)


def test_a_new_leader_does_not_know_earlier_reports() -> None:
    leader = Leader()
    leader.turns(LAGGING_S - 1, full=True)
    leader.lag.mark_ended()
    leader.lag.reset()
    assert LagAction.CHECK not in leader.turns(LAGGING_S - 1, full=True)
    assert leader.turns(0.1, full=False) == [LagAction.CLOSE]
