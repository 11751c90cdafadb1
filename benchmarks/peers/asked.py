"""The protocol between the benchmark and a contestant's process.

The request is JSON. The process creates its tables, writes the backlog, prints one line when it
is ready (with the statement by which its own client enqueues one job), and works from the line
that it then reads on stdin until stdin ends.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp

from benchmarks.receiver import say

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

# As many headers as a queue needs that sends only a body.
HEADERS = {"Content-Type": "application/json"}


@dataclass(frozen=True, slots=True)
class Asked:
    """The request to a contestant: its database, and where and how to POST."""

    dsn: str
    url: str
    body: str
    jobs: int
    mode: dict[str, Any]

    async def ready(self, statement: str, values: Sequence[Any]) -> None:
        """Report the enqueue statement, and wait for the start command."""
        say({"statement": statement, "values": values})
        await asyncio.to_thread(sys.stdin.readline)


@asynccontextmanager
async def posting(url: str, connections: int) -> AsyncIterator[Callable[[bytes], Awaitable[None]]]:
    """Return a function that POSTs with an aiohttp client over kept-alive connections."""
    connector = aiohttp.TCPConnector(limit=connections)
    async with aiohttp.ClientSession(
        connector=connector, cookie_jar=aiohttp.DummyCookieJar()
    ) as session:

        async def post(body: bytes) -> None:
            async with session.post(url, data=body, headers=HEADERS) as response:
                await response.read()
                response.raise_for_status()

        yield post
