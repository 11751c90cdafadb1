"""Failover: the time from kill -9 of a relay to the first delivery by its successor.

Three relays share thirty endpoints. One is killed at a random moment, and at that moment every
endpoint gets an event. The time ends when the first, and when the last, of the killed relay's
endpoints is delivered to. It is given in leases, because no other relay may take over before the
lease has expired.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from benchmarks.figures import Row, Samples, Target
from benchmarks.stage import add_endpoints, search, until_true

if TYPE_CHECKING:
    from asyncpg import Connection

    from benchmarks.stage import Stage
    from tests.support.process import RelayProcess

RELAYS = 3
ENDPOINTS = 30
LEASE_S = 2.0
KILLS, QUICK_KILLS = 20, 2
TARGET = Target("at most", 1.5)

PUBLISH = """
INSERT INTO outbox (type, payload) SELECT 'order.n' || n, '{}' FROM generate_series(0, $1 - 1) n
"""
OWNED = """
SELECT l.id AS lane_id, c.last_seq
  FROM replica r JOIN ownership o ON o.replica_id = r.id
  JOIN lane l USING (endpoint_id) JOIN lane_counter c ON c.lane_id = l.id
 WHERE r.name LIKE '%:' || $1
"""
# By the database's clock, which relays use for all timestamps.
DELIVERED = """
SELECT extract(epoch FROM min(a.started_at) + min(a.elapsed_ms) * interval '1 millisecond')
           ::float8 AS first_at,
       extract(epoch FROM max(a.started_at + a.elapsed_ms * interval '1 millisecond'))
           ::float8 AS last_at
  FROM unnest($1::bigint[], $2::bigint[]) AS lane(id, last_seq)
  JOIN attempt a ON a.lane_id = lane.id AND a.seq = lane.last_seq + 1 AND a.outcome = 'delivered'
HAVING count(DISTINCT lane.id) = cardinality($1)
"""


async def measure(stage: Stage, _rounds: int, *, quick: bool) -> list[Row]:
    """Run a sufficient number of kills, regardless of the rounds."""
    return await run(stage, QUICK_KILLS if quick else KILLS)


async def run(stage: Stage, kills: int) -> list[Row]:
    """Run with another number of kills."""
    first_s: list[float] = []
    last_s: list[float] = []
    rng = random.Random()
    async with AsyncExitStack() as stack:
        database = await stack.enter_async_context(stage.server.database())
        connection = await stack.enter_async_context(search(database))
        await add_endpoints(connection, stage.urls["http"], ENDPOINTS)
        stage.expect(0)
        relays = [
            await stack.enter_async_context(
                stage.relay(database, owns=False, OUTBOX_LEASE_S=f"{LEASE_S:g}")
            )
            for _ in range(RELAYS)
        ]
        for number in range(kills):
            await stage.until_shared_out(connection, relays)
            # At any time between two renewals.
            await asyncio.sleep(rng.uniform(0, LEASE_S))
            first, last = await _kill(connection, rng.choice(relays), relays)
            first_s.append(first)
            last_s.append(last)
            stage.say(
                f"failover, kill {number + 1} of {kills}: "
                f"first {first / LEASE_S:.2f}, all {last / LEASE_S:.2f} leases"
            )
    found = {
        "first delivery, median": first_s,
        "first delivery, longest": [max(first_s)],
        "all lanes, median": last_s,
        "all lanes, longest": [max(last_s)],
    }
    return [
        Row(
            "failover",
            name,
            "s",
            Samples(tuple(values)),
            "the lease",
            Samples((LEASE_S,) * len(values)),
            target=TARGET,
        )
        for name, values in found.items()
    ]


async def _kill(
    connection: Connection[Any], victim: RelayProcess, relays: list[RelayProcess]
) -> tuple[float, float]:
    """Kill it, return the seconds to its first and last lane's delivery, and restart it."""
    assert victim.process is not None
    lanes = await connection.fetch(OWNED, str(victim.process.pid))
    victim.process.send_signal(signal.SIGKILL)
    killed_at = time.time()
    await connection.execute(PUBLISH, ENDPOINTS)
    others = [relay for relay in relays if relay is not victim]
    found: list[Any] = []

    async def delivered() -> bool:
        found[:] = await connection.fetch(
            DELIVERED, [r["lane_id"] for r in lanes], [r["last_seq"] for r in lanes]
        )
        return bool(found)

    await until_true(delivered, others)
    await victim.end(signal.SIGKILL)
    await victim.start()
    return found[0]["first_at"] - killed_at, found[0]["last_at"] - killed_at
