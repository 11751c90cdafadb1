"""The state of a running session: readiness and gauges for the HTTP endpoints."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outbox.relay import gauges

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox.config import Settings
    from outbox.relay.delivery.dispatcher import Dispatcher
    from outbox.relay.delivery.endpoint_supervisor import EndpointSupervisor
    from outbox.relay.sequencing.sequencer import Sequencer
    from outbox.telemetry.catalogue import Metric
    from outbox.telemetry.meters import Meters
    from outbox.telemetry.snapshot import Series

MISSED_POLLS_MAX = 3
"""Cursor polls that may be missed, on top of the lease, before the replica is not ready."""


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether a replica is ready, and why not."""

    ready: bool
    reason: str = ""
    """Why it is not ready, in one line."""
    redacted_reason: str | None = None
    """The reason for unauthenticated clients, if `reason` may contain addresses or names."""

    @property
    def public_reason(self) -> str:
        """The reason without details that only operators may see."""
        return self.reason if self.redacted_reason is None else self.redacted_reason


@dataclass(frozen=True, slots=True)
class RunningSession:
    """The parts of a session that report state."""

    settings: Settings
    dispatcher: Dispatcher
    sequencer: Sequencer
    supervisor: EndpointSupervisor
    lease_left_s: Callable[[], float]
    now: Callable[[], float]
    """Epoch seconds, by the database's clock."""

    def readiness(self) -> Readiness:
        """Readiness of database, lease and cursor; receivers do not affect it."""
        if self.lease_left_s() <= 0:
            return Readiness(ready=False, reason="its lease ran out")
        sequencer = self.sequencer
        if sequencer.broken is not None:
            return Readiness(ready=False, reason=f"sequencing stopped: {sequencer.broken}")
        if sequencer.polled_at is None:
            return Readiness(ready=False, reason="it has not read the cursor yet")
        since_s = asyncio.get_running_loop().time() - sequencer.polled_at
        if since_s > self.settings.lease_s + MISSED_POLLS_MAX * self.settings.poll_s:
            return Readiness(ready=False, reason=f"it last read the cursor {since_s:.0f} s ago")
        return Readiness(ready=True)

    async def gauges(self, meters: Meters) -> dict[Metric, Series]:
        """Metrics that are sampled, not counted."""
        dispatcher = self.dispatcher
        found = await gauges.endpoint_gauges(
            dispatcher.owned(), meters, self.now(), dispatcher.wait_reason
        )
        return {**found, **gauges.leader_gauges(self.sequencer.lag_s, self.supervisor.survey)}
