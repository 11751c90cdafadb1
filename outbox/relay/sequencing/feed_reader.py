"""Reads ahead what feeds need, on a connection of its own that is open only while one runs.

In the leader's turn such a read would delay the next live events.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

import structlog

from outbox.core.sequencing.feeds import (
    ARRIVING_S,
    READ_EVENTS_MAX,
    split_by_batch,
)
from outbox.errors import OutboxError
from outbox.relay.sequencing.feeder import TAIL_IDS, note_missing
from outbox.relay.sequencing.filter_evaluator import FilterEvaluator
from outbox.store.connection.connect import CONNECTION_ERRORS, in_one_line
from outbox.store.connection.response_deadline import response_deadline

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from outbox.core.sequencing.feeds import Feed, Place
    from outbox.relay.sequencing.feeder import Feeder
    from outbox.relay.wake_event import WakeEvent
    from outbox.store.connection.store_connection import Worker
    from outbox.store.sequencing.feeds import FeedStore
    from outbox.store.sequencing.filters import FilterStore

log = structlog.get_logger("outbox.sequencer")

LIVE_READ_EVENTS_MAX, LIVE_PAUSE_S = 200, 0.005
"""Events of a read, and the pause after it, while events are live: what is read takes the time of
this process, too."""
READ_BATCHES_MAX = 1_000
"""Batches of one read."""
COUNT_EVERY_S = 0.25
"""Interval in which the pending deliveries of endpoints are counted."""
REREAD_S = 2.0
"""Delay after a lost connection."""


class FeedReader:
    """Reads ahead for a feeder.

    Args:
        connect: opens a connection.
        wake: wakes the sequencer, which may be asleep.
        read_s: maximum duration of a read; the connection counts as lost after that.
    """

    def __init__(
        self,
        feeder: Feeder,
        connect: Callable[[], Awaitable[Worker]],
        store: Callable[[Worker], tuple[FeedStore, FilterStore]],
        wake: WakeEvent,
        read_s: float,
    ) -> None:
        self._feeder = feeder
        self._connect = connect
        self._stores = store
        self._wake = wake
        self._read_s = read_s

    async def run(self) -> None:
        """Read until cancelled."""
        while True:
            await self._feeder.changed.wait()
            self._feeder.changed.clear()
            if not self._feeder.feeds:
                continue
            failure: BaseException | None = None
            try:
                async with asyncio.timeout(self._read_s):
                    connection = await self._connect()
                async with asyncio.TaskGroup() as tasks:
                    # A cancelled read would wait for the response to its rollback.
                    terminating = tasks.create_task(_terminate_at_end(connection))
                    await self._read_all(connection)
                    terminating.cancel()
            except* (*CONNECTION_ERRORS, OutboxError) as errors:
                failure = errors.exceptions[0]
            if failure is not None:
                # A task group that ends with an error swallows a cancellation that comes then.
                if (task := asyncio.current_task()) is not None and task.cancelling():
                    raise asyncio.CancelledError
                log.warning("feeds cannot be read ahead", reason=in_one_line(failure))
                self._feeder.changed.set()
                await asyncio.sleep(REREAD_S)

    async def _read_all(self, connection: Worker) -> None:
        """Read while there is a feed."""
        store, filters = self._stores(connection)
        feeder, evaluator = self._feeder, FilterEvaluator(filters)
        clock = asyncio.get_running_loop().time
        count_at = 0.0
        while feeds := feeder.feeds:
            was_ready = feeder.due_at is not None
            if clock() >= count_at:
                with response_deadline(connection, self._read_s, "count what is pending"):
                    await self._count_pending(store, feeds)
                count_at = clock() + COUNT_EVERY_S
                # The sequencer may have fallen asleep because too much was pending.
                was_ready = False
            places = sorted({feed.read_to for feed in feeder.hungry()})
            for place in places:
                if not (some := feeder.sharing(place)):
                    # The leader has moved them meanwhile.
                    continue
                with response_deadline(connection, self._read_s, "read ahead"):
                    await self._read(store, evaluator, place, some)
                if feeder.is_live:
                    await asyncio.sleep(LIVE_PAUSE_S)
            if feeder.due_at is not None and not was_ready:
                self._wake.set()
            if not places:
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(count_at):
                        await feeder.changed.wait()
                feeder.changed.clear()

    async def _read(
        self, store: FeedStore, evaluator: FilterEvaluator, place: Place, feeds: Sequence[Feed]
    ) -> None:
        """Read the next batches of feeds at one place."""
        events_max = LIVE_READ_EVENTS_MAX if self._feeder.is_live else READ_EVENTS_MAX
        events_max = min(events_max, self._feeder.ahead_max)
        batches = await store.read_batches(place, events_max, READ_BATCHES_MAX)
        if not batches:
            return
        split = split_by_batch(batches, await store.read_events(batches))
        for feed in feeds:
            wanted = [event for some in split for event in feed.wanted(some)]
            refused, failed = await evaluator.evaluate(feed.router, wanted)
            self._feeder.failed |= failed
            evaluator.mark_stored(failed)
            note_missing(feed, feed.add(place, batches, split, refused))

    async def _count_pending(self, store: FeedStore, feeds: Sequence[Feed]) -> None:
        """Bound what is pending at each endpoint, until little is left of its feed."""
        found = await store.read_pending([f.loaded.endpoint_id for f in feeds], ARRIVING_S)
        for feed in feeds:
            pending, high, arrived = found[feed.loaded.endpoint_id]
            left = high - feed.read_to.id + feed.ahead
            is_near = left <= max(arrived, TAIL_IDS)
            feed.pending_max = None if is_near else max(feed.loaded.pending_max - pending, 0)


async def _terminate_at_end(connection: Worker) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        connection.terminate()
