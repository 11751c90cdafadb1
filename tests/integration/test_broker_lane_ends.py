"""Changed lane counts of a broker's endpoint: each older lane gets an end entry."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import orjson
import pytest

from outbox.operations.endpoints import changes as endpoint_changes
from tests.integration.test_brokers import (
    NO_STREAM,
    MemoryBroker,
    Streams,
    last_failure,
    stream_endpoint,
)
from tests.integration.test_lane_changes import set_lanes
from tests.support.relay import (
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
    import random

    from outbox.destinations.broker import BrokerAddress
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

LACKING = """
SELECT count(*) FROM lane_progress p JOIN lane l ON l.id = p.lane_id
  JOIN endpoint e ON e.id = l.endpoint_id
 WHERE l.generation < e.generation AND p.end_seq IS NULL
"""


@pytest.fixture
def streams() -> Streams:
    return Streams()


def contents(streams: Streams, generation: int) -> list[list[int | str]]:
    """The sequences of each lane of a generation; an end entry is `end`, with the number before."""
    found: list[list[int | str]] = []
    for name in sorted(streams.streams):
        if int(name.split("-")[1]) == generation:
            found.append([])
            for message in streams.streams[name]:
                headers = dict(message.headers)
                if headers.get("outbox-control") == "end":
                    found[-1] += ["end", int(headers["X-Previous-Sequence"])]
                else:
                    found[-1].append(message.sequence)
    return found


async def ended(database: Database) -> None:
    await until(lambda: fetchval(database, f"SELECT ({LACKING}) = 0"), what="the end entries")


@pytest.mark.full
async def test_a_lane_ends_also_if_nothing_was_delivered(
    database: Database, streams: Streams
) -> None:
    await stream_endpoint(database)
    await set_lanes(database, 3)
    async with running(database, Network(), brokers=streams.connect):
        await publish(database, 1, key="a")
        await all_ended(database)
        await set_lanes(database, 2)
        await ended(database)
        await publish(database, 2, key="a")
        await all_ended(database)
    assert contents(streams, 1) == [["end", 0]]
    assert sorted(contents(streams, 2), key=str) == [["end", 0], ["end", 0], [1, "end", 1]]
    assert contents(streams, 3) == [[1]]
    assert await exceptions(database) == {}


async def test_the_new_lanes_begin_after_the_ends(database: Database, streams: Streams) -> None:
    """The appends of the new generation follow every end entry, also those of idle lanes."""
    await stream_endpoint(database)
    await set_lanes(database, 4)
    order: list[tuple[int, int | str]] = []
    async with running(database, Network(), brokers=streams.connect):
        await publish(database, *range(20), key="a")
        await publish(database, *range(20), key="b")
        await set_lanes(database, 2)
        await publish(database, *range(20), key="a")
        await all_ended(database)
    for _, message in streams.log:
        headers = dict(message.headers)
        generation = int(headers["X-Lane"].split("-")[1])
        order.append((generation, headers.get("outbox-control", "delivery")))
    assert order == sorted(order, key=lambda each: each[0])
    assert order.count((2, "end")) == 4


async def test_kills_and_lost_responses_write_an_end_once(
    database: Database, streams: Streams, rng: random.Random
) -> None:
    await stream_endpoint(database)
    for lanes in (2, 3, 1, 2):
        streams.lost_responses = rng.randrange(3)
        async with killed_at_the_end(database, Network(), brokers=streams.connect):
            await publish(database, 1, 2, 3, key=rng.choice("abc"))
            appends = len(streams.appends)
            await set_lanes(database, lanes)
            await until(lambda seen=appends: len(streams.appends) > seen, what="an append")
    streams.lost_responses = 0
    async with running(database, Network(), brokers=streams.connect):
        await publish(database, 4, key="a")
        await all_ended(database)
        await ended(database)
    for generation, lanes in ((1, 1), (2, 2), (3, 3), (4, 1)):
        streams_of = contents(streams, generation)
        assert len(streams_of) == lanes
        for sequences in streams_of:
            *deliveries, mark, previous = sequences
            assert mark == "end"
            assert deliveries == list(range(1, int(previous) + 1))
    assert await exceptions(database) == {}


async def test_dead_letters_before_the_end_are_named_by_it(
    database: Database, streams: Streams
) -> None:
    await stream_endpoint(database)
    streams.refuses = lambda message: b'"data":3' in message.body
    async with running(database, Network(), brokers=streams.connect):
        await publish(database, 1, 2, 3)
        await all_ended(database)
        await set_lanes(database, 2)
        await ended(database)
    assert contents(streams, 1) == [[1, 2, "end", 2]]
    (first,) = (name for name in streams.streams if name.split("-")[1] == "1")
    assert streams.streams[first][-1].sequence == 4


async def test_a_lane_that_cannot_end_holds_the_new_ones(
    database: Database, streams: Streams
) -> None:
    """Its failure is shown like that of a delivery, although it has none."""
    await stream_endpoint(database)
    async with running(database, Network(), brokers=streams.connect):
        await publish(database, 1)
        await all_ended(database)
        (name,) = streams.streams
        lost = streams.streams.pop(name)
        await set_lanes(database, 2)
        await publish(database, 2)
        await until(lambda: last_failure(database), what="the hold")
        assert await last_failure(database) == "forgot"
        assert not any(streams.streams.values())
        streams.streams[name] = lost
        await all_ended(database)
    assert contents(streams, 1) == [[1, "end", 1]]
    assert await exceptions(database) == {}


@pytest.mark.full
async def test_a_lane_that_cannot_end_is_reported_as_stuck(
    database: Database, streams: Streams
) -> None:
    await stream_endpoint(database)
    await add_endpoint(database, "watch", types=["outbox.lane.stuck"])
    reported = "SELECT payload::text FROM outbox WHERE type = 'outbox.lane.stuck'"
    async with running(database, Network(), brokers=streams.connect):
        await publish(database, 1)
        await all_ended(database)
        streams.streams.clear()
        await set_lanes(database, 2)
        await until(lambda: fetchval(database, reported), what="the report")
    report = orjson.loads(await fetchval(database, reported))
    assert (report["sequence"], report["failure"]) == (2, "forgot")
    assert report.keys() & {"event", "type", "skip"} == set()


@pytest.mark.full
async def test_an_end_in_flight_while_the_address_changes_is_written_to_the_new_server(
    database: Database,
) -> None:
    """The new server has a copy of the streams as they were before."""
    servers: dict[str, Streams] = {}

    def connect(address: BrokerAddress) -> MemoryBroker:
        return servers.setdefault(address.url, Streams()).connect(address)

    await stream_endpoint(database)
    async with running(database, Network(), brokers=connect):
        await publish(database, 1)
        await all_ended(database)
        ((url, old),) = servers.items()
        moved = url.replace("://", "://new-")
        new = servers[moved] = Streams()
        new.streams = {name: list(stream) for name, stream in old.streams.items()}
        new.fences = dict(old.fences)
        old.gate, stored = asyncio.Event(), len(old.log)
        await set_lanes(database, 2)
        await until(lambda: len(old.log) > stored, what="the end in flight")
        async with database.at_hand() as connection:
            await endpoint_changes.update_endpoint(
                connection, "relay", "shop", lambda was: replace(was, url=moved), actor="test"
            )
        applied = "SELECT count(*) = 1 FROM endpoint WHERE url LIKE '%new-%'"
        await until(lambda: fetchval(database, applied), what="the change")
        await until(lambda: new.connections, what="the connection to the new server")
        old.gate.set()
        await ended(database)
        await publish(database, 2)
        await all_ended(database)
    assert contents(new, 1) == [[1, "end", 1]]


async def test_a_lost_response_to_an_end_is_resolved(database: Database, streams: Streams) -> None:
    await stream_endpoint(database)
    async with running(database, Network(), brokers=streams.connect):
        await publish(database, 1)
        await all_ended(database)
        opened, streams.lost_responses = streams.opened, 1
        await set_lanes(database, 2)
        await ended(database)
    assert streams.lost_responses == 0
    assert streams.opened > opened
    assert contents(streams, 1) == [[1, "end", 1]]


@pytest.mark.full
async def test_an_end_entry_shows_that_the_broker_works_again(
    database: Database, streams: Streams
) -> None:
    await stream_endpoint(database)
    state = "SELECT state FROM endpoint_health"
    async with running(database, Network(), brokers=streams.connect):
        await publish(database, 1)
        await all_ended(database)
        streams.stop = NO_STREAM
        await set_lanes(database, 2)
        await until(lambda: fetchval(database, f"SELECT ({state}) = 'failing'"), what="the failure")
        streams.stop = None
        await ended(database)
        await until(
            lambda: fetchval(database, f"SELECT ({state}) = 'recovering'"), what="the recovery"
        )
