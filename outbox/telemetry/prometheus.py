"""Prometheus exposition of snapshots, in the text format or OpenMetrics.

Names and labels follow OpenTelemetry's compatibility rules for Prometheus.
"""

from __future__ import annotations

from enum import Enum
from itertools import accumulate
from typing import TYPE_CHECKING, Any, cast

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client import exposition as text_format
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.openmetrics import exposition as openmetrics
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


class ExpositionFormat(Enum):
    """A format, by its media type."""

    TEXT = "text/plain"
    OPENMETRICS = "application/openmetrics-text"


_ENCODERS: dict[ExpositionFormat, tuple[Any, str]] = {
    ExpositionFormat.TEXT: (text_format.generate_latest, text_format.CONTENT_TYPE_PLAIN_0_0_4),
    ExpositionFormat.OPENMETRICS: (openmetrics.generate_latest, openmetrics.CONTENT_TYPE_LATEST),
}


def negotiate_format(accept: str) -> ExpositionFormat:
    """The format for an Accept header: OpenMetrics if it is listed, else the text format.

    Versions and escaping schemes are ignored: all names are valid in each of them.
    """
    media_types = {each.partition(";")[0].strip().lower() for each in accept.split(",")}
    listed = ExpositionFormat.OPENMETRICS.value in media_types
    return ExpositionFormat.OPENMETRICS if listed else ExpositionFormat.TEXT


class PrometheusRenderer:
    """Renders snapshots together with process metrics.

    Args:
        about: resource attributes of the process, such as its version, for `target_info`.
    """

    def __init__(self, about: Mapping[str, object]) -> None:
        self._about = {_label(name): str(value) for name, value in about.items()}
        self._process = ProcessCollector(registry=None)

    def render(self, snapshot: Snapshot, chosen: ExpositionFormat) -> tuple[bytes, str]:
        """The exposition and its content type; thread-safe."""
        registry = CollectorRegistry()
        registry.register(_Families(snapshot, self._about))
        registry.register(self._process)
        encode, content_type = _ENCODERS[chosen]
        return encode(registry), content_type


class _Families(Collector):
    def __init__(self, snapshot: Snapshot, about: dict[str, str]) -> None:
        self._snapshot = snapshot
        self._about = about

    def collect(self) -> Iterator[Family]:
        yield InfoMetricFamily("target", "The process.", self._about)
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
