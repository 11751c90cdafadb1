"""Servers on 127.0.0.1 that stand between us and PostgreSQL, or pretend to be it."""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

_SSL_REQUEST = 80877103


@asynccontextmanager
async def listening(handler: Handler) -> AsyncIterator[int]:
    """A TCP server for the length of a block; yields its port."""
    connections: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        try:
            await handler(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass  # The client went first.
        finally:
            connections.discard(task)
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in list(connections):
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)


def forward_to(socket_path: str) -> Handler:
    """Pass everything on to a unix socket and back."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.close()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_unix_connection(socket_path)
        try:
            await asyncio.gather(pump(reader, back), pump(there, writer))
        finally:
            back.close()

    return handler


def refuse_with(sqlstate: str, message: str) -> Handler:
    """Answer the start-up packet with an error, in PostgreSQL's protocol."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            (size,) = struct.unpack("!i", await reader.readexactly(4))
            packet = await reader.readexactly(size - 4)
            if struct.unpack("!i", packet[:4])[0] != _SSL_REQUEST:
                break
            writer.write(b"N")
        fields = f"SFATAL\0VFATAL\0C{sqlstate}\0M{message}\0\0".encode()
        writer.write(b"E" + struct.pack("!i", len(fields) + 4) + fields)
        await writer.drain()

    return handler


async def silent(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    """Take everything and say nothing."""
    while await reader.read(65536):
        pass


def free_port() -> int:
    """A port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
