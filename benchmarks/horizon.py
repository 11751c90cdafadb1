"""A pinned horizon: somebody's transaction stays open, and dead rows stay with it.

Tables that are written over and over grow then, and so does what it takes to read
them.  Ours are few, small, and written once for many events; so deliveries go on as
before.  The same steady load, first without such a transaction, then with one that is
open all the while; the size of our tables before, at its end, and when it is gone.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from benchmarks.commits import MAKE_ACCOUNTS
from benchmarks.figures import Row, Samples, Target, percentile
from benchmarks.latency import LANES, NS_PER_MS, WARM_UP, produce
from benchmarks.stage import add_endpoint, search

if TYPE_CHECKING:
    from asyncpg import Connection

    from benchmarks.stage import Stage
    from tests.support.postgres import Database

PER_S = 500
PINNED_S, QUICK_PINNED_S = 600.0, 4.0
PARTS, QUICK_PARTS = 5, 1
"""The pinned time is looked at in parts, the last of which counts: it is the worst."""
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
        return await run(stage, QUICK_PINNED_S, QUICK_PARTS)
    return await run(stage, PINNED_S, PARTS)


async def run(stage: Stage, pinned_s: float, parts: int) -> list[Row]:
    """The same with other numbers."""
    part_s = pinned_s / parts
    async with (
        stage.server.database() as database,
        search(database) as connection,
        search(database) as somebody,
    ):
        await connection.execute(MAKE_ACCOUNTS)
        await add_endpoint(connection, stage.urls["http"], lanes=LANES)
        async with stage.relay(database):
            free = await _load(stage, database, part_s)
            await _say(stage, connection, "free", free)
            async with somebody.transaction(isolation="repeatable_read"):
                # It takes an id, too, so that nothing after it is ever old.
                await somebody.execute("SELECT pg_current_xact_id()")
                for number in range(parts):
                    pinned = await _load(stage, database, part_s)
                    await _say(stage, connection, f"pinned, {number + 1} of {parts}", pinned)
            await connection.execute("VACUUM")
            after = await _load(stage, database, part_s)
            await _say(stage, connection, "free again, vacuumed", after)
    return [
        Row(
            "horizon",
            f"{name}, after {pinned_s:g} s",
            unit,
            Samples((pinned[key],)),
            "before it was pinned",
            Samples((free[key],)),
            target=target,
        )
        for key, name, unit, target in (
            ("per_s", "deliveries per second", "/s", RATE_TARGET),
            ("p50", "p50", "ms", TARGET),
            ("p99", "p99", "ms", None),
        )
    ]


async def _load(stage: Stage, database: Database, seconds: float) -> dict[str, float]:
    """So many events a second; from COMMIT to the receiver, and how many arrived a second."""
    events = int(PER_S * seconds)
    stage.expect(events, keep=True)
    made, told = await asyncio.gather(
        produce(database, "event", PER_S, events), stage.receiver.answer()
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


async def _say(
    stage: Stage, connection: Connection[Any], when: str, found: dict[str, float]
) -> None:
    size = await connection.fetchrow(SIZE)
    stage.say(
        f"horizon, {when}: {found['per_s']:.0f}/s, p50 {found['p50']:.2f} ms, p99 "
        f"{found['p99']:.2f} ms; tables written over {size['kb']:,} KB, {size['dead']:,} dead rows"
    )
