"""A receiver that observes connections: the process of each request, and when it was closed."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import psutil

from tests.support.tcp import listening

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator, Callable

RESPONSE = b"HTTP/1.1 204 No Content\r\n\r\n"


@dataclass(slots=True)
class Arrived:
    """A received request."""

    pid: int
    at: float
    """Epoch seconds."""
    lane: str
    seq: int
    delivery: str
    writer: asyncio.StreamWriter = field(repr=False)
    responded: bool = False
    closed: bool = False
    """Whether the sender closed it before the response."""

    def response(self) -> None:
        """Respond with 204; if the sender does not read, it stays in the kernel's buffers."""
        self.responded = True
        self.writer.write(RESPONSE)


class Wire:
    """All requests, in the order of arrival.

    Args:
        holds: whether a request waits for `Arrived.response`.
    """

    def __init__(self, holds: Callable[[Arrived], bool]) -> None:
        self.holds = holds
        self.pids: set[int] = set()
        """The processes that may send."""
        self.arrived: list[Arrived] = []

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        """Listen during the block; yields the address."""
        async with listening(self._serve) as port:
            yield f"http://127.0.0.1:{port}/"

    def requests_of(self, pid: int) -> list[Arrived]:
        """The requests of a process."""
        return [each for each in self.arrived if each.pid == pid]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pid = self._sender(writer.get_extra_info("peername")[1])
        last: Arrived | None = None
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lines = head.decode().split("\r\n")[1:]
                headers = {k.lower(): v.strip() for k, _, v in (x.partition(":") for x in lines)}
                await reader.readexactly(int(headers["content-length"]))
                last = Arrived(
                    pid,
                    time.time(),
                    headers["x-lane"],
                    int(headers["x-sequence"]),
                    headers["x-delivery"],
                    writer,
                )
                self.arrived.append(last)
                if not self.holds(last):
                    last.response()
        finally:
            if last is not None and not last.responded:
                last.closed = True

    def _sender(self, port: int) -> int:
        for pid in self.pids:
            with suppress(psutil.NoSuchProcess):
                connections = psutil.Process(pid).net_connections("tcp")
                if any(connection.laddr.port == port for connection in connections):
                    return pid
        raise AssertionError(f"none of {self.pids} has a connection from port {port}")
