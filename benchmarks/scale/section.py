"""CPU time per delivery with a lot of data, compared with little data.

Each *site* is a database with a relay that runs all the time; the loads of a comparison alternate,
so that both are measured within seconds. CPU seconds are those of the relay and of the PostgreSQL
backends that serve it, from the first event until all deliveries are written.

Idle objects must cost nothing: endpoints and lanes without events are compared with ten that have
some, under a steady load, where periodic work weighs most. Active objects must not cost more per
delivery: all of them get events at once.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import psutil

from benchmarks.cpu import Meter
from benchmarks.figures import Rounds, Row, Samples, Target
from benchmarks.scale import backlog
from benchmarks.scale.costs import add, costs
from benchmarks.scale.crowd import TO_ALL, Crowd, write
from benchmarks.stage import search, until

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from asyncpg import Connection

    from benchmarks.cpu import Cost
    from benchmarks.stage import Stage
    from tests.support.postgres import Database
    from tests.support.process import RelayProcess

GROWTH = Target("at most", 1.33)
MEMORY = Target("under", 250.0)
MB = 1e6

# Types rotate over the first $3 endpoints, or are the one that all get; keys rotate, too.
PUBLISH = """
INSERT INTO outbox (type, key, payload)
SELECT coalesce($5, 'order.n' || n % $3::int), 'k' || n % $4::int,
       jsonb_build_object('n', n, 'filler', repeat('x', $6::int))
  FROM generate_series($1::int, $2::int - 1) AS n
"""
ALL_KEYS = 1 << 30
"""Each event has its own key."""
# The time at which the owner wrote the delivery, which is its last step.
WRITTEN = """
SELECT (SELECT coalesce(sum(acked_seq), 0) FROM lane_progress)
       >= (SELECT coalesce(sum(last_seq), 0) FROM lane_counter)
       AND (SELECT coalesce(max(id), 0) FROM outbox)
           <= (SELECT high FROM batch ORDER BY batch DESC LIMIT 1)
"""
POLL_EVERY_S = 0.2


@dataclass(frozen=True, slots=True)
class Load:
    """What is published, and how it is delivered."""

    events: int
    among: int = 1
    """The number of endpoints, in rotation."""
    keys: int = 1
    fan_out: int = 1
    """Above 1: every endpoint gets each event."""
    per_s: float | None = None
    """The rate; None: all events at once."""
    payload_bytes: int = 200
    delay_s: float = 0.0
    """The delay of the receiver in seconds."""

    @property
    def deliveries(self) -> int:
        return self.events * self.fan_out


@dataclass(frozen=True, slots=True)
class Side:
    """A load on a site."""

    name: str
    site: str
    load: Load


@dataclass(frozen=True, slots=True)
class Comparison:
    """A side, and the one that it is compared with."""

    ours: Side
    baseline: Side
    target: Target | None = GROWTH


@dataclass(frozen=True, slots=True)
class Plan:
    """All measurements."""

    sites: Mapping[str, Crowd]
    """The memory of the others is compared with that of the first."""
    comparisons: tuple[Comparison, ...]
    backlogs: tuple[int, int]
    """A large backlog, and the one that it is compared with."""


def plan(
    endpoints: int = 10_000,
    lanes: Crowd = Crowd(100, 1000),  # noqa: B008 (frozen)
    few: int = 10,
    few_lanes: int = 64,
    deliveries: int = 20_000,
    seconds: float = 8.0,
    backlogs: tuple[int, int] = (1_000_000, 100_000),
    payloads: Iterable[tuple[int, int]] = ((4 << 10, 4_000), (64 << 10, 1_000), (255 << 10, 300)),
    delays: Iterable[tuple[float, int]] = ((0.1, 4_000), (1.0, 320), (5.0, 128)),
) -> Plan:
    """Return the plan; with smaller numbers it is quick.

    Args:
        payloads, delays: Each with its number of deliveries.
    """
    steady = Load(int(500 * seconds), among=few, keys=few_lanes, per_s=500)
    to_one = replace(steady, among=1)
    burst = Load(deliveries, among=few, keys=few_lanes)
    to_lanes = max(deliveries, lanes.lanes_total)
    base = Load(min(deliveries, 4_000), keys=few_lanes, payload_bytes=100)
    quick = replace(base, delay_s=0.001)
    lanes_text = f"{lanes.lanes_total:,} lanes"
    of_few = Side(f"{few} endpoints", "few", burst)
    of_one = Side("of 100 B", "one", base)
    comparisons = [
        Comparison(
            Side(f"{few} of {endpoints:,} endpoints get something", "endpoints", steady),
            replace(of_few, load=steady),
        ),
        Comparison(
            Side(
                f"all of {endpoints:,} endpoints do", "endpoints", replace(burst, among=endpoints)
            ),
            of_few,
        ),
        Comparison(
            Side(f"{few_lanes} of {lanes_text} get something", "lanes", to_one),
            Side(f"{few_lanes} lanes", "one", to_one),
        ),
        Comparison(
            Side(
                f"all of {lanes_text} do",
                "lanes",
                Load(to_lanes, among=lanes.endpoints, keys=ALL_KEYS),
            ),
            Side(f"{few_lanes} lanes", "one", Load(to_lanes, keys=ALL_KEYS)),
        ),
        Comparison(
            Side(
                f"one event to {endpoints:,} endpoints",
                "endpoints",
                Load(max(deliveries // endpoints, 1), fan_out=endpoints),
            ),
            Side(f"to {few}", "few", Load(deliveries // few, fan_out=few)),
        ),
        Comparison(
            Side("1,000 keys of one endpoint", "one", Load(deliveries, keys=1000)),
            Side("10 keys", "one", Load(deliveries, keys=10)),
        ),
    ]
    comparisons += [
        Comparison(
            Side(
                f"payloads of {size >> 10} KiB",
                "one",
                replace(base, payload_bytes=size, events=number),
            ),
            of_one,
            target=None,
        )
        for size, number in payloads
    ]
    comparisons += [
        Comparison(
            Side(
                f"a receiver that takes {delay_s:g} s",
                "one",
                replace(quick, delay_s=delay_s, events=number),
            ),
            Side("1 ms", "one", quick),
            target=None,
        )
        for delay_s, number in delays
    ]
    sites = {
        "few": Crowd(few),
        "one": Crowd(1, few_lanes),
        "endpoints": Crowd(endpoints),
        "lanes": lanes,
    }
    return Plan(sites, tuple(comparisons), backlogs)


FULL = plan()
QUICK = plan(
    endpoints=300,
    lanes=Crowd(10, 50),
    few=5,
    few_lanes=8,
    deliveries=600,
    seconds=1.0,
    backlogs=(2_000, 500),
    payloads=((64 << 10, 50),),
    delays=((0.1, 50),),
)


async def measure(stage: Stage, rounds: int, *, quick: bool) -> list[Row]:
    """Run every comparison alternately, round by round; then the backlogs."""
    return await run(stage, rounds, QUICK if quick else FULL)


async def run(stage: Stage, rounds: int, plan: Plan) -> list[Row]:
    """Run with other numbers."""
    rows: list[Row] = []
    async with AsyncExitStack() as stack:
        sites = {
            name: await Site.open(stack, stage, name, crowd) for name, crowd in plan.sites.items()
        }
        rows += _of_existing(sites, plan)
        for each in plan.comparisons:
            rows += await _compare(stage, rounds, sites, each)
    return rows + await backlog.run(stage, rounds, *plan.backlogs, target=GROWTH)


class Site:
    """A database with a crowd, and a running relay."""

    def __init__(self, connection: Connection[Any], relay: RelayProcess, crowd: Crowd) -> None:
        self._connection = connection
        self._relay = relay
        self._published = 0
        self.crowd = crowd
        self.started_s = self.rss_mb = 0.0
        """Seconds from the relay's start to its first delivery with all endpoints acquired; and its
        resident size then.
        """

    @classmethod
    async def open(cls, stack: AsyncExitStack, stage: Stage, name: str, crowd: Crowd) -> Site:
        """Open the site until the stack is closed."""
        database: Database = await stack.enter_async_context(stage.server.database())
        connection = await stack.enter_async_context(search(database))
        await write(connection, stage.urls["http"], crowd)
        began_at = time.monotonic()
        relay = await stack.enter_async_context(stage.relay(database))
        site = cls(connection, relay, crowd)
        await site.run_load(stage, Load(20))
        site.started_s = time.monotonic() - began_at
        site.rss_mb = site._rss_mb()
        stage.say(
            f"scale, {name}: {crowd.endpoints:,} endpoints, {crowd.lanes_total:,} lanes, at work "
            f"after {site.started_s:.1f} s with {site.rss_mb:.0f} MB"
        )
        return site

    async def run_load(self, stage: Stage, load: Load) -> Cost:
        """Run one load and return its cost."""
        connection = self._connection
        meter = await Meter.start([self._relay], connection)
        stage.expect(load.deliveries, delay_s=load.delay_s)
        await self._publish(load)
        await stage.receiver.response()
        await until(connection, WRITTEN, self._relay, POLL_EVERY_S)
        return meter.cost(load.deliveries)

    async def _publish(self, load: Load) -> None:
        to_all = TO_ALL if load.fan_out > 1 else None
        rest = (load.among, load.keys, to_all, max(load.payload_bytes - 26, 0))
        first, self._published = self._published, self._published + load.events
        if load.per_s is None:
            await self._connection.execute(PUBLISH, first, self._published, *rest, timeout=600)
            return
        clock = asyncio.get_running_loop().time
        began_at = clock()
        for n in range(load.events):
            await asyncio.sleep(began_at + n / load.per_s - clock())
            await self._connection.execute(PUBLISH, first + n, first + n + 1, *rest)

    def _rss_mb(self) -> float:
        assert self._relay.process is not None
        return float(psutil.Process(self._relay.process.pid).memory_info().rss / MB)


async def _compare(
    stage: Stage, rounds: int, sites: Mapping[str, Site], each: Comparison
) -> list[Row]:
    ours, baseline = Rounds(), Rounds()
    turns = [(ours, each.ours), (baseline, each.baseline)]
    for number in range(rounds):
        for found, side in turns:
            described = add(found, await sites[side.site].run_load(stage, side.load))
            stage.say(
                f"scale, round {number + 1} of {rounds}, {side.name}: {described} "
                "CPU s per 1,000 deliveries"
            )
        turns.reverse()  # The order alternates.
    return costs(each.ours.name, ours, each.baseline.name, baseline, each.target)


def _of_existing(sites: Mapping[str, Site], plan: Plan) -> list[Row]:
    """Compare crowds that get nothing."""
    first = sites[next(iter(plan.sites))]
    return [
        row
        for name in ("endpoints", "lanes")
        for site in [sites[name]]
        for many in [f"{getattr(site.crowd, 'lanes_total' if name == 'lanes' else name):,} {name}"]
        for row in (
            Row(
                "scale",
                f"memory, {many}",
                "MB",
                Samples((site.rss_mb,)),
                f"{first.crowd.endpoints} endpoints",
                Samples((first.rss_mb,)),
                relation="difference",
                target=MEMORY,
            ),
            Row(
                "scale",
                f"from the start until it delivers, {many}",
                "s",
                Samples((site.started_s,)),
                f"{first.crowd.endpoints} endpoints",
                Samples((first.started_s,)),
            ),
        )
    ]
