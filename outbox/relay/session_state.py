"""A session at work: how it is, for whoever asks from outside."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outbox.relay import gauges

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox.config import Settings
    from outbox.relay.delivery.dispatcher import Dispatcher
    from outbox.relay.delivery.endpoint_supervisor import Caretaker
    from outbox.relay.sequencing.sequencer import Sequencer
    from outbox.telemetry.catalogue import Metric
    from outbox.telemetry.meters import Meters
    from outbox.telemetry.snapshot import Series

LOOKS_MISSED_MAX = 3
"""So many looks at the cursor may be late, besides the lease, before that is told."""


@dataclass(frozen=True, slots=True)
class Condition:
    """Whether a replica does its work."""

    ready: bool
    why: str = ""
    """Why not, in one line."""
    told: str | None = None
    """The same to whoever asks, where the reason has addresses and names in it."""

    @property
    def to_anybody(self) -> str:
        """Why not, with nothing in it that is for operators alone."""
        return self.why if self.told is None else self.told


@dataclass(frozen=True, slots=True)
class Working:
    """The parts of a session that can be asked."""

    settings: Settings
    dispatcher: Dispatcher
    sequencer: Sequencer
    care: Caretaker
    lease_left_s: Callable[[], float]
    now: Callable[[], float]
    """Epoch seconds, by the database's clock."""

    def condition(self) -> Condition:
        """Whether database and cursor work; how the receivers are is no matter here."""
        if self.lease_left_s() <= 0:
            return Condition(ready=False, why="its lease ran out")
        sequencer = self.sequencer
        if sequencer.broken is not None:
            return Condition(ready=False, why=f"sequencing stopped: {sequencer.broken}")
        if sequencer.looked_at is None:
            return Condition(ready=False, why="it has not read the cursor yet")
        since_s = asyncio.get_running_loop().time() - sequencer.looked_at
        if since_s > self.settings.lease_s + LOOKS_MISSED_MAX * self.settings.poll_s:
            return Condition(ready=False, why=f"it last read the cursor {since_s:.0f} s ago")
        return Condition(ready=True)

    async def gauges(self, meters: Meters) -> dict[Metric, Series]:
        """What is not counted but looked at."""
        dispatcher = self.dispatcher
        found = await gauges.of_endpoints(
            dispatcher.owned(), meters, self.now(), dispatcher.why_waiting
        )
        return {**found, **gauges.of_leader(self.sequencer.lag_s, self.care.survey)}
