"""The reader's one connection is everybody's: what a read may be."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from outbox.core.delivery.batch import BATCH_BYTES_MAX
from outbox.core.delivery.commands import Fetch
from outbox.core.model.endpoint import BATCH_MAX
from outbox.relay.delivery.fetcher import ROWS_PER_LANE, ROWS_PER_READ, Reader
from tests.core.lane_tables import delivery

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(eq=False)
class Reading:
    """A lane that waits for what it owes."""

    id: int
    batch_max: int | None
    got: int = 0
    payload_bytes: int = 1

    @property
    def loaded(self) -> Any:
        return self

    @property
    def home(self) -> Any:
        endpoint = SimpleNamespace(id=self.id % 7, tenant=None, batch_max=self.batch_max)
        return SimpleNamespace(endpoint=endpoint)

    @property
    def machine(self) -> Any:
        return SimpleNamespace(fetched=self.fetched, owed=10_000)

    def fetched(self, rows: Any) -> None:
        self.got = len(rows)


class Full:
    """Lanes that owe more than anybody asks for; keeps how many rows each read was of."""

    def __init__(self, payload: bytes = b"{}") -> None:
        self.reads: list[int] = []
        self._payload = payload

    async def deliveries(
        self, lanes: Any, _: Any, __: Any, rows_max: Sequence[int], ___: int
    ) -> Any:
        self.reads.append(sum(rows_max))
        rows = [delivery(n + 1)._replace(payload=self._payload) for n in range(max(rows_max))]
        return {lane.id: rows[:most] for lane, most in zip(lanes, rows_max, strict=True)}


async def test_who_may_send_much_together_keeps_the_others_waiting_no_longer() -> None:
    """A read is as large at most as one for lanes that send one by one."""
    lanes = [Reading(n, (None, 1000, 10)[n % 3]) for n in range(99)]
    store = Full()
    await read(lanes, store)
    # The last one may be the largest there is.
    assert max(store.reads) < ROWS_PER_READ + BATCH_MAX
    assert {lane.got for lane in lanes if lane.batch_max != 1000} == {ROWS_PER_LANE}
    assert {lane.got for lane in lanes if lane.batch_max == 1000} == {1000}


async def test_payloads_that_are_small_only_as_they_are_stored_are_bounded_in_hand() -> None:
    """Or what compresses well takes fifty times as much of the relay."""
    large = b'"%b"' % (b"x" * 20_000)
    lanes = [Reading(1, 1000), Reading(2, None)]
    await read(lanes, Full(large))
    assert [lane.got for lane in lanes] == [BATCH_BYTES_MAX // len(large), ROWS_PER_LANE]
    # As many as of any lane it may always have.
    await read(lanes[:1], Full(large * 10))
    assert lanes[0].got == ROWS_PER_LANE


async def test_where_payloads_are_large_fewer_are_read() -> None:
    """What a read takes is known when it is there, and the next one is smaller."""
    lanes = [Reading(n, None) for n in range(16)]
    store = Full(b'"%b"' % (b"x" * 250_000))
    await read(lanes, store)
    await read(lanes, store)
    # Four of them go in a request.
    assert store.reads == [16 * ROWS_PER_LANE, 16 * 4]


async def read(lanes: Sequence[Reading], store: Full) -> None:
    """Read once for all of them."""
    left, done = set(lanes), asyncio.Event()

    def on_rows(lane: Any) -> None:
        left.discard(lane)
        if not left:
            done.set()

    reader = Reader(store, on_rows)  # type: ignore[arg-type]
    for lane in lanes:
        reader.want(lane, Fetch(0, 0))  # type: ignore[arg-type]
    task = asyncio.create_task(reader.run())
    async with asyncio.timeout(10):
        await done.wait()
    task.cancel()
