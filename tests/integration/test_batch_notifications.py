"""What one replica sequences reaches the lanes of the others, told in groups."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from outbox.core.cluster.lease import preferred
from outbox.core.sequencing import batch_notifications
from outbox.relay.cluster.listener import Listener
from outbox.relay.wake_event import Bell
from tests.support.relay import (
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
    from collections.abc import AsyncIterator, Awaitable, Callable

    from tests.support.postgres import Database

pytestmark = pytest.mark.costly

LEASE_S = 60.0
"""They look by themselves each fifth of it: too late for these tests."""
SOON_S = 10.0
ENDPOINTS = 24


@asynccontextmanager
async def two_relays(database: Database) -> AsyncIterator[tuple[Network, Network]]:
    """Each has some of the endpoints, which get everything.

    Who has which follows from random ids; of 24 one has none once in 2^23 times.
    """
    for n in range(ENDPOINTS):
        await add_endpoint(database, f"e{n}", types=["a.b"])
    one, other = Network(), Network()
    async with running(database, one, lease_s=LEASE_S), running(database, other, lease_s=LEASE_S):
        await until(lambda: _shared_out(database), SOON_S, "the endpoints to be shared out")
        yield one, other


async def _shared_out(database: Database) -> bool:
    async with database.connection(server_settings={"search_path": "relay"}) as connection:
        ids = [r["id"] for r in await connection.fetch("SELECT id FROM replica")]
        rows = await connection.fetch("SELECT endpoint_id, replica_id FROM ownership")
        return len(ids) == 2 and all(
            r["replica_id"] == preferred(r["endpoint_id"], ids) for r in rows
        )


async def test_every_event_of_a_trickle_is_heard_of_at_once(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So long that not one of the others would be told by a later batch.
    monkeypatch.setattr(batch_notifications, "TELL_EVERY_S", 0.2)
    monkeypatch.setattr(batch_notifications, "TELL_WITHIN_S", 0.3)
    async with two_relays(database) as (one, other):
        await publish(database, *range(20))
        await all_ended(database, SOON_S)
        assert one.sent
        assert other.sent
        assert len(one.sent) + len(other.sent) == ENDPOINTS * 20
    assert await exceptions(database) == {}


async def test_what_is_told_need_not_be_read(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_notifications, "TELL_EVERY_S", 0.0)
    async with two_relays(database) as (one, other):

        async def see_nothing(*_: object) -> None:
            return None

        monkeypatch.setattr("outbox.store.lanes.LaneStore.news", see_nothing)
        for n in range(5):
            await publish(database, n)
            await until(lambda n=n: len(one.sent) + len(other.sent) == ENDPOINTS * (n + 1), SOON_S)
        await all_ended(database, SOON_S)
        assert one.sent
        assert other.sent


async def test_what_a_stranger_tells_is_not_believed(database: Database) -> None:
    """Whoever may connect may notify."""
    async with two_relays(database) as (one, other):
        lane_id = await fetchval(database, "SELECT max(id) FROM lane")
        for text in (f"1-1000000 {lane_id}:1000", "nonsense", "7:7", "x" * 5000):
            await fetchval(database, "SELECT pg_notify('relay:owners', $1)", text)
        for n in range(5):
            await publish(database, n)
            await until(lambda n=n: len(one.sent) + len(other.sent) == ENDPOINTS * (n + 1), SOON_S)
        await all_ended(database, SOON_S)
    assert await exceptions(database) == {}


# --------------------------------------------------------- who hears producers


async def test_only_who_sequences_is_woken_by_producers(database: Database) -> None:
    bell = Bell()
    changes: list[None] = []
    listener = Listener(
        database.connect, "relay", bell, lambda: changes.append(None), lambda *_: None, [], 1.0
    )
    listener.hear_producers(wanted=False)
    task = asyncio.create_task(listener.run())
    await until(lambda: changes, SOON_S, "it to listen")

    async def notify(*channels: str) -> None:
        for channel in channels:
            await fetchval(database, "SELECT pg_notify($1, 'reconfigured')", channel)

    await notify("relay", "relay:owners")
    await until(lambda: len(changes) == 2, SOON_S, "what came after it")
    assert not await bell.wait(0)
    # It may have missed something until now: read first, then wait.
    listener.hear_producers(wanted=True)
    assert await bell.wait(SOON_S)
    await notify("relay")
    assert await bell.wait(SOON_S)
    listener.hear_producers(wanted=False)
    await until(lambda: _is_deaf(notify, bell, changes), SOON_S, "it to stop listening")
    task.cancel()
    await asyncio.wait([task])


async def _is_deaf(notify: Callable[..., Awaitable[None]], bell: Bell, changes: list[None]) -> bool:
    bell.clear()
    before = len(changes)
    await notify("relay", "relay:owners")
    await until(lambda: len(changes) > before, SOON_S, "what came after it")
    return not await bell.wait(0)


async def test_who_follows_a_leader_that_left_is_woken_by_producers(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks by itself each minute only."""
    wishes: list[bool] = []
    hear_producers = Listener.hear_producers

    def hear(self: Listener, *, wanted: bool) -> None:
        wishes.append(wanted)
        hear_producers(self, wanted=wanted)

    monkeypatch.setattr(Listener, "hear_producers", hear)
    await add_endpoint(database)
    network = Network()
    options = {"poll_s": 60.0, "lease_s": LEASE_S}
    leader = "SELECT r.id FROM cursor c JOIN replica r ON r.id = c.writer"
    async with running(database, network, **options) as first:
        was = await until(lambda: fetchval(database, leader), SOON_S, "it to lead")
        async with running(database, network, **options):
            await until(lambda: False in wishes, SOON_S, "the other to stand by")
            first.stop()
            await until(lambda: _leads_another(database, leader, was), SOON_S, "the other to lead")
            for n in range(5):
                await publish(database, n)
                await until(lambda n=n: len(network.data()) == n + 1, SOON_S, "an event")
    assert network.data() == list(range(5))


async def _leads_another(database: Database, leader: str, was: int) -> bool:
    return await fetchval(database, leader) not in (None, was)
