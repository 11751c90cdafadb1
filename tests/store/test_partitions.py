"""Partitions of periods: there before they are needed, and made without disturbing anybody."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from outbox.core.model.sql_names import search_path
from outbox.core.sequencing.partition_window import AHEAD, WIDTH, Retention
from outbox.store.connection.migrate import migrate
from outbox.store.partitions import PARENTS, PartitionStore
from outbox.store.retention import RetentionStore
from tests.support.relay import publish

if TYPE_CHECKING:
    from asyncpg import Connection

    from tests.support.postgres import Database

SESSION = {"server_settings": {"search_path": "relay"}}
INSERT = "INSERT INTO outbox (type, payload) VALUES ('a.b', '{}')"
TABLES = [table for tables in PARENTS.values() for table in tables]


async def _store(database: Database) -> tuple[PartitionStore, Connection[Any]]:
    connection = await database.connect(**SESSION)
    return PartitionStore(connection), connection


async def _begin_period(database: Database) -> None:
    """A new period of events, whatever is known of its partition."""
    connection = await database.connect(**SESSION)
    store = RetentionStore(connection, Retention(None, None, None), period_s=0)
    await publish(database, 1)
    await store.advance_periods()


async def _is_whole(store: PartitionStore, parent: str, last: int) -> bool:
    """Every number up to the end of a period has one partition."""
    parts = await store.partitions(parent)
    joined = all(a.hi == b.lo for a, b in pairwise(parts))
    return joined and parts[0].lo == 0 and parts[-1].hi == (last + 1) * WIDTH


async def test_a_new_schema_needs_nothing(database: Database) -> None:
    store, _ = await _store(database)
    assert await store.extend() == 0
    for parent in TABLES:
        assert await _is_whole(store, parent, AHEAD)


async def test_partitions_stay_ahead_of_the_period_that_is_written(database: Database) -> None:
    store, _ = await _store(database)
    for number in (1, 2):
        await _begin_period(database)
        assert await store.extend() == 1
        assert await _is_whole(store, "outbox", number + AHEAD)
        assert await store.extend() == 0


async def test_a_producer_in_a_long_transaction_is_not_disturbed(database: Database) -> None:
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
async def test_a_schema_of_any_name_is_rid_of_what_is_dropped(empty_database: Database) -> None:
    for schema in ("Staging", 'odd "name'):
        path = {"search_path": search_path(schema)}
        connection = await empty_database.connect(server_settings=path)
        await migrate(connection, schema)
        await connection.execute("""
            INSERT INTO period (kind, number) VALUES ('events', 1);
            UPDATE period SET dropped_at = now() WHERE kind = 'events' AND number = 0
        """)
        assert await PartitionStore(connection).drop() == (1, 0)


async def test_one_maintainer_at_a_time(database: Database) -> None:
    store, _ = await _store(database)
    other, _ = await _store(database)
    async with store.maintenance_lock() as alone, other.maintenance_lock() as second:
        assert (alone, second) == (True, False)
    async with other.maintenance_lock() as alone:
        assert alone


async def test_two_maintainers_without_a_lock_make_what_one_would(database: Database) -> None:
    stores = [PartitionStore(await database.connect(**SESSION), pooled=True) for _ in range(3)]
    for number in (1, 2, 3):
        await _begin_period(database)
        for _ in range(3):
            await asyncio.gather(*(each.extend() for each in stores), return_exceptions=True)
        assert await stores[0].extend() == 0
        assert await _is_whole(stores[0], "outbox", number + AHEAD)


async def test_events_are_found_by_index_once_the_maintainer_was_there(database: Database) -> None:
    store, connection = await _store(database)
    await connection.execute("""
        INSERT INTO outbox (type, key, payload)
        SELECT 'a.b', 'k', to_jsonb(repeat('x', 500)) FROM generate_series(1, 2000) i
    """)
    new = "SELECT brin_summarize_new_values('outbox_0_event_id_key_idx')"
    # Nobody waits for who vacuums, and the next time is soon.
    other = await database.connect(**SESSION)
    async with other.transaction():
        await other.execute("LOCK outbox_0 IN SHARE UPDATE EXCLUSIVE MODE")
        await store.summarize()
    await store.summarize()
    assert await connection.fetchval(new) == 0
