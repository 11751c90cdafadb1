"""A notification queue that others fill up makes neither producers nor relays fail.

Any role may listen and not read.  When the server's queue is full, a commit that notifies fails; so
above half of it producers and relays do not notify, and relays poll.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from outbox.operations.endpoints import states as endpoint_states
from outbox.store.channels import NOTIFY_ALL, WAKE_OWNERS
from outbox.store.connection.store_connection import StoreConnection
from tests.support.postgres import Server
from tests.support.relay import (
    Network,
    add_endpoint,
    all_ended,
    exceptions,
    publish,
    running,
    shared_out,
)
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from asyncpg import Connection

    from tests.support.postgres import Database

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.one_major]

PATH = {"server_settings": {"search_path": "relay"}}
QUEUE_PAGES = 64
QUEUE_LIMITED_SINCE = 17
"""Before this version the size of the queue, 8 GB, is not a setting."""
INSERT = "INSERT INTO outbox (type, payload) VALUES ('a.b', '{}')"
ASLEEP = "SELECT setval('wakeup', (extract(epoch FROM now()) + 60)::bigint)"
NOTIFICATION = "SELECT pg_notify('other', repeat('x', 7000))"
USED = "SELECT pg_notification_queue_usage()"


@pytest.fixture(scope="session")
def limited_server(pg_major: int) -> Iterator[Server]:
    if pg_major < QUEUE_LIMITED_SINCE:
        pytest.skip("the size of the queue cannot be limited")
    server = Server(pg_major, {"max_notify_queue_pages": QUEUE_PAGES})
    with server.embedded:
        yield server


@pytest.fixture
async def database(limited_server: Server) -> AsyncIterator[Database]:
    async with limited_server.database() as database:
        yield database


@asynccontextmanager
async def filled(database: Database, share: float) -> AsyncIterator[None]:
    """Fill the queue up to a share while a session listens and does not read."""
    async with database.connection() as listener, database.connection() as other:
        await listener.execute("LISTEN other")
        await listener.execute("BEGIN; SELECT 1")
        try:
            while await other.fetchval(USED) < share:
                await other.execute(NOTIFICATION)
        except asyncpg.ProgramLimitExceededError:
            assert share == 1
        yield


@pytest.fixture
async def db(database: Database) -> Connection[Any]:
    connection = await database.connect(**PATH)
    await connection.execute(ASLEEP)
    return connection


async def notified(database: Database, statement: str) -> bool:
    """Whether a statement notifies the relay; the queue's first reader is not in its way."""
    received: list[str] = []
    async with database.connection() as listener, database.connection(**PATH) as other:
        await listener.add_listener("relay", lambda *_: received.append("relay"))
        await listener.add_listener("done", lambda *_: received.append("done"))
        await other.execute(statement)
        await other.execute("NOTIFY done")
        await until(lambda: "done" in received, what="the notification")
    return "relay" in received


async def test_producers_notify_while_half_of_the_queue_is_free(
    database: Database, db: Connection[Any]
) -> None:
    async with filled(database, 0.3):
        assert await notified(database, INSERT)
        assert await notified(database, f"SET relay.notify = off; {INSERT}") is False
    async with filled(database, 0.6):
        assert await notified(database, INSERT) is False
    assert await notified(database, INSERT)


async def test_no_producer_fails_while_the_queue_is_full(
    database: Database, db: Connection[Any]
) -> None:
    """Neither one that began before, and inserts now, nor one that inserts and commits later."""
    before = await database.connect(**PATH)
    async with before.transaction():
        await before.execute("SELECT 1")
        async with filled(database, 0.6):
            open_one = await database.connect(**PATH)
            transaction = open_one.transaction()
            await transaction.start()
            await open_one.execute(INSERT)
        async with filled(database, 1):
            await transaction.commit()
            await db.execute(INSERT)
            await before.execute(INSERT)
            with pytest.raises(asyncpg.ProgramLimitExceededError):
                await db.execute(NOTIFICATION)
    assert await db.fetchval("SELECT count(*) FROM outbox") == 3


async def test_a_transaction_that_has_notified_before_can_still_fail(
    database: Database, db: Connection[Any]
) -> None:
    """The limit that the guide names, and its way out."""
    async with database.connection(**PATH) as loud, database.connection(**PATH) as quiet:
        await loud.execute(f"BEGIN; {INSERT}")
        await quiet.execute(f"BEGIN; SET LOCAL relay.notify = off; {INSERT}")
        async with filled(database, 1):
            with pytest.raises(asyncpg.ProgramLimitExceededError):
                await loud.execute("COMMIT")
            await quiet.execute("COMMIT")
    assert await db.fetchval("SELECT count(*) FROM outbox") == 1


async def test_a_relay_delivers_by_polling(database: Database, db: Connection[Any]) -> None:
    await add_endpoint(database)
    network = Network()
    async with running(database, network):
        await publish(database, 0)
        await all_ended(database)
        async with filled(database, 1):
            await db.execute(ASLEEP)
            await publish(database, 1, 2)
            await until(lambda: network.data() == [0, 1, 2], what="the events")
            # An operator's change does not notify either, and succeeds.
            await endpoint_states.pause_endpoints(db, "relay", ["shop"], actor="test")
            await publish(database, 3)
            await endpoint_states.resume_endpoints(db, "relay", ["shop"], actor="test")
            await until(lambda: network.data() == [0, 1, 2, 3], what="the last event")
    assert await exceptions(database) == {}


async def test_a_message_has_the_same_result_without_a_notification(
    database: Database, db: Connection[Any]
) -> None:
    """The number of rows of its last statement is the verdict."""
    assert isinstance(db, StoreConnection)
    for share in (0.1, 1):
        async with filled(database, share):
            assert await db.write(NOTIFY_ALL) == 1
            await asyncio.wait_for(db.execute(WAKE_OWNERS, "1-2"), 20)


async def test_two_relays_deliver_by_polling(database: Database, db: Connection[Any]) -> None:
    """A leader does not notify the owners of other endpoints either."""
    for name in ("one", "two"):
        await add_endpoint(database, name)
    network = Network()
    async with running(database, network), running(database, network):
        await until(lambda: shared_out(database, 2), what="the endpoints to be shared out")
        async with filled(database, 1):
            await publish(database, 1, 2)
            await until(lambda: len(network.accepted) == 4, what="the events")
    assert await exceptions(database) == {}
