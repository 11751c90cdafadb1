"""Requests that meet the close of an idle connection, on the servers of other projects.

Each server closes connections that were idle for a second. When exactly, is measured first; the
requests are timed around it.
"""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from benchmarks.connections.servers import SERVERS, describe, serving
from benchmarks.figures import Row, Samples, Target
from benchmarks.stage import child
from outbox.errors import CannotRun

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchmarks.connections.servers import HttpServer
    from benchmarks.stage import Stage

CONNECTIONS, ROUNDS, QUICK_ROUNDS = 60, 20, 1
PROBES = 8
AROUND_S = 0.055
"""How much before and after the close requests are sent, too."""
CLOSE_MAX_S = 8.0
NONE = Target("at most", 0.0)
PROBE = b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 2\r\n\r\n{}"


async def measure(stage: Stage, rounds: int, *, quick: bool) -> list[Row]:
    """Race on each server that is installed, once: the number of requests is what counts."""
    return await run(stage, SERVERS, CONNECTIONS, QUICK_ROUNDS if quick else ROUNDS)


async def run(
    stage: Stage, servers: Iterable[HttpServer], connections: int, rounds: int
) -> list[Row]:
    """Run with other numbers."""
    rows: list[Row] = []
    for server in servers:
        try:
            rows += await _race(stage, server, connections, rounds)
        except CannotRun as error:
            stage.say(f"keepalive, {server.name}: not measured: {error}")
            rows.append(_row(server.name, (), "failed", str(error)))
    return rows


async def _race(stage: Stage, server: HttpServer, connections: int, rounds: int) -> list[Row]:
    directory = stage.directory / re.sub(r"\W", "-", server.name)
    async with serving(server, directory) as url:
        port = int(url.rstrip("/").rpartition(":")[2])
        idle_s = await asyncio.gather(*(_idle_s(port) for _ in range(PROBES)))
        from_s, to_s = max(min(idle_s) - AROUND_S, 0.0), max(idle_s) + AROUND_S
        words = ("--connections", connections, "--rounds", rounds)
        limits = ("--from-s", from_s, "--to-s", to_s)
        async with child("connections.client", url, *words, *limits) as client:
            found = await client.response()
        name = await describe(server)
    stage.say(
        f"keepalive, {name}: idle for {min(idle_s):.2f} to {max(idle_s):.2f} s; of "
        f"{connections * rounds:,} requests, {found['failed']} failed, "
        f"{found['sent again']} were sent again"
    )
    return [_row(name, (found[what], connections * rounds), what) for what in found]


def _row(name: str, counts: tuple[int, int] | tuple[()], what: str, missing: str = "") -> Row:
    ours, requests = (Samples((each,)) for each in counts) if counts else (Samples(()), Samples(()))
    return Row(
        "keepalive",
        f"{name}, {what}",
        "requests",
        ours,
        "requests",
        requests,
        missing_reason=missing or None,
        target=NONE if what == "failed" else None,
    )


async def _idle_s(port: int) -> float:
    """How long a server keeps an idle connection open.

    Raises:
        CannotRun: it does not close it.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(PROBE)
        responded_at = time.monotonic()
        async with asyncio.timeout(CLOSE_MAX_S):
            with suppress(ConnectionError):
                while await reader.read(65_536):
                    responded_at = time.monotonic()
        return time.monotonic() - responded_at
    except TimeoutError:
        raise CannotRun(f"it closes no idle connection within {CLOSE_MAX_S:g} s") from None
    finally:
        writer.close()
