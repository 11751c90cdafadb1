"""Races between an owner, operators, and other statements."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from outbox.core.delivery.circuit_breaker import CircuitBreaker
from outbox.core.model.response import AttemptResult
from outbox.operations.endpoints import changes as endpoint_changes
from outbox.operations.endpoints import states as endpoint_states
from outbox.relay.delivery.attempt_sender import AttemptSender
from outbox.relay.delivery.dispatcher import Dispatcher
from outbox.relay.delivery.endpoint_supervisor import EndpointSupervisor
from outbox.store.delivery.lanes import LaneStore
from tests.support.relay import (
    BUSY,
    OK,
    REFUSED,
    Network,
    add_endpoint,
    all_ended,
    exceptions,
    fetchval,
    publish,
    relay,
    running,
)
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Collection
    from uuid import UUID

    from outbox.core.delivery.circuit_breaker import BreakerRecord
    from outbox.core.delivery.commands import Send
    from outbox.core.delivery.endpoint import Endpoint
    from outbox.relay.delivery.attempt import Attempt
    from outbox.relay.delivery.owned_endpoints import LaneRuntime
    from tests.support.postgres import Database
    from tests.support.relay import Sent

pytestmark = pytest.mark.system


async def change_endpoint(database: Database, **settings: Any) -> None:
    async with database.connection(server_settings={"search_path": "relay"}) as connection:
        await endpoint_changes.update_endpoint(
            connection, "relay", "shop", lambda old: replace(old, **settings), actor="test"
        )


async def test_a_lane_blocked_during_a_poll_stays_blocked(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    await add_endpoint(database, lanes=64, on_dead_letter="block")
    response_b = asyncio.Event()

    async def response(sent: Sent) -> AttemptResult:
        if sent.body["data"] == "b1":
            await response_b.wait()
        return REFUSED if sent.body["data"] in ("a1", "b1") else OK

    read_blocked = LaneStore.blocked

    async def slowly(self: LaneStore, lane_ids: Collection[int]) -> set[int]:
        found = await read_blocked(self, lane_ids)
        response_b.set()
        await until(lambda: _blocks(database, 2), what="the second block")
        return found

    monkeypatch.setattr(LaneStore, "blocked", slowly)
    network = Network(response)
    async with running(database, network):
        await publish(database, "a1", "a2", key="a")
        await until(lambda: _blocks(database, 1), what="the first block")
        await publish(database, "b1", "b2", "b3", key="b")
        await until(lambda: len(network.sent) == 2, what="a request")
        await change_endpoint(database, disable_after_s=1000.0)
        await until(lambda: _blocks(database, 2), what="the second block")
        await change_endpoint(database, disable_after_s=2000.0)
        await publish(database, "c", key="c")
        await until(lambda: network.data() == ["c"], what="another lane")
    assert [sent.body["data"] for sent in network.sent] == ["a1", "b1", "c"]
    assert await exceptions(database) == {}


@pytest.mark.full
async def test_a_delivery_waiting_for_a_slot_obeys_a_pause(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    updated_once = asyncio.Event()
    update = Dispatcher.update_endpoints

    def updated(self: Dispatcher, endpoints: list[Endpoint], *decisions: Any) -> None:
        update(self, endpoints, *decisions)
        if any(endpoint.state == "paused" for endpoint in endpoints):
            updated_once.set()

    monkeypatch.setattr(Dispatcher, "update_endpoints", updated)
    await add_endpoint(database, "slow", types=["slow"])
    await add_endpoint(database, types=["a.b"])
    release = asyncio.Event()

    async def response(sent: Sent) -> AttemptResult:
        if sent.body["data"] == "slow":
            await release.wait()
        return OK

    network = Network(response)
    async with running(database, network, in_flight_max=1):
        await publish(database, "slow", type="slow")
        await until(lambda: len(network.sent) == 1, what="the slot to be taken")
        await publish(database, "paused")
        await until(lambda: _numbered(database, 2), what="sequencing")
        async with database.connection(server_settings={"search_path": "relay"}) as connection:
            await endpoint_states.pause_endpoints(connection, "relay", ["shop"], actor="test")
            await updated_once.wait()
            release.set()
            await publish(database, "last", type="slow")
            await until(lambda: network.data() == ["slow", "last"], what="the slot to be free")
            await endpoint_states.resume_endpoints(connection, "relay", ["shop"], actor="test")
        await all_ended(database)
    assert network.data() == ["slow", "last", "paused"]


async def test_new_lanes_obey_a_pause_of_the_same_transaction(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    await add_endpoint(database, lanes=1)
    await add_endpoint(database, "other")
    is_held, release = asyncio.Event(), asyncio.Event()
    read_skipped = LaneStore.skipped

    async def held(self: LaneStore, endpoint_ids: Collection[UUID]) -> dict[int, int]:
        if is_changed:
            is_held.set()
            await release.wait()
        return await read_skipped(self, endpoint_ids)

    monkeypatch.setattr(LaneStore, "skipped", held)
    network, is_changed = Network(), False
    async with running(database, network):
        await publish(database, 1)
        await all_ended(database)
        is_changed = True
        async with database.connection(server_settings={"search_path": "relay"}) as connection:
            async with connection.transaction():
                await endpoint_changes.update_endpoint(
                    connection, "relay", "shop", lambda old: replace(old, lanes=2), actor="test"
                )
                await endpoint_states.pause_endpoints(connection, "relay", ["shop"], actor="test")
            await is_held.wait()
            await publish(database, 2)
            await until(lambda: len(network.accepted) == 3, what="the other endpoint's delivery")
            release.set()
            await publish(database, 3)
            await until(lambda: len(network.accepted) == 4, what="the other endpoint's delivery")
            assert [sent.body["data"] for sent in network.accepted] == [1, 1, 2, 3]
            await endpoint_states.resume_endpoints(connection, "relay", ["shop"], actor="test")
        await all_ended(database)
    assert sorted(network.data()) == [1, 1, 2, 2, 3, 3]


@pytest.mark.full
async def test_a_delivery_waiting_for_a_slot_obeys_a_retry_after(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting: set[int] = set()
    send = AttemptSender.send

    async def seen(
        self: AttemptSender, lane: LaneRuntime, what: Send, started_at: float
    ) -> Attempt | None:
        waiting.add(lane.loaded.id)
        return await send(self, lane, what, started_at)

    monkeypatch.setattr(AttemptSender, "send", seen)
    await add_endpoint(database, lanes=32, types=["a.b"])
    await add_endpoint(database, "other", types=["other"])
    response_first = asyncio.Event()

    async def response(sent: Sent) -> AttemptResult:
        if sent.body["type"] == "other":
            return OK
        await response_first.wait()
        return AttemptResult.completed(429, 0.001, headers=(("Retry-After", "60"),))

    network = Network(response)
    async with running(database, network, in_flight_max=1):
        for key in "abcdefgh":
            await publish(database, key, key=key)
        lanes = await _lanes(database)
        await until(lambda: len(waiting) == lanes, what="them to wait for the slot")
        await publish(database, "other", type="other")
        await until(lambda: len(waiting) == lanes + 1, what="the other one to wait behind them")
        response_first.set()
        await until(lambda: network.data() == ["other"], what="the slot to be free")
    assert len(network.sent) == 2


async def test_sending_is_bounded_while_the_log_cannot_be_written(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox.relay.delivery.recorder.PENDING_MAX", 3)
    monkeypatch.setattr("outbox.core.delivery.request_run.RESULTS_MAX", 2)
    await add_endpoint(database, types=["a.b"])
    network = Network()
    async with running(database, network, lease_s=30.0, ack_group_ms=0.0):
        await publish(database, "first")
        await all_ended(database)
        async with (
            database.connection(server_settings={"search_path": "relay"}) as connection,
            connection.transaction(),
        ):
            await connection.execute("LOCK TABLE attempt_run IN SHARE MODE")
            await publish(database, *range(20))
            await until(lambda: _numbered(database, 21), what="sequencing")
            await until(lambda: len(network.sent) >= 5, what="what may be sent")
            await add_endpoint(database, "other", types=["other"])
            await publish(database, "other", type="other")
            await until(lambda: "other" in network.data(), what="another endpoint")
            # A run goes on while no more than three rows wait, before and during the write.
            assert len(network.sent) <= 1 + (3 + 2) + (3 + 2) + 1
        await all_ended(database)
    assert [data for data in network.data() if data != "other"] == ["first", *range(20)]


@pytest.mark.full
async def test_the_work_of_one_endpoint_does_not_visit_the_others(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    visited: set[CircuitBreaker] = set()
    record = CircuitBreaker.record

    def recorded(self: CircuitBreaker) -> BreakerRecord:
        visited.add(self)
        return record(self)

    for n in range(5):
        await add_endpoint(database, f"fine{n}", types=["fine"])
    await add_endpoint(database, types=["a.b"])
    network = Network(lambda sent: BUSY if sent.body["type"] == "a.b" else OK)
    async with running(database, network):
        await publish(database, "fine", type="fine")
        await all_ended(database)
        monkeypatch.setattr(CircuitBreaker, "record", recorded)
        await publish(database, *range(10))
        failing = "SELECT count(*) = 1 FROM endpoint_health WHERE state = 'failing'"
        await until(lambda: fetchval(database, failing), what="the breaker to open")
    assert len(visited) == 1


async def test_a_cancelled_relay_ends_although_its_session_fails(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails_at_the_end(_: EndpointSupervisor) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise ConnectionResetError

    monkeypatch.setattr(EndpointSupervisor, "run", fails_at_the_end)
    await add_endpoint(database)
    network = Network()
    worker = relay(database, network)
    task = asyncio.create_task(worker.run())
    await publish(database, 1)
    await until(lambda: network.data() == [1], what="the relay to work")
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=20)
    worker.stop()
    assert done
    assert task.cancelled()


async def _numbered(database: Database, deliveries: int) -> bool:
    return bool(await fetchval(database, "SELECT count(*) = $1 FROM delivery", deliveries))


async def _lanes(database: Database) -> int:
    """The number of lanes that the keys map to."""
    await until(lambda: _numbered(database, 8), what="sequencing")
    return int(await fetchval(database, "SELECT count(DISTINCT lane_id) FROM delivery"))


async def _blocks(database: Database, count: int) -> bool:
    return bool(await fetchval(database, "SELECT count(*) = $1 FROM lane_block", count))
