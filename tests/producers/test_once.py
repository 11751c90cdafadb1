"""Idempotency keys under concurrency: savepoints, two-phase commit, snapshots and batches."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

import outbox
from outbox import Event
from tests.support.relay import Network, add_endpoint, all_ended, exceptions, publish, running
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from uuid import UUID

    from asyncpg import Connection

    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

BLOCKED = "SELECT count(*) = $1 FROM pg_locks WHERE NOT granted AND locktype = 'transactionid'"


async def payloads(database: Database) -> list[int]:
    async with database.at_hand() as db:
        rows = await db.fetch("SELECT payload::text::int AS n FROM outbox ORDER BY id")
    return [row["n"] for row in rows]


async def blocked(
    database: Database, call: Coroutine[Any, Any, Any], sessions: int = 1
) -> asyncio.Task[Any]:
    """Start a call, and wait until it, too, waits for another session's transaction."""
    task = asyncio.create_task(call)
    async with database.at_hand() as db:
        await until(lambda: db.fetchval(BLOCKED, sessions), what="the session to wait")
    return task


async def test_a_key_of_a_rolled_back_savepoint_goes_to_the_session_that_waits(
    database: Database,
) -> None:
    first, second = await database.connect(), await database.connect()
    async with first.transaction():
        savepoint = first.transaction()
        await savepoint.start()
        assert await outbox.publish(first, "a", 1, once="k", autocommit=True) is not None
        waiting = await blocked(database, outbox.publish(second, "a", 2, once="k", autocommit=True))
        await savepoint.rollback()
        assert await asyncio.wait_for(waiting, 20) is not None
        assert await outbox.publish(first, "a", 3, once="k", autocommit=True) is None
    assert await payloads(database) == [2]


async def test_a_key_of_a_rolled_back_savepoint_can_be_claimed_in_the_same_transaction(
    database: Database,
) -> None:
    app = await database.connect()
    async with app.transaction():
        for payload in (1, 2):
            savepoint = app.transaction()
            await savepoint.start()
            assert await outbox.publish(app, "a", payload, once="k", autocommit=True) is not None
            assert (
                await outbox.publish(app, "a", lambda n=payload: n * 10, once="l", autocommit=True)
                is not None
            )
            await (savepoint.rollback() if payload == 1 else savepoint.commit())
    assert await payloads(database) == [2, 20]


@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
async def test_a_key_of_a_prepared_transaction_is_decided_by_its_end(
    database: Database, end: str
) -> None:
    await add_endpoint(database)
    first, second = await database.connect(), await database.connect()
    gid = f"'{database.name}'"
    network = Network()
    async with running(database, network):
        await first.execute("SET relay.notify = off; BEGIN")
        assert await outbox.publish(first, "a", 1, once="k", autocommit=True) is not None
        await first.execute(f"PREPARE TRANSACTION {gid}")
        # The relay sees the gap, and stops before it is filled.
        await publish(database, 0)
        await until(lambda: network.data() == [0])
    waiting = await blocked(database, outbox.publish(second, "a", 2, once="k", autocommit=True))
    async with running(database, network):
        await first.execute(f"{end} PREPARED {gid}")
        event_id = await asyncio.wait_for(waiting, 20)
        await all_ended(database)
    assert (event_id is None, network.data()) == (
        (True, [0, 1]) if end == "COMMIT" else (False, [0, 2])
    )
    assert await exceptions(database) == {}


@pytest.mark.parametrize("isolation", ["repeatable_read", "serializable"])
async def test_a_key_claimed_after_the_snapshot_fails_the_transaction(
    database: Database, isolation: Any
) -> None:
    """Its snapshot does not show the published event, so no result would be right."""
    first, second = await database.connect(), await database.connect()
    transaction = second.transaction(isolation=isolation)
    await transaction.start()
    await second.fetchval("SELECT count(*) FROM relay.outbox")
    assert await outbox.publish(first, "a", 1, once="k", autocommit=True) is not None
    with pytest.raises(asyncpg.SerializationError):
        await outbox.publish(second, "a", 2, once="k", autocommit=True)
    await transaction.rollback()
    assert await outbox.publish(second, "a", 2, once="k", autocommit=True) is None
    assert await payloads(database) == [1]


async def test_of_equal_keys_in_a_batch_the_first_is_published(database: Database) -> None:
    app = await database.connect()
    events = [Event("a", n, once=key) for n, key in enumerate("bacbad")]
    ids = await outbox.publish_many(app, [*events, Event("a", 6)], autocommit=True)
    assert [n for n, event_id in enumerate(ids) if event_id is not None] == [0, 1, 2, 5, 6]
    assert await payloads(database) == [0, 1, 2, 5, 6]


async def test_batches_with_the_same_keys_in_different_orders_do_not_deadlock(
    database: Database,
) -> None:
    holder, first, second = [await database.connect() for _ in range(3)]
    transaction = holder.transaction()
    await transaction.start()
    await outbox.publish(holder, "a", 0, once="b", autocommit=True)

    def batch(app: Connection[Any], keys: str) -> Coroutine[Any, Any, list[UUID | None]]:
        return outbox.publish_many(app, [Event("a", 1, once=key) for key in keys], autocommit=True)

    # In the order of the batches, the first would hold c and want a, the second the reverse.
    one = await blocked(database, batch(first, "cba"))
    other = await blocked(database, batch(second, "ac"), sessions=2)
    await transaction.rollback()
    published = await asyncio.gather(one, other)
    assert sorted(sum(id_ is not None for id_ in ids) for ids in published) == [0, 3]
