"""Deliveries per second of a relay while clients list events at its API as fast as they may.

Each client has a token of its own and sends its next request when it has read the response, unless
that exceeds the token's rate. The clients are a process of their own. What they list has been
delivered before; the backlog that is measured is published when every client has had a response.
A relay beside a process that only computes, at the same priority, shows how much of that the
machine's processors cost, and how much the API.

An idle relay with and without the API: its imported modules, and the resident size of its process
and of the API's.
"""

from __future__ import annotations

import time
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from http import HTTPStatus
from typing import TYPE_CHECKING

import aiohttp
import psutil

from benchmarks.cpu import TICK_S, cpu_s, server_cpu_s
from benchmarks.deliveries import BACKLOG_OF_MANY, FRAME_BYTES, QUICK_SHARE, Load
from benchmarks.figures import Rounds, Row, Target
from benchmarks.stage import add_endpoints, child, search, until_true
from outbox.config import Settings
from tests.support.api import make_token
from tests.support.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.stage import Stage
    from tests.support.process import RelayProcess

LOAD = Load("4 endpoints of 4 lanes", 4, 40_000, endpoints=4)
LISTED = 1_000
CLIENTS = (4, 16)
COMPUTING = -1
"""Instead of a number of clients: no client, but a process that computes."""
TARGETS = {4: Target("at least", 0.9)}
"""Compared with a process that computes as much: its processor time is taken on any machine whose
cores are busy, whoever uses it."""
PER_S = float(Settings.model_fields["api_rate_max"].default)
"""Requests per second that a token may send."""
MB = 1e6
COUNTED = "BENCH_MODULES"
COUNT_MODULES = f"""
import atexit, os, pathlib, sys
counted = pathlib.Path(os.environ["{COUNTED}"]) / str(os.getpid())
atexit.register(lambda: counted.write_text(str(len(sys.modules))))
"""
"""A `sitecustomize` that writes the number of modules at the end of a process."""


async def measure(stage: Stage, rounds: int, *, quick: bool) -> list[Row]:
    """Run with each number of clients alternately, round by round."""
    requests = int(LOAD.requests * (QUICK_SHARE if quick else 1))
    return await run(stage, rounds, replace(LOAD, requests=requests), CLIENTS)


async def run(stage: Stage, rounds: int, load: Load, clients: Sequence[int]) -> list[Row]:
    """Run with other numbers."""
    found = {count: Rounds() for count in (0, COMPUTING, *clients)}
    idle = {is_served: Rounds() for is_served in (True, False)}
    for number in range(rounds):
        sides = list(found)
        if number % 2:
            sides.reverse()  # The order alternates.
        for count in sides:
            described = _add(found[count], await _drain(stage, load, count))
            beside = "computing" if count == COMPUTING else f"{count} clients"
            stage.say(f"api, round {number + 1} of {rounds}, {beside}: {described}")
        for is_served, samples in idle.items():
            described = _add(samples, await _idle(stage, is_served=is_served))
            served = "with" if is_served else "without"
            stage.say(f"api, round {number + 1} of {rounds}, idle {served} the API: {described}")
    computing = Row(
        "api",
        "deliveries, beside a process that computes",
        "/s",
        found[COMPUTING].samples_of("deliveries"),
        "without clients",
        found[0].samples_of("deliveries"),
    )
    shared = Row(
        "api",
        f"deliveries, {clients[0]} clients",
        "/s",
        found[clients[0]].samples_of("deliveries"),
        "beside a process that computes",
        found[COMPUTING].samples_of("deliveries"),
        target=TARGETS.get(clients[0]),
    )
    rows = [computing, *(row for count in clients for row in _rows(count, found)), shared]
    return rows + [
        Row(
            "api",
            f"{what}, idle relay that serves the API",
            unit,
            idle[True].samples_of(what),
            "one that does not",
            idle[False].samples_of(what),
        )
        for what, unit in (("modules", ""), ("memory", "MB"), ("memory of both processes", "MB"))
    ]


def _rows(count: int, found: dict[int, Rounds]) -> list[Row]:
    def row(what: str, unit: str) -> Row:
        ours, baseline = found[count].samples_of(what), found[0].samples_of(what)
        name = f"{what}, {count} clients"
        return Row("api", name, unit, ours, "without clients", baseline)

    return [
        row("deliveries", "/s"),
        row("CPU of the relay", "s"),
        row("CPU of PostgreSQL", "s"),
        replace(
            row("CPU of the API", "s"),
            baseline_name="CPU of the relay",
            baseline=found[count].samples_of("CPU of the relay"),
        ),
        replace(
            row("requests", "/s"),
            baseline_name="their rate limit",
            baseline=found[count].samples_of("limit"),
        ),
    ]


def _add(samples: Rounds, values: dict[str, float]) -> str:
    """Add the values of a turn, and return their description."""
    for name, value in values.items():
        samples.add(name, value)
    return ", ".join(f"{name} {value:,.2f}" for name, value in values.items())


async def _drain(stage: Stage, load: Load, count: int) -> dict[str, float]:
    """Drain a backlog beside clients; return rates, and CPU seconds for 1,000 deliveries."""
    async with AsyncExitStack() as stack:
        database = await stack.enter_async_context(stage.server.database())
        connection = await stack.enter_async_context(search(database))
        url, filler = stage.urls[load.scheme], load.payload_bytes - FRAME_BYTES
        await add_endpoints(connection, url, load.endpoints, lanes=load.lanes)
        admin = f"127.0.0.1:{free_port()}"
        relay = await stack.enter_async_context(stage.relay(database, OUTBOX_ADMIN=admin))
        await until_served(relay, admin)
        stage.expect(LISTED)
        await connection.execute(BACKLOG_OF_MANY, LISTED, filler, load.endpoints)
        await stage.receiver.response()
        await connection.execute("ANALYZE")
        name = "computing" if count == COMPUTING else "api_clients"
        clients = await stack.enter_async_context(child(name))
        tokens = [await make_token(database, f"client-{n}") for n in range(count)]
        clients.send_command(url=f"http://{admin}", tokens=tokens, per_s=PER_S)
        await clients.response()
        began_at = time.monotonic()
        stage.expect(load.requests)
        await connection.execute(BACKLOG_OF_MANY, load.requests, filler, load.endpoints)
        process = _process(relay)
        server = psutil.Process(await connection.fetchval("SELECT pg_backend_pid()")).parent()
        meters: dict[str, Callable[[], float]] = {
            "CPU of the relay": lambda: cpu_s([process]),
            "CPU of the API": lambda: cpu_s(process.children()),
            "CPU of PostgreSQL": lambda: server_cpu_s(server),
        }
        before = {name: spent() for name, spent in meters.items()}
        per_s = float((await stage.receiver.response())["per_s"])
        cpu = {
            name: max(spent() - before[name], TICK_S) / load.requests * 1000
            for name, spent in meters.items()
        }
        counts: dict[str, int] = {}
        if count != COMPUTING:
            clients.send_command(how="many")
            counts = await clients.response()
        if set(counts) - {"200"}:
            stage.say(f"api, {count} clients, responses: {counts}")
        rates = {
            "requests": counts.get("200", 0) / (time.monotonic() - began_at),
            "limit": len(tokens) * PER_S,
        }
        return {"deliveries": per_s} | cpu | rates


async def _idle(stage: Stage, *, is_served: bool) -> dict[str, float]:
    """Return the modules of an idle relay, and its memory in MB."""
    admin = f"127.0.0.1:{free_port()}"
    stage.write("sitecustomize.py", COUNT_MODULES)
    env = {"PYTHONPATH": str(stage.directory), COUNTED: str(stage.directory)}
    if is_served:
        env["OUTBOX_ADMIN"] = admin
    async with (
        stage.server.database() as database,
        stage.relay(database, owns=True, **env) as relay,
    ):
        if is_served:
            await until_served(relay, admin)
        process = _process(relay)
        family = [each.memory_info().rss / MB for each in (process, *process.children())]
        await relay.end()
    modules = int((stage.directory / str(process.pid)).read_text())
    return {"modules": modules, "memory": family[0], "memory of both processes": sum(family)}


async def until_served(relay: RelayProcess, admin: str) -> None:
    """Wait until the API responds."""

    async def responds() -> bool:
        with suppress(aiohttp.ClientError):
            async with aiohttp.ClientSession() as session, session.get(f"http://{admin}/") as got:
                return got.status == HTTPStatus.OK
        return False

    await until_true(responds, [relay])


def _process(relay: RelayProcess) -> psutil.Process:
    assert relay.process is not None
    return psutil.Process(relay.process.pid)
