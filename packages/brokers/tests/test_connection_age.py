"""Connections to brokers do not stay for ever: on an address that its name has no longer, or past
the age at which they end.  The lanes' order and positions hold across the exchange.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

pytest.importorskip("confluent_kafka")

from outbox.core.brokers.port import Position
from outbox.destinations.broker import BrokerAddress
from outbox.destinations.brokers import Brokers
from outbox.network import reuse_limits
from outbox_brokers.kafka import broker as kafka_driver
from outbox_brokers.kafka import reader
from outbox_brokers.kafka.broker import KafkaBroker
from outbox_brokers.kafka.loops import build_client
from outbox_devtools.destination_suite import message
from tests.support.brokers import kafka
from tests.support.brokers.kafka import MockCluster
from tests.support.brokers.moving import NAME, NEW, OLD, OWNER, Appending, meet_closes, moving_name
from tests.support.brokers.nats import nats_server, server_binary
from tests.support.brokers.rigs import LOOPBACK
from tests.support.brokers.valkey import valkey
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

pytestmark = pytest.mark.system

LANES = ("ep-1-0", "ep-1-1", "ep-1-2")
NATS = pytest.param("nats", marks=pytest.mark.skipif(server_binary() is None, reason="no server"))


class Server(NamedTuple):
    url: str
    """With a name and a port to be filled in."""
    name: str
    port: int
    stored: Callable[[str], Awaitable[list[int]]]
    advertise: Callable[[int], object] = lambda _: None
    """Let clients use this port of loopback."""


@pytest.fixture(params=["redis", NATS, "kafka"])
async def server(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Server]:
    if request.param == "redis":
        async with valkey(tmp_path / "valkey") as redis:
            yield Server("redis://{}:{}/events", NAME, redis.port, redis.sequences)
    elif request.param == "nats":
        async with nats_server(tmp_path / "nats") as nats:
            await nats.create_stream()
            yield Server("nats://{}:{}/orders", NAME, nats.port, nats.sequences)
    else:
        # librdkafka resolves names by itself.
        cluster = MockCluster()
        cluster.create_topic("events", 4)

        async def stored(lane: str) -> list[int]:
            partition = int(lane[-1])
            return await asyncio.to_thread(kafka.sequences, cluster.server, "events", partition)

        port = int(cluster.server.rpartition(":")[2])
        yield Server(
            "kafka://{}:{}/events", "localhost", port, stored, partial(cluster.advertise, OLD)
        )
        cluster.close()


async def test_lanes_follow_a_name_and_lose_nothing(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reuse_limits, "ADDRESS_CHECK_S", 0.0)
    monkeypatch.setattr(kafka_driver, "RENEWAL_S_MIN", 0.0)
    async with moving_name(server.port, server.name) as name:
        brokers = Brokers(LOOPBACK, name)
        url = server.url.format(server.name, name.port)
        broker = brokers.connect(BrokerAddress(url, timeout_s=10))
        appending = Appending(broker, LANES)
        running = asyncio.create_task(appending.run())
        follows = server.name == NAME
        for address in (NEW, OLD, NEW):
            before = dict(appending.through)
            await until(
                lambda before=before: (  # type: ignore[misc]
                    running.done() or all(appending.through[each] > before[each] for each in LANES)
                ),
                what="all lanes to go on",
            )
            assert appending.stops == []
            connections = sum(each.connections for each in name.ways.values())
            name.address, left = address, name.address
            await until(
                lambda before=connections: (  # type: ignore[misc]
                    sum(each.connections for each in name.ways.values()) > before
                ),
                what="another connection",
            )
            if follows:
                await until(
                    lambda left=left, new=address: (  # type: ignore[misc]
                        name.ways[new].is_used and not name.ways[left].is_used
                    ),
                    what="the new address alone",
                )
        appending.stop()
        await running
        await broker.aclose()
    assert appending.stops == []
    for lane in LANES:
        assert await server.stored(lane) == list(range(1, appending.through[lane] + 1))


async def test_a_connection_that_is_too_old_carries_no_further_call(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reuse_limits, "AGE_MAX_S", 0.2)
    monkeypatch.setattr(kafka_driver, "RENEWAL_S_MIN", 0.0)
    async with moving_name(server.port, server.name) as name:
        brokers = Brokers(LOOPBACK, name)
        url = server.url.format(server.name, name.port)
        broker = brokers.connect(BrokerAddress(url, timeout_s=10))
        appending = Appending(broker, LANES)
        running = asyncio.create_task(appending.run())
        await until(lambda: name.ways[OLD].connections >= 4, what="other connections")
        appending.stop()
        await running
        await broker.aclose()
    assert appending.stops == []
    for lane in LANES:
        assert await server.stored(lane) == list(range(1, appending.through[lane] + 1))


@pytest.mark.parametrize("lost", ["request", "response"])
async def test_the_close_of_an_idle_connection_is_no_failure(server: Server, lost: str) -> None:
    """Whether the server has the request or not, the lane goes on at once, and nothing is doubled.

    librdkafka does it by itself.
    """
    async with moving_name(server.port, server.name) as name:
        way = name.ways[OLD]
        server.advertise(name.port)
        url = server.url.format(server.name, name.port)
        broker = Brokers(LOOPBACK, name).connect(BrokerAddress(url, timeout_s=10))
        appending = Appending(broker, LANES[:1])
        await meet_closes(appending, way, lost)
        await broker.aclose()
        server.advertise(server.port)
    assert appending.stops == []
    (lane,) = appending.through
    stored = await server.stored(lane)
    if server.name != NAME:
        # The mock cluster takes copies that a real one refuses by their number.
        stored = list(dict.fromkeys(stored))
    assert stored == list(range(1, appending.through[lane] + 1))


@pytest.mark.parametrize("server", ["kafka"], indirect=True)
async def test_rotating_addresses_renew_the_clients_of_kafka_seldom(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reuse_limits, "ADDRESS_CHECK_S", 0.0)
    made: list[object] = []

    async def count(factory: Callable[[], Any]) -> Any:
        made.append(factory)
        return await build_client(factory)

    monkeypatch.setattr(kafka_driver, "build_client", count)
    async with moving_name(server.port, server.name) as name:
        url = server.url.format(server.name, name.port)
        broker = Brokers(LOOPBACK, name).connect(BrokerAddress(url, timeout_s=10))
        lane, after = LANES[0], 0
        assert isinstance(await broker.open(lane, OWNER, 0, None), Position)
        for turn in range(20):
            name.address = (NEW, OLD)[turn % 2]
            appended = await broker.append(lane, OWNER, after, [message(lane, after + 1)])
            assert appended.stop is None
            after = appended.through
        await broker.aclose()
    # Readers and producers, before and after the first change.
    assert len(made) <= 4


@pytest.mark.full
@pytest.mark.parametrize("server", ["kafka"], indirect=True)
async def test_a_partition_that_is_read_longer_than_a_client_lives_is_read_to_its_end(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "RECORDS_MAX", 10)
    lane, total = LANES[0], 100
    async with moving_name(server.port, server.name) as name:
        url = server.url.format(server.name, name.port)
        first = Brokers(LOOPBACK, name).connect(BrokerAddress(url, timeout_s=20))
        assert isinstance(await first.open(lane, OWNER, 0, None), Position)
        batch = [message(lane, each) for each in range(1, 1 + total)]
        assert (await first.append(lane, OWNER, 0, batch)).stop is None
        await first.aclose()

        # A reader lives for one call, which reads half of the partition at most.
        monkeypatch.setattr(reuse_limits, "AGE_MAX_S", 0.0)
        monkeypatch.setattr(kafka_driver, "RENEWAL_S_MIN", 0.0)
        add = reader._Progress.add

        def add_slowly(self: reader._Progress, record: Any, name: bytes) -> int | None:
            time.sleep(0.04)
            return add(self, record, name)

        monkeypatch.setattr(reader._Progress, "add", add_slowly)
        driver = KafkaBroker(BrokerAddress(url, timeout_s=2), LOOPBACK, name)
        tries: list[object] = []
        async with asyncio.timeout(120):
            while not (tries and isinstance(tries[-1], Position)):
                tries.append(await driver.open(lane, OWNER, total, None))
                await asyncio.sleep(0.5)  # As between the attempts of a lane.
        await driver.aclose()
    assert tries[-1] == Position(total, f"d{total}")
    assert len(tries) > 1
