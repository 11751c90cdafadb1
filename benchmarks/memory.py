"""Memory of the relay process, compared with an idle relay.

The peak resident size until it settles: with ten thousand endpoints without events, and while a
million events accumulate for a receiver that is down.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import psutil

from benchmarks.deliveries import BACKLOG
from benchmarks.figures import Row, Samples, Target
from benchmarks.stage import add_endpoint, search, until
from tests.support.tcp import free_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from benchmarks.stage import Stage

ENDPOINTS, QUICK_ENDPOINTS = 10_000, 200
BACKLOG_EVENTS, QUICK_BACKLOG_EVENTS = 1_000_000, 20_000
LANES = 64
SETTLE_S = 3.0
"""Observation time in seconds after all data is present."""
SAMPLE_S = 0.05
MB = 1e6
TARGET = Target("under", 200.0)

SEQUENCED = """
SELECT (SELECT max(id) FROM outbox) <= (SELECT high FROM batch ORDER BY batch DESC LIMIT 1)
"""


async def measure(stage: Stage, rounds: int, *, quick: bool) -> list[Row]:
    """Run one round: memory does not depend on other load of the machine."""
    return await run(
        stage,
        QUICK_ENDPOINTS if quick else ENDPOINTS,
        QUICK_BACKLOG_EVENTS if quick else BACKLOG_EVENTS,
    )


async def run(stage: Stage, endpoints: int, events: int) -> list[Row]:
    """Run with other numbers."""
    empty = await peak_mb(stage, 0, 0)
    stage.say(f"memory, nothing to do: {empty:.0f} MB")
    idle = await peak_mb(stage, endpoints, 0)
    stage.say(f"memory, {endpoints:,} idle endpoints: {idle:.0f} MB")
    behind = await peak_mb(stage, 1, events)
    stage.say(f"memory, backlog of {events:,} events: {behind:.0f} MB")
    return [
        Row(
            "memory",
            name,
            "MB",
            Samples((found,)),
            "a relay with nothing to do",
            Samples((empty,)),
            relation="difference",
            target=TARGET,
        )
        for name, found in (
            (f"{endpoints:,} idle endpoints", idle),
            (f"backlog of {events:,} events", behind),
        )
    ]


async def peak_mb(stage: Stage, endpoints: int, events: int) -> float:
    """Return the relay's peak resident size, from its start until it settled."""
    async with stage.server.database() as database, search(database) as connection:
        unreachable_url = f"http://127.0.0.1:{free_port()}/"
        for n in range(endpoints):
            lanes = LANES if events else 1
            await add_endpoint(connection, unreachable_url, name=f"endpoint-{n}", lanes=lanes)
        if events:
            await connection.execute(BACKLOG, events, 170, timeout=600)
        await connection.execute("ANALYZE")
        async with stage.relay(database) as relay:
            assert relay.process is not None
            async with _peak(relay.process.pid) as peak:
                if events:
                    await until(connection, SEQUENCED, relay, poll_s=0.5)
                await asyncio.sleep(SETTLE_S)
            return peak[0] / MB


@asynccontextmanager
async def _peak(pid: int) -> AsyncIterator[list[int]]:
    """Measure the peak resident size during the block, in bytes."""
    process = psutil.Process(pid)
    peak = [0]

    async def watch() -> None:
        while True:
            peak[0] = max(peak[0], process.memory_info().rss)
            await asyncio.sleep(SAMPLE_S)

    watching = asyncio.create_task(watch())
    try:
        yield peak
    finally:
        watching.cancel()
        await asyncio.wait([watching])
