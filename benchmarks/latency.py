"""Latency from COMMIT to the receiver, compared with the sum of its unavoidable parts.

All times are from the machine's monotonic clock, which processes share. An event's latency is the
time from its producer's COMMIT to the receiver's complete request. The parts: a commit; a
notification, from COMMIT to the listener's callback; and a bare POST with its response. The latter
two are measured at the same rate and concurrently, because a relay does both concurrently, too. The
first tenth is excluded as warm-up.
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
    """Run both rates, the relay and the parts alternately."""
    return await run(stage, rounds, PER_S, QUICK_SECONDS if quick else SECONDS)


async def run(stage: Stage, rounds: int, rates: tuple[int, ...], seconds: float) -> list[Row]:
    """Run with other numbers."""
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
                ours.samples_of(name),
                "commit + NOTIFY + POST",
                parts.samples_of(name),
                target=target,
            )
            for name, (_, target) in SHARES.items()
        ]
    return rows


async def relay(stage: Stage, per_s: int, seconds: float) -> tuple[list[float], list[float]]:
    """Return for every event the milliseconds to the receiver, and those of its COMMIT."""
    events = int(per_s * seconds)
    async with stage.server.database() as database:
        async with search(database) as connection:
            await connection.execute(MAKE_ACCOUNTS)
            await add_endpoint(connection, stage.urls["http"], lanes=LANES)
        stage.expect(events, keep=True)
        async with stage.relay(database):
            made = await produce(database, "event", per_s, events)
            arrived = (await stage.receiver.response())["arrived"]
    latency_ms = [(arrived[n] - made["sent_at"][n]) / NS_PER_MS for n in _warm(events)]
    return latency_ms, [made["took_ns"][n] / NS_PER_MS for n in _warm(events)]


async def notifications_and_posts(
    stage: Stage, per_s: int, seconds: float
) -> tuple[list[float], list[float]]:
    """Return the milliseconds from COMMIT to the listener's callback, and those of a bare POST."""
    events = int(per_s * seconds)
    notified_at: dict[str, int] = {}
    everything = asyncio.Event()

    def on_notification(_: object, __: int, ___: str, n: object) -> None:
        notified_at[str(n)] = time.monotonic_ns()
        if len(notified_at) == events:
            everything.set()

    stage.expect(0)
    words = ("--requests", events, "--per-s", per_s)
    async with (
        stage.server.database() as database,
        database.connection() as listener,
        child("client", stage.urls["http"], *words) as client,
    ):
        await listener.execute(MAKE_ACCOUNTS)
        await listener.add_listener("bench", on_notification)
        await client.response()
        made = await produce(database, "notify", per_s, events, beside=client)
        await everything.wait()
        took_s: list[float] = (await client.response())["took_s"]
    notify_ms = [(notified_at[n] - made["sent_at"][n]) / NS_PER_MS for n in _warm(events)]
    return notify_ms, [s * 1000 for s in took_s[int(events * WARM_UP) :]]


def _warm(events: int) -> list[str]:
    """Return the events after the warm-up."""
    return [str(n) for n in range(int(events * WARM_UP), events)]


async def live(stage: Stage, database: Database, per_s: int, seconds: float) -> list[float]:
    """Return the milliseconds from COMMIT to the receiver of every event after the warm-up."""
    events = int(per_s * seconds)
    stage.expect(events, keep=True)
    made = await produce(database, "event", per_s, events)
    arrived = (await stage.receiver.response())["arrived"]
    return [(arrived[n] - made["sent_at"][n]) / NS_PER_MS for n in _warm(events)]


async def produce(
    database: Database, what: str, per_s: int, events: int, beside: Child | None = None
) -> dict[str, Any]:
    """Write events; `beside` begins at the same moment."""
    async with child(
        "producer",
        database.dsn,
        *("--what", what, "--writers", WRITERS),
        *("--per-s", per_s, "--events", events),
    ) as producer:
        await producer.response()
        producer.send_command(begin=True)
        if beside is not None:
            beside.send_command(begin=True)
        made: dict[str, Any] = await producer.response()
        return made
