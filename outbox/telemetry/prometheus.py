"""Prometheus exposition of snapshots, in the text format or OpenMetrics.

Names and labels follow OpenTelemetry's compatibility rules for Prometheus.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any, cast

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from outbox.telemetry.catalogue import MetricKind
from outbox.telemetry.snapshot import Buckets

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from prometheus_client.metrics_core import Metric as Family

    from outbox.telemetry.catalogue import Metric
    from outbox.telemetry.snapshot import Series, Snapshot


_FAMILIES: dict[MetricKind, Any] = {
    MetricKind.COUNTER: CounterMetricFamily,
    MetricKind.GAUGE: GaugeMetricFamily,
    MetricKind.HISTOGRAM: HistogramMetricFamily,
}


class PrometheusRenderer:
    """Renders snapshots together with process metrics.

    Args:
        about: resource attributes of the process, such as its version, for `target_info`.
    """

    def __init__(self, about: Mapping[str, object]) -> None:
        self._about = {_label(name): str(value) for name, value in about.items()}
        self._process = ProcessCollector(registry=None)

    def render(self, snapshot: Snapshot, accept: str) -> tuple[bytes, str]:
        """The exposition and its content type; thread-safe.

        Args:
            snapshot: the metrics.
            accept: the request's Accept header, which selects the format.
        """
        encode, content_type = choose_encoder(accept)
        registry = CollectorRegistry()
        registry.register(_Families(snapshot, self._about))
        registry.register(self._process)
        return encode(registry), content_type


class _Families(Collector):
    def __init__(self, snapshot: Snapshot, about: dict[str, str]) -> None:
        self._snapshot = snapshot
        self._about = about

    def collect(self) -> Iterator[Family]:
        yield InfoMetricFamily("target", "The relay.", self._about)
        for metric, series in self._snapshot.series.items():
            yield _family(metric, series)


def _family(metric: Metric, series: Series) -> Family:
    labels = [_label(name) for name in metric.attributes]
    family: Any = _FAMILIES[metric.kind](metric.prometheus, metric.description, labels=labels)
    for attributes, value in series.items():
        # Prometheus treats an empty label, for an attribute that does not apply, as absent.
        values = [each or "" for each in attributes]
        if isinstance(value, Buckets):
            bounds = [*map(str, metric.bounds), "+Inf"]
            cumulative = list(zip(bounds, accumulate(value.counts), strict=True))
            family.add_metric(values, cumulative, value.sum)
        else:
            family.add_metric(values, value)
    return cast("Family", family)


def _label(name: str) -> str:
    return name.replace(".", "_")
