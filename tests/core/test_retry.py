from __future__ import annotations

import math
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.core.retry import STANDARD, RetryPolicy
from outbox.errors import UsageError

uniforms = st.floats(0, 1, exclude_max=True)
policies = st.builds(
    lambda base_s, factor, above_s, **rest: RetryPolicy(
        base_s=base_s, factor=factor, cap_s=base_s + above_s, **rest
    ),
    base_s=st.floats(0, 3600),
    factor=st.floats(1, 10),
    above_s=st.floats(0, 86400),
    jitter=st.sampled_from(["full", "proportional", "none"]),
    jitter_ratio=st.floats(0, 1),
    attempts_max=st.integers(1, 100),
    age_max_s=st.floats(0, 7 * 86400),
)


def bare(**numbers: Any) -> RetryPolicy:
    return RetryPolicy(jitter="none", **numbers)


def test_standard_is_5_s_times_3_2_up_to_6_h() -> None:
    delays_s = [bare().delay_s(attempts, 0.5) for attempts in range(1, 12)]
    assert delays_s == pytest.approx(
        [5, 16, 51.2, 163.84, 524.288, 1677.7216, 5368.70912, 17179.869184, 21600, 21600, 21600]
    )
    assert RetryPolicy() == STANDARD
    assert STANDARD.jitter == "full"


def test_full_jitter_spreads_over_the_whole_delay() -> None:
    assert STANDARD.delay_s(3, 0.0) == 0.0
    assert STANDARD.delay_s(3, 0.5) == pytest.approx(25.6)
    assert STANDARD.delay_s(3, 0.999999) == pytest.approx(51.2, rel=1e-4)


def test_proportional_jitter_keeps_near_the_delay_also_at_the_cap() -> None:
    plane = RetryPolicy(base_s=300, jitter="proportional", jitter_ratio=0.15, attempts_max=6)
    assert plane.delay_s(1, 0.0) == pytest.approx(255)
    assert plane.delay_s(1, 0.5) == pytest.approx(300)
    assert plane.delay_s(50, 0.0) == pytest.approx(21600 * 0.85)
    assert plane.delay_s(50, 0.999999) == pytest.approx(21600 * 1.15, rel=1e-4)


@given(policies, st.integers(1, 10**9), uniforms)
def test_a_delay_is_finite_and_within_its_jitter(
    policy: RetryPolicy, attempts: int, u: float
) -> None:
    delay_s = policy.delay_s(attempts, u)
    assert math.isfinite(delay_s)
    ratio = policy.jitter_ratio if policy.jitter == "proportional" else 0.0
    assert 0.0 <= delay_s <= policy.cap_s * (1 + ratio)


@given(policies, st.integers(1, 200))
def test_without_jitter_delays_never_shrink(policy: RetryPolicy, attempts: int) -> None:
    exact = RetryPolicy.from_dict(policy.to_dict() | {"jitter": "none"})
    assert exact.delay_s(1, 0.0) == pytest.approx(exact.base_s)
    assert exact.delay_s(attempts, 0.0) <= exact.delay_s(attempts + 1, 0.0)


@given(policies, st.integers(1, 200), uniforms, uniforms)
def test_delays_rise_with_u(policy: RetryPolicy, attempts: int, u: float, v: float) -> None:
    low, high = sorted((u, v))
    assert policy.delay_s(attempts, low) <= policy.delay_s(attempts, high)


def test_a_huge_number_of_attempts_is_the_cap() -> None:
    assert bare().delay_s(10**12, 0.0) == 21600.0
    assert bare(factor=1.0).delay_s(10**12, 0.0) == 5.0
    assert bare(base_s=0, cap_s=0).delay_s(10**12, 0.0) == 0.0


def test_the_budget_ends_by_attempts_or_by_age_whichever_is_first() -> None:
    assert not STANDARD.exhausted(11, 86_399.9)
    assert STANDARD.exhausted(12, 0.0)
    assert STANDARD.exhausted(13, 0.0)
    assert STANDARD.exhausted(2, 86_400.0)


def test_a_clock_that_went_back_does_not_end_a_budget() -> None:
    assert not STANDARD.exhausted(2, -3600.0)


@given(policies, st.floats(0, 1e9))
def test_every_budget_ends(policy: RetryPolicy, elapsed_s: float) -> None:
    assert policy.exhausted(policy.attempts_max, elapsed_s)
    assert policy.exhausted(1, policy.age_max_s)


@given(policies)
def test_a_policy_survives_being_stored(policy: RetryPolicy) -> None:
    assert RetryPolicy.from_dict(orjson.loads(orjson.dumps(policy.to_dict()))) == policy


def test_what_is_left_out_is_standard() -> None:
    assert RetryPolicy.from_dict({"base_s": 1}) == RetryPolicy(base_s=1.0)
    assert RetryPolicy.from_dict({}) == STANDARD


@pytest.mark.parametrize(
    ("numbers", "named"),
    [
        ({"base_s": -1}, "base_s"),
        ({"base_s": math.nan}, "base_s"),
        ({"base_s": "5"}, "base_s"),
        ({"base_s": True}, "base_s"),
        ({"factor": 0.5}, "factor"),
        ({"factor": math.inf}, "factor"),
        ({"base_s": 10, "cap_s": 5}, "cap_s"),
        ({"cap_s": 1e12}, "cap_s"),
        ({"jitter": "some"}, "jitter"),
        ({"jitter": []}, "jitter"),
        ({"jitter_ratio": 1.5}, "jitter_ratio"),
        ({"attempts_max": 0}, "attempts_max"),
        ({"attempts_max": 2.5}, "attempts_max"),
        ({"attempts_max": True}, "attempts_max"),
        ({"age_max_s": -1}, "age_max_s"),
        ({"attempts": 3}, "attempts"),
    ],
)
def test_bad_numbers_are_refused_in_one_line_that_names_them(
    numbers: dict[str, Any], named: str
) -> None:
    with pytest.raises(UsageError, match=named) as error:
        RetryPolicy.from_dict(numbers)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("attempts", "u"), [(0, 0.5), (-1, 0.5), (1, 1.0), (1, -0.1)])
def test_a_delay_is_only_asked_for_after_an_attempt(attempts: int, u: float) -> None:
    with pytest.raises(ValueError, match=r"attempt|u must"):
        STANDARD.delay_s(attempts, u)
