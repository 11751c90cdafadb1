"""Prometheus' own parser reads the exposition, and finds the whole catalogue in it."""

from __future__ import annotations

from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_open,
)
from prometheus_client.parser import text_string_to_metric_families as parse_text

from outbox.core.delivery.commands import AttemptRow
from outbox.core.model.response import AttemptResult
from outbox.telemetry import catalogue
from outbox.telemetry.catalogue import CATALOGUE, MetricKind
from outbox.telemetry.meters import Meters
from outbox.telemetry.prometheus import ExpositionFormat, PrometheusRenderer
from outbox.telemetry.snapshot import Buckets, Snapshot

PAGE = PrometheusRenderer({"service.name": "outbox-relay", "service.version": "1"})


def everything() -> Snapshot:
    """Return a snapshot with a value in each series."""
    series = {}
    for metric in CATALOGUE:
        key = tuple("x" for _ in metric.attributes)
        counts = tuple(range(len(metric.bounds) + 1))
        value = Buckets(counts, 2.5) if metric.kind is MetricKind.HISTOGRAM else 3
        series[metric] = {key: value}
    return Snapshot(0.0, 1.0, series)


def test_every_metric_is_exported_with_its_type_and_labels() -> None:
    text, content_type = PAGE.render(everything(), ExpositionFormat.TEXT)
    assert content_type.startswith("text/plain; version=")
    found = {family.name: family for family in parse_text(text.decode())}
    for metric in CATALOGUE:
        family = found[metric.prometheus.removesuffix("_total")]
        assert family.type == metric.kind.value
        assert family.documentation == metric.description
        labels = {name.replace(".", "_") for name in metric.attributes}
        names = [set(sample.labels) - {"le"} for sample in family.samples]
        assert all(each == labels for each in names), metric.name
    assert "process_resident_memory_bytes" in found
    (about,) = found["target_info"].samples
    assert about.labels == {"service_name": "outbox-relay", "service_version": "1"}


def test_histogram_buckets_are_cumulative() -> None:
    text, _ = PAGE.render(everything(), ExpositionFormat.TEXT)
    found = {family.name: family for family in parse_text(text.decode())}
    samples = found["outbox_delivery_attempts"].samples
    buckets = [sample.value for sample in samples if sample.name.endswith("_bucket")]
    assert buckets == [0, 1, 3, 6, 10, 15, 21, 28, 36, 45]
    assert [s.value for s in samples if s.name.endswith(("_count", "_sum"))] == [45, 2.5]


def test_openmetrics_is_used_on_request() -> None:
    text, content_type = PAGE.render(everything(), ExpositionFormat.OPENMETRICS)
    assert content_type.startswith("application/openmetrics-text")
    names = {family.name for family in parse_open(text.decode())}
    assert {m.prometheus.removesuffix("_total") for m in CATALOGUE} <= names


def test_endpoint_names_are_escaped() -> None:
    meters = Meters()
    name = 'a "shop"\\ \n of mine'
    row = AttemptRow(1, 1, 1, "delivered", 200, None, 0.0, 0.1)
    meters.record_attempt(meters.acquire(name), row, AttemptResult.completed(200, 0.1))
    text, _ = PAGE.render(meters.snapshot(1.0, {}), ExpositionFormat.TEXT)
    found = {family.name: family for family in parse_text(text.decode())}
    metric = catalogue.ATTEMPTS_MADE.prometheus.removesuffix("_total")
    (sample,) = found[metric].samples
    assert sample.labels == {"endpoint": name, "outcome": "delivered", "error_type": ""}
