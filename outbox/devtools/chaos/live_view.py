"""Live view of a chaos run on a terminal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

BAR_CELLS = 40
COLOURS = {"up": "green", "down": "red", "frozen": "cyan", "half-open": "yellow"}


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """State of a run at one snapshot."""

    phase: str
    elapsed_s: float
    faults_s: float
    """Duration of the fault phase, in seconds."""
    committed: int
    rolled_back: int
    arrived: int
    good: int
    copies: int
    relays: list[str]
    active_faults: list[str]
    last: list[str]
    """Descriptions of the newest faults."""


def render(snapshot: RunSnapshot) -> RenderableType:
    """Render the view."""
    from rich.console import Group
    from rich.text import Text

    share = min(snapshot.elapsed_s / snapshot.faults_s, 1.0)
    cells = round(BAR_CELLS * share)
    behind = max(snapshot.committed - snapshot.arrived, 0)
    relays = Text.assemble(("relays     ", "dim"))
    for number, state in enumerate(snapshot.relays):
        relays.append(f"{number} {state:<10}", COLOURS.get(state, ""))
    return Group(
        Text.assemble(
            (f"{snapshot.phase:<10} ", "bold"),
            ("█" * cells, "green"),
            ("░" * (BAR_CELLS - cells), "dim"),
            f" {snapshot.elapsed_s:.0f} of {snapshot.faults_s:.0f} s",
        ),
        Text(""),
        relays,
        Text.assemble(
            ("committed  ", "dim"),
            f"{snapshot.committed:,}",
            ("   delivered ", "dim"),
            f"{snapshot.good:,}",
            ("   behind ", "dim"),
            (f"{behind:,}", "yellow" if behind > 1000 else ""),
            ("   copies ", "dim"),
            f"{snapshot.copies:,}",
            ("   rolled back ", "dim"),
            f"{snapshot.rolled_back:,}",
        ),
        Text.assemble(("now        ", "dim"), ", ".join(snapshot.active_faults) or "no fault"),
        Text(""),
        *(Text(f"  {line}", "dim", no_wrap=True, overflow="ellipsis") for line in snapshot.last),
    )
