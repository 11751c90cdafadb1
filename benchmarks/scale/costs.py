"""Rows with the cost of a delivery."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.figures import Row

if TYPE_CHECKING:
    from benchmarks.cpu import Cost
    from benchmarks.figures import Rounds, Target


def costs(
    name: str, ours: Rounds, baseline_name: str, baseline: Rounds, target: Target | None
) -> list[Row]:
    """Return a row for the relay, one for PostgreSQL, and one for the sum, which has the target."""
    return [
        Row(
            "scale",
            f"{name}, {part}",
            "s",
            ours.samples_of(part),
            baseline_name,
            baseline.samples_of(part),
            target=target if part == "together" else None,
        )
        for part in ours.values
    ]


def add(rounds: Rounds, cost: Cost) -> str:
    """Add the cost of a turn, and return its description."""
    for part, seconds in cost.parts("relay").items():
        rounds.add(part, seconds)
    return f"relay {cost.relays_s:.3f}, PostgreSQL {cost.postgres_s:.3f}"
