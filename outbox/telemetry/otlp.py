"""Conversion of snapshots to the metrics data of OpenTelemetry's SDK."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opentelemetry.sdk.metrics import export as sdk
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from outbox.telemetry.catalogue import MetricKind
from outbox.telemetry.snapshot import Buckets

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource

    from outbox.telemetry.catalogue import Metric
    from outbox.telemetry.snapshot import Attributes, Snapshot, Value

NS = 1_000_000_000


class OtlpConverter:
    """Converts snapshots to exporter input.

    Args:
        resource: the resource of all metrics.
        version: the version of this program.
        delta: delta temporality, the change since the last snapshot; False: cumulative.  Gauges
            are the same in both.
    """

    def __init__(self, resource: Resource, version: str, *, delta: bool = False) -> None:
        self._resource = resource
        self._scope = InstrumentationScope("outbox", version)
        self._delta = delta
        self._last: Snapshot | None = None

    def convert(self, snapshot: Snapshot) -> sdk.MetricsData:
        """The data of one export."""
        last, self._last = self._last, snapshot
        if not self._delta:
            last = None
        metrics = [
            sdk.Metric(
                name=metric.name,
                description=metric.description,
                unit=metric.unit,
                data=self._data(metric, snapshot, last),
            )
            for metric, series in snapshot.series.items()
            if series
        ]
        scope = sdk.ScopeMetrics(scope=self._scope, metrics=metrics, schema_url="")
        resource = sdk.ResourceMetrics(
            resource=self._resource, scope_metrics=[scope], schema_url=self._resource.schema_url
        )
        return sdk.MetricsData(resource_metrics=[resource])

    def _data(self, metric: Metric, snapshot: Snapshot, last: Snapshot | None) -> sdk.DataT:
        series, now_ns = snapshot.series[metric], int(snapshot.at * NS)

        def start_ns(key: Attributes) -> int:
            since = snapshot.since(metric, key)
            return int((since if last is None else max(since, last.at)) * NS)

        if metric.kind is MetricKind.GAUGE:
            gauges = [
                sdk.NumberDataPoint(_attributes(metric, key), start_ns(key), now_ns, _number(value))
                for key, value in series.items()
            ]
            return sdk.Gauge(gauges)
        temporality = (
            sdk.AggregationTemporality.DELTA
            if self._delta
            else sdk.AggregationTemporality.CUMULATIVE
        )
        # A series that was dropped and created again in between has no earlier value.
        before: dict[Attributes, Value] = {}
        if last is not None:
            earlier = last.series.get(metric, {})
            before = {
                key: value
                for key, value in earlier.items()
                if last.since(metric, key) == snapshot.since(metric, key)
            }
        if metric.kind is MetricKind.COUNTER:
            counts = [
                sdk.NumberDataPoint(
                    _attributes(metric, key),
                    start_ns(key),
                    now_ns,
                    _number(value) - _number(before.get(key, 0)),
                )
                for key, value in series.items()
            ]
            return sdk.Sum(counts, temporality, is_monotonic=True)
        points = [
            _histogram(metric, key, value, before.get(key), start_ns(key), now_ns)
            for key, value in series.items()
        ]
        return sdk.Histogram(points, temporality)


def _histogram(
    metric: Metric, key: Attributes, value: Value, before: Value | None, start_ns: int, now_ns: int
) -> sdk.HistogramDataPoint:
    assert isinstance(value, Buckets)
    counts, total = list(value.counts), value.sum
    if isinstance(before, Buckets):
        counts = [n - m for n, m in zip(counts, before.counts, strict=True)]
        total -= before.sum
    return sdk.HistogramDataPoint(
        attributes=_attributes(metric, key),
        start_time_unix_nano=start_ns,
        time_unix_nano=now_ns,
        count=sum(counts),
        sum=total,
        bucket_counts=counts,
        explicit_bounds=metric.bounds,
        # Minimum and maximum are not tracked; they are optional in OTLP.
        min=None,  # type: ignore[arg-type]
        max=None,  # type: ignore[arg-type]
    )


def _attributes(metric: Metric, key: Attributes) -> dict[str, str]:
    pairs = zip(metric.attributes, key, strict=True)
    return {name: value for name, value in pairs if value is not None}


def _number(value: Value) -> float:
    assert not isinstance(value, Buckets)
    return value
