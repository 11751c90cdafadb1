"""Latency of another tenant's events while tenants publish as much as they can.

A tenant publishes four events a second through the API: alone, beside a process that only computes,
and while other tenants, with 100 endpoints each, send requests of 1,000 events without a pause. The
endpoints of those are paused, so it is the sequencer that has to do with their events. The latency
is that from the beginning of the request to the receiver; a request that is refused is repeated.

The target for ten flooding tenants is one second for the slowest event.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import aiohttp

from benchmarks.api import until_served
from benchmarks.figures import Rounds, Row, Samples, Target, percentile
from benchmarks.latency import NS_PER_MS
from benchmarks.stage import add_tenant_endpoint, child, search
from outbox.operations.endpoints import states as endpoint_states
from tests.support.api import make_token
from tests.support.ports import free_port
from tests.support.postgres import SCHEMA

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.stage import Stage

OTHER = "other"
ENDPOINTS, QUICK_ENDPOINTS = 100, 3
FLOODERS = (1, 10)
EVENTS, QUICK_EVENTS = 40, 6
EVERY_S = 0.25
FLOOD = {"events": [{"type": "a.b"}] * 1000}
CLIENTS = 4
"""Of each flooding tenant."""
ALONE, COMPUTING = 0, -1
P99 = 0.99
SLOWEST_MS = 1000.0


async def measure(stage: Stage, rounds: int, *, quick: bool) -> list[Row]:
    """Measure alone, beside a process that computes, and with each number of flooding tenants."""
    endpoints, events = (QUICK_ENDPOINTS, QUICK_EVENTS) if quick else (ENDPOINTS, EVENTS)
    return await run(stage, rounds, FLOODERS, endpoints, events)


async def run(
    stage: Stage, rounds: int, flooders: Sequence[int], endpoints: int, events: int
) -> list[Row]:
    """Run with other numbers."""
    found = {count: Rounds() for count in (ALONE, COMPUTING, *flooders)}
    for number in range(rounds):
        counts = list(found)
        if number % 2:
            counts.reverse()  # The order alternates.
        for count in counts:
            latency_ms = await _publish(stage, count, endpoints, events)
            p99, slowest = percentile(latency_ms, P99), max(latency_ms)
            found[count].add("p99", p99)
            found[count].add("slowest", slowest)
            beside = {ALONE: "alone", COMPUTING: "computing"}.get(count, f"{count} tenants")
            p50 = percentile(latency_ms, 0.5)
            stage.say(
                f"flood, round {number + 1} of {rounds}, {beside}: p50 {p50:,.0f} ms, "
                f"p99 {p99:,.0f} ms, slowest {slowest:,.0f} ms"
            )
    rows = []
    for count in flooders:
        ours = found[count].samples_of("p99")
        name = f"another tenant's p99, {count} flooding"
        for what, baseline in (("alone", ALONE), ("beside a process that computes", COMPUTING)):
            rows.append(Row("flood", name, "ms", ours, what, found[baseline].samples_of("p99")))
        rows.append(
            Row(
                "flood",
                f"another tenant's slowest event, {count} flooding",
                "ms",
                found[count].samples_of("slowest"),
                "one second",
                Samples((SLOWEST_MS,) * rounds),
                target=Target("at most", 1.0),
            )
        )
    return rows


async def _publish(stage: Stage, flooders: int, endpoints: int, events: int) -> list[float]:
    """Return the milliseconds from each request to its event's arrival."""
    async with AsyncExitStack() as stack:
        database = await stack.enter_async_context(stage.server.database())
        connection = await stack.enter_async_context(search(database))
        await add_tenant_endpoint(connection, OTHER, OTHER, stage.urls["http"])
        tenants = [f"flood-{n}" for n in range(flooders)]
        for tenant in tenants:
            names = [f"{tenant}-{n}" for n in range(endpoints)]
            for name in names:
                await add_tenant_endpoint(connection, tenant, name, stage.urls["http"])
            await endpoint_states.pause_endpoints(connection, SCHEMA, names, actor="bench")
        admin = f"127.0.0.1:{free_port()}"
        relay = await stack.enter_async_context(
            stage.relay(database, owns=flooders <= 0, OUTBOX_ADMIN=admin)
        )
        await until_served(relay, admin)
        url = f"http://{admin}"
        token = await make_token(database, OTHER, tenant=OTHER)
        stage.expect(events, keep=True)
        if flooders == COMPUTING:
            await (await stack.enter_async_context(child("computing"))).response()
        for tenant in tenants:
            clients = await stack.enter_async_context(child("share_clients"))
            clients.send_command(
                url=url,
                token=await make_token(database, tenant, tenant=tenant),
                clients=CLIENTS,
                method="POST",
                path="/v1/events",
                body=FLOOD,
                pause_s=0.0,
                refused_pause_s=1.0,
            )
            await clients.response()
        sent_at = await _send(url, token, events)
        arrived: dict[str, int] = (await stage.receiver.response())["arrived"]
    return [(arrived[str(n)] - at) / NS_PER_MS for n, at in enumerate(sent_at)]


async def _send(url: str, token: str, events: int) -> list[int]:
    """Publish numbered events; return when each request began (monotonic ns)."""
    sent_at = []
    headers = {"Authorization": f"Bearer {token}"}
    async with aiohttp.ClientSession(headers=headers) as session, asyncio.TaskGroup() as group:

        async def publish(n: int) -> None:
            body: dict[str, Any] = {"type": "a.b", "payload": {"n": n}}
            while True:
                async with session.post(f"{url}/v1/events", json=body) as response:
                    if response.ok:
                        return
                await asyncio.sleep(EVERY_S)

        for n in range(events):
            sent_at.append(time.monotonic_ns())
            group.create_task(publish(n))
            await asyncio.sleep(EVERY_S)
    return sent_at
