"""The cost of several replicas: the same work, shared by one, two and three of them.

CPU seconds of the relay processes, and of the PostgreSQL backends that serve them, per thousand
deliveries; the producer's own backend is excluded. The fixed cost of a replica (its lease, its
acknowledgement groups, its batch notifications) weighs most under a steady low rate, and least in a
backlog. A run is measured from the moment all endpoints are assigned until all deliveries are
written.

In addition, the statements that an idle replica sends to PostgreSQL are counted at a proxy: for the
leader, and for a standby.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from benchmarks.cpu import Cost, Meter
from benchmarks.figures import Rounds, Row, Samples, Target
from benchmarks.stage import add_endpoints, search, until
from benchmarks.statements import counting

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from asyncpg import Connection

    from benchmarks.stage import Stage

ENDPOINTS = 200
REPLICAS = (1, 2, 3)
IDLE_S, QUICK_IDLE_S = 20.0, 3.0
GROWTH = Target("at most", 1.2)

PUBLISH = """
INSERT INTO outbox (type, key, payload)
SELECT 'order.n' || n % $3, 'order-' || n,
       jsonb_build_object('n', n, 'filler', repeat('x', 170))
  FROM generate_series($1::int, $2::int - 1) AS n
"""
ALL_WRITTEN = """
SELECT (SELECT count(*) FROM attempt WHERE outcome = 'delivered')
       >= (SELECT count(*) FROM outbox)
"""


@dataclass(frozen=True, slots=True)
class Load:
    """What is published: a number of events per second, or all at once."""

    name: str
    events: int
    per_s: float | None = None


LOADS = (Load("1,000 events/s", 8_000, 1_000), Load("a backlog", 20_000))
QUICK_SHARE = 0.1


async def measure(stage: Stage, rounds: int, *, quick: bool) -> list[Row]:
    """Run both loads with each number of replicas alternately, then the idle ones."""
    loads: Iterable[Load] = LOADS
    if quick:
        loads = [replace(load, events=int(load.events * QUICK_SHARE)) for load in loads]
    idle_s = QUICK_IDLE_S if quick else IDLE_S
    return await run(stage, rounds, loads, REPLICAS, ENDPOINTS) + await idle(stage, idle_s)


async def run(
    stage: Stage, rounds: int, loads: Iterable[Load], many: Sequence[int], endpoints: int
) -> list[Row]:
    """Run with other numbers; the others are compared with the first number of replicas."""
    rows: list[Row] = []
    for load in loads:
        found: dict[int, Rounds] = {replicas: Rounds() for replicas in many}
        for number in range(rounds):
            for replicas in many:
                parts = (await cpu(stage, load, replicas, endpoints)).parts("relays")
                for part, seconds in parts.items():
                    found[replicas].add(part, seconds)
                stage.say(
                    f"replicas, {load.name}, round {number + 1} of {rounds}, {replicas}: "
                    + ", ".join(f"{part} {s:.3f}" for part, s in parts.items())
                    + " CPU s per 1,000 deliveries"
                )
        first = many[0]
        rows += [
            Row(
                "replicas",
                f"{load.name}, {replicas} replicas, {part}",
                "s",
                found[replicas].samples_of(part),
                "1 replica" if first == 1 else f"{first} replicas",
                found[first].samples_of(part),
                target=GROWTH if part == "together" else None,
            )
            for replicas in many[1:]
            for part in found[replicas].values
        ]
    return rows


async def cpu(stage: Stage, load: Load, replicas: int, endpoints: int) -> Cost:
    """Run one turn in a database of its own."""
    async with AsyncExitStack() as stack:
        database = await stack.enter_async_context(stage.server.database())
        connection = await stack.enter_async_context(search(database))
        await add_endpoints(connection, stage.urls["http"], endpoints)
        relays = [
            await stack.enter_async_context(stage.relay(database, owns=False))
            for _ in range(replicas)
        ]
        await stage.until_shared_out(connection, relays)
        meter = await Meter.start(relays, connection)
        stage.expect(load.events)
        await _publish(connection, load, endpoints)
        await stage.receiver.response()
        for relay in relays:
            await until(connection, ALL_WRITTEN, relay)
        return meter.cost(load.events)


async def idle(stage: Stage, seconds: float) -> list[Row]:
    """Return the statements per second of two idle replicas."""
    async with AsyncExitStack() as stack:
        database = await stack.enter_async_context(stage.server.database())
        connection = await stack.enter_async_context(search(database))
        await add_endpoints(connection, stage.urls["http"], ENDPOINTS)
        counters, relays = [], []
        for _ in range(2):
            dsn, counter = await stack.enter_async_context(counting(database))
            counters.append(counter)
            relay = stage.relay(database, owns=False, OUTBOX_DSN=dsn)
            relays.append(await stack.enter_async_context(relay))
            await stage.until_shared_out(connection, relays)
        before = [counter.statements for counter in counters]
        await asyncio.sleep(seconds)
        per_s = [(c.statements - n) / seconds for c, n in zip(counters, before, strict=True)]
    stage.say(f"replicas, idle: {per_s[0]:.1f} statements/s, standing by {per_s[1]:.1f}")
    return [
        Row(
            "replicas",
            name,
            "/s",
            Samples((found,)),
            "renewing the lease",
            Samples((1.0,)),
        )
        for name, found in zip(("idle, leading", "idle, standing by"), per_s, strict=True)
    ]


async def _publish(connection: Connection[Any], load: Load, endpoints: int) -> None:
    if load.per_s is None:
        await connection.execute(PUBLISH, 0, load.events, endpoints, timeout=600)
        return
    clock = asyncio.get_running_loop().time
    started = clock()
    for n in range(load.events):
        await asyncio.sleep(started + n / load.per_s - clock())
        await connection.execute(PUBLISH, n, n + 1, endpoints)
