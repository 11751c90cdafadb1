"""From COMMIT to the receiver, beside the sum of the parts that nobody can save.

All times are read from one clock, which the machine's processes share.  An
event's latency runs from the moment its producer sends COMMIT to the moment
the receiver has the whole request.  The parts: a commit; a notification from the
moment its transaction sends COMMIT to the listener's callback; and a bare POST
with its answer.  The latter two are measured at the same rate, and at once,
because whoever delivers events has both going on at once, too.  The first tenth
of each does not count: everything is done for the first time then.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from benchmarks.commits import MAKE_ACCOUNTS
from benchmarks.figures import Rounds, Row, Target, percentile
from benchmarks.stage import add_endpoint, child, search

if TYPE_CHECKING:
    from benchmarks.stage import Child, Stage
    from tests.support.postgres import Database

PER_S = (100, 1000)
SECONDS, QUICK_SECONDS = 6.0, 1.5
LANES = 8
WRITERS = 8
SHARES = {"p50": (0.5, Target("at most", 2.5)), "p99": (0.99, Target("at most", 5.0))}
NS_PER_MS = 1e6
WARM_UP = 0.1


async def measure(stage: Stage, rounds: int, *, quick: bool) -> list[Row]:
    """Both rates, the relay and the parts in turns."""
    return await run(stage, rounds, PER_S, QUICK_SECONDS if quick else SECONDS)


async def run(stage: Stage, rounds: int, rates: tuple[int, ...], seconds: float) -> list[Row]:
    """The same with other numbers."""
    rows: list[Row] = []
    for per_s in rates:
        ours, parts = Rounds(), Rounds()
        for number in range(rounds):
            latency_ms, commit_ms = await relay(stage, per_s, seconds)
            notify_ms, post_ms = await notifications_and_posts(stage, per_s, seconds)
            for name, (share, _) in SHARES.items():
                each = [percentile(part, share) for part in (commit_ms, notify_ms, post_ms)]
                ours.add(name, percentile(latency_ms, share))
                parts.add(name, sum(each))
                stage.say(
                    f"latency, {per_s:,} events/s, {name}, round {number + 1} of {rounds}: "
                    f"{ours.values[name][-1]:.2f} ms; commit {each[0]:.2f}, "
                    f"notification {each[1]:.2f}, POST {each[2]:.2f} ms"
                )
        rows += [
            Row(
                "latency",
                f"{per_s:,} events/s, {name}",
                "ms",
                ours.of(name),
                "commit + NOTIFY + POST",
                parts.of(name),
                target=target,
            )
            for name, (_, target) in SHARES.items()
        ]
    return rows


async def relay(stage: Stage, per_s: int, seconds: float) -> tuple[list[float], list[float]]:
    """Of every event the milliseconds to the receiver, and of its COMMIT alone."""
    events = int(per_s * seconds)
    async with stage.server.database() as database:
        async with search(database) as connection:
            await connection.execute(MAKE_ACCOUNTS)
            await add_endpoint(connection, stage.urls["http"], lanes=LANES)
        stage.expect(events, keep=True)
        async with stage.relay(database):
            made = await produce(database, "event", per_s, events)
            arrived = (await stage.receiver.answer())["arrived"]
    latency_ms = [(arrived[n] - made["sent_at"][n]) / NS_PER_MS for n in _warm(events)]
    return latency_ms, [made["took_ns"][n] / NS_PER_MS for n in _warm(events)]


async def notifications_and_posts(
    stage: Stage, per_s: int, seconds: float
) -> tuple[list[float], list[float]]:
    """Milliseconds from COMMIT to the listener's callback, and of a bare POST with its answer."""
    events = int(per_s * seconds)
    heard: dict[str, int] = {}
    everything = asyncio.Event()

    def hear(_: object, __: int, ___: str, n: object) -> None:
        heard[str(n)] = time.monotonic_ns()
        if len(heard) == events:
            everything.set()

    stage.expect(0)
    words = ("--requests", events, "--per-s", per_s)
    async with (
        stage.server.database() as database,
        database.connection() as listener,
        child("client", stage.urls["http"], *words) as client,
    ):
        await listener.execute(MAKE_ACCOUNTS)
        await listener.add_listener("bench", hear)
        await client.answer()
        made = await produce(database, "notify", per_s, events, beside=client)
        await everything.wait()
        took_s: list[float] = (await client.answer())["took_s"]
    notify_ms = [(heard[n] - made["sent_at"][n]) / NS_PER_MS for n in _warm(events)]
    return notify_ms, [s * 1000 for s in took_s[int(events * WARM_UP) :]]


def _warm(events: int) -> list[str]:
    """The events that count."""
    return [str(n) for n in range(int(events * WARM_UP), events)]


async def produce(
    database: Database, what: str, per_s: int, events: int, beside: Child | None = None
) -> dict[str, Any]:
    """Write events; `beside` begins in the same moment."""
    async with child(
        "producer",
        database.dsn,
        *("--what", what, "--writers", WRITERS),
        *("--per-s", per_s, "--events", events),
    ) as producer:
        await producer.answer()
        producer.tell(begin=True)
        if beside is not None:
            beside.tell(begin=True)
        made: dict[str, Any] = await producer.answer()
        return made
