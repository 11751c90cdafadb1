"""Connections to brokers do not stay for ever: on an address that its name has no longer, or past
the age at which they end.  The lanes' order and positions hold across the exchange.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import pytest

pytest.importorskip("confluent_kafka")

from outbox.destinations.broker import BrokerAddress
from outbox.destinations.brokers import Brokers
from outbox.network import reuse_limits
from tests.support.brokers import kafka
from tests.support.brokers.kafka import MockCluster
from tests.support.brokers.moving import NAME, NEW, OLD, Appending, meet_closes, moving_name
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
