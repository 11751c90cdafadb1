"""Bounds of a read: the reader's only connection is shared by all lanes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from outbox.core.admission.request_scheduler import RequestScheduler
from outbox.core.delivery.buffer_budget import COPIES, READ_BYTES_MAX, ROW_BYTES, BufferBudget
from outbox.core.delivery.circuit_breaker import FAILURES_MAX, CircuitBreaker
from outbox.core.delivery.commands import LaneSnapshot, Progress
from outbox.core.delivery.event_cache import EventCache
from outbox.core.delivery.lane import Lane
from outbox.core.model.delivery import EventContent
from outbox.core.model.message_format import BATCH_MAX
from outbox.core.model.response_policy import AttemptOutcome
from outbox.core.sequencing.router import Deliveries
from outbox.relay.delivery.dispatcher import Dispatcher
from outbox.relay.delivery.fetcher import ROWS_PER_LANE, ROWS_PER_READ, DeliveryFetcher
from outbox.relay.sequencing.cursor import SequencedBatch
from tests.core.lane_steps import NOW
from tests.core.lane_tables import delivery

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.store.delivery.delivery_reads import LaneRead


PENDING = 10_000


class WaitingLane:
    """A lane that waits for its pending deliveries."""

    def __init__(
        self, lane_id: int, batch_max: int | None, budget: BufferBudget | None = None
    ) -> None:
        self.id, self.name, self.endpoint_id = lane_id, "lane", None
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

    async def deliveries(self, requested: Sequence[LaneRead], _: EventCache) -> Any:
        self.reads.append(sum(each.rows_max for each in requested))
        found = {}
        for lane, _, after_seq, rows_max, bytes_max in requested:
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
    reader = DeliveryFetcher(store, asyncio.Lock(), lambda _: done.set(), EventCache())  # type: ignore[arg-type]
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


# --------------------------------------------------------------------- from memory


def sequenced(*seqs: int, lane_id: int = 1, erasures: int = 0) -> SequencedBatch:
    """The batch of a replica, whose events were read with it."""
    deliveries = Deliveries([lane_id] * len(seqs), list(seqs), [100 + seq for seq in seqs])
    found = {100 + seq: EventContent._make(delivery(seq)[5:14]) for seq in seqs}
    return SequencedBatch(1, len(seqs), deliveries, found, erasures, None, notified=False)


class Remembering:
    """A fetcher, and one lane that has deliveries up to `last_seq`."""

    def __init__(self, last_seq: int) -> None:
        self.store, self.filled = FullLanes(), asyncio.Event()
        self.lane: Any = WaitingLane(1, None)
        self.lane.state = Lane(LaneSnapshot(1, last_seq, Progress()), 0)
        store: Any = self.store
        self.fetcher = DeliveryFetcher(
            store, asyncio.Lock(), lambda _: self.filled.set(), EventCache()
        )

    async def reads(self) -> list[int]:
        """The reads that the lane needs to be filled."""
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(self.fetcher.run())
            async with asyncio.timeout(20):
                await self.filled.wait()
            running.cancel()
        return self.store.reads


async def test_new_deliveries_of_an_idle_lane_come_from_memory() -> None:
    here = Remembering(3)
    here.fetcher.remember(sequenced(1, 2, 3), {1})
    assert here.fetcher.refill(here.lane) == 0
    assert here.filled.is_set()
    assert [each.seq for each in here.lane.state._buffer.queue] == [1, 2, 3]
    assert here.fetcher.refill(here.lane) is None
    assert await here.reads() == []


@pytest.mark.parametrize("what", ["behind", "another lane", "erased", "not owned", "many"])
async def test_a_lane_reads_what_is_not_in_memory(what: str) -> None:
    here = Remembering(3)
    first = 2 if what == "behind" else 1
    lane_id = 2 if what == "another lane" else 1
    owned = set() if what == "not owned" else {1, 2}
    count = ROWS_PER_READ + 1 if what == "many" else 2
    here.fetcher.remember(sequenced(*range(first, first + count), lane_id=lane_id), owned)
    if what == "erased":
        here.fetcher.replace_events(EventCache())
    assert here.fetcher.refill(here.lane) == 0
    assert not here.filled.is_set()
    assert len(await here.reads()) == 1


async def test_a_read_that_an_erasure_overtakes_fills_no_cache() -> None:
    """It returns what was there before, and only the lanes that read it know to discard it."""
    here = Remembering(PENDING)
    used: list[EventCache] = []
    read = here.store.deliveries

    async def deliveries(requested: Sequence[LaneRead], events: EventCache) -> Any:
        used.append(events)
        here.fetcher.replace_events(EventCache())
        return await read(requested, events)

    here.store.deliveries = deliveries  # type: ignore[method-assign]
    here.fetcher.refill(here.lane)
    await here.reads()
    assert used[0] is not here.fetcher._events


@pytest.mark.parametrize(("known", "sent"), [(0, True), (7, True), (8, False)])
async def test_events_that_were_read_before_an_erasure_are_not_remembered(
    known: int, sent: bool
) -> None:
    """The relay may learn of the erasure before the batch's result, which comes from before it."""
    stub: Any = SimpleNamespace()
    dispatcher = Dispatcher(stub, stub, stub, lambda: 1.0, RequestScheduler(10))
    dispatcher.reread(known)
    dispatcher.notify_batch(sequenced(1, erasures=7))
    assert (101 in dispatcher._worker.fetcher._events) is sent


@pytest.mark.parametrize("behind", [True, False])
async def test_content_is_needed_by_lanes_that_have_no_other_deliveries(behind: bool) -> None:
    stub: Any = SimpleNamespace(store=None)
    dispatcher = Dispatcher(stub, stub, stub, lambda: 1.0, RequestScheduler(10))
    lane: Any = WaitingLane(1, None)
    lane.state = Lane(LaneSnapshot(1, 9 if behind else 0, Progress()), 0)
    lane.runtime.usable = True
    dispatcher._lanes[1] = lane
    assert dispatcher.notify_new_deliveries({1: 10}) is not behind


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

    reader = DeliveryFetcher(store, asyncio.Lock(), on_rows, EventCache())  # type: ignore[arg-type]
    for lane in lanes:
        fetch = lane.state.fetch()
        assert fetch is not None
        reader.request(lane, fetch)  # type: ignore[arg-type]
    task = asyncio.create_task(reader.run())
    async with asyncio.timeout(20):
        await done.wait()
    task.cancel()
