"""The metrics of the API, whose process sends them to the relay that has started it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from outbox.telemetry import catalogue
from outbox.telemetry.snapshot import Buckets

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outbox.telemetry.catalogue import Metric
    from outbox.telemetry.snapshot import Attributes, Snapshot, Value

API_METRICS = {
    metric.name: metric
    for metric in (
        catalogue.API_REQUEST_DURATION,
        catalogue.API_REQUESTS_IN_PROGRESS,
        catalogue.API_REFUSALS,
        catalogue.API_HELD,
    )
}
"""What the API counts itself, by name."""


def add_api_series(snapshot: Snapshot, values: Mapping[str, Any]) -> Snapshot:
    """Return the snapshot with what an API counted.

    Args:
        values: `ApiMeters.to_json()`.
    """
    series = {
        API_METRICS[name]: dict(map(_point, points)) for name, points in values["series"].items()
    }
    started: Mapping[Metric, float] = dict.fromkeys(series, values["started_at"])
    return replace(snapshot, series={**snapshot.series, **series}, started=started)


def _point(point: list[Any]) -> tuple[Attributes, Value]:
    attributes, value = point
    if isinstance(value, dict):
        return tuple(attributes), Buckets(tuple(value["counts"]), value["sum"])
    return tuple(attributes), value
