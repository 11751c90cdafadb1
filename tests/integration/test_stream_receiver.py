"""From the outbox through a broker into a consumer's tables, while the number of lanes changes."""

from __future__ import annotations

import asyncio
import ipaddress
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from outbox.destinations.brokers import Brokers
from outbox.network.egress import EgressPolicy
from outbox.receiver import StreamReceiver
from tests.integration.test_lane_changes import set_lanes
from tests.support.brokers.nats import nats_server
from tests.support.brokers.valkey import valkey
from tests.support.relay import (
    QUICK_RETRY,
    Network,
    add_endpoint,
    exceptions,
    fetchval,
    killed_at_the_end,
    publish,
    running,
)
from tests.support.tiers import sampled
from tests.support.waiting import until

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

KEYS = "abcdefgh"
EFFECTS = "CREATE TABLE effect (n serial PRIMARY KEY, key text NOT NULL, value int NOT NULL)"


# tests/receiver/streams reads from Valkey in the default tier.
@pytest.fixture(params=sampled(["nats", "valkey"]))
async def url(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    async with AsyncExitStack() as stack:
        if request.param == "valkey":
            server = await stack.enter_async_context(valkey(tmp_path / "valkey"))
            yield server.url("events")
        else:
            nats = await stack.enter_async_context(nats_server(tmp_path / "nats"))
            await nats.create_stream()
            yield nats.url


async def test_a_key_keeps_its_order_over_changed_lanes_and_kills_of_relay_and_reader(
    database: Database, url: str, rng: random.Random
) -> None:
    await add_endpoint(database, url=url, lanes=2, retry=QUICK_RETRY)
    brokers = Brokers(EgressPolicy((ipaddress.ip_network("127.0.0.0/8"),)))
    published: dict[str, list[int]] = {key: [] for key in KEYS}
    value = 0

    async def load(count: int) -> None:
        nonlocal value
        for _ in range(count):
            value += 1
            key = rng.choice(KEYS)
            published[key].append(value)
            await publish(database, value, key=key)

    def reader() -> StreamReceiver:
        receiver = StreamReceiver(url, pool, concurrency=4)

        @receiver.on("**")
        async def keep(delivery: Any, connection: Any) -> None:
            insert = "INSERT INTO effect (key, value) VALUES ($1, $2)"
            await connection.execute(insert, delivery.key, delivery.data)

        return receiver

    async def effects() -> int:
        return int(await pool.fetchval("SELECT count(*) FROM effect"))

    async def killed_reader(effects_min: int) -> None:
        """Read until there are so many effects, and end in the middle of whatever it does."""
        task = asyncio.create_task(reader().run())
        await until(lambda: _reached(effects, effects_min), what=f"{effects_min} effects")
        task.cancel()
        await asyncio.wait([task])

    async with asyncpg.create_pool(database.dsn, min_size=1, max_size=6) as pool:
        await pool.execute(EFFECTS)
        for lanes in (3, 1, 4):
            async with killed_at_the_end(database, Network(), brokers=brokers.connect):
                await load(20)
                await set_lanes(database, lanes)
                await load(20)
                await killed_reader(await effects() + rng.randrange(1, 20))
        async with running(database, Network(), brokers=brokers.connect):
            await load(10)
            await killed_reader(value)
    await brokers.aclose()
    found: dict[str, list[int]] = {key: [] for key in KEYS}
    async with database.at_hand() as connection:
        for row in await connection.fetch("SELECT key, value FROM public.effect ORDER BY n"):
            found[row["key"]].append(row["value"])
    assert found == published
    assert await exceptions(database) == {}
    ended = "SELECT count(*) FROM public.outbox_lane WHERE ended"
    assert await fetchval(database, ended) == 2 + 3 + 1


async def _reached(count: Any, least: int) -> bool:
    return bool(await count() >= least)
