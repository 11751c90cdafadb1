"""Partitions: enough ahead, made without disturbing a producer, mended after a crash."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from outbox.store.partitions import AHEAD, PARENTS, PartitionStore

if TYPE_CHECKING:
    from tests.support.postgres import Database

WIDTH = 1_000_000
SESSION = {"server_settings": {"search_path": "relay"}}


async def _store(database: Database) -> tuple[PartitionStore, object]:
    connection = await database.connect(**SESSION)
    return PartitionStore(connection, WIDTH), connection


async def _is_whole(store: PartitionStore, parent: str) -> bool:
    """Every number has exactly one partition."""
    parts = await store.partitions(parent)
    joined = all(a.hi == b.lo for a, b in pairwise(parts))
    return joined and parts[0].lo == 0 and parts[-1].hi is None


async def test_a_new_schema_needs_nothing(database: Database) -> None:
    store, _ = await _store(database)
    assert await store.extend() == 0
    for parent in PARENTS:
        assert await _is_whole(store, parent)


async def test_partitions_stay_ahead_of_the_ids(database: Database) -> None:
    store, connection = await _store(database)
    await connection.execute(f"SELECT setval('outbox_id_seq', {WIDTH + 5})")
    assert await store.extend() > 0
    parts = await store.partitions("outbox")
    assert await _is_whole(store, "outbox")
    assert parts[-1].lo >= WIDTH + 5 + AHEAD * WIDTH
    assert await store.extend() == 0


async def test_a_producer_in_a_long_transaction_is_not_disturbed(database: Database) -> None:
    store, connection = await _store(database)
    producer = await database.connect(**SESSION)
    other = await database.connect(**SESSION)
    await connection.execute(f"SELECT setval('outbox_id_seq', {WIDTH + 5})")
    insert = "INSERT INTO outbox (type, payload) VALUES ('a.b', '{}')"
    await producer.execute(f"BEGIN; {insert}")
    extending = asyncio.create_task(store.extend())
    # It waits for the transaction, and neither that one nor others wait for it.
    await producer.execute(f"SET lock_timeout = '2s'; {insert}")
    await other.execute(f"SET lock_timeout = '2s'; {insert}")
    await producer.execute("COMMIT")
    assert await extending > 0
    assert await _is_whole(store, "outbox")


async def test_an_interrupted_cut_is_mended(database: Database) -> None:
    store, connection = await _store(database)
    await connection.execute(f"SELECT setval('outbox_id_seq', {WIDTH + 5})")
    last = (await store.partitions("outbox"))[-1]
    await connection.execute(f"ALTER TABLE outbox DETACH PARTITION {last.name} CONCURRENTLY")
    assert not await _is_whole(store, "outbox")
    await store.extend()
    assert await _is_whole(store, "outbox")


@pytest.mark.one_major
async def test_a_cut_that_was_given_up_while_waiting_is_mended(database: Database) -> None:
    store, connection = await _store(database)
    producer = await database.connect(**SESSION)
    await connection.execute(f"SELECT setval('outbox_id_seq', {WIDTH + 5})")
    await producer.execute("BEGIN; INSERT INTO outbox (type, payload) VALUES ('a.b', '{}')")
    await connection.execute("SET statement_timeout = '200ms'")
    with pytest.raises(Exception, match="statement timeout"):
        await store.extend()
    await connection.execute("RESET statement_timeout")
    assert [p.detaching for p in await store.partitions("outbox")][-1]
    await producer.execute("COMMIT")
    await store.extend()
    assert await _is_whole(store, "outbox")


async def test_an_open_ended_partition_in_use_stays(database: Database) -> None:
    store, connection = await _store(database)
    last = (await store.partitions("outbox"))[-1]
    await connection.execute(f"SELECT setval('outbox_id_seq', {last.lo + 5})")
    await connection.execute("INSERT INTO outbox (type, payload) VALUES ('a.b', '{}')")
    assert await store.extend() == 0
    assert (await store.partitions("outbox"))[-1] == last


async def test_one_maintainer_at_a_time(database: Database) -> None:
    store, connection = await _store(database)
    other, blocker = await _store(database)
    await blocker.execute(
        "SELECT pg_advisory_lock(hashtextextended('outbox-relay maintains relay', 0))"
    )
    await connection.execute(f"SELECT setval('outbox_id_seq', {WIDTH + 5})")
    assert await store.extend() == 0
    await blocker.execute("SELECT pg_advisory_unlock_all()")
    assert await store.extend() > 0
    assert await other.extend() == 0
