"""Groups of the recorder: what one message writes is bounded."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast
from uuid import UUID

from outbox.core.delivery.commands import AttemptRow, DeadLetter, LaneSnapshot, Progress, Record
from outbox.core.delivery.delivery_history import DeliveryHistory
from outbox.core.delivery.lane import Lane
from outbox.core.model.delivery import Delivery
from outbox.relay.delivery import recorder as recording
from outbox.relay.delivery.recorder import Recorder

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest

    from outbox.core.delivery.commands import Successes
    from outbox.store.delivery.records import RecordStore

ENDPOINT = UUID(int=1)


class Groups:
    """Stands in for the `RecordStore`: keeps the lanes of each group instead of writing them."""

    def __init__(self) -> None:
        self.written: list[list[int]] = []

    async def write(
        self,
        records: Sequence[Record],
        epochs: Sequence[int],
        runs: Sequence[tuple[int, Successes]] = (),
    ) -> None:
        assert len(records) == len(epochs)
        assert not runs
        self.written.append([record.lane_id for record in records])


def dead_letter(lane_id: int, payload_bytes: int) -> Record:
    delivery = Delivery(
        ENDPOINT, str(lane_id), 1, 1, lane_id, UUID(int=lane_id), "a.b", None, None, 1.0, None,
        b"x" * payload_bytes, None,
    )  # fmt: skip
    row = AttemptRow(1, 1, 1, "refused", 400, None, 1.0, 0.001)
    dead = DeadLetter(delivery, "refused", 1, None)
    return Record(lane_id, 1, row, Progress(1, 0, 1), dead)


async def groups_of(records: list[Record]) -> list[list[int]]:
    """Let lanes write these records at the same time; return the lanes of each group."""
    store = Groups()
    recorder = Recorder(cast("RecordStore", store), 0.0, lambda: 60.0, DeliveryHistory())
    lanes = [Lane(LaneSnapshot(record.lane_id, 1, Progress()), 0) for record in records]
    async with asyncio.timeout(30):
        writes = [
            asyncio.create_task(recorder.write(lane, 1, record))
            for lane, record in zip(lanes, records, strict=True)
        ]
        running = asyncio.create_task(recorder.run())
        await asyncio.gather(*writes)
    running.cancel()
    return store.written


async def test_a_group_has_no_more_payload_bytes_than_one_statement_may_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recording, "GROUP_BYTES_MAX", 100)
    assert await groups_of([dead_letter(lane, 40) for lane in range(1, 8)]) == [
        [1, 2, 3], [4, 5, 6], [7],
    ]  # fmt: skip


async def test_a_payload_above_the_limit_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "GROUP_BYTES_MAX", 100)
    sizes = [10, 500, 500]
    records = [dead_letter(lane, size) for lane, size in enumerate(sizes, 1)]
    assert await groups_of(records) == [[1, 2], [3]]


async def test_a_group_has_a_limited_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "GROUP_MAX", 3)
    assert await groups_of([dead_letter(lane, 1) for lane in range(1, 6)]) == [[1, 2, 3], [4, 5]]


async def test_responses_count_until_they_are_written() -> None:
    """They are in memory meanwhile, and the lanes that have others wait."""
    began, may_end = asyncio.Event(), asyncio.Event()

    class SlowGroups(Groups):
        async def write(self, *group: Any) -> None:
            began.set()
            await may_end.wait()
            await super().write(*group)

    store = cast("RecordStore", SlowGroups())
    recorder = Recorder(store, 0.0, lambda: 60.0, DeliveryHistory(), response_bytes_max=1_000)
    lane = Lane(LaneSnapshot(1, 1, Progress()), 0)
    row = AttemptRow(1, 1, 1, "delivered", 200, None, 1.0, 0.001, {"body": "x" * 1_000})
    running = asyncio.create_task(recorder.run())
    async with asyncio.timeout(30):
        recorder.add(lane, 1, Record(1, 1, row))
        await began.wait()
        assert recorder.is_full(lane)
        may_end.set()
        await recorder.flush()
    assert recorder.response_bytes == 0
    assert not recorder.is_full(lane)
    running.cancel()
