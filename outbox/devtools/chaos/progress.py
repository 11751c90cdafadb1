"""Progress of a run, as lines of text."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox.devtools.chaos.run import ChaosRun

EVERY_S = 10.0


class RunProgress:
    """Logs a line for each fault, and the counts every `EVERY_S`.

    Args:
        log: called with each line.
    """

    def __init__(self, log: Callable[[str], None]) -> None:
        self.log = log
        self._logged_at = 0.0

    def show(self, run: ChaosRun) -> None:
        """Log the counts, if a line is due."""
        if time.monotonic() - self._logged_at >= EVERY_S or run.phase == "checking":
            self._logged_at = time.monotonic()
            ledger = run.environment.ledger
            self.log(
                f"{run.elapsed_s:6.1f} s  {run.phase}: {len(ledger.committed):,} committed, "
                f"{ledger.good:,} delivered, {len(ledger.copies):,} copies"
            )

    def show_fault(self, run: ChaosRun, what: str) -> None:
        """Log a fault that is injected now."""
        self.log(f"{run.elapsed_s:6.1f} s  {what}")
