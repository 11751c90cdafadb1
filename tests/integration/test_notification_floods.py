"""Notifications of other roles, which any role that may connect can send, cost little."""

from __future__ import annotations

import asyncio
import itertools
import math
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from outbox.core.sequencing.batch_notifications import NOTIFY_EVERY_S
from outbox.relay.cluster import listener
from outbox.relay.cluster.listener import CHANGES_EVERY_S, FLOOD_PER_S, Listener
from outbox.relay.sequencing import sequencer
from outbox.relay.wake_event import WakeEvent, Wakeups
from outbox.store.delivery.lanes import LaneStore
from outbox.store.sequencing.batches import SequencingStore
from tests.support.relay import Network, add_endpoint, all_ended, fetchval, publish, running
from tests.support.sequencers import settings
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping

    from asyncpg import Connection

    from tests.support.postgres import Database

pytestmark = pytest.mark.system

SOON_S = 20.0
FLOOD = "SELECT count(pg_notify($1, n::text)) FROM generate_series(1, $2::int) n"


class CountedEvent(WakeEvent):
    """Counts how often it is set."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def set(self) -> None:
        self.count += 1
        super().set()


class Calls(Wakeups):
    """What a listener calls."""

    def __init__(self) -> None:
        super().__init__()
        self.producers = self.published = CountedEvent()
        self.changes = 0
        self.texts: list[str] = []

    def poll_changes(self) -> None:
        self.changes += 1

    def notification(self, text: str, _: int) -> None:
        self.texts.append(text)


@asynccontextmanager
async def listening(database: Database) -> AsyncIterator[Calls]:
    calls = Calls()
    working = Listener(
        database.connect,
        settings(database, poll_s=1.0),
        calls,
        calls.notification,
        tuple,
    )
    task = asyncio.create_task(working.run())
    try:
        # Set when it listens to producers, too, which is after it listens to owners.
        await until(lambda: calls.producers.count, SOON_S, "it to listen")
        yield calls
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_a_flood_of_notifications_is_not_listened_to(
    database: Database, logs: list[MutableMapping[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "FLOOD_MIN_S", 0.3)
    loop = asyncio.get_running_loop()
    async with listening(database) as calls:
        started_at = loop.time()
        await fetchval(database, FLOOD, "relay:owners", 20 * FLOOD_PER_S)
        await until(lambda: [each for each in logs if "retry_s" in each], SOON_S, "the log")
        (entry,) = [each for each in logs if "retry_s" in each]
        assert entry["event"] == "too many notifications; polling instead"
        received = [text for text in calls.texts if text]
        # In each second, of which a slow machine takes several.
        assert len(received) <= FLOOD_PER_S * math.ceil(loop.time() - started_at + 1)
        # Until it listens again, it polls.
        calls.producers.clear()
        assert await calls.producers.wait(SOON_S)
        await until(lambda: "" in calls.texts, SOON_S, "a poll for batches")
        await until(lambda: calls.changes == 2, SOON_S, "it to listen again")
        calls.producers.clear()
        await fetchval(database, "SELECT pg_notify('relay', '')")
        assert await calls.producers.wait(SOON_S)
    assert len([each for each in logs if "retry_s" in each]) == 1


@pytest.mark.full
async def test_the_wait_after_a_flood_doubles_while_floods_continue(
    database: Database, logs: list[MutableMapping[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "FLOOD_MIN_S", 0.05)
    monkeypatch.setattr(listener, "FLOOD_POLL_S", 0.01)
    async with listening(database) as calls:
        for floods in range(1, 4):
            # It listens to owners before it reports a change, and to producers only then.
            await fetchval(database, FLOOD, "relay:owners", 2 * FLOOD_PER_S)
            await until(lambda n=floods: calls.changes == n + 1, SOON_S, "it to listen again")
    assert [each["retry_s"] for each in logs if "retry_s" in each] == [0.05, 0.1, 0.2]


async def test_changes_are_coalesced_and_the_last_one_is_reported(database: Database) -> None:
    loop = asyncio.get_running_loop()
    async with listening(database) as calls:
        started_at, before = loop.time(), calls.changes
        async with database.at_hand() as connection:
            for _ in range(300):
                await connection.execute("SELECT pg_notify('relay:owners', 'reconfigured')")
        # The server has sent them, but the listener may not have received the first one yet.
        await until(lambda: calls.changes > before, SOON_S, "the first change")
        last_at, counted = loop.time(), calls.changes
        assert counted - before <= (last_at - started_at) / CHANGES_EVERY_S + 1
        # One that arrived within an interval is deferred to its end.
        await fetchval(database, "SELECT pg_notify('relay:owners', 'reconfigured')")
        await until(lambda: calls.changes > counted, SOON_S, "the last change")


async def test_every_notification_of_a_producer_is_reported_at_once(database: Database) -> None:
    """Half of an interval between reports would be the largest part of a delivery's latency."""
    async with listening(database) as calls:
        before = calls.producers.count
        await fetchval(database, FLOOD, "relay", 20)
        await until(lambda: calls.producers.count - before >= 20, SOON_S, "the notifications")


async def typical_interval(
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
    read: tuple[type, str],
    notify: Callable[[Connection[Any], list[float]], Awaitable[object]],
) -> float:
    """The median interval of a store's reads while a relay is notified; events are delivered.

    Args:
        notify: called with the times of the reads since then.
    """
    loop = asyncio.get_running_loop()
    reads: list[float] = []
    original = getattr(*read)

    async def record(*given: Any, **named: Any) -> Any:
        reads.append(loop.time())
        return await original(*given, **named)

    monkeypatch.setattr(*read, record)
    await add_endpoint(database)
    network = Network()
    async with running(database, network, lease_s=60.0):
        await publish(database, 0)
        await all_ended(database, SOON_S)
        reads.clear()
        async with database.at_hand() as connection:
            await notify(connection, reads)
        await until(lambda: reads, SOON_S, "a read")
        await publish(database, 1)
        await all_ended(database, SOON_S)
    assert network.data() == [0, 1]
    apart = [later - earlier for earlier, later in itertools.pairwise(reads)]
    return sorted(apart)[len(apart) // 2]


@pytest.mark.full
async def test_notifications_without_events_cause_few_reads(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequencer, "EMPTY_READ_EVERY_S", 0.05)

    async def notify(connection: Connection[Any], reads: list[float]) -> None:
        while len(reads) < 40:
            await connection.execute("SELECT pg_notify('relay', '')")

    read = SequencingStore, "read"
    assert await typical_interval(database, monkeypatch, read, notify) >= 0.05 * 0.9


@pytest.mark.full
async def test_forged_notifications_cause_few_reads(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def notify(connection: Connection[Any], _: list[float]) -> None:
        for n in range(500):
            await connection.execute("SELECT pg_notify('relay:owners', $1)", f"1-2 3:{n}")

    # Some notifications are answered by one read, or two if there may be more batches.
    read = LaneStore, "new_batches"
    least_s = NOTIFY_EVERY_S * 0.9
    assert await typical_interval(database, monkeypatch, read, notify) >= least_s
