"""Cost is proportional to activity: counted in rows, statements and calls."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest

from outbox.core.cluster.observed_time import Odometer
from outbox.core.delivery.circuit_breaker import CircuitBreaker
from outbox.core.delivery.commands import Fetch, LaneSnapshot, Progress
from outbox.core.delivery.event_cache import EventCache
from outbox.core.delivery.lane import Lane
from outbox.operations.endpoints import changes as endpoint_changes
from outbox.relay.cluster import ownership
from outbox.relay.delivery import endpoint_supervisor, fetcher
from outbox.relay.delivery.endpoint_supervisor import EndpointSupervisor
from outbox.relay.wake_event import WakeEvent
from outbox.store.delivery.lanes import LaneStore
from outbox.store.delivery.records import RecordStore
from tests.support.relay import (
    Network,
    add_endpoint,
    all_ended,
    fetchval,
    killed_at_the_end,
    publish,
    running,
)
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from outbox.core.delivery.endpoint import Endpoint
    from outbox.store.delivery.delivery_reads import LaneRead
    from outbox.store.delivery.lanes import LoadedLane
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

MANY = 40


class Checkpointed:
    """The checkpointed lanes of each write."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.lanes: list[int] = []
        written = RecordStore.checkpoint

        async def write(
            store: RecordStore, rows: Sequence[tuple[int, int, Progress]], *history: Any
        ) -> set[int]:
            self.lanes += [lane_id for lane_id, _, _ in rows]
            return await written(store, rows, *history)

        patch.setattr(RecordStore, "checkpoint", write)


async def test_only_changed_lanes_are_checkpointed(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lanes that were active earlier are not written again."""
    await add_endpoint(database, lanes=MANY)
    async with running(database, Network()):
        for n in range(4 * MANY):
            await publish(database, n, key=f"k{n}")
        await all_ended(database)
    used = await fetchval(database, "SELECT count(*) FROM lane_progress WHERE acked_seq > 0")
    assert used > MANY / 2
    checkpointed = Checkpointed(monkeypatch)
    monkeypatch.setattr("outbox.relay.delivery.recorder.CHECKPOINT_EVERY_S", 0.01)
    behind = """
        SELECT count(*) = 0 FROM lane_counter c JOIN lane_progress p USING (lane_id)
         WHERE c.last_seq > p.acked_seq"""
    async with running(database, Network()):
        await publish(database, "one more", key="k1")
        await all_ended(database)
        await until(lambda: fetchval(database, behind))
    assert len(checkpointed.lanes) == 1


@pytest.mark.full
async def test_a_takeover_writes_only_the_missing_checkpoints(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    await add_endpoint(database, lanes=MANY)
    async with running(database, Network()):
        for n in range(4 * MANY):
            await publish(database, n, key=f"k{n}")
        await all_ended(database)
    monkeypatch.setattr("outbox.relay.delivery.recorder.CHECKPOINT_EVERY_S", 3600.0)
    async with killed_at_the_end(database, Network()):
        await publish(database, "left behind", key="k1")
        await all_ended(database)
    checkpointed = Checkpointed(monkeypatch)
    monkeypatch.setattr("outbox.relay.delivery.recorder.CHECKPOINT_EVERY_S", 0.01)
    async with running(database, Network()):
        await until(lambda: checkpointed.lanes)
    assert len(checkpointed.lanes) == 1


class Reads:
    """A store that knows only the requested lanes."""

    def __init__(self) -> None:
        self.requested: list[list[int]] = []

    async def deliveries(self, requested: Sequence[LaneRead], _: Any) -> dict[int, list[Any]]:
        self.requested.append([each.lane.id for each in requested])
        await asyncio.sleep(0)
        return {each.lane.id: [] for each in requested}


def lane(lane_id: int, endpoint_id: int, tenant: str | None, pending: int = 1000) -> Any:
    endpoint = SimpleNamespace(id=UUID(int=endpoint_id), tenant=tenant, batch_max=None)
    return SimpleNamespace(
        runtime=SimpleNamespace(endpoint=endpoint, stopped=False, breaker=CircuitBreaker()),
        loaded=SimpleNamespace(id=lane_id, name=f"lane-{lane_id}"),
        read=None,
        state=Lane(LaneSnapshot(lane_id, pending, Progress()), 0),
    )


@pytest.mark.parametrize("tenant", ["flooding", None])
async def test_a_quiet_lane_is_read_at_once_during_a_flood(
    tenant: str | None,
) -> None:
    store = Reads()
    reading = fetcher.DeliveryFetcher(store, asyncio.Lock(), lambda _: None, EventCache())  # type: ignore[arg-type]
    task = asyncio.create_task(reading.run())
    flood = 10 * fetcher.ROWS_PER_READ // fetcher.ROWS_PER_LANE
    for n in range(flood):
        # The endpoints of a tenant share a queue, and so do the lanes of an endpoint without a
        # tenant.
        reading.request(lane(n, n % 100 if tenant else 1, tenant), Fetch(0, 0))
    reading.request(lane(flood, 200, None), Fetch(0, 0))
    await until(lambda: sum(map(len, store.requested)) == flood + 1)
    assert flood in store.requested[0]
    assert sorted(each for requested in store.requested for each in requested) == list(
        range(flood + 1)
    )
    task.cancel()


async def test_lanes_with_few_pending_deliveries_share_a_read() -> None:
    store = Reads()
    reading = fetcher.DeliveryFetcher(store, asyncio.Lock(), lambda _: None, EventCache())  # type: ignore[arg-type]
    task = asyncio.create_task(reading.run())
    for n in range(2 * fetcher.LANES_PER_READ):
        reading.request(lane(n, n, None, pending=1), Fetch(0, 0))
    await until(lambda: sum(map(len, store.requested)) == 2 * fetcher.LANES_PER_READ)
    assert len(store.requested) == 2
    assert fetcher.LANES_PER_READ > fetcher.ROWS_PER_READ / fetcher.ROWS_PER_LANE
    task.cancel()


@pytest.mark.full
async def test_endpoints_are_acquired_in_limited_batches(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop loads all lanes of a portion at once and cannot renew its lease meanwhile."""
    monkeypatch.setattr(ownership, "CLAIMED_LANES_MAX", 12)
    for n in range(20):
        await add_endpoint(database, name=f"e{n}", lanes=3, types=[f"n{n}.made"])
    portions: list[int] = []
    read = LaneStore.lanes

    async def lanes(store: LaneStore, endpoint_ids: Collection[UUID]) -> list[LoadedLane]:
        loaded = await read(store, endpoint_ids)
        portions.append(len(loaded))
        return loaded

    monkeypatch.setattr(LaneStore, "lanes", lanes)
    network = Network()
    async with running(database, network):
        for n in range(20):
            await publish(database, n, type=f"n{n}.made")
        await all_ended(database)
    assert sorted(network.data()) == list(range(20))
    assert portions == [3, 12, 12, 12, 12, 9]


@pytest.mark.full
async def test_settings_are_reloaded_in_limited_batches(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "CLAIMED_ENDPOINTS_MAX", 4)
    for n in range(10):
        await add_endpoint(database, name=f"e{n}", types=[f"n{n}.made"])
    reads: list[int] = []
    urls: dict[str, str] = {}
    read = LaneStore.endpoints

    async def endpoints(store: LaneStore, endpoint_ids: Collection[UUID]) -> list[Endpoint]:
        reads.append(len(endpoint_ids))
        found = await read(store, endpoint_ids)
        urls.update((each.name, each.url) for each in found)
        return found

    monkeypatch.setattr(LaneStore, "endpoints", endpoints)
    network = Network()
    async with running(database, network):
        await until(lambda: fetchval(database, "SELECT bool_and(epoch > 0) FROM ownership"))
        async with database.connection(server_settings={"search_path": "relay"}) as connection:
            for n in range(10):
                url = f"http://elsewhere.test/{n}"
                await endpoint_changes.update_endpoint(
                    connection,
                    "relay",
                    f"e{n}",
                    lambda settings, url=url: replace(settings, url=url),  # type: ignore[misc]
                    actor="test",
                )
        changed = {f"http://elsewhere.test/{n}" for n in range(10)}
        await until(lambda: set(urls.values()) == changed, what="the relay to read all changes")
        for n in range(10):
            await publish(database, n, type=f"n{n}.made")
        await all_ended(database)
    assert sorted(sent.url for sent in network.accepted) == [
        f"http://elsewhere.test/{n}" for n in range(10)
    ]
    assert max(reads) == 4


async def test_the_event_loop_is_shared_during_a_full_poll() -> None:
    endpoint = SimpleNamespace(ends=True)
    homes = [
        SimpleNamespace(endpoint=endpoint, stopped=False, lanes=dict.fromkeys(range(9)), lack=None)
        for _ in range(endpoint_supervisor.LANES_AT_ONCE)
    ]
    caretaker = EndpointSupervisor(
        None,  # type: ignore[arg-type]
        SimpleNamespace(owned=lambda: homes, exhausted=None),  # type: ignore[arg-type]
        WakeEvent(),
        lambda: 0.0,
        Odometer(),
        lambda: False,
        {},
    )
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    await caretaker._check_endpoints()
    assert turns == 10
    task.cancel()
