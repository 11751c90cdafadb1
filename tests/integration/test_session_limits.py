"""Sessions whose client falls silent end by themselves, and no frozen listener stops producers."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from outbox.relay.cluster.connections import Connections
from outbox.store.channels import NOTIFY_ALL
from outbox.store.cluster.sessions import session_label
from outbox.store.connection import dsn
from outbox.store.connection.current_settings import CurrentSettings
from outbox.store.connection.operator import connect_operator
from outbox.store.connection.store_connection import StoreConnection
from outbox_doctor.verify.audit import run_checks
from tests.support.pgbouncer import find_the_schema, pgbouncer
from tests.support.relay import (
    Network,
    add_endpoint,
    all_ended,
    fetchval,
    publish,
    running,
    settings_for,
)
from tests.support.tcp import through_lines
from tests.support.tcp_server import tcp_server
from tests.support.waiting import until

if TYPE_CHECKING:
    from asyncpg import Connection

    from outbox.config import Settings
    from outbox.store.connection.dsn import Dsn
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

LEASE_S = 1.0
QUEUE_PAGES = 64
"""The smallest queue, 512 KiB; PostgreSQL 16 and older cannot be limited."""
QUEUE_LIMITED_SINCE = 17
PRODUCER_BYTES = 6000

BACKENDS = """
SELECT count(*) FROM pg_stat_activity
 WHERE application_name = $1 AND datname = current_database()
"""
# A statement that holds the cursor row, and whose result the client does not read.
LARGE = "SELECT repeat('x', 1000000) FROM cursor, generate_series(1, 30) FOR UPDATE OF cursor"
LOCKED = """
SELECT (SELECT count(*) = 0 FROM (SELECT FROM cursor FOR UPDATE SKIP LOCKED) free) = $1::boolean
"""
READ_SETTINGS = "SELECT name, setting FROM pg_settings WHERE name = ANY ($1)"
LIMITS = [
    "tcp_user_timeout",
    "transaction_timeout",
    "idle_in_transaction_session_timeout",
    "idle_session_timeout",
    "client_connection_check_interval",
]


def label() -> str:
    return session_label(0xF0)


def address_of(database: Database, host: str | None = None) -> Dsn:
    text = database.dsn if host is None else f"postgresql://postgres@{host}/{database.name}"
    return dsn.parse(text, source="test", env={})


def connections_of(
    database: Database, host: str | None = None, **settings: Any
) -> tuple[Connections, Settings]:
    values = settings_for(database, **{"lease_s": LEASE_S, **settings})
    return Connections(CurrentSettings(values, address_of(database, host))), values


async def limits_of(connection: Connection[Any]) -> dict[str, str]:
    return {r["name"]: r["setting"] for r in await connection.fetch(READ_SETTINGS, LIMITS)}


def stop_reading(connection: Any) -> None:
    """As a process that is stopped: its kernel acknowledges until its buffers are full."""
    connection._transport.pause_reading()


@pytest.mark.full
@pytest.mark.slow
async def test_every_session_has_its_limits(pg_major: int) -> None:
    with tcp_server(pg_major) as (server, host):
        async with server.database() as database:
            relay, values = connections_of(database, host)
            operator = await connect_operator(address_of(database, host), values, "test")
            long = await connect_operator(address_of(database, host), values, "test", long=True)
            opened = {
                "worker": await relay.worker(label()),
                "maintenance": await relay.worker(label(), long=True),
                "listener": await relay.listener(label()),
                "operator": operator,
                "long": long,
            }
            found = {name: await limits_of(connection) for name, connection in opened.items()}
            for connection in opened.values():
                connection.terminate()
    lease, off = "1000", "0"
    assert [found[name]["tcp_user_timeout"] for name in opened] == [lease] * 3 + ["30000"] * 2
    idle = [found[name]["idle_in_transaction_session_timeout"] for name in opened]
    assert idle == ["800", "800", off, "10000", "10000"]
    assert found["listener"]["idle_session_timeout"] == lease
    assert found["operator"]["client_connection_check_interval"] == "1000"
    if pg_major >= 17:
        times = [found[name]["transaction_timeout"] for name in opened]
        assert times == ["600000", off, "600000", "600000", off]


async def test_a_setting_that_the_server_lacks_is_left_out(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "outbox.store.connection"
    monkeypatch.setattr(f"{module}.connect.TRANSACTION_TIMEOUT_SINCE", 99)
    monkeypatch.setattr(f"{module}.operator._CHECK_CONNECTION", {"no_such_setting": "1"})
    _, values = connections_of(database)
    connection = await connect_operator(address_of(database), values, "test")
    assert await connection.fetchval("SELECT 1") == 1
    assert (await limits_of(connection)).get("transaction_timeout", "0") == "0"
    connection.terminate()


@pytest.mark.pgbouncer
async def test_behind_a_proxy_the_limits_are_those_of_a_transaction(database: Database) -> None:
    await find_the_schema(database)
    async with pgbouncer(database, pool_size=1) as proxy:
        settings = settings_for(database, dsn=proxy.dsn(), pooled=True, lease_s=LEASE_S)
        address = dsn.parse(proxy.dsn(), source="test", env={})
        worker = await Connections(CurrentSettings(settings, address)).worker(label())
        operator = await connect_operator(address, settings, "test")
        for connection, idle in ((worker, "800"), (operator, "10000")):
            async with connection.transaction():
                found = await limits_of(connection)
            assert found["idle_in_transaction_session_timeout"] == idle
            assert found.get("transaction_timeout", "600000") == "600000"
            left = await limits_of(connection)
            assert left["idle_in_transaction_session_timeout"] == "0"
            assert left.get("transaction_timeout", "0") == "0"
        worker.terminate()
        operator.terminate()


@pytest.mark.full
@pytest.mark.slow
async def test_a_session_with_an_unread_result_ends_and_holds_nothing(pg_major: int) -> None:
    """The backend is "active": no time-out of statements or transactions ends it."""
    with tcp_server(pg_major) as (server, host):
        async with server.database() as database:
            relay, _ = connections_of(database, host)
            worker = await relay.worker(label())
            asking = asyncio.ensure_future(worker.execute(LARGE))
            await until(lambda: worker.waiting_s)
            stop_reading(worker)
            await until(lambda: fetchval(database, LOCKED, True), what="the row to be locked")
            await until(lambda: fetchval(database, LOCKED, False), what="the row to be free")
            worker.terminate()
            await asyncio.gather(asking, return_exceptions=True)


async def test_an_operator_that_is_silent_in_a_transaction_ends(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox.store.connection.operator.IDLE_IN_TRANSACTION_S", 0.5)
    await add_endpoint(database)
    network = Network()
    _, values = connections_of(database)
    async with running(database, network, lease_s=LEASE_S):
        operator = await connect_operator(address_of(database), values, "outbox-cli")
        await operator.execute("BEGIN; SELECT FROM cursor FOR UPDATE")
        await publish(database, 1)
        await until(lambda: network.accepted, what="the server to end the operator's session")
        operator.terminate()
        await all_ended(database)


# -------------------------------------------------------- the notification queue


async def frozen_listener(relay: Connections) -> Connection[Any]:
    """A listener whose process has stopped: it neither reads nor sends its heartbeat."""
    listener = await relay.listener(label())
    await listener.add_listener("relay", lambda *_: None)
    stop_reading(listener)
    return listener


async def notify_slowly(connection: Connection[Any], queues: float) -> None:
    """Send notifications of several queues' size, as a producer does."""
    for _ in range(int(QUEUE_PAGES * 8192 * queues / PRODUCER_BYTES)):
        await connection.execute("SELECT pg_notify('relay', repeat('x', $1))", PRODUCER_BYTES)
        await connection.execute("SELECT pg_sleep(0.03)")


@pytest.mark.full
async def test_a_frozen_listener_does_not_make_producers_fail(pg_major: int) -> None:
    if pg_major < QUEUE_LIMITED_SINCE:
        pytest.skip("the size of the queue cannot be limited")
    with tcp_server(pg_major, max_notify_queue_pages=QUEUE_PAGES) as (server, host):
        async with server.database() as database:
            relay, _ = connections_of(database, host)
            listener = await frozen_listener(relay)
            producer = await database.connect()
            await notify_slowly(producer, 1.8)
            name = f"{label()}:listen"
            assert await fetchval(database, BACKENDS, name) == 0
            listener.terminate()


@pytest.mark.full
@pytest.mark.slow
async def test_a_new_listener_ends_its_predecessor(database: Database) -> None:
    """The old connection was given up by the relay, and its server does not know."""
    async with (
        through_lines(database.server.embedded.socket_dir, database.name) as (lines, address),
        running(database, Network(), dsn=address, lease_s=60.0) as _,
    ):
        listeners = """
            SELECT array_agg(pid) FROM pg_stat_activity
             WHERE application_name LIKE 'outbox-relay:%:listen' AND datname = current_database()"""
        await until(lambda: fetchval(database, listeners))
        (old,) = await fetchval(database, listeners)
        lines.opened[-1].hangs = True

        async def is_replaced() -> bool:
            pids = await fetchval(database, listeners)
            return pids is not None and len(pids) == 1 and pids != [old]

        await until(is_replaced, what="the old listener's backend to end")


@pytest.mark.full
@pytest.mark.slow
async def test_a_full_queue_is_trimmed_by_the_write_that_fails(pg_major: int) -> None:
    """No listener is left, and still every NOTIFY fails until somebody asks for the share."""
    if pg_major < QUEUE_LIMITED_SINCE:
        pytest.skip("the size of the queue cannot be limited")
    with tcp_server(pg_major, max_notify_queue_pages=QUEUE_PAGES) as (server, _):
        async with server.database() as database:
            await add_endpoint(database)
            await fill_queue(database)
            path = {"search_path": "relay"}
            async with database.connection(server_settings=path) as operator:
                assert isinstance(operator, StoreConnection)
                assert await operator.write(NOTIFY_ALL) == 1
            await fill_queue(database)
            network = Network()
            async with running(database, network), running(database, network):
                await publish(database, 1)
                await all_ended(database)
            async with database.at_hand() as connection:
                assert not [f async for f in run_checks(connection) if f.violations]


async def fill_queue(database: Database) -> None:
    """Fill the queue by a listener that does not read, which ends then."""
    async with database.connection() as listener, database.connection() as producer:
        await listener.execute("BEGIN; LISTEN relay; COMMIT; BEGIN; SELECT 1")
        with suppress(asyncpg.ProgramLimitExceededError):
            while True:
                await producer.execute("SELECT pg_notify('relay', repeat('x', 7000))")
        listener.terminate()
        await until(
            lambda: fetchval(
                database,
                "SELECT count(*) = 0 FROM pg_stat_activity WHERE state = 'idle in transaction'",
            )
        )
