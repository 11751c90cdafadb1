"""Memory of the relay process, compared with an idle relay.

The peak resident size until it settles: with ten thousand endpoints without events, while a
million events accumulate for a receiver that is down; and with large events for a receiver that is
down, or accepts requests without a response, by the number of lanes and by how well the events
compress.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import psutil

from benchmarks.deliveries import BACKLOG
from benchmarks.figures import Row, Samples, Target
from benchmarks.stage import add_endpoint, search, until
from tests.support.ports import free_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from benchmarks.stage import Stage

ENDPOINTS, QUICK_ENDPOINTS = 10_000, 200
BACKLOG_EVENTS, QUICK_BACKLOG_EVENTS = 1_000_000, 20_000
LANES = 64
SETTLE_S = 3.0
"""Observation time in seconds after all data is present."""
SAMPLE_S = 0.05
MB = 1e6
TARGET = Target("under", 200.0)
LARGE_EVENTS_PER_LANE = 32
LARGE_FILLER = {
    "compressible": "repeat('x', 244 * 1024)",
    "JSON, 6:1": "string_agg(repeat(md5(n::text), 6), '') FROM generate_series(1, 1300) AS n",
    "incompressible": "string_agg(md5(n::text), '') FROM generate_series(1, 7800) AS n",
}
"""Expressions of 244 KiB of text each."""
LARGE_LOADS = (
    (64, "compressible", "down"),
    (64, "JSON, 6:1", "down"),
    (64, "incompressible", "down"),
    (256, "JSON, 6:1", "down"),
    (64, "JSON, 6:1", "silent"),
    (256, "JSON, 6:1", "silent"),
)
"""Lanes, kind of the events, and what is wrong with the receiver."""
LARGE_TARGET = Target("under", 220.0)
LARGE_SETTLE_S = 20.0
"""Long enough for several attempts of each lane."""

LARGE_BACKLOG = """
INSERT INTO outbox (type, key, payload)
SELECT 'order.paid', 'order-' || n, jsonb_build_object('n', n, 'filler', filler)
  FROM generate_series(1, $1) AS n, (SELECT {filler}) AS made(filler)
"""

SEQUENCED = """
SELECT (SELECT max(id) FROM outbox) <= (SELECT high FROM batch ORDER BY batch DESC LIMIT 1)
"""


async def measure(stage: Stage, rounds: int, *, quick: bool) -> list[Row]:
    """Run one round: memory does not depend on other load of the machine."""
    return await run(
        stage,
        QUICK_ENDPOINTS if quick else ENDPOINTS,
        QUICK_BACKLOG_EVENTS if quick else BACKLOG_EVENTS,
        LARGE_LOADS[:1] if quick else LARGE_LOADS,
    )


async def run(
    stage: Stage,
    endpoints: int,
    events: int,
    large_loads: Sequence[tuple[int, str, str]],
    large_settle_s: float = LARGE_SETTLE_S,
) -> list[Row]:
    """Run with other numbers."""
    empty = await peak_mb(stage, 0, 0)
    stage.say(f"memory, nothing to do: {empty:.0f} MB")
    idle = await peak_mb(stage, endpoints, 0)
    stage.say(f"memory, {endpoints:,} idle endpoints: {idle:.0f} MB")
    behind = await peak_mb(stage, 1, events)
    stage.say(f"memory, backlog of {events:,} events: {behind:.0f} MB")
    measured = [
        (f"{endpoints:,} idle endpoints", idle, TARGET),
        (f"backlog of {events:,} events", behind, TARGET),
    ]
    for lanes, kind, receiver in large_loads:
        found = await large_peak_mb(stage, lanes, kind, receiver, large_settle_s)
        name = f"{lanes} lanes, events of 244 KiB ({kind}), receiver {receiver}"
        stage.say(f"memory, {name}: {found:.0f} MB")
        measured.append((name, found, LARGE_TARGET))
    return [
        Row(
            "memory",
            name,
            "MB",
            Samples((found,)),
            "a relay with nothing to do",
            Samples((empty,)),
            relation="difference",
            target=target,
        )
        for name, found, target in measured
    ]


async def large_peak_mb(
    stage: Stage, lanes: int, kind: str, receiver: str, settle_s: float
) -> float:
    """Return the relay's peak resident size with large events for a receiver in trouble."""
    async with (
        _silent_receiver() as silent_port,
        stage.server.database() as database,
        search(database) as connection,
    ):
        port = silent_port if receiver == "silent" else free_port()
        await add_endpoint(connection, f"http://127.0.0.1:{port}/", lanes=lanes)
        statement = LARGE_BACKLOG.format(filler=LARGE_FILLER[kind])
        await connection.execute(statement, lanes * LARGE_EVENTS_PER_LANE, timeout=600)
        await connection.execute("ANALYZE")
        async with stage.relay(database) as relay:
            assert relay.process is not None
            async with _peak(relay.process.pid) as peak:
                await until(connection, SEQUENCED, relay, poll_s=0.5)
                await asyncio.sleep(settle_s)
            return peak[0] / MB


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
async def _silent_receiver() -> AsyncIterator[int]:
    """Accept connections on a port, and neither read nor respond."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listening:
        yield listening.getsockname()[1]


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
