"""Delivery history: counts, and quantiles of its histograms."""

from __future__ import annotations

from itertools import pairwise
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.core.delivery.delivery_history import (
    ALL_ENDPOINTS,
    LATENCY_BOUNDS_S,
    DeliveryHistory,
    latency_quantile_s,
)

SHOP, MAIL, BANK = UUID(int=7), UUID(int=3), UUID(int=5)
DURATIONS = st.lists(st.floats(min_value=0, max_value=29), min_size=1, max_size=50)


def test_counts_are_taken_once_with_their_sum() -> None:
    history = DeliveryHistory()
    assert not history
    history.add_successes(SHOP, [0.001, 0.02, 70.0])
    history.add_failure(MAIL)
    history.add_failure(SHOP)
    assert len(history) == 2
    taken = history.remove(2)
    assert [each.endpoint_id for each in taken] == [ALL_ENDPOINTS, MAIL, SHOP]
    counts = {each.endpoint_id: each.counts for each in taken}
    assert (counts[SHOP].successes, counts[SHOP].failures) == (3, 1)
    assert (counts[MAIL].successes, counts[MAIL].failures) == (0, 1)
    total = counts[ALL_ENDPOINTS]
    assert (total.successes, total.failures) == (3, 2)
    assert total.latencies == counts[SHOP].latencies == [1, 0, 1, *[0] * 9, 1]
    assert not history
    assert history.remove(2) == []


def test_counts_that_wait_longest_are_taken_first() -> None:
    history = DeliveryHistory()
    for endpoint_id in (SHOP, MAIL, SHOP, BANK):
        history.add_failure(endpoint_id)
    parts = []
    while history:
        parts.append({each.endpoint_id: each.counts.failures for each in history.remove(1)})
        # What is counted meanwhile waits for the others.
        if len(parts) == 1:
            history.add_failure(SHOP)
    expected = [(SHOP, 2), (MAIL, 1), (BANK, 1), (SHOP, 1)]
    assert parts == [{ALL_ENDPOINTS: n, each: n} for each, n in expected]


@given(DURATIONS, st.sampled_from([0.5, 0.99]))
def test_a_quantile_is_in_the_bucket_of_the_exact_one(durations: list[float], share: float) -> None:
    history = DeliveryHistory()
    history.add_successes(SHOP, durations)
    latencies = history.remove(1)[0].counts.latencies
    found = latency_quantile_s(latencies, share)
    assert found is not None
    rank = max(-(-len(durations) * share // 1), 1)
    exact = sorted(durations)[int(rank) - 1]
    bounds = (0.0, *LATENCY_BOUNDS_S)
    low, high = next((a, b) for a, b in pairwise(bounds) if exact <= b)
    assert low <= found <= high


@pytest.mark.parametrize(("latencies", "expected"), [([0] * 13, None), ([0] * 12 + [5], 30.0)])
def test_the_borders_of_a_histogram(latencies: list[int], expected: float | None) -> None:
    assert latency_quantile_s(latencies, 0.5) == expected
