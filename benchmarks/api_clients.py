"""Clients of the API that list events as fast as their tokens may, in a separate process.

It reads a JSON line from stdin: the URL, a token for each client, and the requests per second of
each. It prints a line when every client has had a response, and for every further line on stdin the
number of responses by status since the line before. It ends at the end of stdin.

    {"url": "http://127.0.0.1:8080", "tokens": ["obx_..."], "per_s": 100}
    {"responded": 1}
    {"200": 873, "503": 2}
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from typing import Any

import aiohttp
import orjson

from benchmarks.receiver import say

PATH = "/v1/events?limit=50"
RECONNECT_S = 0.02
NICE = 10
"""Clients are on other machines, where they take no processor time from deliveries."""


class Clients:
    """The clients, with the number of responses by status."""

    def __init__(self, url: str, per_s: float) -> None:
        self.counts: Counter[str] = Counter()
        self._url, self._interval_s = url + PATH, 1 / per_s

    async def run(self, session: aiohttp.ClientSession, token: str, ready: asyncio.Event) -> None:
        """List events until cancelled; the responses are not parsed."""
        headers = {"Authorization": f"Bearer {token}"}
        clock = asyncio.get_running_loop().time
        while True:
            began_at = clock()
            try:
                async with session.get(self._url, headers=headers) as response:
                    await response.read()
            except aiohttp.ClientError:
                self.counts["failed"] += 1
                await asyncio.sleep(RECONNECT_S)
                continue
            self.counts[str(response.status)] += 1
            ready.set()
            await asyncio.sleep(began_at + self._interval_s - clock())


async def run(url: str, tokens: list[str], per_s: float) -> None:
    clients, ready = Clients(url, per_s), [asyncio.Event() for _ in tokens]
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as group:
        running = [
            group.create_task(clients.run(session, token, event))
            for token, event in zip(tokens, ready, strict=True)
        ]
        for event in ready:
            await event.wait()
        say({"responded": len(tokens)})
        while await asyncio.to_thread(sys.stdin.readline):
            say(dict(clients.counts))
            clients.counts.clear()
        for each in running:
            each.cancel()


if __name__ == "__main__":
    os.nice(NICE)
    given: dict[str, Any] = orjson.loads(sys.stdin.readline())
    asyncio.run(run(given["url"], given["tokens"], given["per_s"]))
