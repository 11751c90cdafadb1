"""No backend of a relay, an erasure or a migration waits for its client while it holds anything.

A client may fall silent after any message: frozen, cut off, or gone with its machine.  A backend
that has a transaction id then keeps it, and what it has locked, for as long as the client is
silent, and before PostgreSQL 17 no server setting ends that.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import asyncpg
import orjson
import pytest

import outbox
from outbox.core.sequencing.partition_window import Retention
from outbox.operations.criteria import Criteria, DeadLetterSelection
from outbox.operations.dead_letters import replay as replays
from outbox.operations.endpoints import removal as endpoint_removal
from outbox.operations.events import erase
from outbox.operations.events.erase import ErasureTarget
from outbox.operations.replays import backfill
from outbox.operations.replays import jobs as replay_jobs
from outbox.store.cluster.replicas import ReplicaStore
from outbox.store.connection.migrate import migrate
from outbox.store.connection.store_connection import StoreConnection
from outbox.store.retention.partitions import PartitionStore
from outbox.store.retention.periods import RetentionStore
from tests.support import schedules
from tests.support.lockstep import in_lockstep
from tests.support.pgbouncer import find_the_schema
from tests.support.relay import (
    BUSY,
    OK,
    QUICK_RETRY,
    REFUSED,
    AttemptResult,
    Network,
    Sent,
    add_endpoint,
    all_ended,
    exceptions,
    fetchval,
    publish,
    register,
    running,
)
from tests.support.split_runs import SPLIT_RUNS
from tests.support.tiers import sampled
from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

LEASE_S = 10.0
"""Longer than usual, because the proxy slows everything down."""
SESSION = {"server_settings": {"search_path": "relay"}}
GONE = AttemptResult.completed(410, 0.001)
REJECTED = AttemptResult.completed(400, 0.001)
ECHO = AttemptResult.completed(200, 0.001, body=b"personal data")

# Erases the events, and puts into attempts what requests in flight would have recorded.
WRITE_LEFTOVERS = f"""{SPLIT_RUNS}
UPDATE outbox SET payload = NULL, headers = NULL, erased_at = now();
UPDATE attempt_run SET response = '{{"body": "personal data"}}'
"""


@pytest.mark.full
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


@pytest.mark.full
async def test_expiry_schedules_delayed_events_and_disabling(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox.relay.delivery.endpoint_supervisor.ENDPOINTS_CHECK_EVERY_S", 0.1)
    await add_endpoint(database)
    await add_endpoint(database, "gone")
    async with database.connection(**SESSION) as db:
        replica_id = await register(ReplicaStore(db), 0.01)
        await db.execute("UPDATE ownership SET replica_id = $1", replica_id)
        await schedules.add_schedule(db)
        await schedules.let_be_due(db, 2)
        deliver_at = datetime.now(UTC) + timedelta(seconds=30)
        await outbox.publish(db, "a.b", 1, deliver_at=deliver_at, autocommit=True)
        await db.execute("UPDATE future_event SET deliver_at = now()")
    network = Network(lambda sent: GONE if sent.url.endswith("gone") else OK)
    async with (
        in_lockstep(database) as (seen, dsn),
        running(database, network, dsn=dsn, lease_s=LEASE_S),
    ):
        disabled = "SELECT state = 'disabled' FROM endpoint WHERE name = 'gone'"
        await until(lambda: fetchval(database, disabled), what="the endpoint to be disabled")
        await until(lambda: len(network.accepted) == 3, what="the events")
    assert await fetchval(database, "SELECT count(*) FROM replica") == 0
    assert not seen.hold_points, seen.report()


@pytest.mark.full
@pytest.mark.parametrize("pooled", [False, True], ids=["prepared", "inline"])
async def test_replays_a_backfill_and_a_stopped_filter(database: Database, pooled: bool) -> None:
    """Also with the statements that are sent through a connection pooler."""
    if pooled:
        await find_the_schema(database)
    await add_endpoint(database, lanes=2)
    await add_endpoint(database, "ids")
    await add_endpoint(database, "filter", on_dead_letter="block")
    await add_endpoint(database, "removed")
    network = Network(lambda sent: OK if sent.url.endswith("shop") else REFUSED)
    async with running(database, network):
        await publish(database, *range(8))
        dead = "SELECT count(*) = 17 FROM dead_letter"
        await until(lambda: fetchval(database, dead), what="the dead letters")
    network.script = lambda _: OK
    await add_endpoint(database, "broken", filter="@.total > 100")
    # Syntax that this version of PostgreSQL does not know.
    await fetchval(database, "UPDATE subscription SET filter = '@.total >' WHERE filter <> ''")
    await add_endpoint(database, "watcher", types=["outbox.filter.stopped"])
    async with database.connection(**SESSION) as db:
        by_endpoint = "SELECT d.id FROM dead_letter d JOIN endpoint e ON e.id = d.endpoint_id"
        ids = [row["id"] for row in await db.fetch(f"{by_endpoint} WHERE e.name = 'ids'")]
        await replays.start_replay(db, "relay", DeadLetterSelection(tuple(ids[:5])), actor="test")
        for name in ("ids", "filter", "removed"):
            selection = DeadLetterSelection(criteria=Criteria(endpoint=name))
            await replays.start_replay(db, "relay", selection, actor="test")
        await endpoint_removal.remove_endpoint(
            db, "relay", "removed", actor="test", dead_letter=True
        )
        since = datetime(2020, 1, 1, tzinfo=UTC)
        for name in ("shop", "broken"):
            await backfill.request_backfill(db, "relay", Criteria(name, since=since), actor="test")
        async with (
            in_lockstep(database) as (seen, dsn),
            running(database, network, dsn=dsn, lease_s=LEASE_S, pooled=pooled),
        ):
            await publish(database, *range(8, 12))
            ended = "SELECT count(*) = 6 FROM replay_job WHERE ended_at IS NOT NULL"
            await until(lambda: fetchval(database, ended), what="the jobs to end")
            await all_ended(database)
        jobs = (await replay_jobs.list_jobs(db, "relay"))[::-1]
        journal = await db.fetch("SELECT kind, data FROM journal ORDER BY id")
    assert [(job.kind, job.taken, job.stopped) for job in jobs] == [
        ("dead", 5, {}),
        ("dead", 3, {}),
        ("dead", 1, {}),
        ("dead", 0, {"removed": 1}),
        ("history", 8, {}),
        ("history", 8, {}),
    ]
    entries = [orjson.loads(row["data"]) for row in journal if row["kind"] == "replay_ended"]
    ended_jobs = [{"job": job.id, "state": "done", "taken": job.taken} for job in jobs]
    assert sorted(entries, key=lambda entry: entry["job"]) == ended_jobs
    (stopped,) = (orjson.loads(row["data"]) for row in journal if row["kind"] == "filter_stopped")
    assert stopped["filter"] == "@.total >"
    assert stopped["from_batch"] > 1
    assert len([sent for sent in network.accepted if sent.url.endswith("watcher")]) == 1
    assert await exceptions(database) == {}
    assert seen.messages > 100
    assert not seen.hold_points, seen.report()


async def test_maintenance(database: Database) -> None:
    await add_endpoint(database, lanes=1)
    await add_endpoint(database, "bad", lanes=1)
    network = Network(lambda sent: REJECTED if sent.url.endswith("bad") else OK)
    async with running(database, network):
        await publish(database, *range(4))
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
        # Their log is dropped, so everything of them has expired; these are in the new period.
        async with running(database, network):
            await publish(database, "x", "y", "z")
            await all_ended(database)
        async with database.connection(**SESSION) as db:
            await db.execute(WRITE_LEFTOVERS)
            await db.execute("INSERT INTO idempotency_key (key, expires_at) VALUES ('k', now())")
        deleted = await retention.delete_expired()
        await connection.close()
    assert dropped > 1
    # Six responses and three dead letters are erased; four dead letters and a key go.
    assert deleted == 6 + 3 + 4 + 1
    assert await fetchval(database, "SELECT count(*) FROM dead_letter WHERE payload IS NULL") == 3
    assert await fetchval(database, "SELECT count(*) FROM idempotency_key") == 0
    assert not seen.hold_points, seen.report()


@pytest.mark.parametrize("target", sampled([ErasureTarget(tenant="acme"), ErasureTarget(key="k")]))
async def test_erasure(database: Database, target: ErasureTarget) -> None:
    await add_endpoint(database, all_tenants=True)
    await add_endpoint(database, "bad", all_tenants=True)
    network = Network(lambda sent: REJECTED if sent.url.endswith("bad") else ECHO)
    async with running(database, network), database.connection(**SESSION) as db:
        await publish(database, *range(3), tenant="acme", key="k")
        await all_ended(database)
        deliver_at = datetime.now(UTC) + timedelta(days=1)
        await outbox.publish(
            db, "a.b", 1, tenant="acme", key="k", deliver_at=deliver_at, autocommit=True
        )
    async with in_lockstep(database) as (seen, dsn):
        connection = await asyncpg.connect(dsn, connection_class=StoreConnection, **SESSION)
        done = await erase.erase_events(connection, "relay", target, actor="test")
        await connection.close()
    assert (done.events, done.future_events, done.dead_letters, done.responses) == (3, 1, 3, 3)
    assert not seen.hold_points, seen.report()


@pytest.mark.full
async def test_migration(empty_database: Database) -> None:
    await empty_database.server.execute("DROP ROLE IF EXISTS app", "CREATE ROLE app")
    async with in_lockstep(empty_database) as (seen, dsn):
        connection = await asyncpg.connect(dsn, connection_class=StoreConnection)
        granted = [("producer", "app"), ("relay", "app")]
        done = await migrate(connection, "relay", roles=granted, payload_bytes_max=5000)
        await migrate(connection, "relay", revoked=["app"])
        await connection.close()
    assert done
    assert not seen.hold_points, seen.report()
