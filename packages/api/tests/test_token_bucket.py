"""Token buckets: what is admitted, what is reported, and what is remembered."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox_api.token_bucket import Allowance, TokenBuckets


def test_a_burst_is_admitted_and_then_the_rate_applies() -> None:
    buckets = TokenBuckets(Allowance(per_s=2, burst=3), keys_max=10)
    assert [buckets.consume("a", 100.0) for _ in range(3)] == [0, 0, 0]
    assert buckets.consume("a", 100.0) == pytest.approx(0.5)
    assert buckets.consume("a", 100.25) == pytest.approx(0.25)
    assert buckets.consume("b", 100.25) == 0
    assert buckets.consume("a", 100.5) == 0
    assert buckets.wait_s("a", 100.5) == pytest.approx(0.5)
    assert buckets.wait_s("a", 102.0) == 0
    assert [buckets.consume("a", 200.0) for _ in range(3)] == [0, 0, 0]


def test_more_tokens_than_there_are_may_be_charged() -> None:
    buckets = TokenBuckets(Allowance(per_s=0.5, burst=1), keys_max=10)
    buckets.charge("a", 100.0, 1)
    assert buckets.wait_s("a", 100.0, tokens=0) == 0
    buckets.charge("a", 100.0, 2)
    assert buckets.wait_s("a", 100.0, tokens=0) == pytest.approx(4)
    assert buckets.wait_s("a", 103.0, tokens=0) == pytest.approx(1)
    assert buckets.wait_s("a", 104.0, tokens=0) == 0
    assert buckets.wait_s("a", 104.0) == pytest.approx(2)
    assert buckets.wait_s("b", 104.0) == 0


@given(
    st.floats(0.1, 100),
    st.integers(1, 20),
    st.lists(st.floats(0, 3), max_size=60),
)
def test_no_interval_exceeds_the_limit(per_s: float, burst: int, gaps: list[float]) -> None:
    buckets = TokenBuckets(Allowance(per_s, burst), keys_max=10)
    now, let_through = 1e6, []
    for gap in gaps:
        now += gap
        wait_s = buckets.consume("a", now)
        if wait_s == 0:
            let_through.append(now)
        else:
            assert buckets.wait_s("a", now + wait_s + 1e-6) == 0
    for n, first in enumerate(let_through):
        for m, last in enumerate(let_through[n:], 1):
            assert m <= burst + (last - first) * per_s + 1e-3


def test_full_buckets_and_the_oldest_of_too_many_are_evicted() -> None:
    buckets = TokenBuckets(Allowance(per_s=1, burst=2), keys_max=100)
    for n in range(1000):
        buckets.consume(n, 50.0)
    assert len(buckets) == 100
    buckets.consume("a", 60.0)
    assert len(buckets) == 1
