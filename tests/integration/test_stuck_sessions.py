"""Sessions of relays that hang while they hold something are terminated by any relay."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from outbox.relay.cluster.connections import Connections
from outbox.store.cluster.replicas import ReplicaStore
from outbox.store.cluster.sessions import LISTENER_SUFFIX, session_label
from outbox.store.connection import dsn
from outbox.store.connection.current_settings import CurrentSettings
from outbox.store.connection.store_connection import StoreConnection
from tests.support.pgbouncer import find_the_schema, pgbouncer
from tests.support.postgres import Server
from tests.support.relay import (
    Network,
    add_endpoint,
    all_ended,
    exceptions,
    fetchval,
    publish,
    register,
    running,
    settings_for,
)
from tests.support.roles import dsn_of, role
from tests.support.waiting import until

if TYPE_CHECKING:
    from asyncpg import Connection

    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

LEASE_S = 1.0
HOLD = "BEGIN; SELECT FROM relay.cursor FOR UPDATE"
IS_HALF_ASKED = """
SELECT EXISTS (SELECT FROM pg_stat_activity
                WHERE application_name = $1 AND state = 'active' AND wait_event = 'ClientRead')
"""
COUNT_BACKENDS = """
SELECT count(*) FROM pg_stat_activity
 WHERE application_name = $1 AND datname = current_database()
"""
QUEUE_PAGES, QUEUE_LIMITED_SINCE = 64, 17


def label() -> str:
    return session_label(int.from_bytes(os.urandom(4)))


async def half_asked(database: Database, name: str, dsn: str | None = None) -> Connection[Any]:
    """A session that holds the cursor row, and whose client stops after a statement's Parse."""
    session = await asyncpg.connect(
        dsn or database.dsn, server_settings={"application_name": name}, statement_cache_size=0
    )
    await session.execute(HOLD)
    await session.prepare("SELECT 1")
    await until(lambda: fetchval(database, IS_HALF_ASKED, name))
    return session


@pytest.mark.full
async def test_a_half_asked_session_without_a_replica_stops_nothing(
    database: Database, logs: list[Any]
) -> None:
    await add_endpoint(database)
    network = Network()
    name = label()
    async with running(database, network, lease_s=LEASE_S):
        await publish(database, 1)
        await until(lambda: network.accepted)
        session = await half_asked(database, name)
        pid = session.get_server_pid()
        await publish(database, 2)
        await until(lambda: 2 in network.data(), 20 * LEASE_S, "the session to be terminated")
        await all_ended(database)
        session.terminate()
    found = [each for each in logs if each["event"] == "a session that hung was terminated"]
    assert [(each["pid"], each["label"]) for each in found] == [(pid, name)]
    assert await exceptions(database) == {}


@pytest.mark.full
@pytest.mark.pgbouncer
async def test_a_half_asked_session_behind_a_proxy_stops_nothing(database: Database) -> None:
    await find_the_schema(database)
    await add_endpoint(database)
    network = Network()
    name = label()
    async with pgbouncer(database) as proxy:
        relays = {"dsn": proxy.dsn(), "pooled": True, "poll_s": 0.1, "lease_s": LEASE_S}
        async with running(database, network, **relays):
            await publish(database, 1)
            await until(lambda: network.accepted)
            session = await half_asked(database, name, proxy.dsn())
            await publish(database, 2)
            await until(lambda: 2 in network.data(), 20 * LEASE_S, "the session to be terminated")
            await all_ended(database)
            session.terminate()


async def test_what_works_or_is_not_ours_is_left_alone(database: Database) -> None:
    async with role(database, "relay") as other_role:
        own = {"application_name": label()}
        slow, idle = [await database.connect(server_settings=own) for _ in range(2)]
        locked = await database.connect(server_settings={"application_name": label()})
        foreign = await database.connect(server_settings={"application_name": "shop"})
        others = await asyncpg.connect(dsn_of(database, other_role), server_settings=own)
        patient = label()
        registered = await database.connect(server_settings={"application_name": patient})
        kept = [slow, idle, locked, foreign, others, registered]
        async with database.connection(server_settings={"search_path": "relay"}) as connection:
            store = ReplicaStore(connection)
            await register(store, 3600.0, label=patient)
            await registered.execute("BEGIN")
            await foreign.execute("BEGIN")
            await others.execute("BEGIN")
            await foreign.execute("LOCK TABLE relay.schedule IN ACCESS EXCLUSIVE MODE")
            working = [
                asyncio.ensure_future(slow.execute("SELECT pg_sleep(60)")),
                asyncio.ensure_future(locked.execute("SELECT FROM relay.schedule")),
            ]
            waits = """SELECT count(*) = 2 FROM pg_stat_activity
                        WHERE pid = ANY ($1) AND state = 'active'"""
            pids = [slow.get_server_pid(), locked.get_server_pid()]
            await until(lambda: fetchval(database, waits, pids))
            aged = """SELECT bool_and(state_change < clock_timestamp() - interval '0.1 s')
                        FROM pg_stat_activity WHERE pid = ANY ($1)"""
            all_pids = [each.get_server_pid() for each in kept]
            await until(lambda: fetchval(database, aged, all_pids))
            for _ in range(3):
                assert await store.terminate_stuck_sessions(0.1) == []
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)
        for each in kept:
            each.terminate()


async def test_a_session_must_hang_twice_at_the_same_statement(database: Database) -> None:
    async with database.connection(server_settings={"search_path": "relay"}) as connection:
        store = ReplicaStore(connection)
        session = await database.connect(server_settings={"application_name": label()})
        pid = session.get_server_pid()
        aged = f"""SELECT state_change < clock_timestamp() - interval '0.1 s'
                     FROM pg_stat_activity WHERE pid = {pid}"""
        await session.execute("BEGIN")
        for _ in range(3):
            await until(lambda: fetchval(database, aged))
            assert await store.terminate_stuck_sessions(0.1) == []
            await session.execute("SELECT 1")
        await until(lambda: fetchval(database, aged))
        assert await store.terminate_stuck_sessions(0.1) == []
        (ended,) = await store.terminate_stuck_sessions(0.1)
        assert (ended.pid, ended.state) == (pid, "idle in transaction")
        assert ended.waiting_s > 0.1


async def test_a_replica_stays_until_its_sessions_have_ended(database: Database) -> None:
    """Its row names the label by which the session is found again."""
    async with database.connection(server_settings={"search_path": "relay"}) as connection:
        store = ReplicaStore(connection)
        name = label()
        replica_id = await register(store, label=name, sequencer_pid=1)
        session = await database.connect(server_settings={"application_name": name})
        backend = session.get_server_pid()
        os.kill(backend, signal.SIGSTOP)
        try:
            assert not await store.expire_replica(replica_id, "test", 1.0)
            assert await fetchval(database, "SELECT count(*) FROM replica") == 1
        finally:
            os.kill(backend, signal.SIGCONT)
        await until(lambda: fetchval(database, f"SELECT ({COUNT_BACKENDS}) = 0", name))
        assert await store.expire_replica(replica_id, "test", 1.0)
        session.terminate()


async def test_sessions_of_another_role_do_not_keep_a_replica(database: Database) -> None:
    """They may not be terminated, and the fence suffices."""
    async with role(database, "relay") as mine, role(database, "relay", "reader") as another:
        name = label()
        session = await asyncpg.connect(
            dsn_of(database, another), server_settings={"application_name": name}
        )
        connection: Any = await asyncpg.connect(
            dsn_of(database, mine),
            server_settings={"search_path": "relay"},
            connection_class=StoreConnection,
        )
        store = ReplicaStore(connection)
        replica_id = await register(store, label=name, sequencer_pid=1)
        assert await store.expire_replica(replica_id, "test", 1.0)
        connection.terminate()
        assert await fetchval(database, COUNT_BACKENDS, name) == 1
        session.terminate()


@pytest.mark.full
@pytest.mark.slow
async def test_a_blocked_listener_is_terminated_by_another_relay(pg_major: int) -> None:
    """Over a socket of the machine the server has no time-out for a client that does not read."""
    if pg_major < QUEUE_LIMITED_SINCE:
        pytest.skip("the size of the queue cannot be limited")
    server = Server(pg_major, {"max_notify_queue_pages": QUEUE_PAGES})
    with server.embedded:
        async with server.database() as database:
            # With a short lease the server may end it as idle, before it is blocked.
            values = settings_for(database, lease_s=60.0)
            address = dsn.parse(database.dsn, source="test", env={})
            name = label()
            listener: Any = await Connections(CurrentSettings(values, address)).listener(name)
            await listener.add_listener("relay", lambda *_: None)
            listener._transport.pause_reading()
            blocked = f"""
                SELECT wait_event = 'ClientWrite' FROM pg_stat_activity
                 WHERE application_name = '{name}{LISTENER_SUFFIX}'"""

            async def is_blocked() -> bool:
                await fetchval(database, "SELECT pg_notify('relay', repeat('x', 7000))")
                return bool(await fetchval(database, blocked))

            await until(is_blocked)
            await add_endpoint(database)
            network = Network()
            async with running(database, network, lease_s=LEASE_S):
                gone = f"SELECT ({COUNT_BACKENDS}) = 0"
                await until(
                    lambda: fetchval(database, gone, name + LISTENER_SUFFIX),
                    20 * LEASE_S,
                    "the listener to be terminated",
                )
                for n in range(2 * QUEUE_PAGES):
                    await fetchval(database, "SELECT pg_notify('relay', repeat('x', 7000))")
                    await publish(database, n)
                await all_ended(database)
            listener.terminate()
