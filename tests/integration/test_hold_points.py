"""No backend of a relay waits for its client while it holds anything.

A client may fall silent after any message: frozen, cut off, or gone with its machine.  A backend
that has a transaction id then keeps it, and what it has locked, for as long as the client is
silent, and before PostgreSQL 17 no server setting ends that.  Not covered are replays and the
deletion of expired rows, which still take several messages.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import asyncpg
import pytest

import outbox
from outbox.core.sequencing.partition_window import Retention
from outbox.store.connection.store_connection import StoreConnection
from outbox.store.partitions import PartitionStore
from outbox.store.replicas import ReplicaStore
from outbox.store.retention import RetentionStore
from tests.support import schedules
from tests.support.lockstep import in_lockstep
from tests.support.relay import (
    BUSY,
    OK,
    QUICK_RETRY,
    AttemptResult,
    Network,
    Sent,
    add_endpoint,
    all_ended,
    fetchval,
    publish,
    register,
    running,
)
from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

LEASE_S = 10.0
"""Longer than usual, because the proxy slows everything down."""
SESSION = {"server_settings": {"search_path": "relay"}}
GONE = AttemptResult.completed(410, 0.001)


async def test_start_deliveries_dead_letters_and_stop(database: Database) -> None:
    await add_endpoint(database, lanes=2)
    await add_endpoint(database, "broken", retry={**QUICK_RETRY, "attempts_max": 2})

    def respond(sent: Sent) -> AttemptResult:
        return BUSY if sent.url.endswith("broken") else OK

    async with (
        in_lockstep(database) as (seen, dsn),
        running(database, Network(respond), dsn=dsn, lease_s=LEASE_S),
    ):
        for n in range(3):
            await publish(database, n)
        await all_ended(database)
        await publish(database, *range(10, 16))
        await all_ended(database)
    assert seen.messages > 100
    assert not seen.hold_points, seen.report()


async def test_expiry_schedules_delayed_events_and_disabling(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox.relay.delivery.endpoint_supervisor.CHECK_EVERY_S", 0.1)
    await add_endpoint(database)
    await add_endpoint(database, "gone")
    async with database.connection(**SESSION) as db:
        replica_id = await register(ReplicaStore(db), 0.01)
        await db.execute("UPDATE ownership SET replica_id = $1", replica_id)
        await schedules.add(db)
        await schedules.let_be_due(db, 2)
        deliver_at = datetime.now(UTC) + timedelta(seconds=30)
        await outbox.publish(db, "a.b", 1, deliver_at=deliver_at)
        await db.execute("UPDATE future_event SET deliver_at = now()")
    network = Network(lambda sent: GONE if sent.url.endswith("gone") else OK)
    async with (
        in_lockstep(database) as (seen, dsn),
        running(database, network, dsn=dsn, lease_s=LEASE_S),
    ):
        disabled = "SELECT state = 'disabled' FROM endpoint WHERE name = 'gone'"
        await until(lambda: fetchval(database, disabled), 30, "the endpoint to be disabled")
        await until(lambda: len(network.accepted) == 3, 30, "the events")
    assert await fetchval(database, "SELECT count(*) FROM replica") == 0
    assert not seen.hold_points, seen.report()


async def test_maintenance(database: Database) -> None:
    await add_endpoint(database)
    async with running(database, Network()):
        await publish(database, *range(10))
        await all_ended(database)
    async with in_lockstep(database) as (seen, dsn):
        connection = await asyncpg.connect(dsn, connection_class=StoreConnection, **SESSION)
        partitions = PartitionStore(connection)
        retention = RetentionStore(connection, Retention(0, 0, 0), period_s=0)
        dropped = 0
        for _ in range(8):
            await partitions.extend()
            dropped += len(await retention.advance_periods())
        await partitions.drop()
        await partitions.summarize()
        await partitions.analyze()
        await retention.delete_expired()
        await connection.close()
    assert dropped > 1
    assert not seen.hold_points, seen.report()
