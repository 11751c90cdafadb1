"""A TCP proxy that loses responses, cuts requests, and holds bytes until they are released.

It is the link of a destination that connects to a server.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from outbox_devtools.destination_suite.rig import FixedResolver
from outbox_devtools.listening import listening
from outbox_devtools.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from outbox.destination import Broker, Resolver


class CuttingProxy:
    """Forwards to a port; what it does to bytes applies from now on, to all connections."""

    def __init__(self, port: int) -> None:
        self.target_port = port
        """The port that new connections are forwarded to."""
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


class ProxiedLink:
    """A driver behind a proxy.

    Args:
        settle: waits until the broker has executed what was sent.
    """

    def __init__(self, broker: Broker, proxy: CuttingProxy, settle: Callable[[], Any]) -> None:
        self.broker = broker
        self._proxy = proxy
        self._settle = settle

    def lose_responses(self) -> None:
        self._proxy.response_bytes_max = 0

    def hold_requests(self) -> None:
        self._proxy.requests_pass.clear()

    async def held(self) -> None:
        await until(lambda: self._proxy.held_bytes, what="a request")

    async def release(self) -> None:
        proxy = self._proxy
        proxy.requests_pass.set()
        await until(lambda: proxy.released_bytes >= proxy.held_bytes, what="the late bytes")
        await self._settle()

    def heal(self) -> None:
        self._proxy.response_bytes_max = None


@asynccontextmanager
async def proxied(
    port: int,
    make: Callable[[int, float, Resolver], Broker],
    settle: Callable[[], Any],
    timeout_s: float,
) -> AsyncIterator[ProxiedLink]:
    """A driver behind a proxy to a port of 127.0.0.1.

    Args:
        make: makes the driver; gets the proxy's port and the time-out of a call.
        settle: waits until the broker has executed what was sent.
    """
    resolver = FixedResolver()
    async with cutting(port) as (proxy, own_port):
        broker = make(own_port, timeout_s, resolver)
        try:
            yield ProxiedLink(broker, proxy, settle)
        finally:
            proxy.requests_pass.set()
            await broker.aclose()
