"""Bounds of a read: the reader's only connection is shared by all lanes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from outbox.core.delivery.buffer_budget import COPIES, READ_BYTES_MAX, ROW_BYTES, BufferBudget
from outbox.core.delivery.circuit_breaker import FAILURES_MAX, CircuitBreaker
from outbox.core.delivery.commands import LaneSnapshot, Progress
from outbox.core.delivery.lane import Lane
from outbox.core.model.message_format import BATCH_MAX
from outbox.core.model.response_policy import AttemptOutcome
from outbox.relay.delivery.fetcher import ROWS_PER_LANE, ROWS_PER_READ, DeliveryFetcher
from tests.core.lane_steps import NOW
from tests.core.lane_tables import delivery

if TYPE_CHECKING:
    from collections.abc import Sequence


PENDING = 10_000


class WaitingLane:
    """A lane that waits for its pending deliveries."""

    def __init__(
        self, lane_id: int, batch_max: int | None, budget: BufferBudget | None = None
    ) -> None:
        self.id = lane_id
        share = (budget or BufferBudget()).share_of("shop")
        self.state = Lane(
            LaneSnapshot(lane_id, PENDING, Progress()), 0, batch_max=batch_max, share=share
        )
        self.read = None
        endpoint = SimpleNamespace(id=lane_id % 7, tenant=None, batch_max=batch_max)
        self.runtime = SimpleNamespace(endpoint=endpoint, breaker=CircuitBreaker(), stopped=False)

    @property
    def loaded(self) -> Any:
        return self

    @property
    def got(self) -> int:
        return len(self.state._buffer.queue)


class FullLanes:
    """Lanes with more pending deliveries than any read returns; records the size of each read."""

    def __init__(self, payload: bytes = b"{}") -> None:
        self.reads: list[int] = []
        self._payload = payload

    async def deliveries(
        self, lanes: Any, _: Any, after: Sequence[int], rows: Sequence[int], room: Sequence[int]
    ) -> Any:
        self.reads.append(sum(rows))
        found = {}
        for lane, after_seq, rows_max, bytes_max in zip(lanes, after, rows, room, strict=True):
            count = max(min(rows_max, bytes_max // len(self._payload)), 1)
            found[lane.id] = [
                delivery(after_seq + 1 + n)._replace(payload=self._payload) for n in range(count)
            ]
        return found


async def test_a_large_batch_limit_does_not_delay_other_lanes() -> None:
    """A read is at most as large as one for lanes that send one by one."""
    lanes = [WaitingLane(n, (None, 1000, 10)[n % 3]) for n in range(99)]
    for _ in range(4):
        await read_again(lanes, FullLanes())
    store = FullLanes()
    await read(lanes, store)
    # The last event may have the largest allowed size.
    assert max(store.reads) < ROWS_PER_READ + BATCH_MAX
    assert {lane.got for lane in lanes if lane.id % 3 != 1} == {ROWS_PER_LANE}
    assert {lane.got for lane in lanes if lane.id % 3 == 1} == {1000}


async def test_large_payloads_reduce_the_rows_per_read() -> None:
    """The size of a row is known afterwards, and the next read is smaller."""
    lanes = [WaitingLane(n, None) for n in range(16)]
    store = FullLanes(b'"%b"' % (b"x" * 250_000))
    await read_again(lanes, store)
    await read_again(lanes, store)
    assert store.reads == [16 * 9, 16 * 3]
    await read(lanes, store)
    assert {lane.got for lane in lanes} == {READ_BYTES_MAX // 250_002}


async def test_all_reads_share_one_budget() -> None:
    """The lanes that find no room get one delivery each, and are not behind the others."""
    payload = b'"%b"' % (b"x" * 100_000)
    budget = BufferBudget(16 << 20)
    lanes = [WaitingLane(n, 100, budget) for n in range(100)]
    await read(lanes, FullLanes(payload))
    assert budget.held <= budget.bytes_max
    row = ROW_BYTES + COPIES * len(payload)
    held = sum(lane.got for lane in lanes) * row
    assert budget.held + budget.beyond == held < budget.bytes_max + 100 * row
    assert min(lane.got for lane in lanes) == 1


@pytest.mark.parametrize("trouble", ["failing", "rejected"])
async def test_a_lane_in_trouble_reads_one_delivery(trouble: str) -> None:
    lane = WaitingLane(1, None)
    if trouble == "rejected":
        for _ in range(FAILURES_MAX):
            lane.runtime.breaker.record_result(AttemptOutcome.RETRY, NOW, 0.0)
    else:
        progress = Progress(retry_seq=1, attempts=1, spent=1, next_attempt_at=NOW)
        lane.state = Lane(LaneSnapshot(1, PENDING, progress), 0)
    await read([lane], store := FullLanes())
    assert store.reads == [1]


async def test_a_lane_that_is_claimed_again_is_read_once() -> None:
    """The read of the runtime before, which was not its turn yet, is given up."""
    before, now = WaitingLane(1, None), WaitingLane(1, None)
    before.runtime.stopped = True
    store, done = FullLanes(), asyncio.Event()
    reader = DeliveryFetcher(store, asyncio.Lock(), lambda _: done.set())  # type: ignore[arg-type]
    for lane in (before, now):
        fetch = lane.state.fetch()
        assert fetch is not None
        reader.request(lane, fetch)  # type: ignore[arg-type]
    task = asyncio.create_task(reader.run())
    async with asyncio.timeout(20):
        await asyncio.wait([task, asyncio.create_task(done.wait())], return_when="FIRST_COMPLETED")
    assert not task.done(), task.exception()
    task.cancel()
    assert store.reads == [now.got]
    assert before.got == 0


async def read_again(lanes: Sequence[WaitingLane], store: FullLanes) -> None:
    """Read once for all lanes, and discard what was read."""
    await read(lanes, store)
    for lane in lanes:
        lane.state.close()


async def read(lanes: Sequence[WaitingLane], store: FullLanes) -> None:
    """Read once for all lanes."""
    left, done = set(lanes), asyncio.Event()

    def on_rows(lane: Any) -> None:
        left.discard(lane)
        if not left:
            done.set()

    reader = DeliveryFetcher(store, asyncio.Lock(), on_rows)  # type: ignore[arg-type]
    for lane in lanes:
        fetch = lane.state.fetch()
        assert fetch is not None
        reader.request(lane, fetch)  # type: ignore[arg-type]
    task = asyncio.create_task(reader.run())
    async with asyncio.timeout(20):
        await done.wait()
    task.cancel()
