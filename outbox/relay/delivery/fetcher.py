"""The delivery fetcher: reads pending deliveries into the lanes' delivery buffers.

All reads use one connection, so that a hundred lanes that need a refill at the same
time cost a few queries.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from outbox.core.admission.round_robin import RoundRobin
from outbox.core.delivery.batch import BATCH_BYTES_MAX
from outbox.core.delivery.commands import ErasedEvent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from outbox.core.delivery.commands import Fetch
    from outbox.core.model.delivery import Delivery
    from outbox.relay.delivery.owned_endpoints import LaneRuntime
    from outbox.store.delivery.lanes import LaneStore

log = structlog.get_logger("outbox.dispatcher")

ROWS_PER_LANE = 32
BYTES_PER_LANE = 512 << 10
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
    """

    def __init__(
        self, store: LaneStore, reading: asyncio.Lock, on_rows: Callable[[LaneRuntime], object]
    ) -> None:
        self._store = store
        self._reading = reading
        self._on_rows = on_rows
        # Fair by tenant, or by endpoint without one: a large backlog delays only its owner.
        self._requests: RoundRobin[tuple[LaneRuntime, Fetch]] = RoundRobin()
        self._requested = asyncio.Event()

    def refill(self, lane: LaneRuntime) -> None:
        """Queue a read if the lane's delivery buffer needs one."""
        if (fetch := lane.state.fetch()) is not None:
            self.request(lane, fetch)

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
            requested = self._requests.pop_until(ROWS_PER_READ)
            if not self._requests:
                self._requested.clear()
            async with self._reading:
                rows = await self._store.deliveries(
                    [lane.loaded for lane, _ in requested],
                    [fetch.floor_batch for _, fetch in requested],
                    [fetch.after_seq for _, fetch in requested],
                    [_rows_max(lane) for lane, _ in requested],
                    BYTES_PER_LANE,
                )
            for lane, fetch in requested:
                following = _following(fetch.after_seq, rows[lane.loaded.id])
                lane.payload_bytes = _mean_bytes(following) or lane.payload_bytes
                lane.state.append_fetched(following)
                if following:
                    self._on_rows(lane)
                elif not lane.runtime.stopped and lane.state.acked_seq <= fetch.after_seq:
                    log.error(
                        "pending deliveries of a lane are missing; run outbox verify",
                        lane=lane.loaded.name,
                        after=fetch.after_seq,
                    )


def _rows_max(lane: LaneRuntime) -> int:
    """Rows per read of a lane: at least one batch of the endpoint, and fewer if the payloads
    of the last read were large.
    """
    rows_max = max(ROWS_PER_LANE, lane.runtime.endpoint.batch_max or 0)
    return min(rows_max, BATCH_BYTES_MAX // lane.payload_bytes + 1)


def _mean_bytes(rows: Sequence[Delivery | ErasedEvent]) -> int:
    """Mean size of a payload in memory; a read is bounded by the stored, compressed size,
    which may be much smaller.
    """
    sizes = [len(row.payload) for row in rows if not isinstance(row, ErasedEvent)]
    return sum(sizes) // len(sizes) if sizes else 0


def _following(seq: int, rows: Iterable[Delivery | ErasedEvent]) -> list[Delivery | ErasedEvent]:
    """The rows before the first missing sequence number, which must be sent first.

    Large payloads can be small when compressed.  No more of them are kept than fit into one
    request, or than `ROWS_PER_LANE`.
    """
    following: list[Delivery | ErasedEvent] = []
    room_bytes = BATCH_BYTES_MAX
    for row in rows:
        if row.seq != seq + len(following) + 1:
            break
        room_bytes -= 0 if isinstance(row, ErasedEvent) else len(row.payload)
        if room_bytes < 0 and len(following) >= ROWS_PER_LANE:
            break
        following.append(row)
    return following
