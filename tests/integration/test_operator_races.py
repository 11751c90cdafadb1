"""An operator acts while something of the endpoint is on its way."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from outbox.core.model.response import Answer
from outbox.operations import endpoint_states
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


NUMBERED = "SELECT count(*) = $1 FROM delivery"
CLAIMED = "SELECT replica_id FROM ownership WHERE endpoint_id = $1"


async def noticed(database: Database, name: str) -> None:
    """The relay has taken in what was changed before: its looks follow one another."""
    for n in range(2):
        made = await add_endpoint(database, f"{name}{n}", types=["none"])
        await until(lambda made=made: fetchval(database, CLAIMED, made.id), 10, "a look")


async def pause(database: Database) -> None:
    async with database.connection(server_settings={"search_path": "relay"}) as connection:
        await endpoint_states.pause(connection, "relay", ["shop"], actor="test")


async def resume(database: Database) -> None:
    async with database.connection(server_settings={"search_path": "relay"}) as connection:
        await endpoint_states.resume(connection, "relay", ["shop"], actor="test")


async def test_a_block_that_is_being_written_is_not_taken_for_one_that_was_lifted(
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
            await until(lambda: network.sent, 10, "the refusal")
            await noticed(database, "while")
        await until(lambda: fetchval(database, "SELECT count(*) FROM lane_block"), 10, "the block")
        await noticed(database, "behind")
        assert [sent.body["data"] for sent in network.sent] == [1]
        await resume(database)
        await all_ended(database)
    assert [sent.body["data"] for sent in network.sent] == [1, 2]
    assert await exceptions(database) == {}


async def test_what_waits_for_a_place_is_not_sent_when_its_endpoint_was_paused_meanwhile(
    database: Database,
) -> None:
    await add_endpoint(database, lanes=8)
    answers = asyncio.Event()

    async def answer(_: Sent) -> Answer:
        await answers.wait()
        return OK

    network = Network(answer)
    async with running(database, network, in_flight_max=1):
        await publish(database, *range(30))
        await until(lambda: fetchval(database, NUMBERED, 30), 10, "sequencing")
        await until(lambda: network.sent, 10, "the first request")
        await pause(database)
        await noticed(database, "pause")
        answers.set()
        await until(lambda: network.accepted, 10, "the one that is in flight")
        await noticed(database, "answer")
        assert len(network.sent) == 1
        await resume(database)
        await all_ended(database)
    assert sorted(network.data()) == list(range(30))
    assert await exceptions(database) == {}


async def test_what_waits_for_a_place_is_not_sent_while_the_receiver_asks_for_rest(
    database: Database,
) -> None:
    await add_endpoint(database, lanes=8)
    clock = asyncio.get_running_loop().time
    times: list[float] = []
    answers = asyncio.Event()

    async def answer(_: Sent) -> Answer:
        times.append(clock())
        if len(times) > 1:
            return OK
        await answers.wait()
        return Answer.of(429, 0.001, headers=(("Retry-After", "1"),))

    network = Network(answer)
    async with running(database, network, in_flight_max=1):
        await publish(database, *range(30))
        await until(lambda: fetchval(database, NUMBERED, 30), 10, "sequencing")
        await until(lambda: network.sent, 10, "the first request")
        await noticed(database, "all")
        asked_at = clock()
        answers.set()
        await all_ended(database)
    assert times[1] - asked_at > 0.95
    assert sorted(network.data()) == list(range(30))
    assert await exceptions(database) == {}
