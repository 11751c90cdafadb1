"""The delivery fetcher: reads pending deliveries into the lanes' delivery buffers.

All reads use one connection, so that a hundred lanes that need a refill at the same
time cost a few queries.
"""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import TYPE_CHECKING

import structlog

from outbox.core.admission.round_robin import RoundRobin
from outbox.core.delivery.circuit_breaker import BreakerState
from outbox.core.model.delivery import epoch_seconds
from outbox.store.delivery.delivery_reads import LaneRead

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable

    from outbox.core.delivery.buffer_budget import ReadBounds
    from outbox.core.delivery.commands import ErasedEvent, Fetch
    from outbox.core.delivery.event_cache import EventCache, Placed
    from outbox.core.model.delivery import Delivery
    from outbox.relay.delivery.owned_endpoints import LaneRuntime
    from outbox.relay.sequencing.cursor import SequencedBatch
    from outbox.store.delivery.lanes import LaneStore

log = structlog.get_logger("outbox.dispatcher")

ROWS_PER_LANE = 32
ROWS_PER_READ = 512
"""Bounded because processing the rows blocks the event loop."""
LANES_PER_READ = 32
"""Lanes with few pending deliveries share a read.  More lanes would not help: all of them
then wait for slots, which takes longer than another read."""


class DeliveryFetcher:
    """Reads deliveries for lanes until cancelled.

    Args:
        reading: held while the store is used, because it has one connection.
        on_rows: called with each lane that received deliveries.
        events: the events that were read lately.
    """

    def __init__(
        self,
        store: LaneStore,
        reading: asyncio.Lock,
        on_rows: Callable[[LaneRuntime], object],
        events: EventCache,
    ) -> None:
        self._store = store
        self._reading = reading
        self._on_rows = on_rows
        self._events = events
        # The deliveries of this replica's last batch, by lane, if its events were read with it.
        self._placed: dict[int, list[Placed]] = {}
        # Fair by tenant, or by endpoint without one: a large backlog delays only its owner.
        self._requests: RoundRobin[tuple[LaneRuntime, Fetch]] = RoundRobin()
        self._requested = asyncio.Event()

    def replace_events(self, events: EventCache) -> None:
        """Send nothing more that was read before, because events were erased."""
        self._events, self._placed = events, {}

    def remember(self, sequenced: SequencedBatch, owned: Container[int]) -> None:
        """Keep the events that the sequencer read with its last batch.

        Args:
            owned: the lanes that this replica delivers.
        """
        self._events.add(sequenced.contents)
        self._placed = {}
        deliveries, fed = sequenced.deliveries, len(sequenced.deliveries.feed_ids)
        if len(deliveries) - fed > ROWS_PER_READ or sequenced.events > len(sequenced.contents):
            return
        after = epoch_seconds(sequenced.committed_after)
        for lane_id, seq, outbox_id in islice(deliveries.new, fed, None):
            if lane_id in owned:
                placed = self._placed.setdefault(lane_id, [])
                placed.append((seq, sequenced.batch, outbox_id, after))

    def refill(self, lane: LaneRuntime) -> int | None:
        """Fill the lane's delivery buffer from memory, or queue a read, if it needs that.

        Returns:
            After which sequence; None: it needs neither.
        """
        if (fetch := lane.state.fetch()) is None:
            return None
        placed = self._placed.get(lane.loaded.id)
        if placed and placed[0][0] == fetch.after_seq + 1 and placed[0][2] in self._events:
            rows_max, bytes_max = _reserve(lane)
            rows = self._events.deliveries(lane.loaded, placed[:rows_max], bytes_max, {})
            lane.state.append_fetched(rows)
            self._on_rows(lane)
        else:
            self.request(lane, fetch)
        return fetch.after_seq

    async def read(self, lane: LaneRuntime, fetch: Fetch) -> None:
        """Queue a read for the lane, and wait until it has completed."""
        lane.read = asyncio.get_running_loop().create_future()
        self.request(lane, fetch)
        await asyncio.shield(lane.read)

    def request(self, lane: LaneRuntime, fetch: Fetch) -> None:
        """Queue a read for the lane."""
        endpoint = lane.runtime.endpoint
        rows = max(min(lane.state.pending, _rows_max(lane)), ROWS_PER_READ // LANES_PER_READ)
        self._requests.put(endpoint.tenant or endpoint.id, (lane, fetch), rows)
        self._requested.set()

    async def run(self) -> None:
        """Read until cancelled; asyncpg's errors end it."""
        while True:
            await self._requested.wait()
            # Nothing waits for the read of a lane that was given up meanwhile, and its endpoint may
            # have been claimed again: a read has each lane once.
            requested = [
                (lane, fetch)
                for lane, fetch in self._requests.pop_until(ROWS_PER_READ)
                if lane.read is not None or not lane.runtime.stopped
            ]
            if not self._requests:
                self._requested.clear()
            async with self._reading:
                reads = [
                    LaneRead(lane.loaded, fetch.floor_batch, fetch.after_seq, *_reserve(lane))
                    for lane, fetch in requested
                ]
                rows = await self._store.deliveries(reads, self._events)
            for lane, fetch in requested:
                following = _following(fetch.after_seq, rows.pop(lane.loaded.id))
                lane.state.append_fetched(following)
                if lane.read is not None:
                    lane.read.set_result(None)
                    lane.read = None
                elif following:
                    self._on_rows(lane)
                if (
                    not following
                    and not lane.runtime.stopped
                    and lane.state.acked_seq <= fetch.after_seq
                ):
                    log.error(
                        "pending deliveries of a lane are missing; run outbox verify",
                        lane=lane.loaded.name,
                        after=fetch.after_seq,
                    )


def _reserve(lane: LaneRuntime) -> ReadBounds:
    return lane.state.reserve(_rows_max(lane))


def _rows_max(lane: LaneRuntime) -> int:
    """Rows that a lane needs: at least one batch of the endpoint.  A retry, and a lane that waits
    for the circuit breaker, need one.
    """
    if lane.state.failing or lane.runtime.breaker.state is not BreakerState.HEALTHY:
        return 1
    return max(ROWS_PER_LANE, lane.runtime.endpoint.batch_max or 0)


def _following(seq: int, rows: Iterable[Delivery | ErasedEvent]) -> list[Delivery | ErasedEvent]:
    """The rows before the first missing sequence number, which must be sent first."""
    following: list[Delivery | ErasedEvent] = []
    for row in rows:
        if row.seq != seq + len(following) + 1:
            break
        following.append(row)
    return following
