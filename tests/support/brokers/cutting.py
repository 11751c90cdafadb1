"""A TCP proxy that loses responses, cuts requests, and holds bytes until they are released."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from tests.support.tcp import listening

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class CuttingProxy:
    """Forwards to a port; what it does to bytes applies from now on, to all connections."""

    def __init__(self, port: int) -> None:
        self.target_port = port
        """Of new connections."""
        self.request_bytes_max: int | None = None
        """Bytes of requests that pass before the connections are cut; None: all."""
        self.response_bytes_max: int | None = None
        """Bytes of responses that pass before the connections are cut; None: all."""
        self.requests_pass = asyncio.Event()
        self.requests_pass.set()
        self.held_bytes = 0
        """Bytes of requests that were held because `requests_pass` was cleared."""
        self.released_bytes = 0
        """Those of them that were sent since."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
        try:
            async with asyncio.TaskGroup() as tasks:
                responses = tasks.create_task(self._responses(server_reader, writer))
                await self._requests(reader, server_writer)
                responses.cancel()
        except* (OSError, _Cut):
            pass
        finally:
            server_writer.close()
            writer.close()

    async def _requests(self, reader: asyncio.StreamReader, server: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if not self.requests_pass.is_set():
                self.held_bytes += len(data)
                await self.requests_pass.wait()
                server.write(data)
                await server.drain()
                self.released_bytes += len(data)
                continue
            if self.request_bytes_max is not None:
                data = data[: self.request_bytes_max]
                self.request_bytes_max -= len(data)
            server.write(data)
            await server.drain()
            if self.request_bytes_max == 0:
                raise _Cut

    async def _responses(self, server: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await server.read(65536):
            if self.response_bytes_max is not None:
                data = data[: self.response_bytes_max]
                self.response_bytes_max -= len(data)
            writer.write(data)
            await writer.drain()
            if self.response_bytes_max == 0:
                raise _Cut
        raise _Cut


class _Cut(Exception):
    pass


@asynccontextmanager
async def cutting(port: int) -> AsyncIterator[tuple[CuttingProxy, int]]:
    """A proxy in front of a port, and its own port."""
    proxy = CuttingProxy(port)
    async with listening(proxy.serve) as own_port:
        yield proxy, own_port
