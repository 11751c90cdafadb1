"""A forward proxy like Smokescreen: it resolves names, and refuses internal addresses."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outbox.network.egress import EgressPolicy
from outbox.web.proxy import parse_proxy

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Mapping

    from outbox.web.proxy import Proxy


@dataclass
class Smokescreen:
    """The requests and responses of the proxy, and its settings."""

    names: Mapping[str, str] = field(default_factory=dict)
    """Addresses by name; other names do not exist."""
    places: Mapping[str, int] = field(default_factory=dict)
    """The local port that stands in for an address."""
    response: bytes | None = None
    """If set, the proxy sends this to every client and closes the connection."""
    credentials: str = ""
    port: int = 0
    secure: bool = False
    heads: list[str] = field(default_factory=list)
    connections: int = 0

    @property
    def proxy(self) -> Proxy:
        scheme = "https" if self.secure else "http"
        return parse_proxy(f"{scheme}://{self.credentials}127.0.0.1:{self.port}")

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.heads.append(head)
            status_line = self.response or self._refusal(head)
            writer.write(status_line or b"HTTP/1.1 200 Connection established\r\n\r\n")
            await writer.drain()
            if status_line is None:
                await self._join(self._address(head), reader, writer)
        writer.close()

    def _address(self, head: str) -> str:
        host = head.split(" ")[1].rpartition(":")[0].strip("[]")
        return self.names.get(host, host)

    def _refusal(self, head: str) -> bytes | None:
        try:
            reason = EgressPolicy().refusal(self._address(head), port=443, tls=True)
        except ValueError:
            return b"HTTP/1.1 502 Bad Gateway\r\nX-Smokescreen-Error: no such host\r\n\r\n"
        if reason is None:
            return None
        return (
            b"HTTP/1.1 407 Request rejected by proxy\r\nContent-Length: 2\r\n"
            b"x-smokescreen-error: Deny: %b\r\n\r\nno" % reason.encode()
        )

    async def _join(
        self, address: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.places[address])
        async with contextlib.aclosing(_Closing(far_writer)), asyncio.TaskGroup() as tasks:
            tasks.create_task(_pipe(reader, far_writer))
            tasks.create_task(_pipe(far_reader, writer))


@dataclass
class _Closing:
    writer: asyncio.StreamWriter

    async def aclose(self) -> None:
        # Python 3.11.2 (Debian) cannot abort a TLS connection that is already closed.
        with contextlib.suppress(AttributeError):
            self.writer.transport.abort()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


@contextlib.asynccontextmanager
async def proxying(
    proxy: Smokescreen, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Smokescreen]:
    """Run the proxy on a free port of 127.0.0.1."""
    tasks: list[asyncio.Task[None]] = []
    writers: list[asyncio.StreamWriter] = []

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        tasks.append(asyncio.ensure_future(proxy.serve(reader, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=tls)
    proxy.port = server.sockets[0].getsockname()[1]
    proxy.secure = tls is not None
    try:
        yield proxy
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in writers:
            await _Closing(writer).aclose()
        await server.wait_closed()
