"""What is shown on a terminal while it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

BAR_CELLS = 40
COLOURS = {"up": "green", "down": "red", "frozen": "cyan", "half-open": "yellow"}


@dataclass(frozen=True, slots=True)
class Moment:
    """The run at one moment."""

    phase: str
    elapsed_s: float
    storm_s: float
    """How long the faults last."""
    committed: int
    rolled_back: int
    arrived: int
    good: int
    copies: int
    relays: list[str]
    going_on: list[str]
    last: list[str]
    """The newest faults, in words."""


def picture(moment: Moment) -> RenderableType:
    """The whole picture."""
    from rich.console import Group
    from rich.text import Text

    share = min(moment.elapsed_s / moment.storm_s, 1.0)
    cells = round(BAR_CELLS * share)
    behind = max(moment.committed - moment.arrived, 0)
    relays = Text.assemble(("relays     ", "dim"))
    for number, state in enumerate(moment.relays):
        relays.append(f"{number} {state:<10}", COLOURS.get(state, ""))
    return Group(
        Text.assemble(
            (f"{moment.phase:<10} ", "bold"),
            ("█" * cells, "green"),
            ("░" * (BAR_CELLS - cells), "dim"),
            f" {moment.elapsed_s:.0f} of {moment.storm_s:.0f} s",
        ),
        Text(""),
        relays,
        Text.assemble(
            ("committed  ", "dim"),
            f"{moment.committed:,}",
            ("   delivered ", "dim"),
            f"{moment.good:,}",
            ("   behind ", "dim"),
            (f"{behind:,}", "yellow" if behind > 1000 else ""),
            ("   copies ", "dim"),
            f"{moment.copies:,}",
            ("   rolled back ", "dim"),
            f"{moment.rolled_back:,}",
        ),
        Text.assemble(("now        ", "dim"), ", ".join(moment.going_on) or "quiet"),
        Text(""),
        *(Text(f"  {line}", "dim", no_wrap=True, overflow="ellipsis") for line in moment.last),
    )
