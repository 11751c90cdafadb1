"""A pinned horizon: somebody's transaction stays open, and dead rows stay with it.

Tables that are written over and over grow then, and so does what it takes to read
them.  Ours are few, small, and written once for many events; so deliveries go on as
before.  One database has a steady load for ten minutes with such a transaction open.
Then, while it still is, the same load goes in turns to that one and to another, whose
horizon moves: what the machine does otherwise befalls both.  The producers write events
alone: rows of their own that they update get slower with the horizon, too, but that is
not the relay's doing.  The size of our tables before, at its end, and when it is gone.
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

# Written over and over; what is only ever added to grows with or without a horizon.
SIZE = """
SELECT coalesce(sum(pg_total_relation_size(c.oid)), 0)::bigint / 1024 AS kb,
       coalesce(sum(s.n_dead_tup), 0)::bigint AS dead
  FROM pg_class c JOIN pg_stat_all_tables s ON s.relid = c.oid
 WHERE c.relnamespace = current_schema()::regnamespace AND c.relkind = 'r'
   AND NOT c.relispartition
"""


async def measure(stage: Stage, _: int, *, quick: bool) -> list[Row]:
    """One round: it takes a quarter of an hour."""
    if quick:
        return await run(stage, QUICK_PINNED_S, QUICK_TURNS, QUICK_TURN_S)
    return await run(stage, PINNED_S, TURNS, TURN_S)


async def run(stage: Stage, pinned_s: float, turns: int, turn_s: float) -> list[Row]:
    """The same with other numbers."""
    free: list[dict[str, float]] = []
    pinned: list[dict[str, float]] = []
    async with (
        _site(stage) as (other, _),
        _site(stage) as (database, connection),
        search(database) as somebody,
    ):
        for each in (other, database):
            await _load(stage, each, turn_s)
        await _say(stage, connection, "before")
        async with somebody.transaction(isolation="repeatable_read"):
            # It takes an id, too, so that nothing after it is ever old.
            await somebody.execute("SELECT pg_current_xact_id()")
            # One after the other: the receiver tells what arrived, and not too much at once.
            for part in range(1, PARTS + 1):
                await _load(stage, database, pinned_s / PARTS)
                await _say(stage, connection, f"pinned for {pinned_s * part / PARTS:g} s")
            sides = [(free, other), (pinned, database)]
            for _ in range(turns):
                for found, each in sides:
                    found.append(await _load(stage, each, turn_s))
                # Neither always comes after the other.
                sides.reverse()
                stage.say(f"horizon, free: {_told(free[-1])}; pinned: {_told(pinned[-1])}")
        await connection.execute("VACUUM")
        after = await _load(stage, database, turn_s)
        await _say(stage, connection, f"free again and vacuumed, {_told(after)}")
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
    """A database with a relay at work, and a connection to it."""
    async with stage.server.database() as database, search(database) as connection:
        await connection.execute(MAKE_ACCOUNTS)
        await add_endpoint(connection, stage.urls["http"], lanes=LANES)
        async with stage.relay(database):
            yield database, connection


async def _load(stage: Stage, database: Database, seconds: float) -> dict[str, float]:
    """So many events a second; from COMMIT to the receiver, and how many arrived a second."""
    events = int(PER_S * seconds)
    stage.expect(events, keep=True)
    made, told = await asyncio.gather(
        produce(database, "event-alone", PER_S, events), stage.receiver.answer()
    )
    arrived: dict[str, Any] = told["arrived"]
    warm = [str(n) for n in range(int(events * WARM_UP), events)]
    latency_ms = [(arrived[n] - made["sent_at"][n]) / NS_PER_MS for n in warm]
    first, last = min(arrived[n] for n in warm), max(arrived[n] for n in warm)
    return {
        "per_s": (len(warm) - 1) / ((last - first) / 1e9),
        "p50": percentile(latency_ms, 0.5),
        "p99": percentile(latency_ms, 0.99),
    }


def _told(found: dict[str, float]) -> str:
    return f"{found['per_s']:.0f}/s, p50 {found['p50']:.2f} ms, p99 {found['p99']:.2f} ms"


async def _say(stage: Stage, connection: Connection[Any], when: str) -> None:
    size = await connection.fetchrow(SIZE)
    stage.say(f"horizon, {when}: tables written over {size['kb']:,} KB, {size['dead']:,} dead rows")
