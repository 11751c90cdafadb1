"""All metrics at one moment, on their way to whoever asked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outbox.telemetry.catalogue import Metric

Attributes: TypeAlias = "tuple[str | None, ...]"
"""The values of a metric's attributes, in its order; None: it does not apply."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """A histogram's values."""

    counts: tuple[int, ...]
    """In each bucket, the last one being what is above all bounds."""
    sum: float

    @property
    def count(self) -> int:
        return sum(self.counts)


Value: TypeAlias = "float | Buckets"
Series: TypeAlias = "Mapping[Attributes, Value]"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What was measured."""

    started_at: float
    """When counting began, in epoch seconds."""
    at: float
    """Now."""
    series: Mapping[Metric, Series]
    began: Mapping[str, float] = field(default_factory=dict)
    """Endpoints whose counting began later, and when: owned later, or once more since then."""

    def since(self, metric: Metric, key: Attributes) -> float:
        """When counting of a series began, in epoch seconds."""
        if "endpoint" not in metric.attributes:
            return self.started_at
        endpoint = key[metric.attributes.index("endpoint")]
        return self.began.get(endpoint or "", self.started_at)
