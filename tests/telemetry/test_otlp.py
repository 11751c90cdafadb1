"""OTLP pushes, as a collector reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality
from opentelemetry.sdk.resources import Resource

from outbox.core.delivery.commands import AttemptRow
from outbox.core.model.response import AttemptResult
from outbox.telemetry import catalogue
from outbox.telemetry.catalogue import CATALOGUE
from outbox.telemetry.meters import Meters
from outbox.telemetry.otlp import OtlpConverter
from outbox.telemetry.snapshot import Buckets, Snapshot
from tests.telemetry.test_prometheus import everything

if TYPE_CHECKING:
    from collections.abc import Mapping

RESOURCE = Resource({"service.name": "outbox-relay"})


def pushed(data: OtlpConverter, snapshot: Snapshot) -> dict[str, Any]:
    request = encode_metrics(data.convert(snapshot))
    (resource,) = request.resource_metrics
    (scope,) = resource.scope_metrics
    assert scope.scope.name == "outbox"
    return {metric.name: metric for metric in scope.metrics}


def attributes(point: Any) -> Mapping[str, str]:
    return {each.key: each.value.string_value for each in point.attributes}


def counted(at: float, delivered: int, buckets: tuple[int, ...] | None) -> Snapshot:
    series: dict[Any, Any] = {catalogue.EVENTS: {(): delivered}}
    if buckets is not None:
        series[catalogue.DELIVERY_ATTEMPTS] = {(): Buckets(buckets, float(sum(buckets)))}
    return Snapshot(100.0, at, series)


def test_every_metric_is_pushed_with_its_unit() -> None:
    found = pushed(OtlpConverter(RESOURCE, "1"), everything())
    assert {name: metric.unit for name, metric in found.items()} == {
        metric.name: metric.unit for metric in CATALOGUE
    }
    assert all(found[m.name].description == m.description for m in CATALOGUE)
    (point,) = found["outbox.attempts"].sum.data_points
    assert attributes(point) == {"endpoint": "x", "outcome": "x", "error.type": "x"}
    (point,) = found["outbox.delivery.attempts"].histogram.data_points
    assert list(point.bucket_counts) == list(range(10))
    assert (point.count, point.sum) == (45, 2.5)
    assert not point.HasField("min")


def test_an_attribute_that_does_not_apply_is_left_out() -> None:
    key = ("shop", "delivered", None)
    snapshot = Snapshot(0.0, 1.0, {catalogue.ATTEMPTS_MADE: {key: 1}})
    (point,) = pushed(OtlpConverter(RESOURCE, "1"), snapshot)["outbox.attempts"].sum.data_points
    assert attributes(point) == {"endpoint": "shop", "outcome": "delivered"}


def test_counters_are_cumulative_by_default() -> None:
    data = OtlpConverter(RESOURCE, "1")
    pushed(data, counted(160.0, 5, None))
    metric = pushed(data, counted(220.0, 7, None))["outbox.events"].sum
    (point,) = metric.data_points
    assert metric.is_monotonic
    assert metric.aggregation_temporality == AggregationTemporality.Value(
        "AGGREGATION_TEMPORALITY_CUMULATIVE"
    )
    assert (point.as_double or point.as_int) == 7
    assert (point.start_time_unix_nano, point.time_unix_nano) == (100 * 10**9, 220 * 10**9)


def test_delta_temporality_exports_increments() -> None:
    data = OtlpConverter(RESOURCE, "1", delta=True)
    first = (1, *[0] * 9)
    pushed(data, counted(160.0, 5, first))
    found = pushed(data, counted(220.0, 7, (3, 1, *[0] * 8)))
    (point,) = found["outbox.events"].sum.data_points
    assert (point.as_double or point.as_int) == 2
    assert (point.start_time_unix_nano, point.time_unix_nano) == (160 * 10**9, 220 * 10**9)
    (point,) = found["outbox.delivery.attempts"].histogram.data_points
    assert list(point.bucket_counts)[:3] == [2, 1, 0]
    assert (point.count, point.sum) == (3, 3.0)


@pytest.mark.parametrize("delta", [False, True], ids=["cumulative", "delta"])
def test_a_recreated_series_has_a_new_start_time(delta: bool) -> None:
    """Even if the series has exceeded its value from before its eviction."""
    data = OtlpConverter(RESOURCE, "1", delta=delta)
    meters = Meters(100.0, endpoints_max=1)
    row = AttemptRow(1, 1, 1, "delivered", 200, None, 110.0, 0.5)

    def deliver(name: str, times: int) -> None:
        here = meters.acquire(name)
        for _ in range(times):
            meters.record_attempt(here, row, AttemptResult.completed(200, 0.5))
            meters.record_delivered(here, 1, None)
        meters.release(here)

    deliver("shop", 2)
    pushed(data, meters.snapshot(160.0, {}))
    meters.snapshot(190.0, {})  # Another exporter has read the counters.
    deliver("billing", 1)
    deliver("shop", 5)
    found = pushed(data, meters.snapshot(220.0, {}))
    (point,) = found["outbox.attempts"].sum.data_points
    assert attributes(point)["endpoint"] == "shop"
    assert (point.as_double or point.as_int) == 5
    assert point.start_time_unix_nano == 190 * 10**9
    (point,) = found["outbox.attempt.duration"].histogram.data_points
    assert (point.count, point.sum, point.start_time_unix_nano) == (5, 2.5, 190 * 10**9)
    (point,) = found["outbox.delivery.attempts"].histogram.data_points
    assert point.count == (6 if delta else 8), "what is of no endpoint goes on"
    assert point.start_time_unix_nano == (160 if delta else 100) * 10**9
