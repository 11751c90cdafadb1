"""A backlog that was written before the relay started, worked off completely."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.cpu import Meter
from benchmarks.figures import Rounds
from benchmarks.scale.costs import add, costs
from benchmarks.stage import add_endpoint, search, until

if TYPE_CHECKING:
    from asyncpg import Connection

    from benchmarks.cpu import Cost
    from benchmarks.figures import Row, Target
    from benchmarks.stage import Stage

LANES = 64
SEEDED_AT_ONCE = 100_000
POLL_EVERY_S = 1.0
WAIT_S = 3600.0

SEED = """
INSERT INTO outbox (type, key, payload)
SELECT 'order.paid', 'k' || n, jsonb_build_object('n', n, 'filler', repeat('x', 170))
  FROM generate_series($1::int, $2::int - 1) n
"""
# According to the written acknowledgements, which are at most a second late.
WRITTEN = """
SELECT (SELECT sum(acked_seq) FROM lane_progress) >= (SELECT max(id) FROM outbox)
"""


async def run(
    stage: Stage, rounds: int, large: int, small: int, *, target: Target | None
) -> list[Row]:
    """Compare the CPU time per delivery of a large backlog with that of a small one."""
    found = {large: Rounds(), small: Rounds()}
    for number in range(rounds):
        for events in (small, large):
            cost = await _work_off(stage, events)
            described = add(found[events], cost)
            stage.say(
                f"scale, round {number + 1} of {rounds}, a backlog of {events:,}: {described} "
                "CPU s per 1,000 deliveries"
            )
    baseline = (f"of {small:,}", found[small])
    return costs(f"a backlog of {large:,}", found[large], *baseline, target)


async def _work_off(stage: Stage, events: int) -> Cost:
    async with stage.server.database() as database, search(database) as connection:
        await add_endpoint(connection, stage.urls["http"], lanes=LANES)
        await seed(connection, events)
        stage.expect(0)
        async with stage.relay(database) as relay:
            meter = await Meter.start([relay], connection)
            await until(connection, WRITTEN, relay, POLL_EVERY_S, timeout_s=WAIT_S)
            return meter.cost(events)


async def seed(connection: Connection[Any], events: int) -> None:
    """Write the events in groups."""
    for first in range(0, events, SEEDED_AT_ONCE):
        last = min(first + SEEDED_AT_ONCE, events)
        await connection.execute(SEED, first, last, timeout=600)
    await connection.execute("ANALYZE", timeout=600)
