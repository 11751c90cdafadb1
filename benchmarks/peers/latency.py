"""Latency from COMMIT to the receiver at a thousand events per second, for the relay and its peers.

All have the same producer, with the enqueue statement of each client in a transaction with a domain
write, and the same receiver, the benchmark's own, because it records each arrival. There is no
backlog at the start: a contestant that cannot keep up builds one, which its latency shows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson

from benchmarks.commits import MAKE_ACCOUNTS
from benchmarks.deliveries import BACKLOG, FRAME_BYTES
from benchmarks.figures import Target, percentile
from benchmarks.latency import NS_PER_MS, WARM_UP
from benchmarks.peers.contestants import NUMBER, PAYLOAD_BYTES, ready
from benchmarks.peers.throughput import MANY
from benchmarks.peers.turns import Turns, unless_ended
from benchmarks.stage import add_endpoint, child, search

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from typing import Any

    from benchmarks.figures import Row
    from benchmarks.peers.contestants import Contestant
    from benchmarks.stage import Stage
    from tests.support.postgres import Database

PER_S = 1000
SHARES = {"p50": 0.5, "p99": 0.99}
TARGET = Target("at most", 1.0)
FIRST = 8
"""Events before the measurement, which prove that every contestant works."""
PUBLISH = """
INSERT INTO relay.outbox (type, key, payload) VALUES ('order.paid', $1::text, $2::text::jsonb)
"""
FILLER_BYTES = PAYLOAD_BYTES - FRAME_BYTES
PUBLISHED = [f"order-{NUMBER}", f'{{"n": {NUMBER}, "filler": "{"x" * FILLER_BYTES}"}}']
"""The values of `PUBLISH`."""
OURS = "outbox"


async def run(
    stage: Stage, rounds: int, contestants: Sequence[Contestant], seconds: float
) -> list[Row]:
    """Run all contestants alternately, round by round."""
    turns = Turns(stage, "peers-latency", "ms")

    def add(name: str, latency_ms: list[float]) -> None:
        for what, share in SHARES.items():
            turns.found.add(f"{name}, {what}", percentile(latency_ms, share))

    for number in range(rounds):
        add(OURS, await relay(stage, seconds))
        for each in turns.remaining(contestants):
            with turns.turn(each):
                add(each.name, await peer(stage, each, seconds))
        turns.print_round(number, rounds)
    return [
        turns.row(
            f"{PER_S:,} events/s, {what}",
            f"{OURS}, {what}",
            each.name,
            f"{each.name}, {what}",
            TARGET,
        )
        for each in contestants
        for what in SHARES
    ]


async def relay(stage: Stage, seconds: float) -> list[float]:
    """Return for every event the milliseconds to the receiver."""
    async with stage.server.database() as database:
        async with search(database) as connection:
            await add_endpoint(connection, stage.urls["http"], lanes=MANY)
            await connection.execute(BACKLOG, FIRST, FILLER_BYTES)
        stage.expect(FIRST)
        async with stage.relay(database) as started:
            process = started.process
            assert process is not None
            return await _latency_ms(
                stage,
                database,
                (PUBLISH, PUBLISHED),
                lambda: unless_ended("the relay", stage.receiver.response(), process.wait()),
                seconds,
            )


async def peer(stage: Stage, contestant: Contestant, seconds: float) -> list[float]:
    """Return for every job the milliseconds to the receiver.

    Raises:
        CannotRun: It is unavailable, it ended, or it did not finish.
    """
    url, mode = stage.urls["http"], contestant.at_once
    async with (
        stage.server.database(migrated=False) as database,
        ready(contestant, database, url, jobs=FIRST, mode=mode) as working,
    ):
        stage.expect(FIRST)
        working.begin()
        return await _latency_ms(
            stage,
            database,
            (working.statement, working.values),
            lambda: unless_ended(
                contestant.title, stage.receiver.response(), working.process.ended()
            ),
            seconds,
        )


async def _latency_ms(
    stage: Stage,
    database: Database,
    enqueue: tuple[str, list[Any]],
    everything: Callable[[], Awaitable[Any]],
    seconds: float,
) -> list[float]:
    """Enqueue after the first arrivals, and wait for all."""
    async with database.connection() as connection:
        await connection.execute(MAKE_ACCOUNTS)
    await everything()
    events = int(PER_S * seconds)
    stage.expect(events, keep=True)
    sent_at = (await produce(database, *enqueue, per_s=PER_S, events=events))["sent_at"]
    arrived = (await everything())["arrived"]
    counted = map(str, range(int(events * WARM_UP), events))
    return [(arrived[n] - sent_at[n]) / NS_PER_MS for n in counted if n in arrived]


async def produce(
    database: Database,
    statement: str,
    values: list[Any],
    *,
    per_s: int,
    events: int,
    copies: int = 1,
) -> dict[str, Any]:
    """Run a producer, and return what it reports.

    Args:
        copies: How often each transaction runs the statement.
    """
    asked = {
        "dsn": database.dsn,
        "statement": statement,
        "values": values,
        "number": NUMBER,
        "per_s": per_s,
        "events": events,
        "copies": copies,
    }
    async with child("peers.enqueuing", orjson.dumps(asked).decode()) as producer:
        await producer.response()
        producer.send_command(begin=True)
        made: dict[str, Any] = await producer.response()
        return made
