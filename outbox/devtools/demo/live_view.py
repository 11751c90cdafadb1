"""What the demo shows while it runs: lanes that fill and drain."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outbox.core.model.response import in_words
from outbox.operations import endpoints

if TYPE_CHECKING:
    from rich.console import RenderableType

    from outbox.devtools.demo.application import Books
    from outbox.devtools.demo.environment import Stage
    from outbox.operations.endpoints import LaneRow

BAR_CELLS = 16
BAR_FULL = 60
"""How many waiting deliveries fill the bar."""


@dataclass(frozen=True, slots=True)
class Shown:
    """One lane at one moment."""

    endpoint: str
    story: str
    lane: LaneRow
    delivered: int

    @property
    def waiting(self) -> int:
        """Numbered, and not processed by the receiver yet."""
        return max(self.lane.last_seq - max(self.delivered, self.lane.acked_seq), 0)


async def look(stage: Stage) -> list[Shown]:
    """All lanes as they are now."""
    shown: list[Shown] = []
    for destination in stage.destinations:
        plan = destination.plan
        lanes = (await endpoints.get(stage.control, "relay", plan.name)).lanes
        shown += [
            Shown(plan.name, plan.story, lane, destination.per_lane.get(lane.name, 0))
            for lane in lanes
        ]
    return shown


def picture(stage: Stage, books: Books, lanes: list[Shown], moment: str) -> RenderableType:
    """The whole picture for a terminal."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="dim", expand=True)
    table.add_column("endpoint", min_width=8, no_wrap=True)
    table.add_column("lane", min_width=4, no_wrap=True)
    table.add_column("waiting", min_width=BAR_CELLS + 6, no_wrap=True)
    table.add_column("delivered", min_width=9, justify="right", no_wrap=True)
    # What is left of the line; a narrow terminal shows less of it.
    table.add_column("head of the lane", ratio=1, no_wrap=True, overflow="ellipsis")
    last = ""
    for one in lanes:
        name = one.endpoint if one.endpoint != last else ""
        last = one.endpoint
        table.add_row(
            Text(name, "bold"),
            one.lane.name.rsplit("-", 1)[1],
            _bar(one.waiting),
            f"{one.delivered:,}",
            _head(one),
        )
    progress = Text.assemble(
        ("published ", "dim"),
        f"{books.done:,} of {books.planned:,}",
        ("   rolled back ", "dim"),
        f"{len(books.rolled_back):,}",
        ("   delivered ", "dim"),
        f"{sum(one.delivered for one in lanes):,}",
    )
    return Group(
        Text(f"PostgreSQL {stage.postgres_version} · {moment}", "bold"),
        Text(""),
        table,
        Text(""),
        progress,
    )


def _bar(waiting: int) -> RenderableType:
    from rich.text import Text

    cells = min(-(-waiting * BAR_CELLS // BAR_FULL), BAR_CELLS)
    color = "green" if waiting < BAR_FULL / 3 else "yellow" if waiting < BAR_FULL else "red"
    return Text.assemble(("█" * cells, color), f" {waiting}" if waiting else "")


def _head(one: Shown) -> RenderableType:
    from rich.text import Text

    lane = one.lane
    if not lane.attempts or lane.next_attempt_at is None or one.waiting == 0:
        return Text("")
    left_s = max(lane.next_attempt_at.timestamp() - time.time(), 0.0)
    return Text(
        f"{in_words(lane.last_answer)}, again in {left_s:.1f} s "
        f"(number {lane.acked_seq + 1}, attempt {lane.attempts})",
        "yellow",
    )


def is_terminal() -> bool:
    """Whether there is a screen to draw on."""
    return sys.stdout.isatty()
