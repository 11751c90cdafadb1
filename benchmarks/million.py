"""Millions of deliveries end to end: does the relay slow down or grow, and what remains?

Events are written while the relay delivers them, so that there is always a bounded backlog.
After the last one, further events alternate with as many in a new database with its own relay,
which shows whether the speed is that of the beginning: a comparison of the last fifth with the
first would also show how the machine changed in between. The relay's resident size after the
last tenth, compared with that after the first, shows whether it grows. Table sizes are measured
before, at the end, and after retention: that takes a month, so a period length of zero is given
to retention, which then runs as in a relay's maintenance. Append-only tables must return to
their size from before. Updated tables, with a row per lane and the like, are as large as the
dead rows of a minute, after which autovacuum runs, and must not grow further.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import psutil

from benchmarks.deliveries import FRAME_BYTES
from benchmarks.figures import Rounds, Row, Samples, Target
from benchmarks.peers.turns import unless_ended
from benchmarks.stage import add_endpoint, search, until
from outbox.core.sequencing.partition_window import Retention
from outbox.errors import CannotRun
from outbox.store.retention.partitions import PartitionStore
from outbox.store.retention.periods import RetentionStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncpg import Connection

    from benchmarks.stage import Stage
    from tests.support.process import RelayProcess

DELIVERIES, QUICK_DELIVERIES = 500_000, 20_000
FULL_DELIVERIES = 5_000_000
LANES = 64
PAYLOAD_BYTES = 200
TENTHS, OF_A_FIFTH = 10, 2
TURNS, OF_A_TURN = 5, 50
"""Share of the deliveries that follow all others."""
STEPS = 500
"""The receiver reports its count this often, and the events are written in this many parts."""
BACKLOG = 20_000
"""Events are written while no more than this number is undelivered."""
WARM_UP = 5_000
"""Warm-up deliveries, over new connections and cold code."""
TURNS_MAX = 100
"""Retention runs: each period begins, settles and is dropped in three, unless a reader holds it."""
MB = 1e6
PACE = Target("at least", 0.9)
OLD, NEW = "after all of them", "in a new database"
MEMORY = Target("at most", 1.1)
TABLES = Target("at most", 1.1)
WRITTEN_OVER = Target("under", 8.0)
ADDED_TO = ("outbox", "delivery_run", "attempt_run", "batch")

# Every event has its own key, so that lanes are about equally long.
PUBLISH = f"""
INSERT INTO outbox (type, key, payload)
SELECT 'order.paid', 'order-' || n,
       jsonb_build_object('n', n, 'filler', repeat('x', {PAYLOAD_BYTES - FRAME_BYTES}))
  FROM generate_series($1::bigint, $2::bigint - 1) AS n
"""

# The total size of the schema: partitions, indexes, and TOAST.
SIZES = """
SELECT coalesce(substring(relname FROM '^(outbox|delivery_run|attempt_run|batch)_[0-9]+$'), relname)
           AS name,
       sum(pg_total_relation_size(oid))::bigint AS bytes
  FROM pg_class
 WHERE relnamespace = current_schema()::regnamespace AND relkind = 'r'
 GROUP BY 1 ORDER BY 2 DESC
"""
SETTLED = """
SELECT NOT EXISTS (SELECT FROM lane_progress p JOIN lane_counter c USING (lane_id)
                    WHERE p.acked_seq < c.last_seq)
"""
DROPPED = "SELECT count(*) FROM period WHERE dropped_at IS NOT NULL AND kind = $1"


async def measure(stage: Stage, _rounds: int, *, quick: bool) -> list[Row]:
    """Run one round, which is long."""
    return await run(stage, stage.deliveries or (QUICK_DELIVERIES if quick else DELIVERIES))


async def run(stage: Stage, deliveries: int) -> list[Row]:
    """Run with another number."""
    deliveries = _whole(deliveries)
    async with stage.server.database() as database, search(database) as connection:
        await add_endpoint(connection, stage.urls["http"], lanes=LANES)
        async with stage.relay(database) as relay:
            # The very first deliveries differ from all later ones.
            warm_up = min(WARM_UP, deliveries // 4)
            stage.expect(warm_up)
            await connection.execute(PUBLISH, -warm_up, 0)
            await stage.receiver.response()
            await _retain(stage, connection, relay)
            rest = await _sizes(connection)
            times, rss, over = await _deliver(stage, connection, relay, deliveries, stage.say)
            await until(connection, SETTLED, relay)
            end = await _sizes(connection)
            pace = await _in_turns(stage, connection, relay, _whole(deliveries // OF_A_TURN))
            await _retain(stage, connection, relay)
            after = await _sizes(connection)
    _print_tables(stage, rest, end, after)
    first, last = (
        OF_A_FIFTH * deliveries / TENTHS / (times[to] - times[since])
        for since, to in ((0, OF_A_FIFTH), (-1 - OF_A_FIFTH, -1))
    )
    return [
        Row(
            "million",
            f"when {deliveries:,} were delivered",
            "/s",
            pace.samples_of(OLD),
            NEW,
            pace.samples_of(NEW),
            target=PACE,
        ),
        Row(
            "million",
            f"the last fifth of {deliveries:,}",
            "/s",
            Samples((last,)),
            "the first fifth",
            Samples((first,)),
        ),
        Row(
            "million",
            "the relay's memory after the last tenth",
            "MB",
            Samples((rss[-1] / MB,)),
            "after the first tenth",
            Samples((rss[0] / MB,)),
            target=MEMORY,
        ),
        Row(
            "million",
            "what is only added to, after retention",
            "MB",
            Samples((_added_to(after) / MB,)),
            f"before ({_added_to(end) / MB:,.0f} MB at the end)",
            Samples((_added_to(rest) / MB,)),
            target=TABLES,
        ),
        Row(
            "million",
            "what is written over, after the last tenth",
            "MB",
            Samples((over[-1] / MB,)),
            "after the first tenth",
            Samples((over[0] / MB,)),
            relation="difference",
            target=WRITTEN_OVER,
        ),
    ]


def _whole(deliveries: int) -> int:
    """Return this number, adjusted so that all steps are alike."""
    return max(deliveries - deliveries % STEPS, STEPS)


async def _in_turns(
    stage: Stage, connection: Connection[Any], relay: RelayProcess, deliveries: int
) -> Rounds:
    """Compare the deliveries per second with those in a new database, alternating."""
    found = Rounds()
    async with stage.server.database() as database, search(database) as beside:
        await add_endpoint(beside, stage.urls["http"], lanes=LANES)
        async with stage.relay(database) as new:
            turns = [(OLD, connection, relay), (NEW, beside, new)]
            for number in range(TURNS):
                for name, where, site in turns:
                    times, _, _ = await _deliver(stage, where, site, deliveries)
                    found.add(name, deliveries / (times[-1] - times[0]))
                described = ", ".join(
                    f"{name} {values[-1]:,.0f}/s" for name, values in found.values.items()
                )
                stage.say(f"million, turn {number + 1} of {TURNS}: {described}")
                turns.reverse()
    return found


async def _deliver(
    stage: Stage,
    connection: Connection[Any],
    relay: RelayProcess,
    deliveries: int,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[list[float], list[int], list[int]]:
    """Deliver and measure each tenth.

    Returns:
        When each tenth began and the last one ended; after each, the relay's size in bytes; and
        the size of the updated tables.
    """
    assert relay.process is not None
    process = psutil.Process(relay.process.pid)
    times, rss, over = [time.monotonic()], [], []
    made = arrived = tenths = 0
    step = deliveries // STEPS
    backlog = min(BACKLOG, deliveries // TENTHS)
    stage.expect(deliveries, every=step)
    while arrived < deliveries:
        while made < deliveries and made - arrived <= backlog - step:
            await connection.execute(PUBLISH, made, made + step)
            made += step
        ended = relay.process.wait()
        response = await unless_ended("the relay", stage.receiver.response(), ended)
        arrived = response["so_far"]
        if arrived * TENTHS // deliveries > tenths:
            tenths = arrived * TENTHS // deliveries
            times.append(response["at"] / 1e9)
            rss.append(process.memory_info().rss)
            per_s = deliveries / TENTHS / (times[-1] - times[-2])
            sizes = await _sizes(connection)
            over.append(sum(sizes.values()) - _added_to(sizes))
            say(
                f"million, {arrived:,} of {deliveries:,}: {per_s:,.0f}/s, "
                f"relay {rss[-1] / MB:.0f} MB, tables {_added_to(sizes) / MB:,.0f} MB "
                f"and {over[-1] / MB:.1f} MB that are written over"
            )
    return times, rss, over


async def _retain(stage: Stage, connection: Connection[Any], relay: RelayProcess) -> None:
    """Run the relay's maintenance as after the end of the retention.

    Raises:
        CannotRun: Delivered events could not be dropped.
    """
    await until(connection, SETTLED, relay)
    partitions = PartitionStore(connection)
    retention = RetentionStore(connection, Retention(0, 0, 0), period_s=0)
    before = [await connection.fetchval(DROPPED, kind) for kind in ("events", "log")]
    for _ in range(TURNS_MAX):
        await partitions.extend()
        await retention.advance_periods()
        await partitions.drop()
        now = [await connection.fetchval(DROPPED, kind) for kind in ("events", "log")]
        if all(after > was for was, after in zip(before, now, strict=True)):
            break
        await asyncio.sleep(0.2)  # A reader, or a pending checkpoint, delays the drop.
    else:
        raise CannotRun(
            f"retention makes no progress: {now} periods are dropped, {before} were before"
        )
    await connection.execute("VACUUM")
    stage.say("million: retention is done")


async def _sizes(connection: Connection[Any]) -> dict[str, int]:
    return {row["name"]: row["bytes"] for row in await connection.fetch(SIZES)}


def _added_to(sizes: dict[str, int]) -> int:
    return sum(sizes[name] for name in ADDED_TO)


def _print_tables(stage: Stage, *sizes: dict[str, int]) -> None:
    """Print the tables that were large at any time: before, at the end, and after retention."""
    for name in sorted(set().union(*sizes), key=lambda name: -max(s.get(name, 0) for s in sizes)):
        sizes_mb = " / ".join(f"{each.get(name, 0) / MB:,.2f}" for each in sizes)
        if max(each.get(name, 0) for each in sizes) > MB / 10:
            stage.say(f"million, {name}: {sizes_mb} MB before, at the end, after retention")
