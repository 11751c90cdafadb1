"""Figures: what was measured, beside what, and whether that is good enough."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Samples:
    """One value for each round."""

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
    """What a comparison has to reach."""

    bound: Literal["at least", "at most", "under"]
    value: float

    def met(self, found: float) -> bool:
        """Whether the median `found` is good enough."""
        match self.bound:
            case "at least":
                return found >= self.value
            case "at most":
                return found <= self.value
            case "under":
                return found < self.value


@dataclass(frozen=True, slots=True)
class Row:
    """The product's figure beside another one of the same rounds, or why there is none."""

    section: str
    name: str
    unit: str
    ours: Samples
    beside_name: str
    beside: Samples = Samples(())
    why_not: str | None = None
    relation: Literal["ratio", "difference"] = "ratio"
    target: Target | None = None

    @property
    def compared(self) -> Samples:
        """Ratio or difference, round by round: neighbours in time share the machine's mood."""
        pairs = zip(self.ours.values, self.beside.values, strict=True)
        if self.relation == "ratio":
            return Samples(tuple(ours / beside for ours, beside in pairs))
        return Samples(tuple(ours - beside for ours, beside in pairs))

    @property
    def met(self) -> bool | None:
        """None when there is nothing to reach, or nothing to compare with."""
        if self.target is None or self.why_not:
            return None
        return self.target.met(self.compared.median)

    def as_json(self) -> dict[str, Any]:
        """Everything, as JSON has it."""
        return {
            "section": self.section,
            "name": self.name,
            "unit": self.unit,
            "ours": self.ours.values,
            "beside": self.beside_name,
            "beside_values": self.beside.values,
            "why_not": self.why_not,
            self.relation: None if self.why_not else self.compared.values,
            "target": self.target and f"{self.target.bound} {self.target.value:g}",
            "met": self.met,
        }


@dataclass(slots=True)
class Rounds:
    """Collects the samples of contestants that take turns."""

    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, contestant: str, value: float) -> None:
        self.values.setdefault(contestant, []).append(value)

    def of(self, contestant: str) -> Samples:
        return Samples(tuple(self.values[contestant]))


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]
