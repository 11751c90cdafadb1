"""Responses that clients do not read take a bounded memory of the process of the API."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import pytest

from outbox.web.address import parse_address
from tests.support.api import make_token
from tests.support.api_process import api_process
from tests.support.costly_rows import KEY, fill
from tests.support.receivers_listener import token_of
from tests.support.relay import Network, add_endpoint, all_ended, fetchval, running
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.support.api_process import ApiProcess
    from tests.support.postgres import Database

pytestmark = [
    pytest.mark.full,
    pytest.mark.one_major,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc"),
]

GROWTH_BYTES_MAX = 64 * 1024 * 1024
SHOPS = 4
PAYLOADS = 40
PUBLISH = """
SELECT count(publish(type => 'a.b', key => 'k', payload => to_jsonb(repeat('a', 262000))))
  FROM generate_series(1, $1)
"""
"""Payloads of the largest size, which PostgreSQL compresses to some 3 KiB."""
PATHS = (
    f"v1/trace/{KEY}?limit=100&payload=true",
    "v1/endpoints?limit=1000",
    "v1/declaration?limit=1000",
    "v1/journal?limit=1000",
    "v1/schedules?limit=1000",
    "v1/replays?limit=1000&state=all",
    "v1/dead-letters?limit=1000&state=all",
    "v1/status?limit=1000",
    "openapi.json",
)


async def _read(url: str, requests: Sequence[tuple[str, str]]) -> None:
    """Read each response once: what the process keeps for itself afterwards is not counted."""
    async with aiohttp.ClientSession() as session:
        for path, token in requests:
            headers = {"Authorization": f"Bearer {token}"}
            async with session.get(url + path, headers=headers) as response:
                assert response.status == 200, (path, await response.text())
                body = await response.read()
                print(path[:60], len(body))


async def _growth(
    process: ApiProcess, url: str, requests: Sequence[tuple[str, str]], count: int
) -> int:
    """Send `count` requests, read none of the responses, and return the growth of the memory."""
    at = parse_address(url.removeprefix("http://").rstrip("/"))
    loop = asyncio.get_running_loop()
    before = process.reset_peak()
    with ExitStack() as stack:
        clients = []
        for n in range(count):
            path, token = requests[n % len(requests)]
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await loop.sock_connect(client, (at.host, at.port))
            text = (
                f"GET /{path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n\r\n"
            )
            await loop.sock_sendall(client, text.encode())
            clients.append(client)
        await until(lambda: all(map(_has_response, clients)), 120, "the responses")
        return process.memory_bytes("VmHWM") - before


def _has_response(client: socket.socket) -> bool:
    """Whether a response has begun, or the connection was closed."""
    try:
        client.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True


@pytest.mark.parametrize("count", [16, 200])
async def test_unread_pages_of_a_receiver_take_a_bounded_memory(
    database: Database, count: int
) -> None:
    names = [f"shop{n}" for n in range(SHOPS)]
    for name in names:
        await add_endpoint(database, name)
    async with running(database, Network()):
        await fetchval(database, PUBLISH, PAYLOADS)
        await all_ended(database)
    async with database.connection(server_settings={"search_path": "relay"}) as db:
        tokens = [await token_of(db, name) for name in names]
    async with api_process(database) as process:
        requests = []
        async with aiohttp.ClientSession() as session:
            for token in tokens:
                headers = {"Authorization": f"Bearer {token}"}
                async with session.get(process.receivers + "v1/lanes", headers=headers) as response:
                    (lane,) = (await response.json())["items"]
                requests.append((f"v1/lanes/{lane['lane']}/deliveries?limit=1000", token))
        await _read(process.receivers, requests)
        growth = await _growth(process, process.receivers, requests, count)
    print(f"{count} unread pages of a receiver: {growth / 2**20:.0f} MiB more")
    assert growth < GROWTH_BYTES_MAX


@pytest.mark.parametrize("count", [16, 200])
async def test_unread_pages_of_the_api_take_a_bounded_memory(
    database: Database, count: int
) -> None:
    await fill(database, large=True)
    tokens = [await make_token(database, f"reader{n}") for n in range(SHOPS)]
    async with api_process(database) as process:
        await _read(process.api, [(path, tokens[0]) for path in PATHS])
        requests = [
            (PATHS[n % len(PATHS)], tokens[n % len(tokens)])
            for n in range(len(PATHS) * len(tokens))
        ]
        growth = await _growth(process, process.api, requests, count)
    print(f"{count} unread pages of the API: {growth / 2**20:.0f} MiB more")
    assert growth < GROWTH_BYTES_MAX


BODIES = {
    "arrays": b"[" + b",".join([b"[]"] * 340_000) + b"]",
    "objects": b"[" + b",".join([b'{"":1}'] * 140_000) + b"]",
    "members": b"{" + b",".join(b'"%d":1' % n for n in range(90_000)) + b"}",
    "text": '"\U0001f600'.encode() + b"a" * 1_000_000 + b'"',
}
"""Payloads whose values take many times the size of a body of 1 MiB."""
BODIES_BYTES_MAX = 160 * 1024 * 1024


async def test_bodies_with_costly_values_take_a_bounded_memory(database: Database) -> None:
    token = await make_token(database)
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    async with api_process(database) as process, aiohttp.ClientSession() as session:

        async def send(body: bytes, status: int) -> None:
            url = process.api + "v1/events"
            async with session.post(url, data=BytesIO(body), headers=headers) as response:
                assert response.status == status, await response.text()

        await send(b'{"type":"a.b"}', 201)
        before = process.reset_peak()
        for payload in BODIES.values():
            async with asyncio.TaskGroup() as group:
                for _ in range(10):
                    # The payload is larger than the database accepts; and a field is invalid.
                    group.create_task(send(b'{"type":"a.b","payload":' + payload + b"}", 422))
                    group.create_task(send(b'{"type":1,"payload":' + payload + b"}", 422))
        growth = process.memory_bytes("VmHWM") - before
    print(f"costly bodies: {growth / 2**20:.0f} MiB more")
    assert growth < BODIES_BYTES_MAX
