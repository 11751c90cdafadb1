"""Batch notifications: one replica sequences, and the lanes of other replicas are notified in
groups.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from outbox.core.sequencing import batch_notifications
from outbox.relay.cluster.listener import Listener
from outbox.relay.wake_event import Wakeups
from tests.support.relay import (
    Network,
    add_endpoint,
    all_ended,
    exceptions,
    fetchval,
    publish,
    running,
    shared_out,
)
from tests.support.sequencers import settings
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from tests.support.postgres import Database

pytestmark = pytest.mark.costly

LEASE_S = 60.0
"""The replicas poll every fifth of a lease, which is too late for these tests."""
SOON_S = 20.0
ENDPOINTS = 24


@asynccontextmanager
async def two_relays(database: Database) -> AsyncIterator[tuple[Network, Network]]:
    """Two relays that share the endpoints, which get every event."""
    for n in range(ENDPOINTS):
        await add_endpoint(database, f"e{n}", types=["a.b"])
    one, other = Network(), Network()
    async with running(database, one, lease_s=LEASE_S), running(database, other, lease_s=LEASE_S):
        await until(lambda: shared_out(database, 2), SOON_S, "the endpoints to be shared out")
        yield one, other


@pytest.mark.full
async def test_every_single_event_is_notified_at_once(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Long enough that none of the other notifications is sent by a later batch.
    monkeypatch.setattr(batch_notifications, "NOTIFY_EVERY_S", 0.2)
    monkeypatch.setattr(batch_notifications, "NOTIFY_WITHIN_S", 0.3)
    async with two_relays(database) as (one, other):
        await publish(database, *range(20))
        await all_ended(database, SOON_S)
        assert one.sent
        assert other.sent
        assert len(one.sent) + len(other.sent) == ENDPOINTS * 20
    assert await exceptions(database) == {}


async def test_notified_events_need_no_read(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_notifications, "NOTIFY_EVERY_S", 0.0)
    async with two_relays(database) as (one, other):

        async def see_nothing(*_: object) -> None:
            return None

        monkeypatch.setattr("outbox.store.delivery.lanes.LaneStore.new_batches", see_nothing)
        for n in range(5):
            await publish(database, n)
            await until(lambda n=n: len(one.sent) + len(other.sent) == ENDPOINTS * (n + 1), SOON_S)
        await all_ended(database, SOON_S)
        assert one.sent
        assert other.sent


async def test_a_notification_of_an_unauthorized_sender_is_ignored(database: Database) -> None:
    """Every role that may connect may send a notification."""
    async with two_relays(database) as (one, other):
        lane_id = await fetchval(database, "SELECT max(id) FROM lane")
        for text in (f"1-1000000 {lane_id}:1000", "nonsense", "7:7", "x" * 5000):
            await fetchval(database, "SELECT pg_notify('relay:owners', $1)", text)
        for n in range(5):
            await publish(database, n)
            await until(lambda n=n: len(one.sent) + len(other.sent) == ENDPOINTS * (n + 1), SOON_S)
        await all_ended(database, SOON_S)
    assert await exceptions(database) == {}


# ---------------------------------------------------- wake events of producers


class CountedChanges(Wakeups):
    """Counts how often changes are to be polled."""

    changes = 0

    def poll_changes(self) -> None:
        self.changes += 1


async def test_producers_wake_only_the_leader(database: Database) -> None:
    wakeups = CountedChanges()
    listener = Listener(
        database.connect,
        settings(database, poll_s=1.0),
        wakeups,
        lambda *_: None,
        tuple,
    )
    listener.set_leader(leads=False)
    task = asyncio.create_task(listener.run())
    await until(lambda: wakeups.changes, SOON_S, "it to listen")

    async def notify(*channels: str) -> None:
        for channel in channels:
            await fetchval(database, "SELECT pg_notify($1, 'reconfigured')", channel)

    await notify("relay", "relay:owners")
    await until(lambda: wakeups.changes == 2, SOON_S, "what came after it")
    assert not await wakeups.published.wait(0)
    # It may have missed notifications until now: read first, then wait.
    listener.set_leader(leads=True)
    assert await wakeups.published.wait(SOON_S)
    await notify("relay")
    assert await wakeups.published.wait(SOON_S)
    listener.set_leader(leads=False)
    await until(lambda: _is_deaf(notify, wakeups), SOON_S, "it to stop listening")
    task.cancel()
    await asyncio.wait([task])


async def _is_deaf(notify: Callable[..., Awaitable[None]], wakeups: CountedChanges) -> bool:
    wakeups.published.clear()
    before = wakeups.changes
    await notify("relay", "relay:owners")
    await until(lambda: wakeups.changes > before, SOON_S, "what came after it")
    return not await wakeups.published.wait(0)


@pytest.mark.full
async def test_producers_wake_the_next_leader(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It polls once a minute only."""
    requests: list[bool] = []
    set_leader = Listener.set_leader

    def record_request(self: Listener, leads: bool) -> None:
        requests.append(leads)
        set_leader(self, leads)

    monkeypatch.setattr(Listener, "set_leader", record_request)
    await add_endpoint(database)
    network = Network()
    options = {"poll_s": 60.0, "lease_s": LEASE_S}
    leader = "SELECT r.id FROM cursor c JOIN replica r ON r.id = c.writer"
    async with running(database, network, **options) as first:
        was = await until(lambda: fetchval(database, leader), SOON_S, "it to lead")
        async with running(database, network, **options):
            await until(lambda: False in requests, SOON_S, "the other to stand by")
            first.stop()
            await until(lambda: _leads_another(database, leader, was), SOON_S, "the other to lead")
            for n in range(5):
                await publish(database, n)
                await until(lambda n=n: len(network.data()) == n + 1, SOON_S, "an event")
    assert network.data() == list(range(5))


async def _leads_another(database: Database, leader: str, was: int) -> bool:
    return await fetchval(database, leader) not in (None, was)
