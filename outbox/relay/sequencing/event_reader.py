"""The event reader: reads committed events, and decides with them about the gaps.

It carries out the order of steps of `outbox.core.sequencing.gaps`, for the cursor of one replica.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from outbox.store.cluster.leadership import AWAKE

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from outbox.config import Settings
    from outbox.core.sequencing.gaps import CursorChange, CursorState, GapTracker, LockHolders
    from outbox.core.sequencing.router import RoutableEvent, Router
    from outbox.store.sequencing.batches import SequencingStore
    from outbox.store.sequencing.event_reads import Reading


class EventReader:
    """Reads the events of one batch after the other, on the connection of the cursor."""

    def __init__(self, store: SequencingStore, settings: Settings, tracker: GapTracker) -> None:
        self._store = store
        self._settings = settings
        self._tracker = tracker
        # The sequence's lock holders after the last read; None: not known.
        self._holders: LockHolders | None = None
        # Start of the last read, by the loop's clock.
        self._began_at = 0.0
        self.reads_content = True
        """Whether lanes may need the content of the next events."""
        self.awake = True
        """Whether the wake-up flag was "awake" at the last read."""
        self.watched: LockHolders = frozenset()
        """The transactions in flight when the flag was last set to "asleep"."""
        self.more = False
        """Whether the last read left events or gaps to read at once."""
        self.committed_after: datetime | None = None
        """Start of the last read that reached no limit, by the database's clock."""
        self.complete_at: float | None = None
        """Start of the last read that reached no limit, by the loop's clock."""

    def forget(self) -> None:
        """Drop the gaps and the times of earlier reads: another replica may have written."""
        self._tracker.forget()
        self._holders = None
        self.committed_after = self.complete_at = None

    async def read(
        self, state: CursorState, is_current: Callable[[Reading], bool], *, watch: bool
    ) -> Reading | None:
        """Read the next events; None: the result is not current, so nothing may be written.

        Args:
            watch: first capture the producers in flight, to watch them.

        Raises:
            CursorBroken: the sequence cannot be trusted.
        """
        clock = asyncio.get_running_loop().time
        store, tracker = self._store, self._tracker
        tracker.begin_batch(state, await self._holders_before(state, watch=watch), clock())
        limit = self._settings.batch_events_max
        while True:
            self._began_at = clock()
            gaps = tracker.ranges(gaps_max=limit)
            reading = await store.read(
                None if tracker.is_partial else state.high,
                gaps,
                limit,
                with_holders=tracker.needs_holders,
                with_content=self.reads_content,
            )
            if not is_current(reading):
                return None
            reading.check(state.high)
            self._holders = reading.holders
            if not tracker.left_out or tracker.complete(await store.running()):
                return reading

    async def _holders_before(self, state: CursorState, *, watch: bool) -> LockHolders:
        """The lock holders before a read; none if they decide nothing."""
        if watch:
            self.watched = await self._store.holders()
            return self.watched
        if not self._tracker.reads_gaps(state):
            return frozenset()
        # The holders of the last read suffice: a gap is declared dead one batch later.
        return await self._store.holders() if self._holders is None else self._holders

    def close(self, reading: Reading, router: Router) -> tuple[list[RoutableEvent], CursorChange]:
        """The events of a read that fit into a batch, and the changes of the cursor with them."""
        clock = asyncio.get_running_loop().time
        events, settings = reading.events, self._settings
        fits = router.count_fitting_events(events, settings.batch_deliveries_max)
        cut = len(events) == settings.batch_events_max or fits < len(events)
        events = events[:fits]
        after = reading.holders or frozenset()
        change = self._tracker.close_batch([e.id for e in events], cut, after, clock())
        self.awake = reading.wakeup == AWAKE
        self.more = cut or self._tracker.is_partial
        return events, change

    def committed(self, reading: Reading, change: CursorChange) -> None:
        """Remember the last read, whose changes are durable."""
        self._tracker.committed(change)
        if not self.more:
            self.committed_after, self.complete_at = reading.began_at, self._began_at
