"""The schedule runner: publishes due schedules and future events, in the leading replica.

Correctness does not depend on a single runner: a lock on the schedule's row decides.  Other
replicas do not poll, because that would only cost time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import asyncpg
import structlog

from outbox.relay.wake_event import WakeEvent
from outbox.store.connection.connect import in_one_line
from outbox.store.errors import ResponseLost

if TYPE_CHECKING:
    from outbox.store.schedules.put_off import PutOffStore
    from outbox.store.schedules.schedule_runs import ScheduleRunStore

log = structlog.get_logger("outbox.schedule_runner")

REFUSED_RETRY_S = 10.0
"""Retry delay after an error of the database: a missing privilege, a user's trigger."""


class ScheduleRunner:
    """Runs schedules on one connection.

    Args:
        poll_s: polling interval; new schedules are found after this time.
    """

    def __init__(self, store: ScheduleRunStore, put_off: PutOffStore, poll_s: float) -> None:
        self._store = store
        self._put_off = put_off
        self._poll_s = poll_s
        self._wake_event = WakeEvent()
        self._leads = False
        # What a wrong clock has put off may wait to be found.
        self._search = True
        self._postponed = 0

    def set_leader(self, leads: bool) -> None:
        """Enable or disable the runner."""
        if leads and not self._leads:
            self.clock_set_back()
        self._leads = leads

    def clock_set_back(self) -> None:
        """Search for what a clock that was ahead has put off."""
        self._search = True
        self._wake_event.set()

    async def run(self) -> None:
        """Run schedules until cancelled; a lost connection ends it.

        Other errors of the database are logged and retried: deliveries must not depend on
        schedules.
        """
        while True:
            wait_s = self._poll_s
            if self._leads:
                try:
                    wait_s = await self._run_due()
                except ResponseLost:
                    # What was published is not due any more.
                    continue
                except asyncpg.PostgresConnectionError:
                    raise
                except asyncpg.PostgresError as error:
                    wait_s = REFUSED_RETRY_S
                    log.error("scheduled runs failed", reason=in_one_line(error), retry_s=wait_s)
            await self._wake_event.wait(wait_s)

    async def _run_due(self) -> float:
        """Publish what is due; return the seconds until the next poll."""
        if self._search:
            await self._restart_put_off()
        due_in_s = await self._store.due_in_s()
        if due_in_s is None:
            return self._poll_s
        if due_in_s > 0:
            return min(due_in_s, self._poll_s)
        # Alternately, so that neither waits for a backlog of the other.
        ticked, moved = (
            await self._store.run_due_schedules(),
            await self._store.move_future_events(),
        )
        for name, reason in ticked.broken:
            log.error("schedule is invalid", schedule=name, reason=reason)
        if moved:
            await self._report_postponed()
        # Otherwise another replica holds the lock; poll again later.
        return 0.0 if ticked.schedules or moved else self._poll_s

    async def _restart_put_off(self) -> None:
        """Let schedules go on that a wrong clock has put off."""
        self._search = False
        complete = False
        try:
            names, complete = await self._put_off.restart()
        finally:
            # The clock may be set back once more meanwhile.
            self._search |= not complete
        for name in names:
            log.warning("a schedule goes on that a wrong clock had put off", schedule=name)

    async def _report_postponed(self) -> None:
        """Log delayed events that were not stored, when their number has changed."""
        events, reason = await self._store.postponed()
        if events and events != self._postponed:
            log.error("delayed events are postponed", events=events, reason=reason)
        self._postponed = events
