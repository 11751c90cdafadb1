from __future__ import annotations

import math
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.core.model import duration
from outbox.core.model.retry_policy import (
    PRESETS,
    STANDARD,
    RetryPolicy,
    describe,
    format_values,
    parse,
)
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


def test_proportional_jitter_stays_near_the_delay_also_at_the_cap() -> None:
    stepped = RetryPolicy(base_s=300, jitter="proportional", jitter_ratio=0.15, attempts_max=6)
    assert stepped.delay_s(1, 0.0) == pytest.approx(255)
    assert stepped.delay_s(1, 0.5) == pytest.approx(300)
    assert stepped.delay_s(50, 0.0) == pytest.approx(21600 * 0.85)
    assert stepped.delay_s(50, 0.999999) == pytest.approx(21600 * 1.15, rel=1e-4)


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


def test_a_huge_number_of_attempts_gives_the_cap() -> None:
    assert bare().delay_s(10**12, 0.0) == 21600.0
    assert bare(factor=1.0).delay_s(10**12, 0.0) == 5.0
    assert bare(base_s=0, cap_s=0).delay_s(10**12, 0.0) == 0.0


def test_the_budget_ends_by_attempts_or_by_age_whichever_is_first() -> None:
    assert not STANDARD.exhausted(11, 86_399.9)
    assert STANDARD.exhausted(12, 0.0)
    assert STANDARD.exhausted(13, 0.0)
    assert STANDARD.exhausted(2, 86_400.0)


def test_a_clock_set_back_does_not_end_a_budget() -> None:
    assert not STANDARD.exhausted(2, -3600.0)


@given(policies, st.floats(0, 1e9))
def test_every_budget_is_finite(policy: RetryPolicy, elapsed_s: float) -> None:
    assert policy.exhausted(policy.attempts_max, elapsed_s)
    assert policy.exhausted(1, policy.age_max_s)


@given(policies)
def test_a_policy_round_trips_through_storage(policy: RetryPolicy) -> None:
    assert RetryPolicy.from_dict(orjson.loads(orjson.dumps(policy.to_dict()))) == policy


def test_omitted_values_default_to_the_standard_policy() -> None:
    assert RetryPolicy.from_dict({"base_s": 1}) == RetryPolicy(base_s=1.0)
    assert RetryPolicy.from_dict({}) == STANDARD


@pytest.mark.parametrize(
    ("numbers", "named"),
    [
        ({"base_s": -1}, r"retry\.base: "),
        ({"base_s": math.nan}, r"retry\.base: "),
        ({"base_s": "5"}, r"retry\.base: "),
        ({"base_s": True}, r"retry\.base: "),
        ({"factor": 0.5}, r"retry\.factor: "),
        ({"factor": math.inf}, r"retry\.factor: "),
        ({"base_s": 10, "cap_s": 5}, r"retry\.cap: "),
        ({"cap_s": 1e12}, r"retry\.cap: "),
        ({"jitter": "some"}, r"retry\.jitter: "),
        ({"jitter": []}, r"retry\.jitter: "),
        ({"jitter_ratio": 1.5}, r"retry\.ratio: "),
        ({"attempts_max": 0}, r"retry\.attempts: "),
        ({"attempts_max": 2.5}, r"retry\.attempts: "),
        ({"attempts_max": True}, r"retry\.attempts: "),
        ({"age_max_s": -1}, r"retry\.age: "),
        ({"attempts": 3}, "there is no 'attempts'"),
    ],
)
def test_invalid_numbers_are_rejected_with_a_one_line_error(
    numbers: dict[str, Any], named: str
) -> None:
    with pytest.raises(UsageError, match=named) as error:
        RetryPolicy.from_dict(numbers)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("attempts", "u"), [(0, 0.5), (-1, 0.5), (1, 1.0), (1, -0.1)])
def test_a_delay_requires_at_least_one_attempt(attempts: int, u: float) -> None:
    with pytest.raises(ValueError, match=r"attempt|u must"):
        STANDARD.delay_s(attempts, u)


# ------------------------------------------------------------------ text form


def test_a_policy_is_a_preset_values_or_a_preset_with_changes() -> None:
    assert parse("standard") == STANDARD
    assert parse("stepped") == RetryPolicy(
        base_s=300, factor=2, jitter="proportional", jitter_ratio=0.15, attempts_max=6
    )
    assert parse("stepped, attempts=8") == RetryPolicy(
        base_s=300, factor=2, jitter="proportional", jitter_ratio=0.15, attempts_max=8
    )
    assert parse("base=1.5s,factor=2,cap=1h,jitter=none,ratio=0.5,attempts=3,age=2d") == (
        RetryPolicy(
            base_s=1.5,
            factor=2,
            cap_s=3600,
            jitter="none",
            jitter_ratio=0.5,
            attempts_max=3,
            age_max_s=172800,
        )
    )


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_described_by_its_name(name: str) -> None:
    assert describe(PRESETS[name]) == name
    assert parse(format_values(PRESETS[name])) == RetryPolicy.from_dict(
        PRESETS[name].to_dict() | {"jitter_ratio": PRESETS[name].jitter_ratio}
    )


@given(policies)
def test_a_description_contains_the_numbers_of_the_policy(policy: RetryPolicy) -> None:
    again = parse(describe(policy))
    assert again.factor == policy.factor
    assert (again.jitter, again.attempts_max) == (policy.jitter, policy.attempts_max)
    assert again.base_s == pytest.approx(policy.base_s, abs=1e-6)
    assert again.age_max_s == pytest.approx(policy.age_max_s, abs=1e-6)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", 'there is no policy ""; there are standard, fast, patient, stepped'),
        ("slow", 'there is no policy "slow"'),
        ("base=5s,stepped", '"stepped" is not one of base, factor'),
        ("base=", '"base=" is not one of'),
        ("base=5s,base=6s", "retry.base: occurs twice"),
        ("bas=5s", 'there is no "bas"; a policy has base, factor, cap, jitter'),
        ("base=5x", 'retry.base: "5x" is not a time such as 0.5s'),
        ("factor=two", 'retry.factor: "two" is not a number'),
        ("attempts=2.5", 'retry.attempts: "2.5" is not a number'),
        ("factor=nan", "retry.factor: must be between 1 and 100"),
        ("base=2h,cap=1h", "retry.cap: must be between 2h and 30d, not 3600.0"),
        ("jitter=some", "retry.jitter: must be one of full, proportional, none"),
    ],
)
def test_an_invalid_policy_is_rejected(text: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_policy_is_parsed_with_unused_values() -> None:
    for text in ("standard", "ratio=1", "stepped,jitter=full", "patient,jitter=none,ratio=0.4"):
        assert parse(describe(parse(text))) == parse(text)
    assert "ratio" not in describe(parse("base=4s"))


@pytest.mark.parametrize(
    ("seconds", "exact", "rounded"),
    [
        (0, "0s", "0s"),
        (0.02, "0.02s", "0s"),
        (2.5, "2.5s", "2.5s"),
        (9.96, "9.96s", "10s"),
        (59.7, "59.7s", "1m"),
        (90, "90s", "1m 30s"),
        (3599.8, "3599.8s", "1h"),
        (86400, "24h", "1d"),
        (259200, "3d", "3d"),
        (86399, "86399s", "1d"),
    ],
)
def test_durations_round_trip_and_are_rounded(seconds: float, exact: str, rounded: str) -> None:
    assert duration.exact(seconds) == exact
    assert duration.parse(exact) == seconds
    assert duration.rounded(seconds) == rounded
