"""Counts requests and their rate, in the same way for all contestants.

If nginx is installed, it responds, because it costs each contestant the least; one process, no log.
`stub_status` gives the exact number of requests that it has begun to read, and is polled every 10
ms. The rate is that between 5% and 90% of the requests, whose times are interpolated between two
polls, so that the error is a few milliseconds at most. Without nginx it is the benchmark's own
receiver, which records the time of each request.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import time
from bisect import bisect_left
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol

from benchmarks.receiver import FROM_SHARE, TO_SHARE
from benchmarks.stage import program
from outbox.errors import CannotRun
from tests.support.ports import free_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from benchmarks.stage import Stage

SAMPLE_S = 0.01
START_S = 10.0
STATUS = "/status"
CONFIGURATION = """
daemon off;
master_process off;
pid nginx.pid;
error_log stderr error;
events {{ worker_connections 4096; }}
http {{
    access_log off;
    keepalive_requests 1000000000;
    client_header_buffer_size 4k;  # So that a request is read at once.
    client_body_temp_path temporary;
    proxy_temp_path temporary;
    fastcgi_temp_path temporary;
    uwsgi_temp_path temporary;
    scgi_temp_path temporary;
    server {{
        listen 127.0.0.1:{port} backlog=1024;
        location / {{ return 204; }}
        location = {status} {{ stub_status; }}
    }}
}}
"""


class Counter(Protocol):
    """A receiver that responds 204."""

    url: str

    def expect(self, requests: int) -> None:
        """Begin to count."""
        ...

    async def per_s(self) -> float:
        """Return the requests per second after all have arrived."""
        ...


class OwnCounter:
    """The benchmark's own receiver."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.url = stage.urls["http"]

    def expect(self, requests: int) -> None:
        self._stage.expect(requests)

    async def per_s(self) -> float:
        return float((await self._stage.receiver.response())["per_s"])


class NginxCounter:
    """An nginx, whose count is polled over a separate connection."""

    def __init__(
        self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.url = f"http://127.0.0.1:{port}/"
        self._reader = reader
        self._writer = writer
        self._asked = 0
        self._counting: asyncio.Task[float] | None = None

    def expect(self, requests: int) -> None:
        if self._counting is not None:
            self._counting.cancel()
        self._counting = asyncio.create_task(self._count(requests))

    async def per_s(self) -> float:
        assert self._counting is not None
        return await self._counting

    async def _count(self, requests: int) -> float:
        at, before = await self._reading()
        readings = [(at, 0)]
        while readings[-1][1] < requests:
            await asyncio.sleep(SAMPLE_S)
            at, counted = await self._reading()
            readings.append((at, counted - before))
        return rate(readings, requests)

    async def _reading(self) -> tuple[float, int]:
        """Return the midpoint of the poll, and the requests so far without our own."""
        requested_at = time.monotonic()
        self._writer.write(f"GET {STATUS} HTTP/1.1\r\nHost: nginx\r\n\r\n".encode())
        self._asked += 1
        head = await self._reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
        assert length is not None
        body = await self._reader.readexactly(int(length[1]))
        match = re.search(rb"requests\s+\d+ \d+ (\d+)", body)
        assert match is not None
        return (requested_at + time.monotonic()) / 2, int(match[1]) - self._asked


def rate(readings: list[tuple[float, int]], requests: int) -> float:
    """Return the rate between the arrivals of the first and the last counted request."""
    counts = [counted for _, counted in readings]

    def reached_at(counted: int) -> float:
        later = bisect_left(counts, counted)
        (from_at, low), (to_at, high) = readings[later - 1], readings[later]
        return from_at + (to_at - from_at) * (counted - low) / (high - low)

    first, last = int(requests * FROM_SHARE) + 1, int(requests * TO_SHARE) + 1
    return (last - first) / (reached_at(last) - reached_at(first))


def nginx() -> tuple[str, str] | None:
    """Return the program and its version, if it is installed and has stub_status."""
    path = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
    if path is None:
        return None
    build_info = subprocess.run([path, "-V"], capture_output=True, text=True).stderr
    version = re.search(r"nginx/([\d.]+)", build_info)
    if version is None or "http_stub_status_module" not in build_info:
        return None
    return path, version[1]


def receiver_name() -> str:
    """Return the name of the receiver."""
    found = nginx()
    return "the benchmark's own receiver" if found is None else f"nginx {found[1]}"


@asynccontextmanager
async def counter(stage: Stage) -> AsyncIterator[Counter]:
    """Run the available counter for a block."""
    found = nginx()
    if found is None:
        yield OwnCounter(stage)
        return
    port = free_port()
    configuration = stage.write("nginx.conf", CONFIGURATION.format(port=port, status=STATUS))
    argv = [found[0], "-p", str(stage.directory), "-c", str(configuration)]
    async with program("nginx", argv):
        reader, writer = await _connected(port)
        try:
            yield NginxCounter(port, reader, writer)
        finally:
            writer.close()


async def _connected(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            return await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.02)
    raise CannotRun("nginx did not start; see its output above")
