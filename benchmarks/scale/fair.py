"""A quiet endpoint beside others that use all available capacity, compared with it alone.

The others have a receiver in a separate process. A flood lasts from the first quiet event to the
last: its lanes have more pending deliveries than can be delivered meanwhile, and more are published
all the time, in small transactions, so that the relay is never idle. Slow and dead endpoints have
as many pending deliveries. All share the machine, the producer and PostgreSQL: the flood's use of
those is included in the figures. So a flood is also measured as that of another relay, on the same
machine and the same PostgreSQL: no fairness of a relay can avoid that cost.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any

from benchmarks.commits import MAKE_ACCOUNTS
from benchmarks.figures import Row, Samples, Target, percentile
from benchmarks.latency import NS_PER_MS, WARM_UP, produce
from benchmarks.stage import child, search, until
from outbox.core.model.endpoint_settings import EndpointSettings
from outbox.operations.endpoints import changes as endpoint_changes
from tests.support.ports import free_port
from tests.support.postgres import SCHEMA

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from asyncpg import Connection

    from benchmarks.stage import Stage
    from tests.support.postgres import Database
    from tests.support.process import RelayProcess

PER_S = 100
SECONDS, QUICK_SECONDS = 12.0, 1.0
LANES = 4
SHARES = {"p50": 0.5, "p99": 0.99}
UNHARMED = Target("at most", 2.0)
WAITING_PER_S, QUICK_WAITING_PER_S = 16_000, 500
"""Pending deliveries per measured second."""
FLOOD_PER_S, AT_ONCE = 1_000, 20
"""Events that are published meanwhile, and those of one transaction."""

FILL = """
INSERT INTO outbox (type, tenant, key, payload)
SELECT 'flood.n' || n % $2::int, $3, 'k' || n, jsonb_build_object('filler', repeat('x', 170))
  FROM generate_series(1, $1::int) n
"""
SEQUENCED = """
SELECT (SELECT max(id) FROM outbox) <= (SELECT high FROM batch ORDER BY batch DESC LIMIT 1)
"""


@dataclass(frozen=True, slots=True)
class Others:
    """The endpoints beside the quiet one."""

    name: str
    endpoints: int
    lanes: int
    tenant: str | None = None
    delay_s: float = 0.0
    dead: bool = False
    """Their URLs refuse connections."""
    floods: bool = False
    """Their receiver accepts deliveries as fast as they can be sent."""
    apart: bool = False
    """Another relay delivers to them, from another database of the same server."""


OURS, ALONE, APART = "beside others", "alone", "beside another relay's"
NO_OTHERS = Others("no others", 0, 0)
OTHERS = (
    Others("one endpoint with a flood", 1, 64, floods=True),
    Others("a tenant with a flood to 20 endpoints", 20, 16, tenant="flooding", floods=True),
    Others("20 endpoints that take 5 s", 20, 16, delay_s=5.0),
    Others("20 dead endpoints", 20, 16, dead=True),
)


async def measure(stage: Stage, rounds: int, *, quick: bool) -> list[Row]:
    """Run each kind of other endpoints, and none, alternately, round by round."""
    if quick:
        return await run(stage, rounds, QUICK_SECONDS, int(QUICK_WAITING_PER_S * QUICK_SECONDS))
    return await run(stage, rounds, SECONDS, int(WAITING_PER_S * SECONDS))


async def run(
    stage: Stage,
    rounds: int,
    seconds: float,
    flood: int,
    everybody: tuple[Others, ...] = OTHERS,
) -> list[Row]:
    """Run with other numbers."""
    rows: list[Row] = []
    for others in everybody:
        sides = {OURS: others, ALONE: NO_OTHERS}
        if others.floods:
            sides[APART] = replace(others, apart=True)
        found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
        turns = list(sides.items())
        for number in range(rounds):
            for name, side in turns:
                found[name].append(await _turn(stage, side, seconds, flood))
                described = ", ".join(f"{k} {v:.2f} ms" for k, v in found[name][-1].items())
                apart = " of another relay" if side.apart else ""
                stage.say(
                    f"fair, round {number + 1} of {rounds}, beside {side.name}{apart}: {described}"
                )
            turns.reverse()  # The order alternates.
        rows += [
            Row(
                "fair",
                f"beside {others.name}, {share}",
                "ms",
                Samples(tuple(each[share] for each in found[OURS])),
                name,
                Samples(tuple(each[share] for each in found[name])),
                target=UNHARMED,
            )
            for name in list(sides)[1:]
            for share in SHARES
        ]
    return rows


async def _turn(stage: Stage, others: Others, seconds: float, flood: int) -> dict[str, float]:
    async with AsyncExitStack() as stack:
        database = await stack.enter_async_context(stage.server.database())
        receiver = await stack.enter_async_context(child("receiver"))
        url = f"http://127.0.0.1:{(await receiver.response())['http']}/"
        receiver.send_command(expect=0, every=0, delay_s=others.delay_s, keep=False, distinct=False)
        connection = await stack.enter_async_context(search(database))
        await connection.execute(MAKE_ACCOUNTS)
        await _add(connection, "quiet", stage.urls["http"], "order.paid", LANES)
        theirs = database
        if others.apart:
            theirs = await stack.enter_async_context(stage.server.database())
            connection = await stack.enter_async_context(search(theirs))
        for n in range(others.endpoints):
            where = f"http://127.0.0.1:{free_port()}/" if others.dead else f"{url}?{n}"
            await _add(connection, f"n{n}", where, f"flood.n{n}", others.lanes, others.tenant)
        relay = await stack.enter_async_context(stage.relay(database))
        if others.apart:
            relay = await stack.enter_async_context(stage.relay(theirs))
        if others.endpoints:
            await stack.enter_async_context(_flooding(theirs, relay, others, flood))
        events = int(PER_S * seconds)
        stage.expect(events, keep=True)
        made = await produce(database, "event-alone", PER_S, events)
        arrived = (await stage.receiver.response())["arrived"]
    warm = [str(n) for n in range(int(events * WARM_UP), events)]
    latency_ms = [(arrived[n] - made["sent_at"][n]) / NS_PER_MS for n in warm]
    return {name: percentile(latency_ms, share) for name, share in SHARES.items()}


async def _add(
    connection: Connection[Any],
    name: str,
    url: str,
    type: str,  # noqa: A002
    lanes: int,
    tenant: str | None = None,
) -> None:
    settings = EndpointSettings(name=name, url=url, lanes=lanes, types=(type,), tenant=tenant)
    await endpoint_changes.add_endpoint(connection, SCHEMA, settings, actor="bench")


@asynccontextmanager
async def _flooding(
    database: Database, relay: RelayProcess, others: Others, flood: int
) -> AsyncIterator[None]:
    """Publish for the others, as long as the block lasts."""
    async with search(database) as connection:
        target_endpoints = (others.endpoints, others.tenant)
        await connection.execute(FILL, flood, *target_endpoints)
        await until(connection, SEQUENCED, relay)

        async def go_on() -> None:
            clock = asyncio.get_running_loop().time
            began_at = clock()
            for n in count():
                await asyncio.sleep(began_at + n * AT_ONCE / FLOOD_PER_S - clock())
                await connection.execute(FILL, AT_ONCE, *target_endpoints)

        filling = asyncio.create_task(go_on())
        try:
            yield
        finally:
            filling.cancel()
            await asyncio.wait([filling])
