"""Requests per second through the adapter, compared with the bare framework and one INSERT.

Both are processes of one worker, and get the same deliveries, signed before the measurement, from
lanes with one request in flight each, as from a relay. The data is in memory if there is enough, so
that CPU work is measured and not the disk.
"""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import aiohttp

from benchmarks.figures import Rounds, Row, Target
from benchmarks.stage import search
from outbox.errors import CannotRun
from outbox.receiver.verification import pairs_of
from outbox.testing import FakeSender
from outbox_devtools.embedded.launch import command
from tests.support.ports import free_port
from tests.support.process import environment

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from benchmarks.stage import Stage
    from outbox.receiver import Request
    from tests.support.postgres import Database

LANES = 16
NUMBERS, QUICK_NUMBERS = 250, 20
"""Deliveries per lane."""
START_S = 30.0
OURS, BARE = "adapter and inbox", "FastAPI and one INSERT"


async def measure(stage: Stage, rounds: int, *, quick: bool) -> list[Row]:
    """Run both alternately."""
    numbers = QUICK_NUMBERS if quick else NUMBERS
    found = Rounds()
    for number in range(rounds):
        for name, app in ((OURS, "ours"), (BARE, "bare")):
            async with stage.server.database(migrated=False) as database:
                found.add(name, await _per_s(database, app, numbers))
        rates = ", ".join(f"{name} {values[-1]:,.0f}/s" for name, values in found.values.items())
        stage.say(f"receiving, round {number + 1} of {rounds}: {rates}")
    return [
        Row(
            "receiving",
            f"{LANES} lanes",
            "/s",
            found.samples_of(OURS),
            BARE,
            found.samples_of(BARE),
            target=Target("at least", 0.4),
        )
    ]


async def _per_s(database: Database, app: str, numbers: int) -> float:
    async with search(database) as connection:
        await connection.execute("CREATE TABLE public.paid (event uuid, n bigint)")
    sender = FakeSender()
    lanes = [
        [sender.event("order.paid", {"n": n}, lane=sender.lane(slot)) for n in range(numbers)]
        for slot in range(LANES)
    ]
    async with _serving(database, app, sender.secret) as url, aiohttp.ClientSession() as client:
        # The first delivery of each lane is the warm-up.
        await asyncio.gather(*(_send(client, url, lane[:1]) for lane in lanes))
        started = time.perf_counter()
        await asyncio.gather(*(_send(client, url, lane[1:]) for lane in lanes))
        took_s = time.perf_counter() - started
    async with search(database) as connection:
        taken = await connection.fetchval("SELECT count(*) FROM public.paid")
    if taken != LANES * numbers:
        raise CannotRun(f"{app}: {taken} of {LANES * numbers} deliveries had their effect")
    return LANES * (numbers - 1) / took_s


async def _send(client: aiohttp.ClientSession, url: str, requests: Sequence[Request]) -> None:
    for request in requests:
        async with client.post(
            url, data=request.body, headers=list(pairs_of(request.headers))
        ) as response:
            if response.status != 200:
                raise CannotRun(f"a delivery got the response {response.status}")
            await response.read()


@asynccontextmanager
async def _serving(database: Database, app: str, secret: str) -> AsyncIterator[str]:
    port = free_port()
    words = ("-m", "uvicorn", f"benchmarks.shops:{app}", "--port", str(port))
    process = await asyncio.create_subprocess_exec(
        *command([sys.executable, *words, "--log-level", "error"], account=None),
        env=environment({"DATABASE_URL": database.dsn, "OUTBOX_SECRET": secret}),
        stdin=asyncio.subprocess.DEVNULL,
    )
    try:
        await _until_there(port)
        yield f"http://127.0.0.1:{port}/hooks"
    finally:
        process.terminate()
        await process.wait()


async def _until_there(port: int) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            return
        await asyncio.sleep(0.05)
    raise CannotRun("the receiver did not start")
