"""Limits of endpoints: concurrent requests, rate and batch size."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TYPE_CHECKING

from tests.sim.books import Violation

if TYPE_CHECKING:
    from uuid import UUID

    from tests.sim.books import Sent
    from tests.sim.clockwork import Process
    from tests.sim.database.tables import Database

SLACK_S = 0.1
"""A late request may catch up with its rate for this long."""
RESOLUTION_S = 1e-6
"""A virtual clock's times are sums of floats: 100 ms later may be a rounding error less."""
STRAY = 1
"""Requests that may be between their slot and the wire when the next one begins."""


class Limits:
    """Counts requests by relay and endpoint; each claim of an endpoint begins a new count."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._open: dict[tuple[Process, UUID], int] = defaultdict(int)
        self._begun: dict[tuple[Process, UUID, int], deque[float]] = defaultdict(
            lambda: deque(maxlen=50)
        )

    def begins(self, sent: Sent) -> None:
        """Count a request that is sent."""
        settings = self._database.endpoint.rows[sent.endpoint_id]
        key = (sent.process, sent.endpoint_id)
        self._open[key] += 1
        limit, per_s = settings["in_flight_max"], settings["rate_per_s"]
        together_max = settings["batch_max"]
        if sent.is_array != (together_max is not None) or len(sent.attempts) > (together_max or 1):
            what = f"{len(sent.attempts)} together, at most {together_max} allowed"
            raise Violation("limits", f"{what} by {settings['name']}")
        if limit is not None and self._open[key] > limit:
            raise Violation("limits", f"{self._open[key]} at once to {settings['name']}")
        if per_s is None:
            return
        epoch = self._database.ownership.rows[sent.endpoint_id]["epoch"]
        begun = self._begun[*key, epoch]
        begun.append(sent.began_at)
        for n, since in enumerate(reversed(begun), 1):
            within_s = sent.began_at - since
            if n > (within_s + SLACK_S + RESOLUTION_S) * per_s + 1 + STRAY:
                raise Violation("limits", f"{n} in {within_s:.3f} s to {settings['name']}")

    def ends(self, sent: Sent) -> None:
        """A request has ended."""
        key = (sent.process, sent.endpoint_id)
        if key in self._open:
            self._open[key] -= 1

    def restored(self) -> None:
        """The database was restored: all sessions and their requests end."""
        self._open.clear()
        self._begun.clear()

    def thawed(self, process: Process) -> None:
        """A process was thawed: requests whose timers were due meanwhile begin at once."""
        for key in [key for key in self._begun if key[0] is process]:
            del self._begun[key]

    def died(self, process: Process) -> None:
        """A process has died, with its requests."""
        for key in [key for key in self._open if key[0] is process]:
            del self._open[key]
