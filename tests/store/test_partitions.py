"""Partitions of periods are created ahead of time, without blocking other sessions."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from outbox.core.model.sql_names import search_path
from outbox.core.sequencing.partition_window import AHEAD, WIDTH, Retention
from outbox.relay import maintenance
from outbox.store.connection.migrate import migrate
from outbox.store.retention.partitions import PARENTS, PartitionStore
from outbox.store.retention.periods import RetentionStore
from tests.support.relay import fetchval, publish
from tests.support.waiting import until

if TYPE_CHECKING:
    from asyncpg import Connection

    from tests.support.postgres import Database

pytestmark = pytest.mark.system

SESSION = {"server_settings": {"search_path": "relay"}}
INSERT = "INSERT INTO outbox (type, payload) VALUES ('a.b', '{}')"
TABLES = [table for tables in PARENTS.values() for table in tables]


async def _store(database: Database) -> tuple[PartitionStore, Connection[Any]]:
    connection = await database.connect(**SESSION)
    return PartitionStore(connection), connection


async def _begin_period(database: Database) -> None:
    """Begin a period of events, also without its partition."""
    connection = await database.connect(**SESSION)
    store = RetentionStore(connection, Retention(None, None, None), period_s=0)
    await publish(database, 1)
    await store.advance_periods()


async def _is_whole(store: PartitionStore, parent: str, last: int) -> bool:
    """Whether every number up to the end of a period has one partition."""
    parts = await store.partitions(parent)
    joined = all(a.hi == b.lo for a, b in pairwise(parts))
    return joined and parts[0].lo == 0 and parts[-1].hi == (last + 1) * WIDTH


async def test_a_new_schema_has_its_partitions(database: Database) -> None:
    store, _ = await _store(database)
    assert await store.extend() == 0
    for parent in TABLES:
        assert await _is_whole(store, parent, AHEAD)


async def test_partitions_are_created_ahead_of_the_current_period(database: Database) -> None:
    store, _ = await _store(database)
    for number in (1, 2):
        await _begin_period(database)
        assert await store.extend() == 1
        assert await _is_whole(store, "outbox", number + AHEAD)
        assert await store.extend() == 0


async def test_a_long_transaction_of_a_producer_is_not_blocked(database: Database) -> None:
    store, _ = await _store(database)
    await _begin_period(database)
    producer = await database.connect(**SESSION)
    other = await database.connect(**SESSION)
    await producer.execute(f"SET lock_timeout = '2s'; BEGIN; {INSERT}")
    assert await store.extend() == 1
    await producer.execute(INSERT)
    await other.execute(f"SET lock_timeout = '2s'; {INSERT}")
    await producer.execute("COMMIT")


@pytest.mark.one_major
async def test_partitions_are_dropped_in_a_schema_of_any_name(empty_database: Database) -> None:
    for schema in ("Staging", 'odd "name'):
        path = {"search_path": search_path(schema)}
        connection = await empty_database.connect(server_settings=path)
        await migrate(connection, schema)
        await connection.execute("""
            INSERT INTO period (kind, number) VALUES ('events', 1);
            UPDATE period SET dropped_at = now() WHERE kind = 'events' AND number = 0
        """)
        assert await PartitionStore(connection).drop() == (1, 0, [])


async def test_only_tables_that_are_attached_or_that_it_detached_are_dropped(
    database: Database,
) -> None:
    """Whoever detached another one may have done so while it had events that were never read."""
    store, connection = await _store(database)
    await connection.execute("""
        INSERT INTO period (kind, number) VALUES ('events', 2);
        UPDATE period SET dropped_at = now() WHERE kind = 'events' AND number = 0;
        ALTER TABLE outbox DETACH PARTITION outbox_0
    """)
    assert await store.drop() == (0, 0, ["outbox_0"])
    assert await connection.fetchval("SELECT to_regclass('outbox_0') IS NOT NULL")
    # As after a crash between DETACH and DROP.
    await connection.execute(
        "UPDATE period SET detaching = ARRAY['outbox_0'::regclass::oid] WHERE number = 0"
    )
    assert await store.drop() == (1, 0, [])
    assert await connection.fetchval("SELECT to_regclass('outbox_0') IS NULL")


async def test_one_maintainer_at_a_time(database: Database) -> None:
    store, _ = await _store(database)
    other, _ = await _store(database)
    async with store.maintenance_lease() as alone, other.maintenance_lease() as second:
        assert (alone, second) == (True, False)
    async with other.maintenance_lease() as alone:
        assert alone


async def test_a_hanging_maintainer_loses_the_lease(database: Database) -> None:
    store, connection = await _store(database)
    other, _ = await _store(database)
    async with store.maintenance_lease() as has_lease:
        assert has_lease
        assert not await other.renew_lease()
        expire = "UPDATE lock SET expires_at = clock_timestamp() WHERE name = 'maintenance'"
        await connection.execute(expire)
        # No maintainer has taken it yet.
        assert await store.renew_lease()
        await connection.execute(expire)
        async with other.maintenance_lease() as has_lease:
            assert has_lease
            assert not await store.renew_lease()
    async with store.maintenance_lease() as has_lease:
        assert has_lease


@pytest.mark.one_major
async def test_a_maintainer_without_the_lease_leaves_slow_steps_to_its_holder(
    database: Database,
) -> None:
    store, connection = await _store(database)
    other, _ = await _store(database)
    await connection.execute("""
        INSERT INTO idempotency_key (key, expires_at) VALUES ('k', '2020-01-01');
        INSERT INTO period (kind, number) VALUES ('events', 1);
        UPDATE period SET dropped_at = now() WHERE kind = 'events' AND number = 0
    """)
    retention = RetentionStore(connection, Retention(0, 0, 0))
    left = "SELECT (SELECT count(*) FROM idempotency_key), to_regclass('outbox_0') IS NOT NULL"
    async with other.maintenance_lease():
        await maintenance._once(store, retention, hourly=True)
        assert tuple(await connection.fetchrow(left)) == (1, True)
    await maintenance._once(store, retention, hourly=True)
    assert tuple(await connection.fetchrow(left)) == (0, False)


@pytest.mark.one_major
async def test_two_maintainers_drop_the_same_tables(database: Database) -> None:
    stores = [(await _store(database))[0] for _ in range(2)]
    reader = await database.connect(**SESSION)
    await reader.execute(f"""
        INSERT INTO period (kind, number) VALUES ('events', 1), ('log', 1);
        UPDATE period SET dropped_at = now() WHERE number = 0;
        SELECT setval('outbox_id_seq', {WIDTH})
    """)
    await reader.execute("BEGIN; SELECT FROM outbox")
    waiting = """
        SELECT count(*) FROM pg_stat_activity
         WHERE datname = current_database() AND wait_event_type = 'Lock' AND query ILIKE 'ALTER%'
    """
    drops = []
    # The second one finds a partition that is being detached.
    for number, store in enumerate(stores, start=1):
        drops.append(asyncio.create_task(store.drop()))

        async def is_waiting(number: int = number) -> bool:
            return await fetchval(database, waiting) == number

        await until(is_waiting, what="it to wait for the reader")
    # Producers wait for neither.
    await asyncio.wait_for(publish(database, 1), 20)
    await reader.execute("COMMIT")
    results = await asyncio.gather(*drops, return_exceptions=True)
    assert any(isinstance(result, tuple) for result in results), results
    assert not any(isinstance(result, asyncpg.DeadlockDetectedError) for result in results)
    await stores[0].drop()
    for parent in TABLES:
        assert (await stores[0].partitions(parent))[0].lo == WIDTH
    gone = (
        "SELECT count(*) FROM pg_class "
        "WHERE relname ~ '^(outbox|batch|delivery_run|attempt_run)_0$'"
    )
    assert await fetchval(database, gone) == 0


async def test_maintainers_without_a_lease_create_each_partition_once(database: Database) -> None:
    stores = [PartitionStore(await database.connect(**SESSION)) for _ in range(3)]
    for number in (1, 2, 3):
        await _begin_period(database)
        for _ in range(3):
            await asyncio.gather(*(each.extend() for each in stores), return_exceptions=True)
        assert await stores[0].extend() == 0
        assert await _is_whole(stores[0], "outbox", number + AHEAD)


async def test_events_are_found_by_index_after_maintenance(database: Database) -> None:
    store, connection = await _store(database)
    await connection.execute("""
        INSERT INTO outbox (type, key, payload)
        SELECT 'a.b', 'k', to_jsonb(repeat('x', 500)) FROM generate_series(1, 2000) i
    """)
    new = "SELECT brin_summarize_new_values('outbox_0_event_id_key_idx')"
    # Maintenance does not wait for a VACUUM; it tries again soon.
    other = await database.connect(**SESSION)
    async with other.transaction():
        await other.execute("LOCK outbox_0 IN SHARE UPDATE EXCLUSIVE MODE")
        await store.summarize()
    await store.summarize()
    assert await connection.fetchval(new) == 0
