"""What /metrics renders, as promtool sees it."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from outbox.telemetry.catalogue import CATALOGUE, Kind
from outbox.telemetry.prometheus import Page
from outbox.telemetry.snapshot import Buckets, Snapshot
from tests.support.promtool import judged
from tests.telemetry.alerts.names import PROCESS


def page() -> bytes:
    """Each metric, with something in it."""
    series = {}
    for metric in CATALOGUE:
        key = tuple("x" for _ in metric.attributes)
        value = Buckets((1,) * (len(metric.bounds) + 1), 2.5)
        series[metric] = {key: value if metric.kind is Kind.HISTOGRAM else 3.0}
    text, _ = Page({"service.name": "outbox-relay"}).render(Snapshot(0.0, 1.0, series), "")
    return text


@pytest.mark.promtool
def test_promtool_has_nothing_to_say() -> None:
    assert judged("check", "metrics", stdin=page()) == (True, "")


def test_what_is_used_of_the_process_is_there() -> None:
    there = {sample.name for family in parse(page().decode()) for sample in family.samples}
    assert set(PROCESS) <= there
