"""Moments of a run, counted: faults and people can be sent to the n-th of a kind."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    Caller = Callable[[str], None]

REQUEST, EVENT, GAP = "a request begins", "an event is visible", "a batch leaves gaps open"
TICK = "a schedule is decided on"
BURIAL = "a replica's row is locked, to be freed of what it owns"


class Moments:
    """Calls whoever asked to be called."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._callers: dict[tuple[str, int], list[Caller]] = defaultdict(list)

    def at(self, moment: str, number: int, call: Caller) -> None:
        """Call this at the moment of this number, with the name of the process it is of."""
        self._callers[moment, number].append(call)

    def come(self, moment: str, process: str = "") -> None:
        """It is there."""
        self.counts[moment] += 1
        for call in self._callers.pop((moment, self.counts[moment]), ()):
            call(process)
