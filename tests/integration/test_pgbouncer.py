"""A relay behind PgBouncer in transaction mode: every transaction may use another session."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest
from structlog.testing import capture_logs

from outbox.errors import CannotRun
from outbox.store.connection.pgbouncer import PooledWorker
from tests.support.load import loaded
from tests.support.pgbouncer import PgBouncer, find_the_schema, pgbouncer
from tests.support.process import outbox as command
from tests.support.relay import (
    Network,
    add_endpoint,
    all_ended,
    exceptions,
    fetchval,
    publish,
    relay,
    running,
)
from tests.support.tcp import through_lines
from tests.support.tiers import sampled
from tests.support.waiting import until

if TYPE_CHECKING:
    import random

    from tests.support.postgres import Database

pytestmark = [pytest.mark.one_major, pytest.mark.pgbouncer]


def through(proxy: PgBouncer) -> dict[str, Any]:
    """The settings of a relay behind the proxy."""
    return {"dsn": proxy.dsn(), "pooled": True, "poll_s": 0.1}


FAULTS = {
    "every connection is closed gently": ("RECONNECT",),
    "every connection is cut": ("KILL {}", "RESUME {}"),
    "it reads its settings again": ("RELOAD",),
    "it does nothing for a while": ("PAUSE {}", "RESUME {}"),
}


@pytest.mark.full
async def test_nothing_is_lost_under_proxy_faults(
    database: Database, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox.relay.delivery.endpoint_supervisor.ENDPOINTS_CHECK_EVERY_S", 0.1)
    monkeypatch.setattr("outbox.relay.maintenance.EVERY_S", 0.1)
    await find_the_schema(database)
    load, sickly = await loaded(database)
    async with pgbouncer(database, pool_size=4, server_lifetime_s=1) as proxy:
        async with (
            running(database, load.network, **through(proxy)),
            running(database, load.network, **through(proxy)),
            load.running(),
        ):
            await load.arrives()
            faults = [*FAULTS.values()]
            rng.shuffle(faults)
            for fault in faults:
                await proxy.admin(*(words.format(database.name) for words in fault))
                await load.arrives()
            await proxy.kill()
            await proxy.start()
            await load.arrives()
            sickly.cured = True
        async with running(database, load.network, **through(proxy)):
            await load.check()


async def test_no_state_leaks_into_pooled_sessions(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox.relay.maintenance.EVERY_S", 0.05)
    await find_the_schema(database)
    await add_endpoint(database)
    network = Network()
    async with (
        pgbouncer(database, pool_size=3) as proxy,
        database.connection() as observer,
    ):
        async with running(database, network, **through(proxy)):
            for n in range(20):
                await publish(database, n)
            await until(lambda: len(network.accepted) == 20)
            assert await fetchval(database, "SELECT bool_and(sequencer_pid IS NULL) FROM replica")
        # The next client gets the sessions as they were opened.
        locks = """SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'
                      AND database = (SELECT oid FROM pg_database
                                       WHERE datname = current_database())"""
        assert await observer.fetchval(locks) == 0
        clients = [
            await asyncpg.connect(proxy.dsn(), statement_cache_size=0, timeout=5) for _ in range(3)
        ]
        for client in clients:
            transaction = client.transaction()
            await transaction.start()  # Each client has its own session now.
            assert await client.fetchval("SELECT count(*) FROM pg_prepared_statements") == 0
            settings = await client.fetchrow(
                """SELECT current_setting('statement_timeout') AS statement_timeout,
                          current_setting('enable_seqscan') AS enable_seqscan,
                          current_setting('idle_in_transaction_session_timeout') AS idle"""
            )
            assert tuple(settings) == ("0", "on", "0")
        for client in clients:
            client.terminate()


async def test_a_cancelled_statement_sends_no_cancel_request(database: Database) -> None:
    """PgBouncer 1.18 may exit when it gets one."""
    socket_dir = database.server.embedded.socket_dir
    async with through_lines(socket_dir, database.name) as (lines, dsn):
        connection = await asyncpg.connect(dsn, connection_class=PooledWorker)
        sleeping = asyncio.create_task(connection.execute("SELECT pg_sleep(60)"))
        running_it = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE wait_event = 'PgSleep')"
        await until(lambda: fetchval(database, running_it), what="the statement to run")
        sleeping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sleeping
        assert connection.is_closed()
        assert lines.attempts == 1


@pytest.mark.full
async def test_periods_rotate_without_session_locks(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox.relay.maintenance.EVERY_S", 0.05)
    monkeypatch.setattr("outbox.core.sequencing.partition_window.LENGTH_MIN_S", 0.0)
    await find_the_schema(database)
    await add_endpoint(database)
    gone = "SELECT to_regclass('outbox_' || $1::int) IS NULL AND to_regclass('batch_0') IS NULL"
    moment_days = 1e-9
    kept = dict.fromkeys(("retention_events_days", "retention_log_days"), moment_days)
    async with (
        pgbouncer(database, server_lifetime_s=1) as proxy,
        running(database, Network(), **through(proxy), **kept),
    ):
        for number in (0, 1):
            await publish(database, number)
            await until(lambda n=number: fetchval(database, gone, n), what="a partition to go")
    assert await exceptions(database) == {}


@pytest.mark.parametrize(
    ("setting", "value"),
    sampled(
        [
            ("synchronous_commit", "'off'"),
            ("default_transaction_isolation", "'serializable'"),
            ("default_transaction_read_only", "'on'"),
        ]
    ),
)
async def test_a_role_with_unsafe_settings_is_refused(
    database: Database, setting: str, value: str
) -> None:
    await find_the_schema(database, **{setting: value})
    network = Network()
    async with pgbouncer(database) as proxy:
        with pytest.raises(CannotRun, match=f"ALTER ROLE .* SET {setting} = ") as caught:
            await relay(database, network, **through(proxy)).run()
        advice = str(caught.value).split(": ", 1)[1].split("; then")[0]
        await database.server.execute(advice)
        await proxy.admin("RECONNECT")
        async with running(database, network, **through(proxy)):
            await until(lambda: fetchval(database, "SELECT count(*) FROM replica"))


async def test_commands_work_through_the_proxy(database: Database) -> None:
    await find_the_schema(database)
    async with pgbouncer(database, pool_size=2) as proxy:
        env = {"OUTBOX_DSN": proxy.dsn(), "OUTBOX_POOLED": "true"}
        for words in (
            ("migrate",),
            ("endpoint", "add", "shop", "https://shop.example.com/"),
            ("publish", "order.paid"),
            ("endpoint", "pause", "shop"),
            ("endpoint", "resume", "shop"),
            ("status",),
            ("verify",),
            ("dead", "list", "--json"),
        ):
            ended = await command(*words, env=env)
            assert ended.code == 0, (words, ended.stderr)
        doctor = await command("doctor", "--json", env=env)
        assert doctor.code == 1, doctor.stderr
        bad = [each for each in doctor.json["findings"] if each["severity"] == "problem"]
        assert [each["check"] for each in bad] == ["relays"], bad


@pytest.mark.full
async def test_a_relay_waits_for_a_connection_of_an_exhausted_pool(database: Database) -> None:
    await find_the_schema(database)
    await add_endpoint(database)
    network = Network()
    with capture_logs() as logs:
        async with (
            pgbouncer(database, pool_size=2) as proxy,
            running(database, network, **through(proxy)),
        ):
            await publish(database, 1)
            await until(lambda: network.accepted)
            greedy = [
                await asyncpg.connect(proxy.dsn(), statement_cache_size=0, timeout=5)
                for _ in range(2)
            ]
            for each in greedy:
                transaction = each.transaction()
                async with asyncio.timeout(20):
                    await transaction.start()
            await publish(database, 2)
            lost = "the session was lost"
            await until(
                lambda: any(each["event"] == lost for each in logs), what="the lease to end"
            )
            sent = len(network.sent)
            for each in greedy:
                each.terminate()
            await until(lambda: 2 in network.data(), what="the relay to go on")
            assert sent == 1
        await all_ended(database)
    assert await exceptions(database) == {}
