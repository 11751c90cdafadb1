"""What a relay holds in memory of large events that compress well, beside a receiver in trouble."""

from __future__ import annotations

import asyncio
from itertools import product
from typing import TYPE_CHECKING

import pytest

from outbox.core.delivery.buffer_budget import COPIES, ROW_BYTES
from outbox.core.delivery.event_cache import EventCache
from outbox.relay.delivery import lane_worker
from outbox.store.delivery.delivery_reads import LaneRead
from outbox.store.delivery.lanes import LaneStore
from tests.integration.test_brokers import URL, Streams
from tests.support.operators import routing_transaction
from tests.support.relay import (
    BUSY,
    OK,
    Network,
    add_endpoint,
    all_ended,
    fetchval,
    killed_at_the_end,
    publish,
    running,
)
from tests.support.waiting import until

if TYPE_CHECKING:
    from outbox.core.delivery.buffer_budget import BufferBudget
    from outbox.core.model.response import AttemptResult
    from outbox.relay.delivery.dispatcher import Dispatcher
    from outbox.relay.relay import Relay
    from tests.support.postgres import Database
    from tests.support.relay import Sent

pytestmark = pytest.mark.one_major

LARGE = "x" * 100_000
ROW = ROW_BYTES + COPIES * (len(LARGE) + 20)
LANES, EVENTS = 8, 64
PATIENT = {"base_s": 60.0, "cap_s": 60.0, "jitter": "none", "attempts_max": 9}


def dispatcher_of(worker: Relay) -> Dispatcher:
    assert worker._session is not None
    assert worker._session.running is not None
    return worker._session.running.dispatcher


def budget_of(worker: Relay) -> BufferBudget:
    return dispatcher_of(worker)._budget


async def test_a_receiver_in_trouble_costs_its_budget_and_then_nothing(database: Database) -> None:
    """All is delivered in order afterwards, although all of it was released meanwhile."""
    await add_endpoint(database, lanes=LANES, retry=PATIENT)
    held: list[tuple[int, int]] = []

    def respond(_: Sent) -> AttemptResult:
        budget = budget_of(worker)
        held.append((budget.held, budget.beyond))
        return response

    response, network = BUSY, Network(respond)
    for n in range(EVENTS):
        await publish(database, [n, LARGE], key=f"k{n}")
    async with running(database, network, buffer_bytes_max=2 << 20) as worker:
        await until(lambda: len(network.sent) >= 5, what="failures")
        budget = budget_of(worker)
        await until(lambda: budget.held == budget.beyond == 0, what="the content to be released")
        response = OK
        await all_ended(database)
        await until(lambda: budget.held == budget.beyond == 0, what="nothing to be held")
    assert max(within for within, _ in held) <= budget.bytes_max
    assert 0 < max(beyond for _, beyond in held) <= LANES * ROW
    for lane in {sent.lane for sent in network.accepted}:
        numbers = [sent.body["data"][0] for sent in network.accepted if sent.lane == lane]
        assert numbers == sorted(numbers)
    assert sorted(sent.body["data"] for sent in network.accepted) == [
        [n, LARGE] for n in range(EVENTS)
    ]


async def test_an_endpoint_that_becomes_unusable_holds_nothing(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lanes have no command that would release the content for which they wait."""
    monkeypatch.setattr(lane_worker, "RELEASE_WAIT_S", 1e9)
    await add_endpoint(database, lanes=1, retry=PATIENT)
    for n in range(8):
        await publish(database, [n, LARGE])
    async with running(database, network := Network(lambda _: BUSY)) as worker:
        await until(lambda: network.sent, what="the failure")
        (lane,) = dispatcher_of(worker).owned()[0].lanes.values()
        await until(lambda: lane.timer is not None, what="the wait for the retry")
        budget = budget_of(worker)
        assert budget.held > ROW
        async with database.at_hand() as connection, routing_transaction(connection):
            await connection.execute("UPDATE endpoint SET timeout_s = 'NaN'")
        await until(lambda: budget.held == budget.beyond == 0, what="the content to be released")


async def test_the_refills_of_many_streams_share_the_budget(database: Database) -> None:
    """A broker that has lost its data makes all lanes read at once."""
    await add_endpoint(database, url=URL, lanes=LANES, on_forgotten="refill")
    streams = Streams()
    network = Network()
    async with running(
        database, network, brokers=streams.connect, buffer_bytes_max=4 << 20
    ) as worker:
        for n in range(6 * LANES):
            await publish(database, [n, LARGE], key=f"k{n}")
        await all_ended(database)
        whole = {lane: len(stream) for lane, stream in streams.streams.items()}
        for stream in streams.streams.values():
            stream.clear()
        streams.gate = asyncio.Event()
        stored = len(streams.appends)
        for n in range(6 * LANES):
            await publish(database, n, key=f"k{n}")
        budget = budget_of(worker)
        await until(lambda: len(streams.appends) - stored == len(whole), what="a part of each")
        assert budget.held <= budget.bytes_max + len(whole) * ROW
        streams.gate.set()
        await all_ended(database)
    assert {lane: len(stream) for lane, stream in streams.streams.items()} == {
        lane: 2 * count for lane, count in whole.items()
    }


async def test_a_read_is_bounded_by_bytes_in_memory(database: Database) -> None:
    """Payloads of both kinds and headers count, uncompressed; the first delivery is always read."""
    await add_endpoint(database, lanes=1, retry=PATIENT)
    async with killed_at_the_end(database, Network(lambda _: BUSY)):
        for n in range(2):
            await publish(database, [n, LARGE])
        await publish(database, 2, headers='{"X-Large": "%s"}' % ("h" * 3_000))
        await fetchval(
            database,
            "INSERT INTO outbox (type, body, content_type) "
            "VALUES ('a.b', convert_to(repeat('b', 50000), 'UTF8'), 'text/plain')",
        )
        for n in (4, 5):
            await publish(database, n)
        await until(lambda: _sequenced(database, 6), what="all to be sequenced")
    async with database.at_hand() as connection:
        store = LaneStore(connection)
        endpoint_id = await connection.fetchval("SELECT id FROM endpoint")
        (lane,) = await store.lanes([endpoint_id])
        for cache, (bytes_max, count) in product(
            (None, EventCache()),
            (
                (0, 1),
                (100_100, 1),
                (200_100, 2),
                (202_000, 2),
                (203_200, 3),
                (253_000, 3),
                (253_300, 6),
                (1 << 20, 6),
            ),
        ):
            found = await store.deliveries([LaneRead(lane, 0, 0, 9, bytes_max)], cache)
            assert len(found[lane.id]) == count, bytes_max
        # The bound is each lane's own, and what comes after a large delivery is read, too.
        found = await store.deliveries([LaneRead(lane, 0, 3, 9, 0)], cache)
        assert [row.seq for row in found[lane.id]] == [4]


async def _sequenced(database: Database, count: int) -> bool:
    return bool(await fetchval(database, "SELECT count(*) = $1 FROM delivery", count))
