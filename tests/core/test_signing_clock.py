"""The clock that signs an endpoint's requests, while the relay's and the database's differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.core.delivery.signing_clock import (
    CLOCKS_DIFFER_S,
    TIMESTAMP_REFUSALS,
    ClockDifference,
    SigningClock,
)
from outbox.core.model.response import AttemptResult
from outbox.core.model.response_policy import RETRYABLE, AttemptOutcome, classify

if TYPE_CHECKING:
    from outbox.core.model.response import Headers

TOLERANCE_S = 300.0
OK = AttemptResult.completed(200, 0.0)
REFUSED = AttemptResult.completed(401, 0.0)
REFUSED_TIME: Headers = (("X-Refused", "timestamp"),)


def differing(ahead_s: float = 600.0) -> tuple[ClockDifference, SigningClock]:
    difference = ClockDifference()
    difference.measure(ahead_s, 0.0)
    return difference, SigningClock(difference)


def outcome(
    clock: SigningClock,
    choice: float | None,
    status: int,
    headers: Headers = (),
    retryable: frozenset[int] = RETRYABLE,
) -> AttemptOutcome:
    response = AttemptResult.completed(status, 0.0, headers=headers)
    return classify(
        response,
        maybe_sent_before=False,
        retryable=clock.retryable(choice, response, retryable),
    )


def test_the_database_signs_while_the_clocks_agree() -> None:
    difference = ClockDifference()
    clock = SigningClock(difference)
    for ahead_s in (0.0, CLOCKS_DIFFER_S, -CLOCKS_DIFFER_S):
        assert not difference.measure(ahead_s, 0.0)
        clock.record(clock.choose(), REFUSED)
        assert clock.choose() is None
        for status in TIMESTAMP_REFUSALS:
            assert outcome(clock, None, status) is AttemptOutcome.REFUSED


def test_a_refused_time_is_never_final() -> None:
    """The libraries' own response, also to an endpoint that does not retry 503."""
    clock = SigningClock(ClockDifference())
    for retryable in (RETRYABLE, frozenset[int]()):
        assert outcome(clock, None, 503, REFUSED_TIME, retryable) is AttemptOutcome.RETRY
    assert outcome(clock, None, 503, (("x-refused", "other"),), frozenset()) is (
        AttemptOutcome.REFUSED
    )


@pytest.mark.parametrize("response", [*sorted(TIMESTAMP_REFUSALS), 503])
def test_a_refusal_is_not_final_and_the_other_clock_signs_next(response: int) -> None:
    _, clock = differing()
    headers = REFUSED_TIME if response == 503 else ()
    for expected in (0.0, 600.0, 0.0):
        choice = clock.choose()
        assert choice == expected
        assert outcome(clock, choice, response, headers) is AttemptOutcome.RETRY
        clock.record(choice, AttemptResult.completed(response, 0.0, headers=headers))


def test_other_statuses_are_as_final_as_ever() -> None:
    _, clock = differing()
    for status in (404, 410, 422):
        assert outcome(clock, clock.choose(), status) is AttemptOutcome.REFUSED
        clock.record(clock.choose(), AttemptResult.completed(status, 0.0))
        assert clock.choose() == 0.0


def test_an_accepted_clock_is_kept_over_one_refusal() -> None:
    """A delivery that is refused for itself does not have the others signed by a wrong clock."""
    _, clock = differing()
    clock.record(0.0, REFUSED)
    assert clock.choose() == 600.0
    for _ in range(3):
        clock.record(600.0, OK)
        clock.record(600.0, REFUSED)
        assert clock.choose() == 600.0
    clock.record(600.0, REFUSED)
    assert clock.choose() == 0.0, "the receiver's clock may have changed"


def test_refusals_of_requests_that_were_in_flight_change_nothing() -> None:
    _, clock = differing()
    for _ in range(4):
        clock.record(0.0, REFUSED)
    assert clock.choose() == 600.0


def test_a_difference_at_the_limit_is_reported_once() -> None:
    difference = ClockDifference()
    changes = [difference.measure(s, 0.0) for s in (60.0, 60.1, 59.9, 30.1, 29.9, 59.9)]
    assert changes == [False, True, False, False, True, False]


def test_the_database_signs_again_when_the_clocks_agree() -> None:
    difference, clock = differing(-600.0)
    clock.record(0.0, REFUSED)
    clock.record(-600.0, OK)
    assert clock.choose() == -600.0
    assert difference.measure(0.0, 0.0)
    assert clock.choose() is None
    assert difference.measure(600.0, 0.0)
    assert clock.choose() == 0.0


def test_what_was_signed_while_the_clocks_differed_is_not_refused_after() -> None:
    difference, clock = differing()
    choice = clock.choose()
    difference.measure(0.0, 0.0)
    assert outcome(clock, choice, 401) is AttemptOutcome.RETRY
    # And the other way round: signed before the step was noticed.
    difference.measure(600.0, 0.0)
    assert outcome(clock, None, 401) is AttemptOutcome.RETRY


OFF_S = st.sampled_from([-600.0, -90.0, 0.0, 90.0, 600.0])


@given(OFF_S, OFF_S)
def test_three_requests_find_the_clock_that_the_receiver_accepts(
    database_off_s: float, relay_off_s: float
) -> None:
    """If one of the two clocks is right, nothing is dead-lettered, and it is found."""
    difference, clock = differing(relay_off_s - database_off_s)
    accepts = [abs(database_off_s) <= TOLERANCE_S, abs(relay_off_s) <= TOLERANCE_S]
    accepted = []
    for _ in range(3):
        choice = clock.choose()
        signed_off_s = database_off_s + (choice or 0.0)
        response = OK if abs(signed_off_s) <= TOLERANCE_S else REFUSED
        accepted.append(response is OK)
        if any(accepts) and difference.matters:
            status = response.status or 0
            assert outcome(clock, choice, status) is not AttemptOutcome.REFUSED
        clock.record(choice, response)
    if any(accepts):
        assert accepted[-2:] == [True, True]
