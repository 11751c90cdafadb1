"""Messages per second into brokers, compared with a bare loop of the client library.

Both append in the same safe form to the same server: each append names the message before it. The
relay drains events that were committed before it started, and logs every delivery.
"""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from benchmarks.deliveries import BACKLOG, FRAME_BYTES
from benchmarks.figures import Rounds, Row, Target
from benchmarks.stage import add_endpoint, child, search, until_true
from tests.support.brokers.nats import nats_server
from tests.support.brokers.valkey import valkey

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from benchmarks.stage import Stage
    from tests.support.process import RelayProcess

PAYLOAD_BYTES = 200
STARTED_SHARE = 0.05
"""Of the messages, before the measurement begins."""
POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Load:
    """What is appended."""

    name: str
    broker: str
    lanes: int
    messages: int
    together: int
    """Messages in one append of the bare loop."""
    target: Target | None = None


QUICK_SHARE = 0.2
LOADS = (
    Load("Valkey, 64 lanes", "valkey", 64, 60_000, 100, Target("at least", 0.4)),
    Load("Valkey, 1 lane", "valkey", 1, 40_000, 100, Target("at least", 0.4)),
    Load("NATS, 64 lanes", "nats", 64, 20_000, 1, Target("at least", 0.4)),
)


@dataclass(frozen=True, slots=True)
class Server:
    """A broker under load."""

    url: str
    stored: Callable[[], Awaitable[int]]
    """How many messages its streams have."""
    clear: Callable[[], Awaitable[object]]


async def measure(stage: Stage, rounds: int, *, quick: bool) -> list[Row]:
    """Drain a backlog into each broker, alternating with the bare loop, round by round."""
    ours, bare, ours_us, bare_us = Rounds(), Rounds(), Rounds(), Rounds()
    async with AsyncExitStack() as stack:
        servers = {"valkey": await _valkey(stage, stack), "nats": await _nats(stage, stack)}
        for number in range(rounds):
            for load in LOADS:
                messages = int(load.messages * QUICK_SHARE) if quick else load.messages
                server = servers[load.broker]
                await server.clear()
                per_s, cpu_us = await relay(stage, server, load.lanes, messages)
                ours.add(load.name, per_s)
                ours_us.add(load.name, cpu_us)
                await server.clear()
                words = ("--messages", messages, "--lanes", load.lanes, "--together", load.together)
                async with child("broker_client", server.url, *words) as process:
                    response = await process.response()
                bare.add(load.name, response["per_s"])
                bare_us.add(load.name, response["cpu_us"])
                stage.say(
                    f"brokers, {load.name}, round {number + 1} of {rounds}: relay {per_s:,.0f}/s "
                    f"with {cpu_us:.0f} us of CPU, bare loop {response['per_s']:,.0f}/s with "
                    f"{response['cpu_us']:.0f} us"
                )
    rates = [
        Row(
            "brokers", load.name, "/s", ours.samples_of(load.name),
            "the client's bare loop", bare.samples_of(load.name), target=load.target,
        )
        for load in LOADS
    ]  # fmt: skip
    costs = [
        Row(
            "brokers", f"{load.name}, CPU per message", "us", ours_us.samples_of(load.name),
            "the client's bare loop", bare_us.samples_of(load.name),
        )
        for load in LOADS
    ]  # fmt: skip
    return rates + costs


async def relay(stage: Stage, server: Server, lanes: int, messages: int) -> tuple[float, float]:
    """Return the relay's messages per second, and its CPU microseconds per message."""
    async with stage.server.database() as database:
        async with search(database) as connection:
            await add_endpoint(connection, server.url, lanes=lanes)
            await connection.execute(BACKLOG, messages, PAYLOAD_BYTES - FRAME_BYTES)
        opened = {"OUTBOX_ALLOW_NETWORKS": "127.0.0.0/8"}
        async with stage.relay(database, owns=True, **opened) as process:
            assert process.process is not None
            times = psutil.Process(process.process.pid).cpu_times
            first = await _reached(server, int(messages * STARTED_SHARE), process)
            began_at, before = time.perf_counter(), times()
            last = await _reached(server, messages, process)
            elapsed_s, after = time.perf_counter() - began_at, times()
    cpu_s = after.user + after.system - before.user - before.system
    return (last - first) / elapsed_s, cpu_s / (last - first) * 1e6


async def _reached(server: Server, messages: int, process: RelayProcess) -> int:
    """Wait until the streams have so many messages, and return how many they have."""
    stored = 0

    async def enough() -> bool:
        nonlocal stored
        stored = await server.stored()
        return stored >= messages

    await until_true(enough, [process], POLL_S)
    return stored


async def _valkey(stage: Stage, stack: AsyncExitStack) -> Server:
    server = await stack.enter_async_context(valkey(stage.directory / "valkey"))

    async def stored() -> int:
        # In the server: thousands of keys would otherwise travel with each look.
        script = (
            "local n = 0 for _, k in ipairs(redis.call('KEYS', '*}')) do "
            "n = n + redis.call('XLEN', k) end return n"
        )
        return int(await server.command("EVAL", script, 0))

    return Server(server.url("bench"), stored, lambda: server.command("FLUSHALL"))


async def _nats(stage: Stage, stack: AsyncExitStack) -> Server:
    server = await stack.enter_async_context(nats_server(stage.directory / "nats"))
    await server.create_stream()
    name = (await server.api("STREAM.NAMES"))["streams"][0]

    async def stored() -> int:
        found = await server.api(f"STREAM.INFO.{name}", {"subjects_filter": ">"})
        subjects = found["state"].get("subjects") or {}
        return sum(count for subject, count in subjects.items() if subject.endswith(".m"))

    async def clear() -> None:
        await server.api(f"STREAM.PURGE.{name}")

    return Server(server.url, stored, clear)
