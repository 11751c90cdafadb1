"""Snapshot of all metrics, the input of the exporters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outbox.telemetry.catalogue import Metric

Attributes: TypeAlias = "tuple[str | None, ...]"
"""Attribute values in the order of `Metric.attributes`; None: the attribute does not apply."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """The values of a histogram."""

    counts: tuple[int, ...]
    """Counts per bucket; the last one is above all bounds."""
    sum: float

    @property
    def count(self) -> int:
        return sum(self.counts)


Value: TypeAlias = "float | Buckets"
Series: TypeAlias = "Mapping[Attributes, Value]"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All series at one time."""

    started_at: float
    """When counting began, in epoch seconds."""
    at: float
    """When the snapshot was taken, in epoch seconds."""
    series: Mapping[Metric, Series]
    began: Mapping[str, float] = field(default_factory=dict)
    """Start times of endpoints whose series started later than `started_at`."""
    started: Mapping[Metric, float] = field(default_factory=dict)
    """Start times of metrics of another process."""

    def since(self, metric: Metric, key: Attributes) -> float:
        """The start time of a series, in epoch seconds."""
        if "endpoint" not in metric.attributes:
            return self.started.get(metric, self.started_at)
        endpoint = key[metric.attributes.index("endpoint")]
        return self.began.get(endpoint or "", self.started_at)
