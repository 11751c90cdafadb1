"""The stall monitor: names the session that keeps events from being sequenced."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from outbox.core.delivery.operational_events import LAGGING_S
from outbox.core.sequencing.stall import StallDetector

if TYPE_CHECKING:
    from outbox.store.cluster.leadership import LeaderStatus
    from outbox.store.sequencing.stalls import Blocker, StallStore

log = structlog.get_logger("outbox.sequencer")

STALL_CHECKS_PER_LEASE = 3
WARN_EVERY_S = 60.0
"""A stall is logged again after this time, and whenever another session is to blame."""


class StallMonitor:
    """Records attempts to sequence, and reports when none succeeds for a lease.

    Args:
        lease_s: shorter stalls are not reported.
    """

    def __init__(self, store: StallStore, replica_id: int, lease_s: float) -> None:
        self._store = store
        self._me = replica_id
        self._lease_s = lease_s
        self._detector = StallDetector()
        self._check_at = self._warn_at = 0.0
        self._warned_of: int | None = None
        self.locked = False
        """Whether another session held the cursor row since the last success."""
        self.blocker: Blocker | None = None
        """The session for which sequencing waits, at the last check of a stall."""

    @property
    def stalled_s(self) -> float:
        """How long sequencing has been impossible; 0: it works, or nothing waits."""
        return self._detector.stalled_s(_now())

    def record_success(self) -> bool:
        """Record that this replica could sequence; returns whether that ends a reported stall."""
        ends = self._warn_at > 0
        if ends:
            log.info("sequencing goes on", stalled_s=round(self.stalled_s, 1))
        self._detector.record_success()
        self._check_at = self._warn_at = 0.0
        self.locked = False
        self.blocker = self._warned_of = None
        return ends

    async def record_locked(self) -> None:
        """Record that another session held the cursor row."""
        self._detector.record_locked(_now())
        self.locked = True
        await self._report()

    async def record_leader(self, status: LeaderStatus) -> None:
        """Record the status of another leader."""
        self._detector.record_leader(status.batch, _now(), behind=status.behind)
        if self._detector.stalled_s(_now()) > 0:
            await self._report()
        elif not status.behind:
            self.record_success()

    async def _report(self) -> None:
        now = _now()
        stalled_s = self._detector.stalled_s(now)
        if stalled_s < self._lease_s or now < self._check_at:
            return
        self._check_at = now + self._lease_s / STALL_CHECKS_PER_LEASE
        blocker = self.blocker = await self._store.read_blocker()
        pid = None if blocker is None else blocker.pid
        if now >= self._warn_at or pid not in (None, self._warned_of):
            self._warn_at, self._warned_of = now + WARN_EVERY_S, pid
            log.warning(
                "events cannot be sequenced",
                stalled_s=round(stalled_s, 1),
                blocked_by=None if blocker is None else blocker.describe(),
                action=None if blocker is None else blocker.end_command,
            )
        if (
            blocker is not None
            and stalled_s >= LAGGING_S
            and await self._store.publish_lagging(self._me, blocker)
        ):
            log.warning("the stall was reported by an operational event")


def _now() -> float:
    return asyncio.get_running_loop().time()
