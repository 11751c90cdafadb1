"""Clients of the API that repeat one request, in a separate process.

It reads a JSON line from stdin: the URL, a token, the number of clients, and the request. It prints
a line at the start, and for every further line on stdin the statuses of the responses since then
and their times in milliseconds. A request without a response counts with its age. It ends at the
end of stdin.

    {"url": "http://127.0.0.1:8080", "token": "obx_...", "clients": 60, "method": "GET",
     "path": "/v1/endpoint-statuses", "body": null, "pause_s": 0.02,
     "refused_pause_s": 1.0}
    {"clients": 60}
    {"statuses": {"200": 31, "429": 40}, "ms": [3.1, 2.7]}
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from typing import Any

import aiohttp
import orjson

from benchmarks.api_clients import NICE
from benchmarks.receiver import say

WAITING = "waiting"
OVERDUE_MS = 500.0
"""A request without a response is counted from this age."""


class Clients:
    """The clients, with what they have seen since the last report."""

    def __init__(self, given: dict[str, Any]) -> None:
        self._method, self._url = given["method"], given["url"] + given["path"]
        self._body = None if given["body"] is None else orjson.dumps(given["body"])
        self._pause_s, self._refused_pause_s = given["pause_s"], given["refused_pause_s"]
        self._headers = {
            "Authorization": f"Bearer {given['token']}",
            "Content-Type": "application/json",
        }
        self._statuses: Counter[str] = Counter()
        self._ms: list[float] = []
        self._began_at: dict[int, float] = {}

    async def run(self, session: aiohttp.ClientSession, number: int) -> None:
        """Send the request again and again, until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            self._began_at[number] = clock()
            try:
                async with session.request(
                    self._method, self._url, data=self._body, headers=self._headers
                ) as response:
                    await response.read()
                    status = str(response.status)
            except aiohttp.ClientError:
                status = "failed"
            self._ms.append((clock() - self._began_at.pop(number)) * 1000)
            self._statuses[status] += 1
            await asyncio.sleep(self._pause_s if status[0] == "2" else self._refused_pause_s)

    def report(self) -> dict[str, Any]:
        """What they have seen since the last report."""
        now = asyncio.get_running_loop().time()
        overdue = [ms for at in self._began_at.values() if (ms := (now - at) * 1000) > OVERDUE_MS]
        found = {
            "statuses": dict(self._statuses + Counter({WAITING: len(overdue)})),
            "ms": self._ms + overdue,
        }
        self._statuses, self._ms = Counter(), []
        return found


async def run(given: dict[str, Any]) -> None:
    clients = Clients(given)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as group:
        running = [
            group.create_task(clients.run(session, number)) for number in range(given["clients"])
        ]
        say({"clients": len(running)})
        while await asyncio.to_thread(sys.stdin.readline):
            say(clients.report())
        for each in running:
            each.cancel()


if __name__ == "__main__":
    os.nice(NICE)
    asyncio.run(run(orjson.loads(sys.stdin.readline())))
