"""The proxy to the database can cut, block and stall connections, and knows their backends."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import asyncpg
import pytest

from outbox.store.connection import dsn
from outbox_devtools.chaos.proxy import Interruption, Proxy
from outbox_devtools.chaos.proxy_dsn import proxied_dsn
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major


@pytest.fixture
async def proxy(database: Database) -> AsyncIterator[Proxy]:
    proxy = Proxy(str(database.server.embedded.socket_dir), 5432)
    await proxy.gate.open()
    yield proxy
    proxy.close()


@asynccontextmanager
async def connection(proxy: Proxy, database: Database) -> AsyncIterator[asyncpg.Connection]:
    connected = await asyncpg.connect(
        host="127.0.0.1", port=proxy.gate.port, user="postgres", database=database.name, timeout=5
    )
    try:
        yield connected
    finally:
        connected.terminate()


async def works(proxy: Proxy, database: Database) -> bool:
    async with connection(proxy, database) as connected:
        return await connected.fetchval("SELECT 1") == 1


async def test_the_proxy_knows_its_backend_pids(proxy: Proxy, database: Database) -> None:
    async with connection(proxy, database) as connected:
        await connected.fetchval("SELECT 1")
        assert [pid for pid, _ in proxy.sessions()] == [connected.get_server_pid()]
    await until(lambda: not proxy.links, what="the link to be forgotten")


async def test_cut_resets_all_connections(proxy: Proxy, database: Database) -> None:
    async with connection(proxy, database) as connected:
        proxy.cut()
        with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError, OSError)):
            await connected.fetchval("SELECT 1")
    assert await works(proxy, database)


async def test_while_it_is_shut_connecting_is_refused(proxy: Proxy, database: Database) -> None:
    proxy.gate.shut()
    with pytest.raises(ConnectionRefusedError):
        await works(proxy, database)
    await proxy.gate.open()
    assert await works(proxy, database)


async def test_a_half_open_connection_never_works_again(proxy: Proxy, database: Database) -> None:
    async with connection(proxy, database) as connected:
        pid = connected.get_server_pid()
        proxy.mute()
        with pytest.raises(TimeoutError):
            await connected.fetchval("SELECT 1", timeout=0.1)
        proxy.resume()
    # The server has not detected the end, as after a network failure.
    async with database.connection() as other:
        assert await other.fetchval("SELECT count(*) FROM pg_stat_activity WHERE pid = $1", pid)
    assert await works(proxy, database)
    assert pid not in [known for known, _ in proxy.sessions()]


async def test_a_connection_hangs_in_the_middle_of_a_statement(
    proxy: Proxy, database: Database
) -> None:
    """Between two messages: the backend waits for the rest, with what it holds."""
    async with connection(proxy, database) as connected, database.connection() as other:
        pid = connected.get_server_pid()
        await connected.execute("BEGIN; CREATE TABLE held ()")
        # The first of the messages by which a statement with an argument is sent.
        assert proxy.hang_half_sent(random.Random(1)) == pid
        with pytest.raises(TimeoutError):
            await connected.fetchval("SELECT $1::integer, pg_sleep(0)", 1, timeout=0.2)
        state = "SELECT state || ' ' || wait_event FROM pg_stat_activity WHERE pid = $1"
        seen = await other.fetchval(state, pid)
        assert seen in ("active ClientRead", "idle in transaction ClientRead")
        assert await other.fetchval("SELECT count(*) FROM pg_locks WHERE pid = $1", pid)
        assert proxy.hang_half_sent(random.Random(1)) is None
    assert await works(proxy, database)


def test_a_proxied_dsn_keeps_all_other_parameters(tmp_path: Path) -> None:
    stored = tmp_path / "pass"
    stored.write_text("# mine\nother:5432:*:me:no\ndb.test:5433:*:me:it\\:s 'so'\n")
    address = dsn.parse(
        "postgresql://me@db.test:5433/app?sslmode=require&options=-cgeqo%3Doff",
        source="test",
        env={},
    )
    text = proxied_dsn(address, "127.0.0.1", 7777, env={"PGPASSFILE": str(stored)})
    led = dsn.parse(text, source="test", env={})
    assert led.addresses == (("127.0.0.1", 7777),)
    assert (led.user, led.database, led.password) == ("me", "app", "it:s 'so'")
    assert led.sslmode == "require"
    assert led.server_settings["options"] == "-cgeqo=off"


async def test_a_client_is_interrupted_after_some_pieces(proxy: Proxy, database: Database) -> None:
    async with connection(proxy, database) as connected:
        interrupted = asyncio.Event()
        proxy.interruption = Interruption(2, 0.5, interrupted.set)
        for _ in range(2):
            assert not interrupted.is_set()
            await connected.execute("SELECT 1")  # One piece each.
        with pytest.raises(TimeoutError):
            await connected.execute("SELECT 1", timeout=0.1)
        assert interrupted.is_set()
        assert await works(proxy, database)


async def test_a_proxy_that_is_silent_for_good_keeps_the_sessions_of_a_client_that_ended(
    proxy: Proxy, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox_devtools.chaos.proxy.CLIENT_CLOSED_S", 0.0)
    async with connection(proxy, database) as connected:
        proxy.mute(for_good=True)
    (link,) = proxy.links
    await until(lambda: link.client_closed, what="the client to end")
    await asyncio.sleep(0)  # A timer of no seconds would expire here.
    assert list(proxy.links) == [link]
    assert connected.is_closed()
