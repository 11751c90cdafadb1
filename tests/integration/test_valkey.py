"""A relay that delivers into a real Valkey server, with kills of both."""

from __future__ import annotations

import asyncio
import ipaddress
from typing import TYPE_CHECKING

import orjson
import pytest

from outbox.destinations.brokers import Brokers
from outbox.network.egress import EgressPolicy
from tests.integration.test_lane_changes import set_lanes
from tests.support.brokers.valkey import valkey
from tests.support.relay import (
    QUICK_RETRY,
    Network,
    add_endpoint,
    all_ended,
    exceptions,
    fetchval,
    killed_at_the_end,
    publish,
    running,
)
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.support.brokers.valkey import Valkey
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

LANES = 4


@pytest.fixture
async def broker_server(tmp_path: Path) -> AsyncIterator[Valkey]:
    async with valkey(tmp_path / "valkey") as running_server:
        yield running_server


@pytest.fixture
async def brokers() -> AsyncIterator[Brokers]:
    made = Brokers(EgressPolicy((ipaddress.ip_network("127.0.0.0/8"),)))
    yield made
    await made.aclose()


@pytest.mark.full
async def test_changed_lanes_end_in_their_streams(
    database: Database, broker_server: Valkey, brokers: Brokers
) -> None:
    await add_endpoint(database, url=broker_server.url(), lanes=2, retry=QUICK_RETRY)
    async with running(database, Network(), brokers=brokers.connect):
        for lanes in (3, 1):
            await publish(database, *range(10), key=f"{lanes}")
            await set_lanes(database, lanes)
        await publish(database, 1, key="3")
        await all_ended(database)
    last: dict[str, list[bytes | None]] = {}
    for name in await lanes_of(broker_server):
        (entry,) = await broker_server.command(
            "XREVRANGE", f"events:{{{name}}}", "+", "-", "COUNT", 1
        )
        last.setdefault(name.split("-")[1], []).append(entry[1].get(b"outbox-control"))
    assert last == {"1": [b"end"] * 2, "2": [b"end"] * 3, "3": [None]}


async def lanes_of(broker_server: Valkey) -> dict[str, list[int]]:
    """The sequences in each stream, by its key."""
    keys = [key.decode() for key in await broker_server.command("KEYS", "events:*}")]
    names = [key.partition("{")[2].removesuffix("}") for key in keys]
    return {name: await broker_server.sequences(name) for name in names}


async def assert_complete(broker_server: Valkey, database: Database) -> None:
    """Each stream has each sequence of its lane once, in order."""
    last = await fetchval(
        database,
        "SELECT jsonb_object_agg(lane_name(l.endpoint_id, l.generation, l.slot), c.last_seq)::text "
        "FROM lane l JOIN lane_counter c ON c.lane_id = l.id WHERE c.last_seq > 0",
    )
    expected = {name: list(range(1, n + 1)) for name, n in orjson.loads(last).items()}
    assert await lanes_of(broker_server) == expected
    assert await exceptions(database) == {}


async def test_kills_of_the_relay_leave_no_hole_and_no_copy(
    database: Database, broker_server: Valkey, brokers: Brokers
) -> None:
    await add_endpoint(database, url=broker_server.url(), lanes=LANES, retry=QUICK_RETRY)
    for round_ in range(5):
        async with killed_at_the_end(database, Network(), brokers=brokers.connect):
            before = await broker_server.command("DBSIZE")
            for n in range(40):
                await publish(database, n, key=f"{round_}-{n}")
            await until(lambda: lanes_of(broker_server), what=f"an append, {before} keys before")
    async with running(database, Network(), brokers=brokers.connect):
        await all_ended(database)
    await assert_complete(broker_server, database)


async def test_kills_of_the_server_leave_no_hole_and_no_copy(
    database: Database, broker_server: Valkey, brokers: Brokers
) -> None:
    await add_endpoint(database, url=broker_server.url(), lanes=LANES, retry=QUICK_RETRY)
    async with running(database, Network(), brokers=brokers.connect):
        for round_ in range(3):
            async with asyncio.TaskGroup() as tasks:
                load = tasks.create_task(
                    publish(database, *range(round_ * 100, round_ * 100 + 100))
                )
                await until(lambda: lanes_of(broker_server), what="an append")
                broker_server.kill()
                await broker_server.start()
                await load
        await all_ended(database)
    await assert_complete(broker_server, database)
    assert await fetchval(database, "SELECT count(*) FROM dead_letter") == 0
