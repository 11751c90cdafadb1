"""Limits of endpoints and tenants, and their isolation from slow endpoints."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from outbox.operations.endpoints import changes as endpoint_changes
from outbox.relay.delivery.admission import PREEMPTED_DETAIL
from tests.support.relay import (
    OK,
    Network,
    add_endpoint,
    all_ended,
    exceptions,
    publish,
    running,
)
from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.support.postgres import Database
    from tests.support.relay import Sent

pytestmark = [pytest.mark.one_major, pytest.mark.costly]


class OpenRequests:
    """Receivers that respond on demand and count open requests."""

    def __init__(self) -> None:
        self.now: dict[str, int] = {}
        self.most: dict[str, int] = {}
        self.may_respond = asyncio.Event()

    async def __call__(self, sent: Sent) -> Any:
        name = sent.url.rpartition("/")[2]
        self.now[name] = self.now.get(name, 0) + 1
        self.most[name] = max(self.most.get(name, 0), self.now[name])
        await self.may_respond.wait()
        self.now[name] -= 1
        return OK


async def change(database: Database, name: str, **changes: Any) -> None:
    async with database.connection(server_settings={"search_path": "relay"}) as connection:
        await endpoint_changes.update_endpoint(
            connection, "relay", name, lambda was: replace(was, **changes), actor="test"
        )


async def test_the_concurrency_of_an_endpoint_is_limited(database: Database) -> None:
    await add_endpoint(database, lanes=16, in_flight_max=3)
    receiver = OpenRequests()
    network = Network(receiver)
    async with running(database, network):
        await publish(database, *range(40))
        await until(lambda: receiver.now.get("shop") == 3, what="three requests")
        await change(database, "shop", in_flight_max=5)
        await until(lambda: receiver.now["shop"] == 5, what="five requests")
        receiver.may_respond.set()
        await all_ended(database)
    assert receiver.most == {"shop": 5}
    assert sorted(network.data()) == list(range(40))
    assert await exceptions(database) == {}


@pytest.mark.full
async def test_a_rate_limit_affects_only_its_endpoint_until_it_is_removed(
    database: Database,
) -> None:
    await add_endpoint(database, "slowly", rate_per_s=0.02, types=["slowly"])
    await add_endpoint(database, types=["a.b"])
    network = Network()
    async with running(database, network, in_flight_max=1):
        await publish(database, *range(8), type="slowly")
        await until(lambda: len(network.sent) == 1, what="the first of them")
        await publish(database, *"abcdefgh")
        await until(lambda: len(network.sent) == 9, what="those of the other one")
        assert [sent.body["type"] for sent in network.sent] == ["slowly"] + 8 * ["a.b"]
        await change(database, "slowly", rate_per_s=None)
        await all_ended(database)
    assert [what for what in network.data() if isinstance(what, int)] == list(range(8))
    assert await exceptions(database) == {}


@pytest.mark.full
async def test_a_stop_does_not_wait_for_slots(database: Database) -> None:
    await add_endpoint(database, lanes=4, rate_per_s=0.001)
    network = Network()
    clock = asyncio.get_running_loop().time
    async with running(database, network, drain_s=30.0) as relay:
        await publish(database, *range(20))
        await until(lambda: network.sent, what="the first request")
        relay.stop()
        stopped_at = clock()
    assert clock() - stopped_at < 10.0
    assert len(network.sent) == 1


@pytest.mark.full
async def test_limits_apply_per_tenant(database: Database) -> None:
    for name, tenant in (("a1", "a"), ("a2", "a"), ("b1", "b"), ("free", None)):
        await add_endpoint(database, name, lanes=4, tenant=tenant)
    receiver = OpenRequests()
    network = Network(receiver)
    async with running(database, network, tenant_in_flight_max=2):
        for tenant in ("a", "b", None):
            await publish(database, *range(20), tenant=tenant)
        await until(lambda: sum(receiver.now.values()) == 2 + 2 + 4, what="what may be open")
        receiver.may_respond.set()
        await all_ended(database)
    assert receiver.most["b1"] == 2
    assert receiver.most["free"] == 4
    assert await exceptions(database) == {}


@pytest.mark.full
async def test_a_delivery_that_expires_while_waiting_for_a_slot_is_not_sent(
    database: Database,
) -> None:
    await add_endpoint(database, rate_per_s=0.5)
    network = Network()
    async with running(database, network):
        await publish(database, "first")
        await all_ended(database)
        async with database.at_hand() as connection:
            await connection.execute(
                """INSERT INTO outbox (type, payload, expires_at)
                   VALUES ('a.b', '"late"', clock_timestamp() + interval '200 ms')"""
            )
        await all_ended(database)
    assert network.data() == ["first"]
    async with database.at_hand() as connection:
        assert await connection.fetchval("SELECT reason FROM dead_letter") == "expired"


@pytest.mark.full
async def test_hanging_endpoints_do_not_delay_others(database: Database) -> None:
    for n in range(12):
        await add_endpoint(database, f"hang{n}", types=["hang"], lanes=4, timeout_s=60.0)
    await add_endpoint(database, types=["a.b"])
    hanging = asyncio.Event()

    async def response(sent: Sent) -> Any:
        if sent.body["type"] == "hang":
            await hanging.wait()
        return OK

    network = Network(response)
    async with running(database, network, in_flight_max=16):
        await publish(database, "first")
        await all_ended(database)
        await publish(database, *range(40), type="hang")
        await until(lambda: len(network.sent) > 2, what="those that hang")
        for n in range(20):
            await publish(database, n)
            await until(lambda n=n: len(network.accepted) == n + 2, what="what is quick")
        hanging.set()
        await all_ended(database)
    assert await exceptions(database) == {}


@pytest.mark.slow
async def test_hanging_endpoints_beyond_the_slots_are_preempted_and_retried(
    database: Database,
) -> None:
    retry = {"base_s": 0.05, "factor": 2.0, "cap_s": 1.0, "attempts_max": 100}
    for n in range(24):
        await add_endpoint(database, f"hang{n}", types=["hang"], retry=retry, timeout_s=60.0)
    await add_endpoint(database, types=["a.b"])
    hangs, responses = asyncio.Event(), asyncio.Event()

    async def response(sent: Sent) -> Any:
        if sent.body["type"] == "hang" and hangs.is_set():
            await responses.wait()
        return OK

    network = Network(response)
    async with running(database, network, in_flight_max=16):
        await publish(database, "first", type="hang")
        await all_ended(database)
        hangs.set()
        await publish(database, "second", "third", type="hang")
        for n in range(12):
            await publish(database, n)
            await until(lambda n=n: n in network.data(), what="what is quick")
        await until(lambda: any(sent.attempt > 1 for sent in network.sent), what="another try")
        async with database.at_hand() as connection:
            details = await connection.fetch(
                """SELECT last_response->>'detail' FROM relay.lane_progress
                   WHERE last_response IS NOT NULL"""
            )
        assert {row[0] for row in details} == {PREEMPTED_DETAIL}
        responses.set()
        await all_ended(database)
    assert set(network.in_flight_max.values()) == {1}
    of_lane: dict[str, list[int]] = {}
    for sent in network.accepted:
        of_lane.setdefault(sent.lane, []).append(sent.seq)
    assert all(seqs == sorted(seqs) for seqs in of_lane.values())
    assert network.data().count("third") == 24
    assert await exceptions(database) == {}
