"""Receivers that mean harm: one port for each kind of them, in a process of its own.

It says where they are, and for every line on stdin how many connections there
were and how many are open.  It ends when stdin does.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack

from benchmarks.receiver import say
from tests.destinations.servers import serving
from tests.support.hostile import SCRIPTS


async def run() -> None:
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(serving(each)) for each in SCRIPTS.values()]
        say({"urls": [each.url for each in servers]})
        while await asyncio.to_thread(sys.stdin.readline):
            say(
                {
                    "connections": sum(each.connections for each in servers),
                    "open": sum(len(each._tasks) for each in servers),
                }
            )


if __name__ == "__main__":
    asyncio.run(run())
