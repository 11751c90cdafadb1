"""What a contestant's process is asked, and how it tells that it is ready.

What it is asked is JSON.  It makes its tables, puts the backlog in, says in one line that
it is ready (and what its own client sends to put one more in), and works from the line
that answers until stdin ends.
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

# As much as those that carry a body and nothing else have to say about it.
HEADERS = {"Content-Type": "application/json"}


@dataclass(frozen=True, slots=True)
class Asked:
    """A database of its own, where to POST what, and how."""

    dsn: str
    url: str
    body: str
    jobs: int
    mode: dict[str, Any]

    async def ready(self, statement: str, values: Sequence[Any]) -> None:
        """Tell how one more is put in, and wait for the word to begin."""
        say({"statement": statement, "values": values})
        await asyncio.to_thread(sys.stdin.readline)


@asynccontextmanager
async def posting(url: str, connections: int) -> AsyncIterator[Callable[[bytes], Awaitable[None]]]:
    """What POSTs a body with an aiohttp client, over so many connections that are kept."""
    connector = aiohttp.TCPConnector(limit=connections)
    async with aiohttp.ClientSession(
        connector=connector, cookie_jar=aiohttp.DummyCookieJar()
    ) as session:

        async def post(body: bytes) -> None:
            async with session.post(url, data=body, headers=HEADERS) as answer:
                await answer.read()
                answer.raise_for_status()

        yield post
