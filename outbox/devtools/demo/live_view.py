"""Live view of the demo: pending deliveries and retry state of each lane."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outbox.core.model.response import describe_response
from outbox.operations import endpoints

if TYPE_CHECKING:
    from rich.console import RenderableType

    from outbox.devtools.demo.application import ShopLedger
    from outbox.devtools.demo.environment import DemoEnvironment
    from outbox.operations.endpoints import LaneRow

BAR_CELLS = 16
BAR_FULL = 60
"""Number of pending deliveries that fill the bar."""


@dataclass(frozen=True, slots=True)
class LaneView:
    """State of one lane at one moment."""

    endpoint: str
    description: str
    lane: LaneRow
    delivered: int

    @property
    def waiting(self) -> int:
        """Deliveries sequenced, but not processed by the receiver yet."""
        return max(self.lane.last_seq - max(self.delivered, self.lane.acked_seq), 0)


async def read_lanes(environment: DemoEnvironment) -> list[LaneView]:
    """Read the current state of all lanes."""
    shown: list[LaneView] = []
    for destination in environment.destinations:
        plan = destination.plan
        lanes = (await endpoints.get_endpoint(environment.control, "relay", plan.name)).lanes
        shown += [
            LaneView(plan.name, plan.description, lane, destination.per_lane.get(lane.name, 0))
            for lane in lanes
        ]
    return shown


def render(
    environment: DemoEnvironment, ledger: ShopLedger, lanes: list[LaneView], moment: str
) -> RenderableType:
    """Render the view for a terminal."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="dim", expand=True)
    table.add_column("endpoint", min_width=8, no_wrap=True)
    table.add_column("lane", min_width=4, no_wrap=True)
    table.add_column("waiting", min_width=BAR_CELLS + 6, no_wrap=True)
    table.add_column("delivered", min_width=9, justify="right", no_wrap=True)
    # It gets the rest of the line, and is truncated on a narrow terminal.
    table.add_column("next retry", ratio=1, no_wrap=True, overflow="ellipsis")
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
        f"{ledger.done:,} of {ledger.planned:,}",
        ("   rolled back ", "dim"),
        f"{len(ledger.rolled_back):,}",
        ("   delivered ", "dim"),
        f"{sum(one.delivered for one in lanes):,}",
    )
    return Group(
        Text(f"PostgreSQL {environment.postgres_version} · {moment}", "bold"),
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


def _head(one: LaneView) -> RenderableType:
    from rich.text import Text

    lane = one.lane
    if not lane.attempts or lane.next_attempt_at is None or one.waiting == 0:
        return Text("")
    left_s = max(lane.next_attempt_at.timestamp() - time.time(), 0.0)
    return Text(
        f"{describe_response(lane.last_response)}, again in {left_s:.1f} s "
        f"(sequence {lane.acked_seq + 1}, attempt {lane.attempts})",
        "yellow",
    )


def is_terminal() -> bool:
    """Whether stdout is a terminal."""
    return sys.stdout.isatty()
