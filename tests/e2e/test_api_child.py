"""The API as a child of `outbox relay`: its failures cost no delivery, and it is back soon.

Each test delivers events of one key to a real receiver all the time; at its end, each has arrived
in order, and none was dead-lettered.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import sys
import time
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import asyncpg
import psutil
import pytest

from outbox import __version__
from outbox.core.model.encryption_keys import format_key
from outbox_api.child import NICE
from tests.support.api_child import (
    all_gone,
    delivering,
    installation,
    pipe_writers,
)
from tests.support.newer_version import ROLLING, VERSION, newer_version
from tests.support.process import outbox
from tests.support.relay import fetchval
from tests.support.roles import dsn_of, role
from tests.support.waiting import LIVE_S, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.api_child import Installation
    from tests.support.postgres import Database

pytestmark = [
    pytest.mark.one_major,
    pytest.mark.skipif(not Path("/proc/self/fdinfo").exists(), reason="reads /proc"),
]

STOPPED = "warning: the API does not run"
CONNECTIONS = 600
"""More than the server admits."""
BODIES = 32
BODY = b'{"type":"a.b","payload":[' + b",".join([b"[null]"] * 140_000) + b"]}"
"""Almost a megabyte, and many times as much when it is parsed."""
ROOM_BYTES = 1024 * 1024
SESSIONS = "SELECT count(*) FROM pg_stat_activity WHERE usename = $1"
END_SESSIONS = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE usename = $1"


async def test_deliveries_go_on_while_the_api_is_killed_and_frozen(
    database: Database, tmp_path: Path
) -> None:
    """Each process of the API reads a pipe that the relay alone holds: it ends with the relay."""
    async with delivering(database, tmp_path) as (installed, flow):
        assert await installed.metric("outbox_api_up") == 1
        assert await installed.metric("outbox_api_restarts_total") == 0
        killed = await installed.child()
        assert killed.nice() == psutil.Process(installed.pid).nice() + NICE
        assert pipe_writers(killed.pid, 0) == {installed.pid}
        killed.kill()
        await installed.until_ready_with(STOPPED)
        await flow.goes_on()
        print(f"back {await installed.until_served(but=killed):.2f} s after it was killed")

        frozen = await installed.child()
        assert pipe_writers(frozen.pid, 0) == {installed.pid}
        frozen.suspend()
        await flow.goes_on()

        async def is_down() -> bool:
            return await installed.metric("outbox_api_up") == 0

        await until(is_down, LIVE_S, "the relay to notice that the API is frozen")
        print(f"back {await installed.until_served(but=frozen):.2f} s after it was noticed")
        await until(lambda: all_gone([killed, frozen]), LIVE_S, "the frozen process to end")
        assert await installed.get("health", "/readyz") == (200, "ready\n")
        assert await installed.metric("outbox_api_up") == 1
        assert await installed.metric("outbox_api_restarts_total") == 2
        ends = installed.log("the API has ended")
        assert "SIGKILL" in ends[0]["reason"]
        assert "frozen" in ends[1]["reason"]


@pytest.mark.full
async def test_deliveries_go_on_while_the_api_has_no_memory(
    database: Database, tmp_path: Path
) -> None:
    async with delivering(database, tmp_path) as (installed, flow):
        child = await installed.child()
        limit = child.memory_info().data + ROOM_BYTES
        child.rlimit(psutil.RLIMIT_DATA, (limit, limit))
        headers = {"Authorization": f"Bearer {installed.token}", "Content-Type": "application/json"}

        async def post() -> int:
            url = installed.url("admin", "/v1/events")
            with suppress(aiohttp.ClientError):
                async with session.post(url, data=BODY, headers=headers) as response:
                    return response.status
            return 0

        async with aiohttp.ClientSession() as session:
            statuses = await asyncio.gather(*(post() for _ in range(BODIES)))
        print(f"responses without memory: {sorted(set(statuses))}")
        assert set(statuses) != {201}, "it had enough memory"
        await flow.goes_on()
        print(f"back after {await installed.until_served():.2f} s")
        assert (await installed.get("health", "/readyz"))[0] == 200


@pytest.mark.full
async def test_deliveries_go_on_while_clients_occupy_all_connections(
    database: Database, tmp_path: Path
) -> None:
    """They are silent, send half a head, or do not read a response."""
    async with delivering(database, tmp_path) as (installed, flow):
        head = (
            "GET /v1/events?limit=1000 HTTP/1.1\r\nHost: localhost\r\n"
            f"Authorization: Bearer {installed.token}\r\n"
        ).encode()
        async with _connected(installed, (b"", head, head + b"\r\n")):
            await flow.goes_on()
            assert (await installed.get("health", "/readyz"))[0] == 200
        print(f"back after {await installed.until_served():.2f} s")
        assert await installed.metric("outbox_api_restarts_total") == 0


@asynccontextmanager
async def _connected(installed: Installation, requests: tuple[bytes, ...]) -> AsyncIterator[None]:
    """Open more connections than the API admits, each with one of the requests."""
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        for number in range(CONNECTIONS):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await loop.sock_connect(client, ("127.0.0.1", installed.ports["admin"]))
            # The server closes the longest waiting ones.
            with suppress(ConnectionError):
                await loop.sock_sendall(client, requests[number % len(requests)])
        yield


@pytest.mark.full
async def test_deliveries_go_on_while_the_api_gets_no_database_connection(
    database: Database, tmp_path: Path
) -> None:
    async with role(database, "api") as name:
        env = {"OUTBOX_API_DSN": dsn_of(database, name)}
        async with delivering(database, tmp_path, **env) as (installed, flow):
            child = await installed.child()
            await fetchval(database, f'ALTER ROLE "{name}" CONNECTION LIMIT 1')
            await fetchval(database, END_SESSIONS, name)
            taken: list[asyncpg.Connection] = []

            async def takes_all() -> bool:
                with suppress(asyncpg.TooManyConnectionsError):
                    taken.append(await asyncpg.connect(dsn_of(database, name)))
                return bool(taken)

            await until(takes_all, LIVE_S, "the only session of the role")

            async def is_refused() -> bool:
                assert (await installed.get("admin", "/"))[0] == 200
                return (await installed.get("admin", "/v1/status"))[0] == 503

            await until(is_refused, LIVE_S, "the API to respond that it has no connection")
            await flow.goes_on()
            await fetchval(database, f'ALTER ROLE "{name}" CONNECTION LIMIT -1')
            await taken[0].close()
            print(f"back after {await installed.until_served():.2f} s")
            assert installed.children() == [child]


async def test_the_api_ends_with_a_killed_relay_and_frees_its_addresses(
    database: Database, tmp_path: Path
) -> None:
    async with delivering(database, tmp_path) as (installed, _):
        child = await installed.child()
        assert installed.relay.process is not None
        installed.relay.process.kill()
        await installed.relay.process.wait()
        await until(lambda: all_gone([child]), LIVE_S, "the process of the API to end")

        def are_free() -> bool:
            # The kernel may close the sockets of a killed process a little later.
            try:
                for listener in ("admin", "receivers"):
                    socket.create_server(("127.0.0.1", installed.ports[listener])).close()
            except OSError:
                return False
            return True

        await until(are_free, LIVE_S, "its addresses to be free")
        await installed.relay.start()
        await installed.until_served()


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells it of its parent's end")
async def test_a_frozen_api_ends_with_a_killed_relay(database: Database, tmp_path: Path) -> None:
    async with delivering(database, tmp_path) as (installed, _):
        frozen = await installed.child()
        frozen.suspend()
        assert installed.relay.process is not None
        installed.relay.process.kill()
        await installed.relay.process.wait()
        await until(lambda: all_gone([frozen]), LIVE_S, "the frozen process to end")
        await installed.relay.start()
        await installed.until_served()


async def test_the_api_ends_with_a_relay_that_is_stopped(
    database: Database, tmp_path: Path
) -> None:
    async with delivering(database, tmp_path) as (installed, flow):
        child = await installed.child()
        child.terminate()  # As by systemd, while the relay drains; the relay decides when it ends.
        await flow.goes_on()
        assert installed.children() == [child]
        assert await installed.relay.end() == 0
        await until(lambda: all_gone([child]), LIVE_S, "the process of the API to end")
        assert not [line for line in installed.relay.log() if line["level"] == "error"]
        await installed.relay.start()
        frozen = await installed.child()
        frozen.suspend()
        began_at = time.monotonic()
        assert await installed.relay.end() == 0
        print(f"ended {time.monotonic() - began_at:.2f} s after SIGTERM, with a frozen API")
        await until(lambda: all_gone([frozen]), LIVE_S, "the frozen process to end")
        await installed.relay.start()


async def test_settings_reach_the_api_unseen(empty_database: Database, tmp_path: Path) -> None:
    """Neither its arguments nor its variables have what the relay was given otherwise."""
    database, key = empty_database, tmp_path / "key"
    key.write_text(secret := format_key(os.urandom(32)))
    made = await outbox("migrate", "--schema", "elsewhere", env={"OUTBOX_DSN": database.dsn})
    assert made.code == 0, made.stderr
    separator = "&" if "?" in database.dsn else "?"
    words = ("--schema", "elsewhere", "--dsn", f"{database.dsn}{separator}password=canary")
    created = await outbox("token", "add", "t", "--scope", "read", "--json", *words)
    env = {"OUTBOX_KEY_FILE": str(key)}
    async with installation(env, tmp_path, *words) as installed:
        installed.token = created.json["secret"]
        child = await installed.child()
        assert not [name for name in child.environ() if name.startswith("OUTBOX_")]
        shown = [*child.cmdline(), *child.environ().values()]
        for text in ("canary", secret.removeprefix("obkey_"), "elsewhere"):
            assert not [each for each in shown if text in each]
        assert await installed.relay.end() == 0


@pytest.mark.full
async def test_the_api_connects_as_the_file_says_when_it_is_refused(
    database: Database, tmp_path: Path
) -> None:
    file = tmp_path / "dsn"
    async with role(database, "api") as old, role(database, "api", "reader") as new:
        file.write_text(dsn_of(database, old))
        env = {"OUTBOX_API_DSN_FILE": str(file)}
        async with delivering(database, tmp_path, **env) as (installed, _):
            child = await installed.child()
            assert await fetchval(database, SESSIONS, old)
            file.write_text(dsn_of(database, new))
            await fetchval(database, f'ALTER ROLE "{old}" NOLOGIN')
            await fetchval(database, END_SESSIONS, old)

            async def connects() -> bool:
                await installed.until_served()
                return bool(await fetchval(database, SESSIONS, new))

            await until(connects, LIVE_S, "the API to connect as the file says")
            assert installed.children() == [child]


@pytest.mark.full
async def test_an_api_of_another_version_is_refused_and_deliveries_go_on(
    database: Database, tmp_path: Path
) -> None:
    """As when the package is upgraded under a running relay."""
    # The relay does not find it: it starts in the directory of the package, which comes first.
    upgraded = tmp_path / "newer"
    async with delivering(database, tmp_path, PYTHONPATH=str(upgraded)) as (installed, flow):
        child = await installed.child()
        assert newer_version(tmp_path, ROLLING) == upgraded
        child.kill()
        reason = f"outbox-api has version {VERSION}, the relay that starts it {__version__}"

        def is_refused() -> bool:
            ends = installed.log("the API has ended")
            return any(reason in line["reason"] for line in ends)

        await until(is_refused, LIVE_S, "the version to be refused")
        await installed.until_ready_with(STOPPED)
        await flow.goes_on()
        shutil.rmtree(upgraded)
        await installed.until_served()
