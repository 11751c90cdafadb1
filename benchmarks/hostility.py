"""Hostile receivers and brokers: one port for each kind, in a separate process.

The process prints its ports, and for every line on stdin the number of accepted and of open
connections. It ends at the end of stdin.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack

from benchmarks.receiver import say
from tests.destinations.servers import serving
from tests.support.brokers.hostile import ATTACKS, HEAVY, attacking
from tests.support.hostile import SCRIPTS


async def run() -> None:
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(serving(each)) for each in SCRIPTS.values()]
        brokers = [
            await stack.enter_async_context(attacking(each))
            for name, each in ATTACKS.items()
            if name not in HEAVY
        ]
        say({"urls": [each.url for each in servers], "brokers": [each.url for each in brokers]})
        while await asyncio.to_thread(sys.stdin.readline):
            say(
                {
                    "connections": sum(each.connections for each in servers)
                    + sum(each.connections for each in brokers),
                    "open": sum(len(each._tasks) for each in servers)
                    + sum(each.open for each in brokers),
                }
            )


if __name__ == "__main__":
    asyncio.run(run())
