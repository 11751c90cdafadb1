"""Deliveries per second of one relay process, compared with the bare aiohttp client.

Both send the same POSTs (body bytes, number of headers, concurrency) to the same receiver, from one
process each, and the receiver measures the time. The relay drains events that were committed before
it started: it sequences them, reads them, signs them, sends them, and writes every attempt.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from benchmarks.figures import Rounds, Row, Target
from benchmarks.stage import add_endpoints, child, search

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from benchmarks.stage import Stage
    from outbox.core.model.message_format import FormatName
    from tests.support.postgres import Database

# Every event has its own key, so that lanes are about equally long.
BACKLOG = """
INSERT INTO outbox (type, key, payload)
SELECT 'order.paid', 'order-' || n,
       jsonb_build_object('n', n, 'filler', repeat('x', $2))
  FROM generate_series(1, $1) AS n
"""
# The same for each of several endpoints, see `add_endpoints`.
BACKLOG_OF_MANY = BACKLOG.replace("'order.paid'", "'order.n' || n % $3")
FRAME_BYTES = len('{"n": 12345, "filler": ""}')


@dataclass(frozen=True, slots=True)
class Load:
    """The load: what is sent, and over how many lanes."""

    name: str
    lanes: int
    """Of each endpoint."""
    requests: int
    payload_bytes: int = 200
    scheme: str = "http"
    delay_s: float = 0.0
    batch_max: int | None = None
    """Deliveries per request; the bare client sends the same number of bodies individually."""
    format_name: FormatName = "envelope"
    endpoints: int = 1
    """Each gets its share of the events."""
    distinct: bool = False
    """Whether each response has an X-Request-Id of its own, which the relay stores."""
    target: Target | None = None


# Some seconds each, because the first one is start-up: of the process, its lanes and its share of
# the capacity.
LOADS = (
    Load("1 lane", 1, 20_000),
    Load("8 lanes", 8, 40_000),
    Load("64 lanes", 64, 60_000, target=Target("at least", 1.4)),
    Load("64 lanes, TLS", 64, 40_000, scheme="https"),
    Load("64 lanes, payloads of 4 KiB", 64, 40_000, payload_bytes=4096),
    Load("16 endpoints of 4 lanes", 4, 60_000, endpoints=16),
    Load("64 lanes, distinct responses", 64, 60_000, distinct=True),
    Load("64 lanes, receiver takes 20 ms", 64, 12_000, delay_s=0.02),
    Load("64 lanes, batches of 50", 64, 80_000, batch_max=50),
    Load("1 lane, batches of 50", 1, 40_000, batch_max=50),
)
QUICK_SHARE = 0.1


async def measure(stage: Stage, rounds: int, *, quick: bool) -> list[Row]:
    """Run every load alternately, round by round."""
    loads = [load for load in LOADS if load.scheme in stage.urls]
    if quick:
        loads = [replace(load, requests=int(load.requests * QUICK_SHARE)) for load in loads]
    return await run(stage, rounds, loads)


async def run(stage: Stage, rounds: int, loads: Iterable[Load]) -> list[Row]:
    """Run with other numbers."""
    loads = list(loads)
    ours, bare = Rounds(), Rounds()
    for number in range(rounds):
        for load in loads:
            ours.add(load.name, await relay(stage, load))
            bare.add(load.name, await client(stage, load))
            stage.say(
                f"deliveries, {load.name}, round {number + 1} of {rounds}: "
                f"relay {ours.values[load.name][-1]:,.0f}/s, "
                f"bare aiohttp {bare.values[load.name][-1]:,.0f}/s"
            )
    return [
        Row(
            "deliveries",
            load.name,
            "/s",
            ours.samples_of(load.name),
            "bare aiohttp client",
            bare.samples_of(load.name),
            target=load.target,
        )
        for load in loads
    ]


async def relay(
    stage: Stage,
    load: Load,
    prepare: Callable[[Database], Awaitable[dict[str, str]]] | None = None,
) -> float:
    """Return the relay's deliveries per second.

    Args:
        prepare: Further preparation before the relay starts; returns its environment.
    """
    async with stage.server.database() as database:
        async with search(database) as connection:
            url, filler = stage.urls[load.scheme], max(load.payload_bytes - FRAME_BYTES, 0)
            await add_endpoints(
                connection,
                url,
                load.endpoints,
                lanes=load.lanes,
                batch_max=load.batch_max,
                format_name=load.format_name,
            )
            await connection.execute(BACKLOG_OF_MANY, load.requests, filler, load.endpoints)
        env = {} if prepare is None else await prepare(database)
        stage.expect(load.requests, delay_s=load.delay_s, distinct=load.distinct)
        async with stage.relay(database, owns=True, **env):
            return float((await stage.receiver.response())["per_s"])


async def client(stage: Stage, load: Load) -> float:
    """Return the bare client's requests per second."""
    stage.expect(load.requests, delay_s=load.delay_s, distinct=load.distinct)
    async with child(
        "client",
        stage.urls[load.scheme],
        *("--requests", load.requests),
        *("--concurrency", load.lanes * load.endpoints),
        *("--payload-bytes", load.payload_bytes),
        env=stage.trusting(),
    ):
        return float((await stage.receiver.response())["per_s"])
