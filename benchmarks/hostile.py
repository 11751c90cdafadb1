"""Live events to a good receiver, with two hundred hostile receivers.

Every kind of `tests.support.hostile` is several endpoints: they drip, flood, hang, lie about
lengths, and send compression bombs. All of them always have pending deliveries. Alternates with the
same relay without them, each in a database of its own; the receivers' process also takes its share
of the machine.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from itertools import cycle
from typing import TYPE_CHECKING

import psutil

from benchmarks.commits import MAKE_ACCOUNTS
from benchmarks.figures import Row, Samples, Target, percentile
from benchmarks.latency import NS_PER_MS, produce
from benchmarks.stage import add_endpoint, child, search

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from benchmarks.stage import Child, Stage
    from tests.support.postgres import Database
    from tests.support.process import RelayProcess

HOSTILE = 200
PER_S = 100
SECONDS, QUICK_SECONDS = 30.0, 1.5
SETTLE_S, QUICK_SETTLE_S = 20.0, 1.0
"""Longer than a time-out, so that the slowest requests have ended, too."""
PENDING_PER_S = 40
"""Deliveries per second to the hostile receivers, in rotation."""
SAMPLE_S = 0.1
LANES = 8
MB = 1e6
PUBLISH = "INSERT INTO outbox (type, payload) VALUES ($1, '{}')"
FLAT = Target("at most", 1.1)
UNHARMED = Target("at most", 2.0)


async def measure(stage: Stage, rounds: int, *, quick: bool) -> list[Row]:
    """Run with and without them alternately, round by round."""
    if quick:
        return await run(stage, rounds, HOSTILE, QUICK_SECONDS, QUICK_SETTLE_S)
    return await run(stage, rounds, HOSTILE, SECONDS, SETTLE_S)


async def run(
    stage: Stage, rounds: int, hostile: int, seconds: float, settle_s: float
) -> list[Row]:
    """Run with other numbers."""
    beside: list[dict[str, float]] = []
    alone: list[dict[str, float]] = []
    for number in range(rounds):
        sides = [(alone, 0), (beside, hostile)]
        if number % 2:
            sides.reverse()  # The order alternates.
        for found, count in sides:
            found.append(await _turn(stage, count, seconds, settle_s))
            described = ", ".join(f"{name} {value:.2f}" for name, value in found[-1].items())
            stage.say(f"hostile, round {number + 1} of {rounds}, beside {count}: {described}")

    def samples(turns: list[dict[str, float]], name: str) -> Samples:
        return Samples(tuple(each[name] for each in turns))

    return [
        *(
            Row(
                "hostile",
                f"{name} beside {hostile} hostile receivers",
                "ms",
                samples(beside, name),
                "without them",
                samples(alone, name),
                target=UNHARMED,
            )
            for name in ("p50", "p99")
        ),
        Row(
            "hostile",
            f"memory beside {hostile} of them, at the end",
            "MB",
            samples(beside, "MB last"),
            "at the beginning",
            samples(beside, "MB first"),
            target=FLAT,
        ),
    ]


async def _turn(stage: Stage, hostile: int, seconds: float, settle_s: float) -> dict[str, float]:
    async with stage.server.database() as database, child("hostility") as receivers:
        urls = (await receivers.response())["urls"]
        async with search(database) as connection:
            await connection.execute(MAKE_ACCOUNTS)
            await add_endpoint(
                connection, stage.urls["http"], lanes=LANES, types=("order.paid",), name="good"
            )
            for n in range(hostile):
                url = f"{urls[n % len(urls)]}?{n}"
                await add_endpoint(connection, url, name=f"hostile-{n}", types=(f"hostile.n{n}",))
        async with stage.relay(database) as relay, _hostile_load(database, hostile):
            await asyncio.sleep(settle_s)
            return await _load(stage, database, relay, receivers, seconds)


@asynccontextmanager
async def _hostile_load(database: Database, hostile: int) -> AsyncIterator[None]:
    """Publish to the hostile endpoints in rotation."""

    async def publish() -> None:
        async with search(database) as connection:
            for n in cycle(range(hostile)):
                await connection.execute(PUBLISH, f"hostile.n{n}")
                await asyncio.sleep(1 / PENDING_PER_S)

    publishing = asyncio.create_task(publish())
    try:
        yield
    finally:
        publishing.cancel()
        await asyncio.wait([publishing])


async def _load(
    stage: Stage, database: Database, relay: RelayProcess, receivers: Child, seconds: float
) -> dict[str, float]:
    """Return the latencies from COMMIT to the good receiver, and the relay's resident size."""
    assert relay.process is not None
    process = psutil.Process(relay.process.pid)
    sizes: list[int] = []

    async def sample() -> None:
        while True:
            sizes.append(process.memory_info().rss)
            await asyncio.sleep(SAMPLE_S)

    events = int(PER_S * seconds)
    stage.expect(events, keep=True)
    sampling = asyncio.create_task(sample())
    try:
        made, reported = await asyncio.gather(
            produce(database, "event-alone", PER_S, events), stage.receiver.response()
        )
    finally:
        sampling.cancel()
        await asyncio.wait([sampling])
    receivers.send_command(how="many")
    counted = await receivers.response()
    arrived = reported["arrived"]
    # A duplicate counts as a request, and then the last deliveries have not been awaited.
    latency_ms = [
        (arrived[str(n)] - made["sent_at"][str(n)]) / NS_PER_MS
        for n in range(events // 10, events)
        if str(n) in arrived
    ]
    third = max(1, len(sizes) // 3)
    return {
        "p50": percentile(latency_ms, 0.5),
        "p99": percentile(latency_ms, 0.99),
        "MB first": max(sizes[:third]) / MB,
        "MB last": max(sizes[-third:]) / MB,
        "connections": counted["connections"],
        "open": counted["open"],
    }
