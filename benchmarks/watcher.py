"""Monitors a relay like an installation: scrapes metrics, receives traces, keeps the page open.

A separate process; it prints the URL of its collector, and then reads from stdin, as a JSON
line, which relay to monitor. It ends at the end of stdin.

    {"collector": "http://127.0.0.1:4318"}
    {"watch": {"http://127.0.0.1:9090/metrics": 1.0}, "token": "obx_..."}    every second
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from outbox.web.address import Address
from outbox.web.serving import listen, serving


async def poll(session: aiohttp.ClientSession, url: str, every_s: float, token: str) -> None:
    """Poll until cancelled; an unreachable relay is polled again."""
    headers = {"Authorization": f"Bearer {token}"}
    while True:
        with suppress(aiohttp.ClientError):
            async with session.get(url, headers=headers) as response:
                await response.read()
        await asyncio.sleep(every_s)


async def receive_signal(request: web.Request) -> web.Response:
    """Read what a collector would store."""
    await request.read()
    return web.Response()


async def main() -> None:
    loop = asyncio.get_running_loop()
    application = web.Application(client_max_size=1 << 26)
    application.router.add_post("/v1/{signal}", receive_signal)
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with (
        serving(application, await listen(Address("127.0.0.1", 0))) as address,
        aiohttp.ClientSession() as session,
    ):
        announcement = {"collector": address.url.rstrip("/")}
        sys.stdout.buffer.write(orjson.dumps(announcement) + b"\n")
        sys.stdout.flush()
        async with asyncio.TaskGroup() as tasks:
            watching: list[asyncio.Task[None]] = []
            while line := await reader.readline():
                asked: dict[str, Any] = orjson.loads(line)
                for each in watching:
                    each.cancel()
                watching = [
                    tasks.create_task(poll(session, url, every_s, asked["token"]))
                    for url, every_s in asked["watch"].items()
                ]
            for each in watching:
                each.cancel()


if __name__ == "__main__":
    asyncio.run(main())
