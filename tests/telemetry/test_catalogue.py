"""The metric catalogue is complete, and its names follow OpenTelemetry."""

from __future__ import annotations

import re

from outbox.telemetry import catalogue
from outbox.telemetry.catalogue import CATALOGUE, Metric, MetricKind


def test_every_metric_is_in_the_catalogue_once() -> None:
    known = [each for each in vars(catalogue).values() if isinstance(each, Metric)]
    assert set(known) == set(CATALOGUE)
    assert len({metric.name for metric in CATALOGUE}) == len(CATALOGUE)
    assert len({metric.prometheus for metric in CATALOGUE}) == len(CATALOGUE)


def test_names_and_units_follow_opentelemetry() -> None:
    for metric in CATALOGUE:
        assert re.fullmatch(r"outbox(\.[a-z]+(_[a-z]+)*)+", metric.name), metric.name
        assert re.fullmatch(r"s|By|\{[a-z_]+\}", metric.unit), metric.name
        assert metric.description.endswith("."), metric.name
        # Neither unit nor type is part of the name: exporters add both.
        assert not re.search(r"_?(total|seconds|count|bucket|sum)$", metric.name), metric.name
        assert bool(metric.bounds) == (metric.kind is MetricKind.HISTOGRAM), metric.name
        assert list(metric.bounds) == sorted(set(metric.bounds)), metric.name


def test_prometheus_names_contain_unit_and_type() -> None:
    assert catalogue.ATTEMPT_DURATION.prometheus == "outbox_attempt_duration_seconds"
    assert catalogue.DELIVERIES.prometheus == "outbox_deliveries_total"
    assert catalogue.BUFFERED.prometheus == "outbox_buffer_usage_bytes"
    assert catalogue.DEAD_LETTERS.prometheus == "outbox_dead_letters"
