"""A sequencer that runs as in the product: it sleeps, and notifications wake it."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from outbox.relay.cluster.listener import Listener
from outbox.relay.wake_event import Wakeups
from tests.support.sequencers import REAL, Slow, Variant, session, settings
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from asyncpg import Connection

    from outbox.core.sequencing.gaps import Range
    from outbox.core.sequencing.router import RoutableEvent
    from outbox.relay.sequencing.cursor import SequencedBatch
    from outbox.relay.sequencing.sequencer import Sequencer
    from outbox.store.cluster.leadership import LeaderStatus
    from outbox.store.sequencing.batches import SequencingStore
    from outbox.store.sequencing.event_reads import Reading
    from tests.support.postgres import Database

SOON_S = 20.0
"""A wake-up that takes longer was lost."""
BACKOFF_S, BACKOFF_MAX_S = 0.005, 0.2
POLL_S = 60.0
"""Much longer than that, so that no event is found by the next poll."""

# The points between the steps of falling asleep at which a producer can act.
POINTS = ("before the flag", "before the holders", "before the read", "after the read", "asleep")


class Drowsy(Slow):
    """Runs actions at points of the next transition to sleep."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self.actions: dict[str, Callable[[], Awaitable[object]]] = {}
        self.flags: Counter[str] = Counter()
        self.refusals = 0
        self.reads = 0
        self.polls = 0
        self._falling = False
        self._losses = 0

    def in_next_batch(self, point: str, action: Callable[[], Awaitable[object]]) -> None:
        """Run an action at a point of the next batch, although it does not fall asleep."""
        self.actions[point] = action
        self._falling = True

    async def _reach(self, point: str) -> None:
        if self._falling and (action := self.actions.pop(point, None)):
            await action()

    async def take_leadership(self, replica_id: int) -> bool:
        """Back off after a lost batch: no sleeper has a lease, on which standbys of the product
        wait, so that two of equal speed would take the leadership from each other for ever."""
        if self._losses:
            await asyncio.sleep(random.random() * min(BACKOFF_MAX_S, BACKOFF_S * 2**self._losses))
        leads = await super().take_leadership(replica_id)
        self.refusals += not leads
        return leads

    async def leader_status(self, me: int) -> LeaderStatus:
        standing = await super().leader_status(me)
        self.polls += 1
        return standing

    async def fall_asleep(self, replica_id: int, for_s: int) -> bool:
        self.flags["asleep"] += 1
        self._falling = bool(self.actions)
        await self._reach("before the flag")
        leads = await super().fall_asleep(replica_id, for_s)
        await self._reach("before the holders")
        return leads

    async def release_leadership(self, replica_id: int) -> bool:
        released = await super().release_leadership(replica_id)
        self.flags["set"] += released
        return released

    async def events(
        self, high: int | None, gaps: Sequence[Range], limit: int
    ) -> list[RoutableEvent]:
        await self._reach("before the read")
        events = await super().events(high, gaps, limit)
        await self._reach("after the read")
        return events

    async def read(self, *cursor: Any, **options: Any) -> Reading:
        reading = await super().read(*cursor, **options)
        self.reads += 1
        self._falling = False
        return reading

    async def write(self, *batch: Any, awake: bool, **options: Any) -> Any:
        if awake:
            self.flags["set"] += 1
        written = await super().write(*batch, awake=awake, **options)
        self._losses = 0 if written else min(self._losses + 1, 10)
        self.refusals += not written
        return written


class Sleeper:
    def __init__(self, sequencer: Sequencer, store: SequencingStore, wakeups: Wakeups) -> None:
        self.sequencer = sequencer
        self.store = store
        self.wakeups = wakeups
        self.task: asyncio.Task[None]
        self._seen: set[int] = set()
        self._more = asyncio.Event()

    def record_batch(self, sequenced: SequencedBatch) -> None:
        """Called by the sequencer after each batch."""
        self._seen.update(sequenced.deliveries.outbox_ids)
        self._more.set()

    async def sequenced(self, *ids: int, within_s: float = SOON_S) -> None:
        """Wait until these events are sequenced; raises TimeoutError."""
        async with asyncio.timeout(within_s):
            while not self._seen.issuperset(ids):
                self._more.clear()
                await self._more.wait()

    async def ended(self) -> None:
        """Wait until it has stopped."""
        await asyncio.wait([self.task], timeout=SOON_S)
        assert self.task.done()

    async def asleep(self) -> None:
        """Wait until it sleeps, or works without a wake-up."""
        await until(lambda: self.sequencer._asleep_until, what="the sequencer to fall asleep")


@asynccontextmanager
async def sleeper(
    database: Database,
    variant: Variant = REAL,
    *,
    notified: bool = True,
    poll_s: float = POLL_S,
    busy_events: int = 1,
) -> AsyncIterator[Sleeper]:
    """A running sequencer with a listener; a failure of either ends the block."""
    wakeups, options = Wakeups(), settings(database, poll_s=poll_s)
    connection = await session(database)
    this: list[Sleeper] = []
    sequencer, store = variant.build(
        connection,
        options,
        wakeups=wakeups,
        store_mixin=Drowsy,
        on_batch=lambda sequenced: this[0].record_batch(sequenced),
        notified=notified,
        busy_events=busy_events,
    )
    store.database = database
    this.append(Sleeper(sequencer, store, wakeups))
    async with asyncio.TaskGroup() as tasks:
        listening = None
        if notified:
            listener = Listener(
                lambda: session(database),
                options,
                wakeups,
                lambda *_: None,
                lambda: [connection.get_server_pid()],
            )
            listening = tasks.create_task(listener.run())
        running = this[0].task = tasks.create_task(sequencer.run())
        try:
            yield this[0]
        finally:
            sequencer.stop()
            await asyncio.wait([running], timeout=SOON_S)
            running.cancel()
            if listening is not None:
                listening.cancel()
