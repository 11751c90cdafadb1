"""The state of a running session: readiness and gauges for the HTTP endpoints."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from outbox.core.model.text import count
from outbox.relay import gauges
from outbox.relay.sequencing.cursor import BATCH_REFUSED
from outbox.store.sequencing.stalls import StandbyWait
from outbox.telemetry import catalogue

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox.config import Settings
    from outbox.core.delivery.signing_clock import ClockDifference
    from outbox.relay.cluster.watchdog import Watchdog
    from outbox.relay.delivery.dispatcher import Dispatcher
    from outbox.relay.delivery.endpoint_supervisor import EndpointSupervisor
    from outbox.relay.sequencing.sequencer import Sequencer
    from outbox.store.sequencing.stalls import WaitReason
    from outbox.telemetry.catalogue import Metric
    from outbox.telemetry.meters import Meters
    from outbox.telemetry.snapshot import Series

STALLED_LEASES = 3
"""Leases without being able to sequence after which no replica is ready."""
MISSED_POLLS_MAX = 3
"""Cursor polls that may be missed, on top of the lease, before the replica is not ready."""


LACKS_RESOURCES = "its process lacks resources for connections"
HELD = "an endpoint is held, because its destination cannot be used here"


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether a replica is ready, and why not."""

    ready: bool
    reason: str = ""
    """Why it is not ready, or what needs an operator although it is, in one line."""
    redacted_reason: str | None = None
    """The reason for unauthenticated clients, if `reason` may contain addresses or names."""

    @property
    def public_reason(self) -> str:
        """The reason without details that only operators may see."""
        return self.reason if self.redacted_reason is None else self.redacted_reason

    def with_warning(self, warning: str, redacted: str | None) -> Readiness:
        """This readiness with one thing more that needs an operator."""
        return replace(
            self,
            reason="; ".join(filter(None, (self.reason, warning))),
            redacted_reason="; ".join(filter(None, (self.public_reason, redacted))),
        )


@dataclass(frozen=True, slots=True)
class RunningSession:
    """The parts of a session that report state."""

    settings: Settings
    dispatcher: Dispatcher
    sequencer: Sequencer
    supervisor: EndpointSupervisor
    watchdog: Watchdog
    clocks: ClockDifference
    lease_left_s: Callable[[], float]
    now: Callable[[], float]
    """Epoch seconds, by the database's clock."""

    def readiness(self) -> Readiness:
        """Readiness of database, lease, cursor and plug-ins; receivers do not affect it."""
        if self.lease_left_s() <= 0:
            return Readiness(ready=False, reason="its lease ran out")
        sequencer, lease_s = self.sequencer, self.settings.lease_s
        if sequencer.broken is not None:
            stopped, redacted = f"sequencing stopped: {sequencer.broken}", None
            if sequencer.broken.startswith(BATCH_REFUSED):
                # The application's own trigger may quote a payload.
                redacted = f"sequencing stopped: {BATCH_REFUSED}"
            return Readiness(ready=False, reason=stopped, redacted_reason=redacted)
        blocker = self.watchdog.blocker("sequencing")
        if sequencer.polled_at is None:
            return _blocked("it has not read the cursor yet", blocker)
        since_s = asyncio.get_running_loop().time() - sequencer.polled_at
        if since_s > lease_s + MISSED_POLLS_MAX * self.settings.poll_s:
            return _blocked(f"it last read the cursor {since_s:.0f} s ago", blocker)
        stall = sequencer.stall
        if stall.stalled_s > STALLED_LEASES * lease_s:
            stalled = f"events could not be sequenced for {stall.stalled_s:.0f} s"
            return _blocked(stalled, stall.blocker or blocker)
        if (lacking := self.dispatcher.exhausted) is not None:
            return Readiness(ready=False, reason=f"{LACKS_RESOURCES}: {lacking}")
        if (missing := self.dispatcher.missing_plugin) is not None:
            # A plug-in's own error may quote anything.
            return Readiness(
                ready=False,
                reason=f"{HELD}: {missing}",
                redacted_reason=f"{HELD}; see outbox doctor",
            )
        if isinstance(standby := self.watchdog.blocker("recording"), StandbyWait):
            # Ready: it keeps its lease, and no other relay could commit either.
            return replace(_blocked("attempts are not recorded", standby), ready=True)
        survey = self.supervisor.survey
        if survey is not None and survey.unaccounted_events:
            # Ready: no restart or rollback would repair it.
            found = count(survey.unaccounted_events, "event")
            return Readiness(
                ready=True, reason=f"{found} missing or superfluous; see outbox doctor"
            )
        if self.clocks.matters:
            # Ready: every relay sees the same clock of the database.
            return Readiness(ready=True, reason=f"{self.clocks.describe()}; see outbox doctor")
        return Readiness(ready=True)

    async def gauges(self, meters: Meters) -> dict[Metric, Series]:
        """Metrics that are sampled, not counted."""
        dispatcher = self.dispatcher
        gauges_read = await gauges.endpoint_gauges(
            dispatcher.owned(), meters, self.now(), dispatcher.wait_reason
        )
        own: dict[Metric, Series] = {
            catalogue.STALLED: {(): self.sequencer.stall.stalled_s},
            catalogue.BUFFERED: {(): dispatcher.buffered_bytes},
        }
        leading = gauges.leader_gauges(
            self.sequencer.lag_s, self.supervisor.survey, meters.endpoints_max
        )
        return {**gauges_read, **own, **leading}


def _blocked(cause: str, blocker: WaitReason | None) -> Readiness:
    """Not ready, because of a session or a standby if it is known."""
    if blocker is None:
        return Readiness(ready=False, reason=cause)

    def reason(*, names: bool) -> str:
        who = blocker.describe(names=names)
        return f"{cause}, blocked by {who}; to end it: {blocker.end_command}"

    return Readiness(ready=False, reason=reason(names=True), redacted_reason=reason(names=False))
