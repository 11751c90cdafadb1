"""Ownership history of the endpoints of a run, from the journal."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outbox_devtools.chaos.facts import OwnershipEvent, RunFacts

CLEAN = ("clean stop", "moved to another replica, or ended")
"""Reasons in the journal entry of an endpoint that was handed over."""


class OwnershipHistory:
    """Which relay owned which endpoint, and when."""

    def __init__(self, facts: RunFacts) -> None:
        self._relay_of = facts.relay_of
        self._events: dict[int, list[OwnershipEvent]] = defaultdict(list)
        for event in sorted(facts.ownership_events, key=lambda event: event.at):
            self._events[event.endpoint].append(event)

    def between(self, endpoint: int, begin: float, end: float) -> list[OwnershipEvent]:
        """Return the events of an endpoint in a period."""
        events = self._events[endpoint]
        first = bisect_left(events, begin, key=lambda event: event.at)
        last = bisect_right(events, end, key=lambda event: event.at)
        return events[first:last]

    def hand_overs(self, endpoint: int) -> list[float]:
        """Return the times at which an endpoint was released by a relay that works."""
        return [e.at for e in self._events[endpoint] if not e.claimed and e.reason in CLEAN]

    def owners(self, endpoint: int, begin: float, end: float) -> set[int]:
        """Return the relays that owned an endpoint at any time of a period."""
        replicas = [event.replica for event in self.between(endpoint, begin, end) if event.claimed]
        events = self._events[endpoint]
        before = bisect_left(events, begin, key=lambda event: event.at)
        if before and events[before - 1].claimed:
            replicas.append(events[before - 1].replica)
        return {self._relay_of[replica] for replica in replicas if replica in self._relay_of}
