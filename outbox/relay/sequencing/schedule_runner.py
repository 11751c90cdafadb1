"""The ticker: publishes what the clock asks for, in the replica that leads.

Nothing depends on there being one: who decides on a tick is decided by its row.  The
others do not look, because it would cost and bring nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import asyncpg
import structlog

from outbox.relay.wake_event import Bell
from outbox.store.connection.connect import in_one_line

if TYPE_CHECKING:
    from outbox.store.schedule_runs import TickStore

log = structlog.get_logger("outbox.ticker")

REFUSED_RETRY_S = 10.0
"""When the database refused something: a missing right, a trigger of somebody's."""


class Ticker:
    """Ticks on one connection.

    Args:
        poll_s: what was added since then is seen after so long.
    """

    def __init__(self, store: TickStore, poll_s: float) -> None:
        self._store = store
        self._poll_s = poll_s
        self._bell = Bell()
        self._leads = False

    def lead(self, leads: bool) -> None:
        """Whether this replica is to do it."""
        if leads and not self._leads:
            self._bell.ring()
        self._leads = leads

    async def run(self) -> None:
        """Tick until cancelled; a lost connection ends it.

        What the database refuses is said and tried again: nobody's deliveries are to
        wait for it.
        """
        while True:
            wait_s = self._poll_s
            if self._leads:
                try:
                    wait_s = await self._look()
                except asyncpg.PostgresConnectionError:
                    raise
                except asyncpg.PostgresError as error:
                    wait_s = REFUSED_RETRY_S
                    log.error("ticks were refused", reason=in_one_line(error), retry_s=wait_s)
            await self._bell.wait(wait_s)

    async def _look(self) -> float:
        """Publish what is due; returns when to look again, in seconds."""
        due_in_s = await self._store.due_in_s()
        if due_in_s is None:
            return self._poll_s
        if due_in_s > 0:
            return min(due_in_s, self._poll_s)
        # In turns, so that neither waits for a crowd of the other.
        ticked, moved = await self._store.tick(), await self._store.move()
        for name, reason in ticked.broken:
            log.error("a schedule cannot be read", schedule=name, reason=reason)
        # Otherwise another one has it in hand, and need not say when it is done.
        return 0.0 if ticked.schedules or moved else self._poll_s
