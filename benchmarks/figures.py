"""Figures: samples, comparisons, and targets."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Samples:
    """One value per round."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)


@dataclass(frozen=True, slots=True)
class Target:
    """The bound that a comparison must reach."""

    bound: Literal["at least", "at most", "under"]
    value: float

    def met(self, found: float) -> bool:
        """Return whether the median `found` reaches the target."""
        match self.bound:
            case "at least":
                return found >= self.value
            case "at most":
                return found <= self.value
            case "under":
                return found < self.value


@dataclass(frozen=True, slots=True)
class Row:
    """Our figure and its comparison in the same rounds, or the reason why it is missing."""

    section: str
    name: str
    unit: str
    ours: Samples
    baseline_name: str
    baseline: Samples = Samples(())
    missing_reason: str | None = None
    relation: Literal["ratio", "difference"] = "ratio"
    target: Target | None = None

    @property
    def compared(self) -> Samples:
        """Ratio or difference per round: adjacent measurements share the machine's state."""
        pairs = zip(self.ours.values, self.baseline.values, strict=True)
        if self.relation == "ratio":
            return Samples(tuple(ours / baseline for ours, baseline in pairs))
        return Samples(tuple(ours - baseline for ours, baseline in pairs))

    @property
    def met(self) -> bool | None:
        """None without a target or without a comparison."""
        if self.target is None or self.missing_reason:
            return None
        return self.target.met(self.compared.median)

    def as_json(self) -> dict[str, Any]:
        """Return the row as JSON fields."""
        return {
            "section": self.section,
            "name": self.name,
            "unit": self.unit,
            "ours": self.ours.values,
            "baseline": self.baseline_name,
            "baseline_values": self.baseline.values,
            "missing_reason": self.missing_reason,
            self.relation: None if self.missing_reason else self.compared.values,
            "target": self.target and f"{self.target.bound} {self.target.value:g}",
            "met": self.met,
        }


@dataclass(slots=True)
class Rounds:
    """Collects the samples of alternating contestants."""

    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, contestant: str, value: float) -> None:
        self.values.setdefault(contestant, []).append(value)

    def samples_of(self, contestant: str) -> Samples:
        return Samples(tuple(self.values[contestant]))


def percentile(values: list[float], share: float) -> float:
    """Return the smallest value that at least `share` of the samples do not exceed."""
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]
