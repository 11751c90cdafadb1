"""The demo: a small chaos run, of a shop whose relay is killed once.

A shop publishes events of its customers; three receivers fail at random, and the mailer rejects
some events permanently.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outbox.core.model.stored_response import describe_response
from outbox.devtools.chaos.live_view import RunView
from outbox.devtools.chaos.plan import ChaosPlan, PlannedEndpoint, PlannedFault
from outbox.devtools.chaos.run import run_chaos
from outbox.errors import CannotRun
from outbox.operations import endpoints

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from rich.console import RenderableType

    from outbox.devtools.chaos.run import ChaosReport, ChaosRun
    from outbox.operations.endpoints import LaneRow

TYPES = ("order.placed", "order.paid", "stock.moved")
CUSTOMERS = 24
ENDPOINTS = (
    PlannedEndpoint("billing", "order.*", frozenset({0, 1}), 4, fail_share=0.10),
    PlannedEndpoint("mailer", "order.paid", frozenset({1}), 2, fail_share=0.20, rejects=3),
    PlannedEndpoint("archive", "**", frozenset({0, 1, 2}), 4, fail_share=0.03),
)
RATE_MIN = 200.0
PUBLISHING_S = 12.0
"""Upper bound of the publishing time, in seconds; the rate rises with the events."""
KILL_AT = 0.4
"""Share of the publishing time after which the relay is killed."""
DEMO_SETTLE_S_MIN, SETTLE_PER_EVENT_S = 60.0, 0.02
RECOVERED_AFTER = 20
"""Deliveries after a kill that show that the new relay works."""
BACKLOG_BAR_CELLS = 16
BAR_FULL = 60
"""Number of pending deliveries that fill the bar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPlan(ChaosPlan):
    """Every customer has events of all types; the load ends with the last event."""

    endpoints: int = len(ENDPOINTS)
    replicas: int = 1
    lease_s: float = 1.0
    kinds: tuple[str, ...] = ("kill",)
    hold_s_max: float = 0.3
    killed_leases_max: float = 0.0
    # The other ones depend on times, which a first run on any machine need not keep.
    checks: Collection[str] = ("lost", "phantoms", "inverted", "unsettled", "verify")

    @property
    def keys(self) -> int:
        return CUSTOMERS

    def schedule(self) -> list[PlannedFault]:
        return [PlannedFault(KILL_AT * self.seconds, "kill", self.seed)]

    @property
    def load_s(self) -> float:
        return math.inf

    @property
    def settle_s(self) -> float:
        return DEMO_SETTLE_S_MIN + SETTLE_PER_EVENT_S * self.events_max

    def types_of(self, key: int) -> Sequence[int]:
        return range(len(TYPES))

    def type_name(self, number: int) -> str:
        return TYPES[number]

    def endpoint(self, number: int) -> PlannedEndpoint:
        return ENDPOINTS[number]


class DemoView(RunView):
    """Shows pending deliveries and the retry state of each lane."""

    def __init__(self, *, live: bool, log: Callable[[str], None]) -> None:
        super().__init__(live=live, log=log)
        self._moment = ""
        self._pid: int | None = None
        self._restarted_at: int | None = None
        """Deliveries when the relay was restarted after the kill."""

    async def show(self, run: ChaosRun) -> None:
        pid = run.environment.relays.relays[0].process.pid
        delivered = run.environment.ledger.good
        if self._pid is None:
            self._report(run, f"relay running, process {pid}")
            self._pid = pid
        elif pid not in (None, self._pid):
            if self._restarted_at is None:
                self._restarted_at = delivered
            elif delivered > self._restarted_at + RECOVERED_AFTER:
                self._report(run, f"relay running again, process {pid}, after a kill -9")
                self._pid = pid
        await super().show(run)

    def show_fault(self, run: ChaosRun, what: str) -> None:
        self._report(run, "relay killed with kill -9; restarting it")

    def log_progress(self, run: ChaosRun) -> None:
        pass  # `_report` logs each change.

    def _report(self, run: ChaosRun, moment: str) -> None:
        self._moment = moment
        if self._screen is None:
            self.log(f"{moment} ({len(run.environment.ledger.committed)} published)")

    async def render(self, run: ChaosRun) -> RenderableType:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        environment = run.environment
        plan, ledger = environment.plan, environment.ledger
        table = Table(box=None, pad_edge=False, header_style="dim", expand=True)
        table.add_column("endpoint", min_width=8, no_wrap=True)
        table.add_column("lane", min_width=4, no_wrap=True)
        table.add_column("waiting", min_width=BACKLOG_BAR_CELLS + 6, no_wrap=True)
        table.add_column("delivered", min_width=9, justify="right", no_wrap=True)
        # It gets the rest of the line, and is truncated on a narrow terminal.
        table.add_column("next retry", ratio=1, no_wrap=True, overflow="ellipsis")
        for planned in ENDPOINTS:
            async with environment.control.use() as connection:
                row = await endpoints.get_endpoint(connection, plan.schema, planned.name)
            for n, lane in enumerate(row.lanes):
                record = ledger.lanes.get(lane.name)
                delivered = record.good if record is not None else 0
                waiting = max(lane.last_seq - max(delivered, lane.acked_seq), 0)
                table.add_row(
                    Text("" if n else planned.name, "bold"),
                    lane.name.rsplit("-", 1)[1],
                    _bar(waiting),
                    f"{delivered:,}",
                    Text(_next_retry(lane) if waiting else "", "yellow"),
                )
        progress = Text.assemble(
            ("published ", "dim"),
            f"{len(ledger.committed):,} of {plan.events_max:,}",
            ("   rolled back ", "dim"),
            f"{ledger.rolled_back:,}",
            ("   delivered ", "dim"),
            f"{ledger.good:,}",
        )
        title = Text(f"PostgreSQL {environment.server_version} · {self._moment}", "bold")
        return Group(title, Text(""), table, Text(""), progress)


def _bar(waiting: int) -> RenderableType:
    from rich.text import Text

    cells = min(-(-waiting * BACKLOG_BAR_CELLS // BAR_FULL), BACKLOG_BAR_CELLS)
    color = "green" if waiting < BAR_FULL / 3 else "yellow" if waiting < BAR_FULL else "red"
    return Text.assemble(("█" * cells, color), f" {waiting}" if waiting else "")


def _next_retry(lane: LaneRow) -> str:
    if not lane.attempts or lane.next_attempt_at is None:
        return ""
    left_s = max(lane.next_attempt_at.timestamp() - time.time(), 0.0)
    return (
        f"{describe_response(lane.last_response)}, again in {left_s:.1f} s "
        f"(sequence {lane.acked_seq + 1}, attempt {lane.attempts})"
    )


async def run_demo(
    events: int, seed: int, major: int | None, *, live: bool, log: Callable[[str], None]
) -> ChaosReport:
    """Run the demo.

    Args:
        events: number of events to commit.
        seed: the seed of the random choices.
        major: major version of PostgreSQL; None: the newest.
        live: show a live view on the terminal.
        log: called with a line of progress, without a live view.

    Raises:
        CannotRun: the database does not start, or not everything is delivered in time.
    """
    rate = max(RATE_MIN, events / PUBLISHING_S)
    plan = DemoPlan(
        minutes=events / rate / 60,
        rate=rate,
        seed=seed,
        events_max=events,
        major=major,
    )
    report = await run_chaos(plan, None, DemoView(live=live, log=log))
    if unsettled := report.result.findings["unsettled"].examples:
        raise CannotRun(
            f"the demo timed out with {unsettled[0]}; the relay's log is in {report.logs}"
        )
    return report
