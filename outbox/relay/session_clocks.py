"""The clocks of a session: the lease on the steady clock, and an estimate of the database's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from outbox.core.cluster.database_clock import DatabaseClock
from outbox.core.cluster.lease import Lease
from outbox.core.cluster.observed_time import Odometer
from outbox.core.delivery.signing_clock import ClockDifference

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox.relay.registration import Registered

log = structlog.get_logger("outbox.relay")

JUMP_S = 1.0
"""Smaller moves of the database's clock are ignored; timers are late by at most that."""


class SessionClocks:
    """Tells a session the time, how long its lease runs, and what was observed.

    Args:
        steady: seconds of the steady clock; wall-clock time comes from the database.
        wall: this machine's clock in epoch seconds, for comparison with the database's.
    """

    def __init__(
        self,
        registered: Registered,
        lease_s: float,
        steady: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        reading = registered.reading
        self._steady = steady
        self._wall = wall
        self._database = DatabaseClock(reading.now, registered.asked_at, steady())
        self.lease = Lease(lease_s)
        self.lease.renewed(registered.started_at)
        self.odometer = Odometer()
        self.odometer.update(reading.observed_s, reading.marks)
        self.difference = ClockDifference()
        """How far this machine's clock is ahead of the database's."""
        self._compare()

    def now(self) -> float:
        """The database's time, in epoch seconds."""
        return self._database.now(self._steady())

    def lease_left_s(self) -> float:
        """Remaining seconds of the lease; not positive when the session must stop."""
        return self.lease.left_s(self._steady())

    def adjust(self, database_now: float, requested_at: float, responded_at: float) -> float:
        """Adjust the database's clock by a response, and compare this machine's with it.

        Args:
            database_now: epoch seconds.
            requested_at, responded_at: seconds of the steady clock.

        Returns:
            By how many seconds the database's clock jumped; 0.0: it did not.
        """
        moved_s = self._database.adjust(database_now, requested_at, responded_at)
        self._compare()
        if abs(moved_s) < JUMP_S:
            return 0.0
        log.warning("database clock jumped", by_s=round(moved_s, 3))
        return moved_s

    def _compare(self) -> None:
        difference = self.difference
        if difference.measure(self._wall(), self.now()):
            if difference.matters:
                ahead_s = round(difference.ahead_s)
                log.warning("the clocks of relay and database differ", ahead_s=ahead_s)
            else:
                log.info("the clocks of relay and database agree again")
