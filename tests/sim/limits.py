"""What endpoints may be asked for at once, and in a second."""

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
"""A rate may be made up for, for so long."""
STRAY = 1
"""A request may be on its way between its turn and the wire when the next one is begun."""


class Limits:
    """Counts by relay and endpoint; a new owner, or the same one anew, counts anew."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._open: dict[tuple[Process, UUID], int] = defaultdict(int)
        self._begun: dict[tuple[Process, UUID, int], deque[float]] = defaultdict(
            lambda: deque(maxlen=50)
        )

    def begins(self, sent: Sent) -> None:
        """A request is sent."""
        settings = self._database.endpoint.rows[sent.endpoint_id]
        who = (sent.process, sent.endpoint_id)
        self._open[who] += 1
        most, per_s = settings["in_flight_max"], settings["rate_per_s"]
        together_max = settings["batch_max"]
        if sent.is_array != (together_max is not None) or len(sent.attempts) > (together_max or 1):
            what = f"{len(sent.attempts)} together, {together_max} asked for"
            raise Violation("limits", f"{what} by {settings['name']}")
        if most is not None and self._open[who] > most:
            raise Violation("limits", f"{self._open[who]} at once to {settings['name']}")
        if per_s is None:
            return
        epoch = self._database.ownership.rows[sent.endpoint_id]["epoch"]
        begun = self._begun[*who, epoch]
        begun.append(sent.began_at)
        for n, since in enumerate(reversed(begun), 1):
            if n > (sent.began_at - since + SLACK_S) * per_s + 1 + STRAY:
                within_s = sent.began_at - since
                raise Violation("limits", f"{n} in {within_s:.3f} s to {settings['name']}")

    def ends(self, sent: Sent) -> None:
        """It is over."""
        who = (sent.process, sent.endpoint_id)
        if who in self._open:
            self._open[who] -= 1

    def thawed(self, process: Process) -> None:
        """Its timers were late: what it was to begin meanwhile it begins now."""
        for key in [key for key in self._begun if key[0] is process]:
            del self._begun[key]

    def died(self, process: Process) -> None:
        """Its requests are closed."""
        for key in [key for key in self._open if key[0] is process]:
            del self._open[key]
