"""View of a run: a live view on a terminal, otherwise lines of progress."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import RenderableType
    from rich.live import Live

    from outbox.devtools.chaos.run import ChaosRun

BAR_CELLS = 40
COLOURS = {"up": "green", "down": "red", "frozen": "cyan", "half-open": "yellow"}
PROGRESS_EVERY_S = 10.0
FAULTS_SHOWN = 8


class RunView:
    """Shows a run; used as a context manager while the live view is on the terminal.

    Args:
        live: show a live view on the terminal.
        log: called with a line of progress.
    """

    def __init__(self, *, live: bool, log: Callable[[str], None]) -> None:
        self.log = log
        self._live = live
        self._screen: Live | None = None
        self._newest_faults: list[str] = []
        self._logged_at = 0.0

    def __enter__(self) -> None:
        if self._live:
            from rich.live import Live

            self._screen = Live(auto_refresh=False)
            self._screen.start()

    def __exit__(self, *_: object) -> None:
        if self._screen is not None:
            self._screen.stop()

    async def show(self, run: ChaosRun) -> None:
        """Show the progress."""
        if self._screen is None:
            self.log_progress(run)
        else:
            self._screen.update(await self.render(run), refresh=True)

    def show_fault(self, run: ChaosRun, what: str) -> None:
        """Show a fault that is injected now."""
        self._newest_faults = [*self._newest_faults[1 - FAULTS_SHOWN :], what]
        if self._screen is None:
            self.log(f"{run.elapsed_s:6.1f} s  {what}")

    def log_progress(self, run: ChaosRun) -> None:
        """Log the progress, if a line is due."""
        if time.monotonic() - self._logged_at >= PROGRESS_EVERY_S or run.phase == "checking":
            self._logged_at = time.monotonic()
            ledger = run.environment.ledger
            self.log(
                f"{run.elapsed_s:6.1f} s  {run.phase}: {len(ledger.committed):,} committed, "
                f"{ledger.good:,} delivered, {len(ledger.copies):,} copies"
            )

    async def render(self, run: ChaosRun) -> RenderableType:
        """Render the live view."""
        from rich.console import Group
        from rich.text import Text

        ledger, faults_s = run.environment.ledger, run.environment.plan.seconds
        share = min(run.elapsed_s / faults_s, 1.0)
        cells = round(BAR_CELLS * share)
        behind = max(len(ledger.committed) - ledger.arrived, 0)
        relays = Text.assemble(("relays     ", "dim"))
        for relay in run.environment.relays.relays:
            relays.append(f"{relay.number} {relay.state:<10}", COLOURS.get(relay.state, ""))
        return Group(
            Text.assemble(
                (f"{run.phase:<10} ", "bold"),
                ("█" * cells, "green"),
                ("░" * (BAR_CELLS - cells), "dim"),
                f" {run.elapsed_s:.0f} of {faults_s:.0f} s",
            ),
            Text(""),
            relays,
            Text.assemble(
                ("committed  ", "dim"),
                f"{len(ledger.committed):,}",
                ("   delivered ", "dim"),
                f"{ledger.good:,}",
                ("   behind ", "dim"),
                (f"{behind:,}", "yellow" if behind > 1000 else ""),
                ("   copies ", "dim"),
                f"{len(ledger.copies):,}",
                ("   rolled back ", "dim"),
                f"{ledger.rolled_back:,}",
            ),
            Text.assemble(
                ("now        ", "dim"), ", ".join(run.injector.active.values()) or "no fault"
            ),
            Text(""),
            *(
                Text(f"  {line}", "dim", no_wrap=True, overflow="ellipsis")
                for line in self._newest_faults
            ),
        )
