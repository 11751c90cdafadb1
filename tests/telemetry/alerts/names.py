"""The metric names that rules and dashboard may use: those of a relay and of Prometheus."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from outbox import telemetry
from outbox.telemetry.catalogue import CATALOGUE, MetricKind
from tests.support.promql import used

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

TELEMETRY = Path(telemetry.__file__).parent
"""The folder of the shipped files."""

TARGET = frozenset({"job", "instance"})
"""The labels that every scraped series has."""

# prometheus_client's ProcessCollector, as exported by /metrics (see test_metrics.py).
PROCESS = (
    "process_cpu_seconds_total",
    "process_open_fds",
    "process_resident_memory_bytes",
    "process_start_time_seconds",
)


def exported() -> dict[str, frozenset[str]]:
    """Return every metric that Prometheus scrapes from a relay, with its labels."""
    known = dict.fromkeys(("up", *PROCESS), TARGET)
    for metric in CATALOGUE:
        labels = TARGET | {name.replace(".", "_") for name in metric.attributes}
        if metric.kind is MetricKind.HISTOGRAM:
            known[f"{metric.prometheus}_bucket"] = labels | {"le"}
            known[f"{metric.prometheus}_count"] = known[f"{metric.prometheus}_sum"] = labels
        else:
            known[metric.prometheus] = labels
    return known


def words(metric: str) -> set[str]:
    """Return the label values of a metric."""
    text = next((m.description for m in CATALOGUE if m.prometheus == metric), "")
    return set(re.findall(r"[a-z]+", text))


def wrong(expression: str, known: Mapping[str, frozenset[str]]) -> Iterator[str]:
    """Return the names in an expression that do not exist."""
    names = used(expression)
    assert names.metrics, expression
    for metric in sorted(names.metrics - known.keys()):
        yield f"there is no metric {metric}"
    for metric, label, value in names.matchers:
        if label not in known.get(metric, ()):
            yield f"{metric} has no label {label}"
        elif label in ("outcome", "state") and not set(value.split("|")) <= words(metric):
            yield f"{metric} never has {label}={value}"
    there = frozenset().union(*(known.get(metric, frozenset()) for metric in names.metrics))
    for label in sorted(names.grouped - there):
        yield f"no metric here has a label {label}"
