"""Endpoints that begin at an earlier place: what feeding them costs the events of others.

The past is written without a relay: events, and the batches that sequenced them. The live events go
to another endpoint; their latency is defined as in `benchmarks.latency`. What is fed goes to a
receiver of its own.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Literal

from benchmarks.commits import MAKE_ACCOUNTS
from benchmarks.figures import Rounds, Row, Samples, Target, percentile
from benchmarks.latency import live, produce
from benchmarks.stage import add_endpoint, child, search, until
from outbox.core.model.endpoint_settings import EndpointSettings
from outbox.core.model.start import BEGINNING
from outbox.operations.endpoints import changes as endpoint_changes
from outbox.operations.endpoints import states as endpoint_states
from tests.support.postgres import SCHEMA

if TYPE_CHECKING:
    from asyncpg import Connection

    from benchmarks.stage import Stage
    from tests.support.postgres import Database

PAST, IDLE_PAST, QUICK_PAST = 10_000_000, 1_000_000, 60_000
PER_BATCH = 50
PER_S = 150
SECONDS, QUICK_SECONDS = 15.0, 4.0
LANES = 8
FEEDS = (1, 8)
FED_PER_S_MIN, IDLE_PER_S_MIN = 2_000, 30_000
ARRIVALS_PER_S, ARRIVAL_SECONDS = 2_000, 10.0
P50_TIMES_MAX = 1.1
P99_TIMES_MAX, P99_MORE_MS_MAX = 1.3, 2.0
"""The 99th percentile may be so many times, or so much, longer."""

INSERT_PAST = """
INSERT INTO outbox (type, key, payload)
SELECT 'past.event', 'k' || n % 500, jsonb_build_object('n', 'past' || n)
  FROM generate_series(1, $1::int) n
"""
# Timelines and lanes are those of a relay that has sequenced all of it.
INSERT_BATCHES = """
INSERT INTO batch (batch, high, events, at)
SELECT n, n * $2::bigint, $2, clock_timestamp() - interval '1 day'
  FROM generate_series(1, $1::bigint / $2) n
"""
FED = "SELECT coalesce(sum(fed), 0)::bigint FROM feed"
LIVE = """
SELECT count(*) > 3 FROM batch WHERE at > clock_timestamp() - interval '0.1 s' AND events > 0
"""
ARRIVED = "SELECT NOT EXISTS (SELECT FROM feed WHERE ended_at IS NULL)"


async def measure(stage: Stage, rounds: int, *, quick: bool) -> list[Row]:
    """Run everything, live events with and without feeds alternating."""
    past, idle_past = (QUICK_PAST, QUICK_PAST) if quick else (PAST, IDLE_PAST)
    seconds = QUICK_SECONDS if quick else SECONDS
    rows = []
    async with stage.server.database() as written:
        async with search(written) as db:
            await write_past(db, past)
        for feeds in FEEDS:
            rows += await beside(stage, written, rounds, seconds, feeds)
    idle, arrivals = Rounds(), Rounds()
    for number in range(rounds):
        idle.add("fed", await idle_rate(stage, idle_past))
        arrivals.add("seconds", await arrival(stage))
        stage.say(
            f"feeding, round {number + 1} of {rounds}: {idle.values['fed'][-1]:,.0f} per s while "
            f"nothing is live; arrived after {arrivals.values['seconds'][-1]:.1f} s"
        )
    rows += [
        _bounded("deliveries fed while nothing is live", "/s", idle.samples_of("fed"),
                 "at least", IDLE_PER_S_MIN),
        _bounded(f"arrival beside {ARRIVALS_PER_S:,} events/s", "s",
                 arrivals.samples_of("seconds"), "at most", ARRIVAL_SECONDS),
    ]  # fmt: skip
    return rows


def _bounded(
    name: str, unit: str, found: Samples, bound: Literal["at least", "at most"], value: float
) -> Row:
    """A figure with a bound of its own."""
    fixed = Samples((value,) * len(found.values))
    return Row(
        "feeding", name, unit, found, f"{bound} {value:,.0f}", fixed, target=Target(bound, 1.0)
    )


async def beside(
    stage: Stage, written: Database, rounds: int, seconds: float, feeds: int
) -> list[Row]:
    """Live events of one endpoint beside feeds of others, and without them.

    Args:
        written: a database with the past.
    """
    with_it, without, rate = Rounds(), Rounds(), Rounds()
    for number in range(rounds):
        async with (
            stage.server.database(template=written.name) as database,
            search(database) as db,
            child("receiver") as fed_receiver,
        ):
            url = f"http://127.0.0.1:{(await fed_receiver.response())['http']}/"
            await add_endpoint(db, stage.urls["http"], lanes=LANES, types=("order.**",))
            async with stage.relay(database) as relay:
                alone_ms = await live(stage, database, PER_S, seconds)
                async with asyncio.TaskGroup() as tasks:
                    running = tasks.create_task(live(stage, database, PER_S, seconds))
                    # Within the warm-up: before live events, feeds would take all there is.
                    await until(db, LIVE, relay)
                    await begin(db, url, feeds)
                    rate.add("fed", await fed_per_s(db, seconds / 2))
                beside_ms = running.result()
        for name, share in (("p50", 0.5), ("p99", 0.99)):
            with_it.add(name, percentile(beside_ms, share))
            without.add(name, percentile(alone_ms, share))
        alone_p99_ms = without.values["p99"][-1]
        without.add("bound", max(P99_TIMES_MAX * alone_p99_ms, alone_p99_ms + P99_MORE_MS_MAX))
        stage.say(
            f"feeding {feeds}, round {number + 1} of {rounds}: {rate.values['fed'][-1]:,.0f} per "
            f"s; p50 {with_it.values['p50'][-1]:.2f} ms beside it and "
            f"{without.values['p50'][-1]:.2f} ms without, p99 {with_it.values['p99'][-1]:.2f} "
            f"and {without.values['p99'][-1]:.2f} ms"
        )
    what = "a feed" if feeds == 1 else f"{feeds} feeds"
    return [
        *(
            Row(
                "feeding",
                f"{PER_S} live events/s beside {what}, {name}",
                "ms",
                with_it.samples_of(name),
                baseline_name,
                without.samples_of(baseline),
                target=Target("at most", times_max),
            )
            for name, baseline_name, baseline, times_max in (
                ("p50", "without a feed", "p50", P50_TIMES_MAX),
                (
                    "p99",
                    f"without a feed, {P99_TIMES_MAX:g} times or {P99_MORE_MS_MAX:g} ms more",
                    "bound",
                    1.0,
                ),
            )
        ),
        _bounded(
            f"deliveries fed by {what} meanwhile", "/s", rate.samples_of("fed"), "at least",
            FED_PER_S_MIN,
        ),
    ]  # fmt: skip


async def fed_per_s(db: Connection[Any], seconds: float) -> float:
    """Return the deliveries that are fed per second in the next seconds."""
    await asyncio.sleep(1)
    before, began_at = await db.fetchval(FED), time.monotonic()
    await asyncio.sleep(seconds)
    return float((await db.fetchval(FED) - before) / (time.monotonic() - began_at))


async def idle_rate(stage: Stage, past: int) -> float:
    """Return the deliveries that are fed per second to paused endpoints, up to their bound."""
    async with stage.server.database() as database, search(database) as db:
        await write_past(db, past)
        names = await begin(db, stage.urls["http"], max(FEEDS))
        await endpoint_states.pause_endpoints(db, SCHEMA, names, actor="bench")
        bound = max(FEEDS) * 10_000
        async with stage.relay(database) as relay:
            await until(db, f"SELECT ({FED}) > 1000", relay)
            before, began_at = await db.fetchval(FED), time.monotonic()
            await until(db, f"SELECT ({FED}) > {bound // 2}", relay)
            fed = await db.fetchval(FED) - before
            return float(fed / (time.monotonic() - began_at))


async def arrival(stage: Stage) -> float:
    """Return after how many seconds an endpoint subscribes, beside live events that match."""
    async with stage.server.database() as database, search(database) as db:
        await write_past(db, QUICK_PAST // 3)
        await add_endpoint(db, stage.urls["http"], lanes=LANES, types=("none",))
        stage.expect(0)
        async with stage.relay(database) as relay:
            began_at = time.monotonic()
            await begin(db, stage.urls["http"], 1, types=("**",))
            events = int(ARRIVALS_PER_S * ARRIVAL_SECONDS)
            await produce(database, "event", ARRIVALS_PER_S, events)
            await until(db, ARRIVED, relay)
            ended = "SELECT extract(epoch FROM max(ended_at) - max(began_at))::float8 FROM feed"
            took_s: float = await db.fetchval(ended)
            assert took_s < time.monotonic() - began_at + 1
            return took_s


async def write_past(db: Connection[Any], events: int) -> None:
    """Write events, and the batches that sequenced them."""
    await db.execute(MAKE_ACCOUNTS)
    await db.execute(INSERT_PAST, events)
    await db.execute(INSERT_BATCHES, events, PER_BATCH)
    # Otherwise the server would do both during the measurement.
    await db.execute("VACUUM (ANALYZE)")
    await db.execute("CHECKPOINT")


async def begin(
    db: Connection[Any], url: str, feeds: int, types: tuple[str, ...] = ("past.*",)
) -> list[str]:
    """Add endpoints that begin at the oldest event, and return their names."""
    names = [f"search-{n}" for n in range(feeds)]
    for name in names:
        settings = EndpointSettings(name=name, url=url, lanes=LANES, types=types)
        await endpoint_changes.add_endpoint(db, SCHEMA, settings, actor="bench", start=BEGINNING)
    return names
