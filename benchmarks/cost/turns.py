"""One turn of a system under a load: what each delivery cost.

The process that delivers has started and has delivered something before the measurement, and has a
second after the last request to write what is left. In a backlog the events of the relay are
committed when the measurement begins; the others have theirs in their tables. At a steady rate the
producers' transactions, each with a small domain write, are part of the cost.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from benchmarks.commits import MAKE_ACCOUNTS
from benchmarks.cost.meter import Meter
from benchmarks.deliveries import BACKLOG
from benchmarks.peers.contestants import ready
from benchmarks.peers.latency import FILLER_BYTES, FIRST, PUBLISH, PUBLISHED, produce
from benchmarks.peers.turns import unless_ended
from benchmarks.stage import add_endpoint, search
from outbox.errors import CannotRun

if TYPE_CHECKING:
    from benchmarks.cost.loads import Load
    from benchmarks.peers.contestants import Contestant
    from benchmarks.peers.counting import Counter
    from benchmarks.stage import Stage
    from tests.support.postgres import Database

SETTLE_S = 1.5
"""Completions are written in groups, of a quarter of a second at most."""
DELIVERED = "SELECT count(*) FROM attempt WHERE outcome = 'delivered'"


async def relay(
    stage: Stage, counting: Counter, load: Load, *, is_loaded: bool
) -> dict[str, float]:
    """Return the sums of a relay's turn.

    Args:
        is_loaded: Whether to run the load, and not only what is before it.

    Raises:
        CannotRun: It ended, or it did not finish.
    """
    async with stage.server.database() as database:
        async with search(database) as connection:
            for n in range(load.endpoints):
                await add_endpoint(connection, counting.url, lanes=load.lanes, name=f"n{n}")
        await _make_accounts(database)
        async with search(database) as connection:
            meter = Meter(connection)
            since = await meter.counters()
            counting.expect(FIRST * load.endpoints)
            async with stage.relay(database) as started:
                assert started.process is not None
                process = started.process
                async with search(database) as producer:
                    await producer.execute(BACKLOG, FIRST, FILLER_BYTES)
                await unless_ended("the relay", counting.per_s(), process.wait())
                if is_loaded and load.per_s is None:
                    async with search(database) as producer, producer.transaction():
                        await producer.execute(BACKLOG, load.events, FILLER_BYTES)
                        await meter.read(process.pid)
                        counting.expect(load.deliveries)
                elif is_loaded and load.per_s is not None:
                    await meter.read(process.pid)
                    counting.expect(load.deliveries)
                    await produce(
                        database, PUBLISH, PUBLISHED, per_s=load.per_s, events=load.events
                    )
                if is_loaded:
                    await unless_ended("the relay", counting.per_s(), process.wait())
                    await asyncio.sleep(SETTLE_S)
                    await meter.read(process.pid)
            delivered = await connection.fetchval(DELIVERED)
            if delivered < load.deliveries and is_loaded:
                raise CannotRun(f"the relay wrote {delivered} deliveries of {load.deliveries}")
            sums = await meter.sums(since)
            if is_loaded and load.per_s is None:
                sums["rows"] -= load.events  # Written before, and counted by the commit.
            return sums


async def peer(
    stage: Stage, counting: Counter, load: Load, contestant: Contestant, *, is_loaded: bool
) -> dict[str, float]:
    """Return the sums of a contestant's turn.

    Args:
        is_loaded: Whether to run the load, and not only what is before it.

    Raises:
        CannotRun: It is unavailable, it ended, or it did not finish.
    """
    is_backlog = load.per_s is None
    jobs, mode = (
        (deliveries_of(load, contestant), contestant.draining)
        if is_backlog
        else (FIRST, contestant.at_once)
    )
    async with (
        stage.server.database(migrated=False) as database,
        database.connection() as connection,
    ):
        await _make_accounts(database)
        meter = Meter(connection)
        since = await meter.counters()
        async with ready(contestant, database, counting.url, jobs=jobs, mode=mode) as working:

            async def everything() -> None:
                await unless_ended(contestant.title, counting.per_s(), working.process.ended())

            if not is_backlog:
                counting.expect(jobs)
                working.begin()
                await everything()
            if is_loaded:
                await meter.read(working.process.pid)
                counting.expect(deliveries_of(load, contestant))
                if load.per_s is None:
                    working.begin()
                else:
                    await produce(
                        database, working.statement, working.values,
                        per_s=load.per_s, events=load.events, copies=load.endpoints,
                    )  # fmt: skip
                await everything()
                await asyncio.sleep(SETTLE_S)
                await meter.read(working.process.pid)
        return await meter.sums(since)


def deliveries_of(load: Load, contestant: Contestant) -> int:
    """Return the number of deliveries; a slow contestant has a smaller backlog."""
    return load.deliveries if load.per_s else min(load.deliveries, contestant.jobs)


async def _make_accounts(database: Database) -> None:
    """Make what the producers update, by a connection that ends, so that its rows are counted."""
    async with database.connection() as connection:
        await connection.execute(MAKE_ACCOUNTS)
