"""Counted moments of a run: a fault or an operator can act at the n-th of a kind."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    Caller = Callable[[str], None]

REQUEST, EVENT, GAP = "a request begins", "an event is visible", "a batch leaves gaps open"
HELD = "events of tenants are moved"
TICK = "the runs of a schedule are decided"
OPEN = "a transaction that has published stays open"
RECORD = "acknowledgements are written"
BATCH = "a batch is written"
REPLAY = "a batch with replays is written"
FEED = "a batch with deliveries of feeds is written"
COMMAND = "a command of an operator begins"
CHANGE = "a change by an operator is written"


class Moments:
    """Counts moments, and calls the functions that are registered for them."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._callers: dict[tuple[str, int], list[Caller]] = defaultdict(list)

    def at(self, moment: str, number: int, call: Caller) -> None:
        """Register a call at the n-th moment of a kind, with the name of its process."""
        self._callers[moment, number].append(call)

    def come(self, moment: str, process: str = "") -> None:
        """Count a moment, and make the calls that are registered for it."""
        self.counts[moment] += 1
        for call in self._callers.pop((moment, self.counts[moment]), ()):
            call(process)
