"""Counters and histograms: buckets, series, and the number of series."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from outbox.core.delivery.commands import AttemptRow, DeadRange
from outbox.core.model.response import AttemptResult, Failure
from outbox.core.model.setting_types import OTHERS
from outbox.telemetry import catalogue
from outbox.telemetry.catalogue import ATTEMPT_OUTCOMES, DELIVERY_OUTCOMES
from outbox.telemetry.meters import Histogram, Meters, error_type
from outbox.telemetry.snapshot import Buckets

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outbox.telemetry.catalogue import Metric
    from outbox.telemetry.snapshot import Series

OK = AttemptResult.completed(200, 0.03)


def row(outcome: str = "delivered", attempt: int = 1, elapsed_s: float = 0.03) -> AttemptRow:
    return AttemptRow(1, 1, attempt, outcome, 200, None, 0.0, elapsed_s)  # type: ignore[arg-type]


def counted(series: Mapping[Metric, Series]) -> Series:
    """Return the non-zero delivery counters."""
    return {key: value for key, value in series[catalogue.DELIVERIES].items() if value}


def test_a_value_counts_in_the_first_bucket_that_it_fits() -> None:
    meters = Meters()
    here = meters.acquire("shop")
    for elapsed_s in (-1.0, 0.005, 0.006, 300.0, 301.0):
        meters.record_attempt(here, row(elapsed_s=elapsed_s), OK)
    buckets = meters.snapshot(1.0, {}).series[catalogue.ATTEMPT_DURATION]["shop",]
    assert isinstance(buckets, Buckets)
    assert buckets.counts == (2, 1, *[0] * 11, 1, 1)
    assert buckets.count == 5
    assert buckets.sum == pytest.approx(601.011)


def test_values_that_are_added_together_count_as_each_alone() -> None:
    alone, together = (Histogram(catalogue.ATTEMPT_DURATION) for _ in range(2))
    values = (-1.0, 0.0, 0.005, 0.006, 300.0, 301.0)
    for value in values:
        alone.add(value)
    together.add_all((None, *values, None))
    assert together.buckets() == alone.buckets()


def test_delivery_outcomes_are_counted() -> None:
    meters = Meters()
    here = meters.acquire("shop")
    meters.record_attempt(here, row("retry"), AttemptResult.completed(503, 0.1))
    meters.record_retry_delay(4.0)
    meters.record_attempt(here, row("retry", 2), AttemptResult.failed(Failure.TIMEOUT, "late", 0.1))
    meters.record_attempt(here, row("delivered", 3), OK)
    meters.record_delivered(here, 3, 1.5)
    meters.record_delivered(here, 1, None)
    meters.record_dead_letter(here, DeadRange(1, 5, 9, "backlog", 0, None))
    series = meters.snapshot(1.0, {}).series
    assert series[catalogue.ATTEMPTS_MADE] == {
        ("shop", "retry", "5xx"): 1,
        ("shop", "retry", "timeout"): 1,
        ("shop", "delivered", None): 1,
    }
    assert series[catalogue.RETRIES] == {
        ("retry",): 1,
        ("probe",): 0,
        ("delivered",): 1,
        ("refused",): 0,
    }
    assert counted(series) == {("shop", "delivered"): 2, ("shop", "backlog"): 5}
    latency = series[catalogue.DELIVERY_LATENCY]["shop",]
    assert isinstance(latency, Buckets)
    assert latency.count == 1, "what is sent again has no latency"


def test_outcomes_are_exported_with_zero() -> None:
    meters = Meters(endpoints_max=1)
    assert meters.snapshot(1.0, {}).series[catalogue.DELIVERIES] == {}
    meters.acquire("shop")
    first = meters.snapshot(1.0, {}).series
    assert first[catalogue.DELIVERIES] == {("shop", outcome): 0 for outcome in DELIVERY_OUTCOMES}
    assert first[catalogue.RETRIES] == {(response,): 0 for response in ATTEMPT_OUTCOMES}
    meters.record_delivered(meters.acquire("another"), 1, None)
    meters.acquire("a third")
    ended = meters.snapshot(1.0, {}).series[catalogue.DELIVERIES]
    assert {o: ended[OTHERS, o] for o in DELIVERY_OUTCOMES} == {
        **dict.fromkeys(DELIVERY_OUTCOMES, 0),
        "delivered": 1,
    }


def test_series_do_not_grow_with_the_endpoints() -> None:
    meters = Meters(endpoints_max=100)
    for n in range(10_000):
        here = meters.acquire(f"endpoint {n}")
        for outcome in ATTEMPT_OUTCOMES:
            meters.record_attempt(here, row(outcome), AttemptResult.completed(503, 0.1))
        meters.record_delivered(here, 1, 0.1)
    series = meters.snapshot(1.0, {}).series
    assert sum(map(len, series.values())) <= 101 * (4 + len(DELIVERY_OUTCOMES) + 2) + 12
    assert series[catalogue.DELIVERIES][OTHERS, "delivered"] == 9_900
    assert sum(series[catalogue.DELIVERIES].values()) == 10_000  # type: ignore[arg-type]


def test_a_released_endpoint_frees_its_series() -> None:
    meters = Meters(endpoints_max=1)
    first = meters.acquire("first")
    meters.record_delivered(first, 1, None)
    assert meters.label("second") == OTHERS
    meters.release(first)
    series = meters.snapshot(1.0, {}).series
    assert counted(series) == {("first", "delivered"): 1}, "not before it is needed"
    meters.record_delivered(meters.acquire("second"), 1, None)
    series = meters.snapshot(1.0, {}).series
    assert counted(series) == {("second", "delivered"): 1}


def test_a_new_session_owns_nothing() -> None:
    meters = Meters(endpoints_max=1)
    meters.acquire("first")
    meters.begin()
    assert meters.label("first") == "first"
    meters.acquire("second")
    assert meters.label("first") == OTHERS


@pytest.mark.parametrize(
    ("response", "error"),
    [
        (AttemptResult.completed(404, 0.1), "4xx"),
        (AttemptResult.completed(302, 0.1), "3xx"),
        (AttemptResult.failed(Failure.DNS, "no such name", 0.1), "dns"),
    ],
)
def test_errors_have_few_distinct_labels(response: AttemptResult, error: str) -> None:
    assert error_type(response) == error
