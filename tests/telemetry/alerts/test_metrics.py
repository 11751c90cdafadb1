"""The output of /metrics, as promtool checks it."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from outbox.telemetry.catalogue import CATALOGUE, MetricKind
from outbox.telemetry.prometheus import ExpositionFormat, PrometheusRenderer
from outbox.telemetry.snapshot import Buckets, Snapshot
from tests.support.promtool import run_promtool
from tests.telemetry.alerts.names import PROCESS


def page() -> bytes:
    """Return a page with a value for each metric."""
    series = {}
    for metric in CATALOGUE:
        key = tuple("x" for _ in metric.attributes)
        value = Buckets((1,) * (len(metric.bounds) + 1), 2.5)
        series[metric] = {key: value if metric.kind is MetricKind.HISTOGRAM else 3.0}
    text, _ = PrometheusRenderer({"service.name": "outbox-relay"}).render(
        Snapshot(0.0, 1.0, series), ExpositionFormat.TEXT
    )
    return text


@pytest.mark.promtool
def test_promtool_reports_no_problems() -> None:
    assert run_promtool("check", "metrics", stdin=page()) == (True, "")


def test_the_used_process_metrics_are_exported() -> None:
    there = {sample.name for family in parse(page().decode()) for sample in family.samples}
    assert set(PROCESS) <= there
