"""Races between an operator and a delivery in progress."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from outbox.core.model.response import AttemptResult
from outbox.operations.endpoints import states as endpoint_states
from tests.support.relay import (
    OK,
    REFUSED,
    Network,
    add_endpoint,
    all_ended,
    exceptions,
    fetchval,
    publish,
    running,
)
from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.support.postgres import Database
    from tests.support.relay import Sent

pytestmark = pytest.mark.system


NUMBERED = "SELECT count(*) = $1 FROM delivery"
CLAIMED = "SELECT replica_id FROM ownership WHERE endpoint_id = $1"


async def noticed(database: Database, name: str) -> None:
    """Wait until the relay has read earlier changes: its polls are sequential."""
    for n in range(2):
        made = await add_endpoint(database, f"{name}{n}", types=["none"])
        await until(lambda made=made: fetchval(database, CLAIMED, made.id), what="a poll")


async def pause(database: Database) -> None:
    async with database.connection(server_settings={"search_path": "relay"}) as connection:
        await endpoint_states.pause_endpoints(connection, "relay", ["shop"], actor="test")


async def resume(database: Database) -> None:
    async with database.connection(server_settings={"search_path": "relay"}) as connection:
        await endpoint_states.resume_endpoints(connection, "relay", ["shop"], actor="test")


async def test_a_block_being_written_is_not_taken_for_an_unblock(
    database: Database,
) -> None:
    await add_endpoint(database, on_dead_letter="block")
    network = Network(lambda sent: REFUSED if sent.body["data"] == 1 else OK)
    async with running(database, network):
        async with (
            database.connection(server_settings={"search_path": "relay"}) as other,
            other.transaction(),
        ):
            await other.execute("LOCK TABLE lane_block IN SHARE MODE")
            await publish(database, 1, 2)
            await until(lambda: network.sent, what="the refusal")
            await noticed(database, "while")
        await until(lambda: fetchval(database, "SELECT count(*) FROM lane_block"), what="the block")
        await noticed(database, "behind")
        assert [sent.body["data"] for sent in network.sent] == [1]
        await resume(database)
        await all_ended(database)
    assert [sent.body["data"] for sent in network.sent] == [1, 2]
    assert await exceptions(database) == {}


async def test_a_delivery_waiting_for_a_slot_is_not_sent_after_a_pause(
    database: Database,
) -> None:
    await add_endpoint(database, lanes=8)
    responses = asyncio.Event()

    async def response(_: Sent) -> AttemptResult:
        await responses.wait()
        return OK

    network = Network(response)
    async with running(database, network, in_flight_max=1):
        await publish(database, *range(30))
        await until(lambda: fetchval(database, NUMBERED, 30), what="sequencing")
        await until(lambda: network.sent, what="the first request")
        await pause(database)
        await noticed(database, "pause")
        responses.set()
        await until(lambda: network.accepted, what="the one that is in flight")
        await noticed(database, "response")
        assert len(network.sent) == 1
        await resume(database)
        await all_ended(database)
    assert sorted(network.data()) == list(range(30))
    assert await exceptions(database) == {}


@pytest.mark.full
async def test_a_delivery_waiting_for_a_slot_is_not_sent_during_a_hold_off(
    database: Database,
) -> None:
    await add_endpoint(database, lanes=8)
    clock = asyncio.get_running_loop().time
    times: list[float] = []
    responses = asyncio.Event()

    async def response(_: Sent) -> AttemptResult:
        times.append(clock())
        if len(times) > 1:
            return OK
        await responses.wait()
        return AttemptResult.completed(429, 0.001, headers=(("Retry-After", "1"),))

    network = Network(response)
    async with running(database, network, in_flight_max=1):
        await publish(database, *range(30))
        await until(lambda: fetchval(database, NUMBERED, 30), what="sequencing")
        await until(lambda: network.sent, what="the first request")
        await noticed(database, "all")
        requested_at = clock()
        responses.set()
        await all_ended(database)
    assert times[1] - requested_at > 0.95
    assert sorted(network.data()) == list(range(30))
    assert await exceptions(database) == {}
