"""A pinned xmin horizon: a transaction stays open, and dead rows cannot be removed.

Tables that are updated repeatedly grow then, and so does the cost of reading them. The outbox has
few such tables, they are small, and they are written once for many events; so deliveries should not
slow down. One database has a steady load for ten minutes with such a transaction open. Then, while
it is still open, the same load goes alternately to that database and to another one with a moving
horizon, so that other activity of the machine affects both. The producers only insert events: rows
that they update themselves get slower with the horizon, too, but the relay does not cause that.
Table sizes are measured before, at the end, and after the horizon is released.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from benchmarks.commits import MAKE_ACCOUNTS
from benchmarks.figures import Row, Samples, Target, percentile
from benchmarks.latency import LANES, NS_PER_MS, WARM_UP, produce
from benchmarks.stage import add_endpoint, search

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from asyncpg import Connection

    from benchmarks.stage import Stage
    from tests.support.postgres import Database

PER_S = 500
PINNED_S, QUICK_PINNED_S = 600.0, 4.0
PARTS = 5
TURNS, QUICK_TURNS = 40, 1
TURN_S, QUICK_TURN_S = 5.0, 2.0
TARGET = Target("at most", 1.1)
RATE_TARGET = Target("at least", 0.9)

# Tables that are updated; append-only tables grow with or without a horizon.
SIZE = """
SELECT coalesce(sum(pg_total_relation_size(c.oid)), 0)::bigint / 1024 AS kb,
       coalesce(sum(s.n_dead_tup), 0)::bigint AS dead
  FROM pg_class c JOIN pg_stat_all_tables s ON s.relid = c.oid
 WHERE c.relnamespace = current_schema()::regnamespace AND c.relkind = 'r'
   AND NOT c.relispartition
"""


async def measure(stage: Stage, _: int, *, quick: bool) -> list[Row]:
    """Run one round, which takes a quarter of an hour."""
    if quick:
        return await run(stage, QUICK_PINNED_S, QUICK_TURNS, QUICK_TURN_S)
    return await run(stage, PINNED_S, TURNS, TURN_S)


async def run(stage: Stage, pinned_s: float, turns: int, turn_s: float) -> list[Row]:
    """Run with other numbers."""
    free: list[dict[str, float]] = []
    pinned: list[dict[str, float]] = []
    async with (
        _site(stage) as (other, _),
        _site(stage) as (database, connection),
        search(database) as blocker,
    ):
        for each in (other, database):
            await _load(stage, each, turn_s)
        await _print_sizes(stage, connection, "before")
        async with blocker.transaction(isolation="repeatable_read"):
            # The transaction takes an xid, so that nothing after it becomes old.
            await blocker.execute("SELECT pg_current_xact_id()")
            # One after the other: the receiver reports the arrivals, and a report must not be too
            # large.
            for part in range(1, PARTS + 1):
                await _load(stage, database, pinned_s / PARTS)
                await _print_sizes(stage, connection, f"pinned for {pinned_s * part / PARTS:g} s")
            sides = [(free, other), (pinned, database)]
            for _ in range(turns):
                for found, each in sides:
                    found.append(await _load(stage, each, turn_s))
                # The order alternates.
                sides.reverse()
                stage.say(f"horizon, free: {_describe(free[-1])}; pinned: {_describe(pinned[-1])}")
        await connection.execute("VACUUM")
        after = await _load(stage, database, turn_s)
        await _print_sizes(stage, connection, f"free again and vacuumed, {_describe(after)}")
    return [
        Row(
            "horizon",
            f"{name}, pinned for {pinned_s:g} s",
            unit,
            Samples(tuple(each[key] for each in pinned)),
            "not pinned",
            Samples(tuple(each[key] for each in free)),
            target=target,
        )
        for key, name, unit, target in (
            ("per_s", "deliveries per second", "/s", RATE_TARGET),
            ("p50", "p50", "ms", TARGET),
            ("p99", "p99", "ms", None),
        )
    ]


@asynccontextmanager
async def _site(stage: Stage) -> AsyncIterator[tuple[Database, Connection[Any]]]:
    """Run a database with a relay, and return a connection to it."""
    async with stage.server.database() as database, search(database) as connection:
        await connection.execute(MAKE_ACCOUNTS)
        await add_endpoint(connection, stage.urls["http"], lanes=LANES)
        async with stage.relay(database):
            yield database, connection


async def _load(stage: Stage, database: Database, seconds: float) -> dict[str, float]:
    """Run this many events per second; return the latencies from COMMIT to the receiver, and the
    rate.
    """
    events = int(PER_S * seconds)
    stage.expect(events, keep=True)
    made, reported = await asyncio.gather(
        produce(database, "event-alone", PER_S, events), stage.receiver.response()
    )
    arrived: dict[str, Any] = reported["arrived"]
    warm = [str(n) for n in range(int(events * WARM_UP), events)]
    latency_ms = [(arrived[n] - made["sent_at"][n]) / NS_PER_MS for n in warm]
    first, last = min(arrived[n] for n in warm), max(arrived[n] for n in warm)
    return {
        "per_s": (len(warm) - 1) / ((last - first) / 1e9),
        "p50": percentile(latency_ms, 0.5),
        "p99": percentile(latency_ms, 0.99),
    }


def _describe(found: dict[str, float]) -> str:
    return f"{found['per_s']:.0f}/s, p50 {found['p50']:.2f} ms, p99 {found['p99']:.2f} ms"


async def _print_sizes(stage: Stage, connection: Connection[Any], when: str) -> None:
    size = await connection.fetchrow(SIZE)
    stage.say(f"horizon, {when}: tables written over {size['kb']:,} KB, {size['dead']:,} dead rows")
