"""Bounds of a read: the reader's only connection is shared by all lanes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from outbox.core.delivery.batch import BATCH_BYTES_MAX
from outbox.core.delivery.commands import Fetch
from outbox.core.model.message_format import BATCH_MAX
from outbox.relay.delivery.fetcher import ROWS_PER_LANE, ROWS_PER_READ, DeliveryFetcher
from tests.core.lane_tables import delivery

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(eq=False)
class WaitingLane:
    """A lane that waits for its pending deliveries."""

    id: int
    batch_max: int | None
    got: int = 0
    payload_bytes: int = 1

    @property
    def loaded(self) -> Any:
        return self

    @property
    def runtime(self) -> Any:
        endpoint = SimpleNamespace(id=self.id % 7, tenant=None, batch_max=self.batch_max)
        return SimpleNamespace(endpoint=endpoint)

    @property
    def state(self) -> Any:
        return SimpleNamespace(append_fetched=self.fetched, pending=10_000)

    def fetched(self, rows: Any) -> None:
        self.got = len(rows)


class FullLanes:
    """Lanes with more pending deliveries than any read returns; records the size of each read."""

    def __init__(self, payload: bytes = b"{}") -> None:
        self.reads: list[int] = []
        self._payload = payload

    async def deliveries(
        self, lanes: Any, _: Any, __: Any, rows_max: Sequence[int], ___: int
    ) -> Any:
        self.reads.append(sum(rows_max))
        rows = [delivery(n + 1)._replace(payload=self._payload) for n in range(max(rows_max))]
        return {lane.id: rows[:most] for lane, most in zip(lanes, rows_max, strict=True)}


async def test_a_large_batch_limit_does_not_delay_other_lanes() -> None:
    """A read is at most as large as one for lanes that send one by one."""
    lanes = [WaitingLane(n, (None, 1000, 10)[n % 3]) for n in range(99)]
    store = FullLanes()
    await read(lanes, store)
    # The last event may have the largest allowed size.
    assert max(store.reads) < ROWS_PER_READ + BATCH_MAX
    assert {lane.got for lane in lanes if lane.batch_max != 1000} == {ROWS_PER_LANE}
    assert {lane.got for lane in lanes if lane.batch_max == 1000} == {1000}


async def test_compressed_payloads_are_bounded_by_their_size_in_memory() -> None:
    """Otherwise well-compressed payloads would take fifty times as much of the relay's memory."""
    large = b'"%b"' % (b"x" * 20_000)
    lanes = [WaitingLane(1, 1000), WaitingLane(2, None)]
    await read(lanes, FullLanes(large))
    assert [lane.got for lane in lanes] == [BATCH_BYTES_MAX // len(large), ROWS_PER_LANE]
    # As many as any lane may always have.
    await read(lanes[:1], FullLanes(large * 10))
    assert lanes[0].got == ROWS_PER_LANE


async def test_large_payloads_reduce_the_rows_per_read() -> None:
    """The size of a read is known afterwards, and the next read is smaller."""
    lanes = [WaitingLane(n, None) for n in range(16)]
    store = FullLanes(b'"%b"' % (b"x" * 250_000))
    await read(lanes, store)
    await read(lanes, store)
    # A request contains four of them.
    assert store.reads == [16 * ROWS_PER_LANE, 16 * 4]


async def read(lanes: Sequence[WaitingLane], store: FullLanes) -> None:
    """Read once for all lanes."""
    left, done = set(lanes), asyncio.Event()

    def on_rows(lane: Any) -> None:
        left.discard(lane)
        if not left:
            done.set()

    reader = DeliveryFetcher(store, asyncio.Lock(), on_rows)  # type: ignore[arg-type]
    for lane in lanes:
        reader.request(lane, Fetch(0, 0))  # type: ignore[arg-type]
    task = asyncio.create_task(reader.run())
    async with asyncio.timeout(20):
        await done.wait()
    task.cancel()
