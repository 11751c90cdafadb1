"""Table of metrics for the documentation; regenerate it with
`python -m outbox.telemetry.metrics_table > outbox/docs/metrics.md`.
"""

from __future__ import annotations

from outbox.core.model.setting_types import OTHERS
from outbox.telemetry.catalogue import CATALOGUE, Metric, MetricKind

HEAD = f"""\
# Metrics

The metrics of `outbox relay`. Prometheus scrapes `/metrics` of the health listener
(`outbox relay --health 127.0.0.1:9090`). With `OTEL_EXPORTER_OTLP_ENDPOINT` the relay also
pushes them by OTLP. Units are UCUM's; a unit in braces is a count.

`endpoint` is the name of an endpoint, for at most `OUTBOX_METRICS_ENDPOINTS_MAX`
endpoints of a replica (default: 100); the others are aggregated as `{OTHERS}`. This bounds the
number of series.

Counters and histograms are per replica and start with its process: sum them over the
replicas. Gauges of lanes and endpoints cover the endpoints that the replica owns. Only the
leader reports the metrics that say so.

| OpenTelemetry | Prometheus | Kind | Unit | Attributes | Description |
|---|---|---|---|---|---|
"""

FOOT = """
Prometheus also gets `target_info` (the version and the replica's name) and process metrics
(`process_cpu_seconds_total`, `process_resident_memory_bytes`, `process_open_fds`).
"""


def table() -> str:
    """The page as Markdown."""
    return HEAD + "".join(_row(metric) + "\n" for metric in CATALOGUE) + FOOT


def _row(metric: Metric) -> str:
    attributes = ", ".join(f"`{name}`" for name in metric.attributes)
    kind = metric.kind.value
    if metric.kind is MetricKind.HISTOGRAM:
        kind += " up to " + ", ".join(f"{bound:g}" for bound in metric.bounds)
    cells = (
        f"`{metric.name}`",
        f"`{metric.prometheus}`",
        kind,
        f"`{metric.unit}`",
        attributes,
        metric.description,
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(table(), end="")  # noqa: T201 (a command-line script)
