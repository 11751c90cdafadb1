"""Table of metrics for the documentation; regenerate it with
`python -m outbox.telemetry.metrics_table > outbox/docs/metrics.md`.
"""

from __future__ import annotations

from outbox.core.model.endpoint import OTHERS
from outbox.telemetry.catalogue import CATALOGUE, Kind, Metric

HEAD = f"""\
# Metrics

What `outbox relay` measures. Prometheus reads it at `/metrics` of the health listener
(`outbox relay --health 127.0.0.1:9090`); with `OTEL_EXPORTER_OTLP_ENDPOINT` it is
pushed by OTLP, too. Units are UCUM's; what is in braces is only counted.

`endpoint` is the name of an endpoint, for at most `OUTBOX_METRICS_ENDPOINTS_MAX`
endpoints of a replica (100 if not said); all others are measured together as
`{OTHERS}`. So ten thousand endpoints do not become a hundred thousand series.

Counters and histograms are of one replica and begin with its process: add up the
replicas. Gauges of lanes and endpoints are of the endpoints that the replica owns;
those that say so are told by the replica that leads.

| OpenTelemetry | Prometheus | Kind | Unit | Attributes | What it says |
|---|---|---|---|---|---|
"""

FOOT = """
Besides, Prometheus reads `target_info` (the version and the replica's name) and how the process is
(`process_cpu_seconds_total`, `process_resident_memory_bytes`, `process_open_fds`).
"""


def table() -> str:
    """The document."""
    return HEAD + "".join(_row(metric) + "\n" for metric in CATALOGUE) + FOOT


def _row(metric: Metric) -> str:
    attributes = ", ".join(f"`{name}`" for name in metric.attributes)
    kind = metric.kind.value
    if metric.kind is Kind.HISTOGRAM:
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
    print(table(), end="")  # noqa: T201 (that is what it is for)
