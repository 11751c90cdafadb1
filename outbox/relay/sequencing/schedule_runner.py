"""The schedule runner: publishes runs, delayed and held events when due, in the leading replica.

Correctness does not depend on a single runner: a lock on the schedule's row decides.  Other
replicas do not poll, because that would only cost time.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import asyncpg
import structlog

from outbox.core.sequencing.tenant_pace import PASS_S
from outbox.store.connection.connect import in_one_line
from outbox.store.errors import ResponseLost

if TYPE_CHECKING:
    from outbox.relay.sequencing.event_reader import EventReader
    from outbox.relay.wake_event import Wakeups
    from outbox.store.schedules.future_events import FutureEventStore
    from outbox.store.schedules.put_off import PutOffStore
    from outbox.store.schedules.schedule_runs import ScheduleRunStore

log = structlog.get_logger("outbox.schedule_runner")

BEHIND_MAX_S = 5.0
"""A pass does not wait longer for the sequencer, which others' events may keep busy."""
SEARCH_SHARES_EVERY_S = 60.0
"""How often a pass is made although no share tells of a held event: a share may be gone."""
REFUSED_RETRY_S = 10.0
"""Retry delay after an error of the database: a missing privilege, a user's trigger.  An error of a
schedule that the database does not let be postponed is logged again after it."""


class ScheduleRunner:
    """Runs schedules, and moves delayed and held events, on one connection.

    Args:
        poll_s: polling interval; new schedules are found after this time.
        reader: the sequencer's, whose backlog does not grow by what is moved.
    """

    def __init__(
        self,
        schedules: ScheduleRunStore,
        events: FutureEventStore,
        put_off: PutOffStore,
        poll_s: float,
        reader: EventReader,
        wakeups: Wakeups,
    ) -> None:
        self._schedules = schedules
        self._events = events
        self._put_off = put_off
        self._poll_s = poll_s
        self._reader = reader
        self._wakeups = wakeups
        self._leads = False
        # What a wrong clock has put off may wait to be found.
        self._search = True
        # When the last pass that moved events ended, and when the next one may begin.
        self._passed_at = self._pass_at = 0.0
        self._search_shares_at = 0.0
        self._postponed = 0
        # When the errors of schedules are logged again.
        self._log_again_at: dict[tuple[str, str], float] = {}

    def set_leader(self, leads: bool) -> None:
        """Enable or disable the runner."""
        if leads and not self._leads:
            self.clock_set_back()
        self._leads = leads

    def clock_set_back(self) -> None:
        """Search for what a clock that was ahead has put off."""
        self._search = True
        self._wakeups.schedules.set()

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
            await self._wakeups.schedules.wait(wait_s)

    async def _run_due(self) -> float:
        """Publish what is due; return the seconds until the next poll."""
        if self._search:
            await self._restart_put_off()
        events_in_s, shares_in_s = await self._events.due_in_s()
        due = [each for each in (await self._schedules.due_in_s(), events_in_s) if each is not None]
        wait_s = min([self._poll_s, *due])
        if wait_s <= 0:
            # Alternately, so that neither waits for a backlog of the other.
            ticked, moved = await self._schedules.run_due_schedules(), await self._events.move_due()
            self._log_invalid(ticked.broken)
            if moved:
                await self._report_postponed()
            # Otherwise another replica holds the lock; poll again later.
            wait_s = 0.0 if ticked.schedules or moved else self._poll_s
        if shares_in_s is None and asyncio.get_running_loop().time() >= self._search_shares_at:
            shares_in_s = 0.0
        if shares_in_s is not None:
            wait_s = min(wait_s, await self._move_shares(shares_in_s))
        return wait_s

    def _log_invalid(self, schedules: tuple[tuple[str, str], ...]) -> None:
        """Log schedules that are invalid, with the reason."""
        now = asyncio.get_running_loop().time()
        logged = {each: at for each, at in self._log_again_at.items() if at > now}
        for name, reason in schedules:
            if (name, reason) not in logged:
                log.error("schedule is invalid", schedule=name, reason=reason)
                logged[name, reason] = now + REFUSED_RETRY_S
        self._log_again_at = logged

    async def _move_shares(self, due_in_s: float) -> float:
        """Make a pass over tenants if it is due; return the seconds until the next one.

        What the last pass has moved is sequenced before the next one, so that the backlog of a slow
        sequencer does not grow by it, in which other tenants' events would wait.
        """
        clock = asyncio.get_running_loop().time
        now = clock()
        wait_s = max(due_in_s, self._pass_at - now)
        if wait_s > 0:
            return wait_s
        self._pass_at = now + PASS_S
        sequenced_at = self._reader.complete_at
        if sequenced_at is not None and sequenced_at < self._passed_at > now - BEHIND_MAX_S:
            return PASS_S
        moved = await self._events.move_shares(now)
        self._search_shares_at = now + SEARCH_SHARES_EVERY_S
        if moved:
            self._passed_at = clock()
            # Without notifications it would read them at its next poll, and the pass after this
            # one waits for that.
            self._wakeups.published.set()
            await self._report_postponed()
        return PASS_S if moved or self._events.more else self._poll_s

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
        events, reason = await self._events.postponed()
        if events and events != self._postponed:
            log.error("delayed events are postponed", events=events, reason=reason)
        self._postponed = events
