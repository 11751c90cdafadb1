"""Millions of deliveries end to end: does anything get slower, or grow, and what is left?

Events are written while the relay delivers them, so that a bounded backlog is always there.
When they are there, some more take turns with as many in a new database that has its own
relay, which tells whether it is as fast as it was in the beginning: the last fifth of them
beside the first would tell as much of the machine, minutes later.  The relay's resident size
after the last tenth beside that after the first tells whether it grows.  The tables are
weighed before, at the end, and when everything was kept long enough: that takes a month, so
retention is told here that a period lasts no time, and does what a relay's maintenance does
then.  What is only ever added to has to be as it was before; what is written over, a row for
each lane and the like, is as large as what a minute leaves behind, which is when autovacuum
comes, and must not become more.
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
from outbox.core.sequencing.partition_window import Keep
from outbox.errors import CannotRun
from outbox.store.partitions import PartitionStore
from outbox.store.retention import RetentionStore

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
"""Of those that come after all of them, and how many times fewer these are."""
STEPS = 500
"""The receiver tells so often how many it has, and so many pieces is everything written in."""
BACKLOG = 20_000
"""Events are written as long as no more than this are not delivered."""
WARM_UP = 5_000
"""Delivered before anything is measured, over connections and code that are new."""
TURNS_MAX = 100
"""Of retention: each period begins, settles and goes in three, unless somebody reads."""
MB = 1e6
PACE = Target("at least", 0.9)
OLD, NEW = "after all of them", "in a new database"
MEMORY = Target("at most", 1.1)
TABLES = Target("at most", 1.1)
WRITTEN_OVER = Target("under", 8.0)
ADDED_TO = ("outbox", "delivery", "attempt", "batch")

# Every event has a key of its own, so that lanes are about equally long.
PUBLISH = f"""
INSERT INTO outbox (type, key, payload)
SELECT 'order.paid', 'order-' || n,
       jsonb_build_object('n', n, 'filler', repeat('x', {PAYLOAD_BYTES - FRAME_BYTES}))
  FROM generate_series($1::bigint, $2::bigint - 1) AS n
"""

# All that the schema takes: partitions, indexes, and what is stored out of line.
SIZES = """
SELECT coalesce(substring(relname FROM '^(outbox|delivery|attempt|batch)_[0-9]+$'), relname)
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
    """One round: it is long."""
    return await run(stage, stage.deliveries or (QUICK_DELIVERIES if quick else DELIVERIES))


async def run(stage: Stage, deliveries: int) -> list[Row]:
    """The same with another number."""
    deliveries = _whole(deliveries)
    async with stage.server.database() as database, search(database) as connection:
        await add_endpoint(connection, stage.urls["http"], lanes=LANES)
        async with stage.relay(database) as relay:
            # The very first ones are not like all that follow.
            warm_up = min(WARM_UP, deliveries // 4)
            stage.expect(warm_up)
            await connection.execute(PUBLISH, -warm_up, 0)
            await stage.receiver.answer()
            await _retain(stage, connection, relay)
            rest = await _sizes(connection)
            times, rss, over = await _deliver(stage, connection, relay, deliveries, stage.say)
            await until(connection, SETTLED, relay)
            end = await _sizes(connection)
            pace = await _in_turns(stage, connection, relay, _whole(deliveries // OF_A_TURN))
            await _retain(stage, connection, relay)
            after = await _sizes(connection)
    _tell_tables(stage, rest, end, after)
    first, last = (
        OF_A_FIFTH * deliveries / TENTHS / (times[to] - times[since])
        for since, to in ((0, OF_A_FIFTH), (-1 - OF_A_FIFTH, -1))
    )
    return [
        Row(
            "million",
            f"when {deliveries:,} were delivered",
            "/s",
            pace.of(OLD),
            NEW,
            pace.of(NEW),
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
    """As many, or a few less or more, so that all steps are alike."""
    return max(deliveries - deliveries % STEPS, STEPS)


async def _in_turns(
    stage: Stage, connection: Connection[Any], relay: RelayProcess, deliveries: int
) -> Rounds:
    """Some more deliveries a second, beside as many in a new database."""
    found = Rounds()
    async with stage.server.database() as database, search(database) as beside:
        await add_endpoint(beside, stage.urls["http"], lanes=LANES)
        async with stage.relay(database) as new:
            turns = [(OLD, connection, relay), (NEW, beside, new)]
            for number in range(TURNS):
                for name, where, whose in turns:
                    times, _, _ = await _deliver(stage, where, whose, deliveries)
                    found.add(name, deliveries / (times[-1] - times[0]))
                told = ", ".join(
                    f"{name} {values[-1]:,.0f}/s" for name, values in found.values.items()
                )
                stage.say(f"million, turn {number + 1} of {TURNS}: {told}")
                turns.reverse()
    return found


async def _deliver(
    stage: Stage,
    connection: Connection[Any],
    relay: RelayProcess,
    deliveries: int,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[list[float], list[int], list[int]]:
    """When each tenth began and the last one ended; after each, the relay's size in bytes, and
    that of what is written over.
    """
    assert relay.process is not None
    process = psutil.Process(relay.process.pid)
    times, rss, over = [time.monotonic()], [], []
    made = arrived = told = 0
    step = deliveries // STEPS
    backlog = min(BACKLOG, deliveries // TENTHS)
    stage.expect(deliveries, every=step)
    while arrived < deliveries:
        while made < deliveries and made - arrived <= backlog - step:
            await connection.execute(PUBLISH, made, made + step)
            made += step
        ended = relay.process.wait()
        answer = await unless_ended("the relay", stage.receiver.answer(), ended)
        arrived = answer["so_far"]
        if arrived * TENTHS // deliveries > told:
            told = arrived * TENTHS // deliveries
            times.append(answer["at"] / 1e9)
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
    """What a relay's maintenance does when everything was kept long enough.

    Raises:
        CannotRun: something keeps what was delivered.
    """
    await until(connection, SETTLED, relay)
    partitions = PartitionStore(connection)
    retention = RetentionStore(connection, Keep(0, 0, 0), period_s=0)
    before = [await connection.fetchval(DROPPED, kind) for kind in ("events", "log")]
    for _ in range(TURNS_MAX):
        await partitions.extend()
        await retention.tend()
        await partitions.drop()
        now = [await connection.fetchval(DROPPED, kind) for kind in ("events", "log")]
        if all(after > was for was, after in zip(before, now, strict=True)):
            break
        await asyncio.sleep(0.2)  # Whoever reads at the moment, or has a checkpoint to write.
    else:
        raise CannotRun(f"retention does not get on: {now} periods are dropped, as {before} were")
    await connection.execute("VACUUM")
    stage.say("million: retention is done")


async def _sizes(connection: Connection[Any]) -> dict[str, int]:
    return {row["name"]: row["bytes"] for row in await connection.fetch(SIZES)}


def _added_to(sizes: dict[str, int]) -> int:
    return sum(sizes[name] for name in ADDED_TO)


def _tell_tables(stage: Stage, *sizes: dict[str, int]) -> None:
    """Those that were large at any time: before, at the end, and after retention."""
    for name in sorted(set().union(*sizes), key=lambda name: -max(s.get(name, 0) for s in sizes)):
        told = " / ".join(f"{each.get(name, 0) / MB:,.2f}" for each in sizes)
        if max(each.get(name, 0) for each in sizes) > MB / 10:
            stage.say(f"million, {name}: {told} MB before, at the end, after retention")
