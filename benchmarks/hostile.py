"""Live events to a good receiver, with hostile receivers, hostile clients and a flood of NOTIFY.

Every kind of `tests.support.hostile` is several endpoints: they drip, flood, hang, lie about
lengths, and send compression bombs. Every attack of `tests.support.brokers.hostile` is one. All of
them always have pending deliveries. At the same time the clients of `benchmarks.hostile_clients`
occupy the relay's listeners, and a role without any right floods its channels. Alternates with the
same relay without them, each in a database of its own. The hostile processes also take their share
of the machine: in a third kind of turn they attack another relay on the same cores.

The flood alone, with a backlog: deliveries per second, with and without it.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import cycle
from typing import TYPE_CHECKING

import aiohttp
import psutil

from benchmarks.commits import MAKE_ACCOUNTS
from benchmarks.deliveries import BACKLOG, FRAME_BYTES, Load
from benchmarks.figures import Rounds, Row, Target, percentile
from benchmarks.given import GivenServer
from benchmarks.hostile_clients import COSTLY_TOKEN, DRIP_TOKEN
from benchmarks.latency import NS_PER_MS, produce
from benchmarks.stage import add_endpoint, child, search
from outbox.errors import CannotRun
from tests.support.api import make_token
from tests.support.ports import free_port
from tests.support.roles import dsn_of, role

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from benchmarks.stage import Child, Stage
    from tests.support.postgres import Database
    from tests.support.process import RelayProcess


class Attacked(StrEnum):
    """Whom the attack is on, while live events are measured."""

    NOTHING = "alone"
    ITSELF = "attacked"
    ANOTHER = "another attacked"


@dataclass(frozen=True, slots=True)
class Attack:
    """The number of hostile receivers and clients, and the time of measurement."""

    receivers: int = 200
    clients: int = 600
    seconds: float = 30.0
    settle_s: float = 20.0
    """Longer than a time-out, so that the slowest requests have ended, too."""
    backlog: Load = Load("64 lanes", 64, 24_000)  # noqa: RUF009 (immutable)
    brokers: int = 1000
    """At most; every attack is one."""


FULL = Attack()
QUICK = replace(FULL, seconds=1.5, settle_s=1.0, backlog=replace(FULL.backlog, requests=6_000))
PER_S = 100
PENDING_PER_S = 40
"""Deliveries per second to the hostile receivers, in rotation."""
SAMPLE_S = 0.1
LANES = 8
MB = 1e6
PUBLISH = "INSERT INTO outbox (type, payload) VALUES ($1, '{}')"
FLAT = Target("at most", 1.1)
UNHARMED = Target("at most", 2.0)
FLOODED = Target("at least", 0.9)
COMPARED = {
    Attacked.NOTHING: "without them",
    Attacked.ANOTHER: "the same attack on another relay",
}
"""What the relay under attack is compared with."""
TURNS = (True, False, False, True)
"""Whether the backlog is delivered during a flood, by turn of a round."""


async def measure(stage: Stage, rounds: int, *, quick: bool) -> list[Row]:
    """Run with and without them alternately, round by round."""
    return await run(stage, rounds, QUICK if quick else FULL)


async def run(stage: Stage, rounds: int, attack: Attack) -> list[Row]:
    """Run with other numbers."""
    found = {attacked: Rounds() for attacked in Attacked}
    flooded, quiet = Rounds(), Rounds()
    for number in range(rounds):
        sides = list(Attacked)
        if number % 2:
            sides.reverse()  # The order alternates.
        for attacked in sides:
            turn = await _turn(stage, attack, attacked)
            for name, value in turn.items():
                found[attacked].add(name, value)
            described = ", ".join(f"{name} {value:.2f}" for name, value in turn.items())
            stage.say(f"hostile, round {number + 1} of {rounds}, {attacked}: {described}")
        took_s = {True: 0.0, False: 0.0}
        for is_flooded in TURNS:
            per_s = await _drain(stage, attack.backlog, is_flooded=is_flooded)
            took_s[is_flooded] += 2 / len(TURNS) / per_s
        flooded.add("backlog", 1 / took_s[True])
        quiet.add("backlog", 1 / took_s[False])
        stage.say(
            f"hostile, round {number + 1} of {rounds}, backlog: "
            f"{flooded.values['backlog'][-1]:,.0f}/s during a flood of NOTIFY, "
            f"{quiet.values['backlog'][-1]:,.0f}/s without"
        )
    several = f"{attack.receivers} receivers, the brokers, {attack.clients} clients, NOTIFY"

    beside = found[Attacked.ITSELF]

    def row(
        name: str,
        what: str,
        unit: str,
        target: Target | None = None,
        other: Attacked = Attacked.NOTHING,
    ) -> Row:
        ours, baseline = beside.samples_of(what), found[other].samples_of(what)
        return Row("hostile", name, unit, ours, COMPARED[other], baseline, target=target)

    return [
        row(f"p50 beside {several}", "p50", "ms", UNHARMED),
        row(f"p99 beside {several}", "p99", "ms", UNHARMED),
        row("p99 beside them", "p99", "ms", UNHARMED, Attacked.ANOTHER),
        row("/healthz beside them, p50", "healthz p50", "ms"),
        row("/healthz beside them, p99", "healthz p99", "ms"),
        row("memory beside them, peak", "MB peak", "MB"),
        Row(
            "hostile",
            "memory beside them, at the end",
            "MB",
            beside.samples_of("MB last"),
            "at the beginning",
            beside.samples_of("MB first"),
            target=FLAT,
        ),
        Row(
            "hostile",
            f"backlog, {attack.backlog.name}, during a flood of NOTIFY",
            "/s",
            flooded.samples_of("backlog"),
            "without the flood",
            quiet.samples_of("backlog"),
            target=FLOODED,
        ),
    ]


@dataclass(frozen=True, slots=True)
class _Installation:
    """A relay with its listeners, and its database."""

    database: Database
    relay: RelayProcess
    listeners: Mapping[str, str]


async def _turn(stage: Stage, attack: Attack, attacked: Attacked) -> dict[str, float]:
    async with child("hostility") as receivers, AsyncExitStack() as stack:
        given = await receivers.response()
        urls = [f"{url}?{n}" for n, url in zip(range(attack.receivers), cycle(given["urls"]))]
        urls += given["brokers"][: attack.brokers]
        live = target = await _install(stage, stack, urls if attacked is Attacked.ITSELF else ())
        if attacked is Attacked.ANOTHER:
            target = await _install(stage, stack, urls)
        clients: Child | None = None
        if attacked is not Attacked.NOTHING:
            await stack.enter_async_context(_hostile_load(target.database, len(urls)))
            clients = await _clients(stack, target.database, attack.clients, target.listeners)
            await stack.enter_async_context(_flood(stage, target.database))
        await asyncio.sleep(attack.settle_s)
        if clients is not None:
            await _counts(clients)  # From here on.
        found = await _load(stage, live, attack.seconds)
        receivers.send_command(how="many")
        counted = await receivers.response()
        found |= {"connections": counted["connections"], "open": counted["open"]}
        if clients is not None:
            stage.say(f"hostile clients, connections and responses: {await _counts(clients)}")
        return found


async def _install(stage: Stage, stack: AsyncExitStack, urls: Sequence[str]) -> _Installation:
    """Run a relay with a good endpoint, and hostile ones."""
    listeners = {
        f"OUTBOX_{name}": f"127.0.0.1:{free_port()}" for name in ("HEALTH", "ADMIN", "RECEIVERS")
    }
    database = await stack.enter_async_context(stage.server.database())
    async with search(database) as connection:
        await connection.execute(MAKE_ACCOUNTS)
        url = stage.urls["http"]
        await add_endpoint(connection, url, lanes=LANES, types=("order.paid",), name="good")
        for n, url in enumerate(urls):
            name, types = f"hostile-{n}", (f"hostile.n{n}",)
            # Only a server of RabbitMQ needs them to be attacking at all.
            given = "user:password" if url.startswith("rabbitmq") else None
            await add_endpoint(connection, url, name=name, types=types, credentials=given)
    opened = {"OUTBOX_ALLOW_NETWORKS": "127.0.0.0/8"}
    relay = await stack.enter_async_context(stage.relay(database, owns=True, **listeners, **opened))
    return _Installation(database, relay, listeners)


async def _clients(
    stack: AsyncExitStack, database: Database, count: int, listeners: Mapping[str, str]
) -> Child:
    """Start the hostile clients with two tokens of a tenant."""
    tokens = {
        name: await make_token(database, name, ("publish", "operate"), tenant="acme")
        for name in (DRIP_TOKEN, COSTLY_TOKEN)
    }
    words = {
        "count": count,
        "health": listeners["OUTBOX_HEALTH"],
        "api": listeners["OUTBOX_ADMIN"],
        "receivers": listeners["OUTBOX_RECEIVERS"],
    }
    clients = await stack.enter_async_context(
        child(
            "hostile_clients",
            *(word for name, value in words.items() for word in (f"--{name}", value)),
            env=tokens,
        )
    )
    await clients.response()
    return clients


async def _counts(clients: Child) -> dict[str, int]:
    clients.send_command(how="many")
    counts: dict[str, int] = await clients.response()
    return counts


@asynccontextmanager
async def _flood(stage: Stage, database: Database) -> AsyncIterator[None]:
    """Flood the relay's channels during the block, if possible as a role without any right."""
    async with AsyncExitStack() as stack:
        dsn = database.dsn
        if not isinstance(stage.server, GivenServer):
            dsn = dsn_of(database, await stack.enter_async_context(role(database)))
        flood = await stack.enter_async_context(child("notifying", dsn))
        await flood.response()
        yield


@asynccontextmanager
async def _hostile_load(database: Database, hostile: int) -> AsyncIterator[None]:
    """Publish to the hostile endpoints in rotation."""

    async def publish() -> None:
        async with search(database) as connection:
            for n in cycle(range(hostile)):
                await connection.execute(PUBLISH, f"hostile.n{n}")
                await asyncio.sleep(1 / PENDING_PER_S)

    publishing = asyncio.create_task(publish())
    try:
        yield
    finally:
        publishing.cancel()
        await asyncio.wait([publishing])


async def _load(stage: Stage, live: _Installation, seconds: float) -> dict[str, float]:
    """Return the latencies from COMMIT to the good receiver, and of `/healthz`, and the memory."""
    assert live.relay.process is not None
    process = psutil.Process(live.relay.process.pid)
    health = f"http://{live.listeners['OUTBOX_HEALTH']}/healthz"
    sizes: list[int] = []
    health_ms: list[float] = []

    async def sample() -> None:
        while True:
            sizes.append(process.memory_info().rss)
            await asyncio.sleep(SAMPLE_S)

    async def check_health() -> None:
        while True:
            began_at = time.perf_counter()
            # A connection of its own, as Kubernetes opens.
            async with aiohttp.ClientSession() as session, session.get(health) as response:
                if response.status != 200:
                    raise CannotRun(f"{health}: {response.status}")
            health_ms.append((time.perf_counter() - began_at) * 1000)
            await asyncio.sleep(SAMPLE_S)

    events = int(PER_S * seconds)
    stage.expect(events, keep=True)
    sampling = [asyncio.create_task(each()) for each in (sample, check_health)]
    try:
        made, reported = await asyncio.gather(
            produce(live.database, "event-alone", PER_S, events), stage.receiver.response()
        )
    finally:
        for each in sampling:
            each.cancel()
        ended = await asyncio.gather(*sampling, return_exceptions=True)
    for error in ended:
        if isinstance(error, Exception):
            raise CannotRun(f"{health} failed: {error!r}")
    arrived = reported["arrived"]
    # A duplicate counts as a request, and then the last deliveries have not been awaited.
    latency_ms = [
        (arrived[str(n)] - made["sent_at"][str(n)]) / NS_PER_MS
        for n in range(events // 10, events)
        if str(n) in arrived
    ]
    third = max(1, len(sizes) // 3)
    return {
        "p50": percentile(latency_ms, 0.5),
        "p99": percentile(latency_ms, 0.99),
        "healthz p50": percentile(health_ms, 0.5),
        "healthz p99": percentile(health_ms, 0.99),
        "MB first": max(sizes[:third]) / MB,
        "MB middle": max(sizes[third:-third] or sizes) / MB,
        "MB last": max(sizes[-third:]) / MB,
        "MB peak": max(sizes) / MB,
    }


async def _drain(stage: Stage, load: Load, *, is_flooded: bool) -> float:
    """Return deliveries per second of a backlog."""
    async with stage.server.database() as database, AsyncExitStack() as stack:
        async with search(database) as connection:
            await add_endpoint(connection, stage.urls[load.scheme], lanes=load.lanes)
            await connection.execute(BACKLOG, load.requests, load.payload_bytes - FRAME_BYTES)
        if is_flooded:
            await stack.enter_async_context(_flood(stage, database))
        stage.expect(load.requests)
        async with stage.relay(database):
            return float((await stage.receiver.response())["per_s"])
