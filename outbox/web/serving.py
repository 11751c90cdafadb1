"""HTTP server with limits against slow and idle clients.

A client must send a request's head within `REQUEST_HEAD_TIMEOUT_S` of the last response,
and read a response within `RESPONSE_READ_TIMEOUT_S`; the handler limits the body.  At most
`CLIENT_CONNECTIONS_MAX` connections are open.  One more closes another one for whose client the
server waits.  Connections are grouped by the client's address and by what the server waits
for (`Awaited`), and the longest waiting connection of the largest group is closed.  So a
client that holds many connections, in whatever state, takes them from itself, and a new
connection is closed only if all others wait for the server.

Deliveries share the event loop: per iteration one connection is accepted, one request begins, or
one part of an unwanted body is read, and data are parsed for `PARSING_S` (see `outbox.web.turns`).

aiohttp reports neither the states of a request nor those of its client.  A protocol of our own
stands between each transport and aiohttp's protocol, the request factory sees the beginning of each
request, and its stream writer the response.  All of them also see malformed requests, which no
handler does.
"""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import ExitStack, asynccontextmanager, suppress
from enum import Enum
from typing import TYPE_CHECKING, Any, cast

import structlog
from aiohttp import web
from aiohttp.http import StreamWriter

from outbox.errors import CannotRun
from outbox.web.address import Address, address_key
from outbox.web.turns import TimeShare, Turns

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aiohttp import StreamReader
    from multidict import CIMultiDict

log = structlog.get_logger("outbox.web")

BACKLOG = 1024
ACCEPT_RETRY_S = 1.0
SHUTDOWN_S = 0.5
"""How long shutdown waits for open requests; aiohttp waits twice."""
REQUEST_HEAD_TIMEOUT_S = 75.0
"""Longer than the keep-alive time-out of most proxies."""
RESPONSE_READ_TIMEOUT_S = 60.0
CLOSE_LINGER_S = 1.0
"""How long the rest of a body is read after its response: closing a connection with unread data
resets it, and the client might not see the response."""
CLIENT_CONNECTIONS_MAX = 512
UNREAD_BODY_BYTES_MAX = 16 * 1024
"""Bytes of a body after which a connection waits for its handler to take them."""
PARSING_S = 0.001
"""A full buffer or a malformed request costs a third of it, a few bytes a hundredth."""
CLIENT_RECEIVE_BYTES = 32 * 1024
"""Bytes that the kernel holds for a connection, about.  All connections with data are read in one
iteration of the loop, so this bounds its duration.  The kernel doubles it: with less than a segment
of the loopback interface (64 KiB), a sender there waits 0.2 s again and again."""

HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Server": "outbox",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""Default headers of every response, errors included; a handler may override them.
There are no CORS headers, so scripts of other origins cannot read responses."""


async def listen(address: Address) -> list[socket.socket]:
    """Listen on an address, one socket for each IP address of its host name.

    Raises:
        CannotRun: the address is in use, or does not belong to this host.
    """
    loop = asyncio.get_running_loop()
    with ExitStack() as stack:
        sockets: list[socket.socket] = []
        try:
            found = await loop.getaddrinfo(
                address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            for family, _, _, _, at in dict.fromkeys(found):
                made = socket.create_server(at, family=family, backlog=BACKLOG)
                sockets.append(stack.enter_context(made))
                made.setblocking(False)
        except (OSError, OverflowError) as error:
            number = getattr(error, "errno", None) or 0
            reason = os.strerror(number) if number > 0 else str(error)
            raise CannotRun(f"cannot listen on {address}: {reason}; choose another") from error
        stack.pop_all()
    return sockets


@asynccontextmanager
async def serving(
    application: web.Application, sockets: list[socket.socket]
) -> AsyncIterator[Address]:
    """Serve `application` inside the context; yields the address of the first socket.

    A request's handler is cancelled when its client disconnects.

    Args:
        sockets: the result of `listen`; they are closed at the end.
    """
    # The application's own server has no connections: it cannot be made to limit them.
    runner = web.AppRunner(application)
    await runner.setup()
    assert runner.server is not None
    server = _Server(runner.server)
    connections = web.ServerRunner(server.http, shutdown_timeout=SHUTDOWN_S)
    await connections.setup()
    tasks = [asyncio.ensure_future(server.accept(each)) for each in sockets]
    try:
        yield Address(*sockets[0].getsockname()[:2])
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for each in sockets:
            each.close()
        await connections.cleanup()
        await runner.cleanup()


class Awaited(Enum):
    """What the server waits for from the client of a connection."""

    FIRST_REQUEST = "first request"
    NEXT_REQUEST = "next request"
    BODY = "body"
    """The rest of the body, before or after the response."""
    READING = "reading"
    """The client reads the response."""


class _Server:
    """An HTTP server with at most `CLIENT_CONNECTIONS_MAX` connections."""

    def __init__(self, application: web.Server) -> None:
        self.connections: dict[web.RequestHandler, _Connection] = {}
        self.waiting: dict[tuple[str, Awaited], dict[_Connection, None]] = {}
        """The connections of each group, the longest waiting first."""
        self.turns = Turns(asyncio.get_running_loop())
        self.parsing = TimeShare(asyncio.get_running_loop(), PARSING_S)
        self._application = application
        self.http = web.Server(
            self._respond,
            request_factory=self._begin_request,
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,
            lingering_time=0,  # See `_Connection.end_request`.
            read_bufsize=UNREAD_BODY_BYTES_MAX,
        )

    async def accept(self, listener: socket.socket) -> None:
        """Accept connections until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            connection: socket.socket | None = None
            try:
                connection, _ = await loop.sock_accept(listener)
                await self.turns.wait()
                await loop.connect_accepted_socket(self, connection)
            except Exception as error:  # One connection must not end the listener.
                if connection is not None:
                    connection.close()
                if isinstance(error, ConnectionError):
                    continue  # The client is gone.
                log.warning(
                    "connections cannot be accepted",  # Such as too many open files.
                    reason=str(error),
                    exc_info=not isinstance(error, OSError),
                )
                await asyncio.sleep(ACCEPT_RETRY_S)

    def __call__(self) -> _Connection:
        return _Connection(self)

    def _begin_request(
        self, message: Any, content: StreamReader, protocol: web.RequestHandler, _: Any, task: Any
    ) -> web.BaseRequest:
        upgrades = message.method == "CONNECT" or (
            message.upgrade and message.headers.get("Upgrade", "").lower() == "websocket"
        )
        if upgrades:
            # No handler upgrades.  aiohttp would parse later requests, and pause the transport,
            # while this connection has paused it for parsing, too.
            content.on_eof(protocol.close)
        connection = self.connections[protocol]

        def body_received() -> None:
            if connection.awaited is Awaited.BODY:
                self.stop_waiting(connection)

        self.wait(connection, Awaited.BODY)
        content.on_eof(body_received)  # At once if there is no body.
        writer = _Writer(connection, content, last=upgrades)
        return self._application.request_factory(message, content, protocol, writer, task)

    async def _respond(self, request: web.BaseRequest) -> web.StreamResponse:
        await self.turns.wait()
        return await self._application.request_handler(request)

    def wait(
        self, connection: _Connection, awaited: Awaited, timeout_s: float | None = None
    ) -> None:
        """Begin to wait for a client, for at most `timeout_s`."""
        self.stop_waiting(connection)
        if not connection.ended:
            connection.awaited = awaited
            self.waiting.setdefault((connection.address, awaited), {})[connection] = None
            if timeout_s is not None:
                loop = asyncio.get_running_loop()
                connection.timeout = loop.call_later(timeout_s, connection.abort)

    def stop_waiting(self, connection: _Connection) -> None:
        """The client has done what was awaited, or is gone."""
        if connection.awaited is None:
            return
        if connection.timeout is not None:
            connection.timeout.cancel()
            connection.timeout = None
        group = connection.address, connection.awaited
        connection.awaited = None
        del self.waiting[group][connection]
        if not self.waiting[group]:
            del self.waiting[group]


class _Connection(asyncio.Protocol):
    """A connection, which reports to its server what it waits for."""

    transport: asyncio.Transport

    def __init__(self, server: _Server) -> None:
        self.server = server
        self.http = server.http()
        self.address = ""
        self.awaited: Awaited | None = None
        self.timeout: asyncio.TimerHandle | None = None
        self.ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVBUF, CLIENT_RECEIVE_BYTES
        )
        peer = transport.get_extra_info("peername")
        self.address = address_key(peer[0]) if peer else ""
        self.server.connections[self.http] = self
        self.http.connection_made(transport)
        self.server.wait(self, Awaited.FIRST_REQUEST, REQUEST_HEAD_TIMEOUT_S)
        if len(self.server.connections) > CLIENT_CONNECTIONS_MAX:
            largest = max(self.server.waiting.values(), key=len)
            next(iter(largest)).abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        self.server.stop_waiting(self)
        self.ended = True
        del self.server.connections[self.http]
        self.http.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        def receive() -> None:
            if not self.ended:
                self.http.data_received(data)

        def receive_later() -> None:
            self.transport.resume_reading()
            try:
                receive()  # It may pause the transport: see `_begin_request`.
            except BaseException:
                self.abort()
                raise

        parsing = self.server.parsing
        if parsing.has_time:
            parsing.run(receive)
        else:
            self.transport.pause_reading()
            parsing.run(receive_later)

    def eof_received(self) -> None:
        self.http.eof_received()

    def pause_writing(self) -> None:
        self.http.pause_writing()

    def resume_writing(self) -> None:
        self.http.resume_writing()

    async def end_request(self, content: StreamReader) -> None:
        """Read the rest of a body that no handler wants, one part per turn."""
        if not content.is_eof():
            self.server.wait(self, Awaited.BODY)
            with suppress(Exception):  # It is late, broken, or the client is gone.
                async with asyncio.timeout(CLOSE_LINGER_S):
                    while not content.is_eof():
                        await self.server.turns.wait()
                        await content.readany()
        awaited = Awaited.NEXT_REQUEST if content.is_eof() else Awaited.BODY
        self.server.wait(self, awaited, REQUEST_HEAD_TIMEOUT_S)

    def abort(self) -> None:
        """Close the connection without flushing data that the client does not read.

        A closed transport stays open until the client has read the rest.
        """
        self.server.stop_waiting(self)
        self.ended = True
        self.transport.abort()


class _Writer(StreamWriter):
    """Writes the response to a request, aiohttp's own to a malformed one included.

    Args:
        last: the connection is closed after it.
    """

    def __init__(self, connection: _Connection, content: StreamReader, *, last: bool) -> None:
        super().__init__(connection.http, asyncio.get_running_loop())
        self.connection = connection
        self.content = content
        self.last = last

    async def write_headers(self, status_line: str, headers: CIMultiDict[str]) -> None:
        headers.pop("Server", None)  # aiohttp's default.
        for name, value in HEADERS.items():
            headers.setdefault(name, value)
        if self.last:
            headers["Connection"] = "close"
        self.connection.server.wait(self.connection, Awaited.READING, RESPONSE_READ_TIMEOUT_S)
        await super().write_headers(status_line, headers)

    async def write_eof(self, chunk: bytes = b"") -> None:
        await super().write_eof(chunk)
        await self.connection.end_request(self.content)
