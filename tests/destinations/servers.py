"""Receivers on raw sockets, so that a test controls every byte."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Awaitable, Callable

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@dataclass(frozen=True)
class Received:
    """A request as received on the wire."""

    method: str
    target: str
    headers: dict[str, str]
    """Header names in lower case."""
    names: list[str]
    body: bytes


class Connection:
    """The receiver's end of one connection."""

    def __init__(
        self, server: RawServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._server = server
        self._reader = reader
        self._writer = writer

    async def head(self) -> Received:
        """Read a request up to its body.

        Raises:
            IncompleteReadError: The connection ended.
        """
        raw = await self._reader.readuntil(b"\r\n\r\n")
        first, *lines = raw.decode("latin-1").split("\r\n")[:-2]
        method, target, _ = first.split(" ")
        pairs = [line.split(": ", 1) for line in lines]
        headers = {name.lower(): value for name, value in pairs}
        return Received(method, target, headers, [name for name, _ in pairs], b"")

    async def request(self) -> Received:
        head = await self.head()
        body = await self._reader.readexactly(int(head.headers["content-length"]))
        received = Received(head.method, head.target, head.headers, head.names, body)
        self._server.received.append(received)
        return received

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def read(self) -> bytes:
        """Read the next bytes; empty at the end."""
        return await self._reader.read(65536)

    async def drip(self, data: bytes) -> None:
        """Send one byte at a time, more slowly than any time-out of a test."""
        for i in range(len(data)):
            await self.send(data[i : i + 1])
            await asyncio.sleep(0.005)

    @property
    def tls(self) -> ssl.SSLObject:
        found: ssl.SSLObject = self._writer.get_extra_info("ssl_object")
        return found

    def delay_packets(self) -> None:
        """Turn Nagle's algorithm on, as servers have it that do not turn it off."""
        sock: socket.socket = self._writer.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 0)

    def write_at_once(self, data: bytes) -> None:
        """Write a packet of its own."""
        os.write(self._writer.get_extra_info("socket").fileno(), data)

    def close(self) -> None:
        self._writer.close()

    def reset(self) -> None:
        """End with RST instead of FIN."""
        sock: socket.socket = self._writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    async def closed_by_peer(self) -> None:
        """Wait until the sender has closed this connection."""
        with contextlib.suppress(ConnectionError):
            while await self._reader.read(65536):
                pass
        self._server.closed_by_peer += 1


@dataclass
class RawServer:
    """Calls `script` for every connection."""

    script: Callable[[Connection], Awaitable[None]]
    received: list[Received] = field(default_factory=list)
    connections: int = 0
    closed_by_peer: int = 0
    url: str = ""
    port: int = 0
    errors: list[Exception] = field(default_factory=list)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self.script(Connection(self, reader, writer))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # The sender closed the connection.
        except Exception as error:
            self.errors.append(error)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError, OSError):
                await writer.wait_closed()

    async def ended(self) -> None:
        """Wait until no connection is open."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def serving(
    script: Callable[[Connection], Awaitable[None]],
    tls: ssl.SSLContext | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
) -> AsyncIterator[RawServer]:
    """Run a receiver on a port of a loopback address, by default a free one of 127.0.0.1."""
    server = RawServer(script)
    listener = await asyncio.start_server(server.accept, host, port, ssl=tls, backlog=512)
    server.port = listener.sockets[0].getsockname()[1]
    server.url = f"{'https' if tls else 'http'}://{host}:{server.port}/hook"
    try:
        yield server
    finally:
        listener.close()
        await server.stop()
        await listener.wait_closed()
    assert not server.errors, server.errors


def respond_with(response: bytes) -> Callable[[Connection], Awaitable[None]]:
    """Send the same response to every request, and keep the connection open."""

    async def script(connection: Connection) -> None:
        while True:
            await connection.request()
            await connection.send(response)

    return script
