"""The reader: fetches what lanes owe.

All reading goes through here, on one connection, so that a hundred lanes that
run dry together cost a few queries.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from outbox.core.admission.round_robin import RoundRobin
from outbox.core.delivery.batch import BATCH_BYTES_MAX
from outbox.core.delivery.commands import Gone

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from outbox.core.delivery.commands import Fetch
    from outbox.core.delivery.message import Delivery
    from outbox.relay.delivery.owned_endpoints import OwnedLane
    from outbox.store.lanes import LaneStore

log = structlog.get_logger("outbox.dispatcher")

ROWS_PER_LANE = 32
BYTES_PER_LANE = 512 << 10
ROWS_PER_READ = 512
"""What is read is taken in at once, and meanwhile the loop does nothing else."""
LANES_PER_READ = 32
"""Lanes that owe little share a read with more of them.  But all of them want to send then, and
more would only wait for their turns, which takes more than another read."""


class Reader:
    """Reads for lanes until cancelled.

    Args:
        on_rows: called with a lane that got something to do.
    """

    def __init__(self, store: LaneStore, on_rows: Callable[[OwnedLane], object]) -> None:
        self._store = store
        self._on_rows = on_rows
        # By tenant, or by endpoint if it has none: nobody waits behind somebody else's flood.
        self._wanted: RoundRobin[tuple[OwnedLane, Fetch]] = RoundRobin()
        self._asked = asyncio.Event()

    def want(self, lane: OwnedLane, fetch: Fetch) -> None:
        """Read this for the lane some time soon."""
        endpoint = lane.home.endpoint
        rows = max(min(lane.machine.owed, _rows_max(lane)), ROWS_PER_READ // LANES_PER_READ)
        self._wanted.put(endpoint.tenant or endpoint.id, (lane, fetch), rows)
        self._asked.set()

    async def run(self) -> None:
        """Read until cancelled; asyncpg's errors end it."""
        while True:
            await self._asked.wait()
            wanted = self._wanted.take(ROWS_PER_READ)
            if not self._wanted:
                self._asked.clear()
            rows = await self._store.deliveries(
                [lane.loaded for lane, _ in wanted],
                [fetch.floor_batch for _, fetch in wanted],
                [fetch.after_seq for _, fetch in wanted],
                [_rows_max(lane) for lane, _ in wanted],
                BYTES_PER_LANE,
            )
            for lane, fetch in wanted:
                following = _following(fetch.after_seq, rows[lane.loaded.id])
                lane.payload_bytes = _mean_bytes(following) or lane.payload_bytes
                lane.machine.fetched(following)
                if following:
                    self._on_rows(lane)
                elif not lane.home.stopped and lane.machine.acked_seq <= fetch.after_seq:
                    log.error(
                        "a lane owes numbers that are not there; run outbox verify",
                        lane=lane.loaded.name,
                        after=fetch.after_seq,
                    )


def _rows_max(lane: OwnedLane) -> int:
    """What is read for a lane at once: more, if more of it goes together, and less, if what
    was read last was large.
    """
    most = max(ROWS_PER_LANE, lane.home.endpoint.batch_max or 0)
    return min(most, BATCH_BYTES_MAX // lane.payload_bytes + 1)


def _mean_bytes(rows: Sequence[Delivery | Gone]) -> int:
    """What a payload takes; a read is bounded by what payloads take as they are stored, and
    compressed that may be little.
    """
    sizes = [len(row.payload) for row in rows if not isinstance(row, Gone)]
    return sum(sizes) // len(sizes) if sizes else 0


def _following(seq: int, rows: Iterable[Delivery | Gone]) -> list[Delivery | Gone]:
    """The rows up to the first hole: what lies behind it must not be sent before it.

    As they are stored many large payloads can be small.  Of those no more are kept than go
    in a request, or than a lane gets that sends one by one.
    """
    following: list[Delivery | Gone] = []
    room_bytes = BATCH_BYTES_MAX
    for row in rows:
        if row.seq != seq + len(following) + 1:
            break
        room_bytes -= 0 if isinstance(row, Gone) else len(row.payload)
        if room_bytes < 0 and len(following) >= ROWS_PER_LANE:
            break
        following.append(row)
    return following
