"""The loads: backlogs that are drained, and events at a steady rate."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Load:
    """A number of events, and the endpoints that each of them is delivered to.

    A queue without fan-out has a job for each delivery, enqueued in the transaction of the event.
    """

    name: str
    events: int
    lanes: int
    """Of each endpoint."""
    endpoints: int = 1
    per_s: int | None = None
    """Events per second; None: all of them are there before the measurement."""

    @property
    def deliveries(self) -> int:
        return self.events * self.endpoints

    @property
    def deliveries_per_s(self) -> int:
        """Zero for a backlog."""
        return (self.per_s or 0) * self.endpoints


LOADS = (
    Load("backlog, 64 lanes of one endpoint", 60_000, 64),
    Load("backlog, 10 endpoints of 8 lanes", 10_000, 8, endpoints=10),
    Load("10 events/s", 200, 64, per_s=10),
    Load("1,000 events/s", 8_000, 64, per_s=1_000),
    Load("100 events/s to 10 endpoints", 800, 8, endpoints=10, per_s=100),
)
QUICK_SHARE = 0.05
