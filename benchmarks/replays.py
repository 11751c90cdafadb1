"""Latency of live events during a large replay of dead letters, compared with no replay.

Both go to one endpoint, in the same lanes, so this is the worst case. An event's latency is defined
as in `benchmarks.latency`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.commits import MAKE_ACCOUNTS
from benchmarks.figures import Rounds, Row, Target, percentile
from benchmarks.latency import live
from benchmarks.stage import add_endpoint, search
from outbox.operations.criteria import DeadLetterSelection
from outbox.operations.dead_letters import replay as replays
from outbox.operations.replays import jobs as replay_jobs
from tests.support.postgres import SCHEMA

if TYPE_CHECKING:
    from benchmarks.stage import Stage

LETTERS, QUICK_LETTERS = 100_000, 10_000
PER_S = 100
SECONDS, QUICK_SECONDS = 15.0, 4.0
LANES = 8
SHARES = {"p50": 0.5, "p99": 0.99}
BESIDE = Target("at most", 2.0)

# Events that were dead-lettered long ago, written without a relay.
INSERT_DEAD_LETTERS = """
WITH events AS (
    INSERT INTO outbox (type, key, payload)
    SELECT 'order.paid', 'k' || n % 500, jsonb_build_object('n', 'dead' || n)
      FROM generate_series(1, $1::int) n RETURNING *)
INSERT INTO dead_letter (endpoint_id, lane_id, batch, seq, to_seq, outbox_id, event_id, type, key,
                         payload, published_at, reason, attempts)
SELECT l.endpoint_id, l.id, 0, -o.id, -o.id, o.id, o.event_id, o.type, o.key, o.payload,
       o.created_at, 'exhausted', 12
  FROM events o, (SELECT endpoint_id, min(id) AS id FROM lane GROUP BY endpoint_id) l
"""
PASSED = "UPDATE batch SET high = (SELECT max(id) FROM outbox) WHERE batch = 0"


async def measure(stage: Stage, rounds: int, *, quick: bool) -> list[Row]:
    """Run with and without a replay, alternating."""
    letters = QUICK_LETTERS if quick else LETTERS
    seconds = QUICK_SECONDS if quick else SECONDS
    with_it, without = Rounds(), Rounds()
    for number in range(rounds):
        async with stage.server.database() as database, search(database) as connection:
            await connection.execute(MAKE_ACCOUNTS)
            await add_endpoint(connection, stage.urls["http"], lanes=LANES)
            await connection.execute(INSERT_DEAD_LETTERS, letters)
            await connection.execute(PASSED)
            await connection.execute("ANALYZE")
            async with stage.relay(database):
                alone_ms = await live(stage, database, PER_S, seconds)
                asked = await replays.start_replay(
                    connection, SCHEMA, DeadLetterSelection(everything=True), actor="bench"
                )
                assert asked.job is not None
                beside_ms = await live(stage, database, PER_S, seconds)
                taken = (await replay_jobs.get_job(connection, SCHEMA, asked.job)).taken
        for name, share in SHARES.items():
            with_it.add(name, percentile(beside_ms, share))
            without.add(name, percentile(alone_ms, share))
        stage.say(
            f"replays, round {number + 1} of {rounds}: {taken:,} of {letters:,} sent again in "
            f"{seconds:g} s; p50 {with_it.values['p50'][-1]:.2f} ms beside them and "
            f"{without.values['p50'][-1]:.2f} ms without, p99 {with_it.values['p99'][-1]:.2f} "
            f"and {without.values['p99'][-1]:.2f} ms"
        )
    return [
        Row(
            "replays",
            f"{PER_S} live events/s, {name}",
            "ms",
            with_it.samples_of(name),
            "without a replay",
            without.samples_of(name),
            target=BESIDE,
        )
        for name in SHARES
    ]
