"""HTTP server with limits against slow and idle clients.

A client must send a request's head within `REQUEST_HEAD_TIMEOUT_S` of the last response,
and read a response within `RESPONSE_TIMEOUT_S`; the handler limits the body.  At most
`CONNECTIONS_MAX` connections are open.  One more closes another one for whose client the
server waits.  Connections are grouped by the client's address and by what the server waits
for (`Awaited`), and the longest waiting connection of the largest group is closed.  So a
client that holds many connections, in whatever state, takes them from itself, and a new
connection is closed only if all others wait for the server.

Deliveries share the event loop: per iteration one connection is accepted, one request begins, or
one part of an unwanted body is read (see `outbox.web.turns`).
"""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from enum import Enum
from typing import TYPE_CHECKING, Any

import structlog
from aiohttp import web

from outbox.core.admission.token_bucket import address_key
from outbox.errors import CannotRun
from outbox.web.address import Address
from outbox.web.turns import Turns

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from aiohttp import StreamReader

log = structlog.get_logger("outbox.web")

BACKLOG = 1024
ACCEPT_RETRY_S = 1.0
SHUTDOWN_S = 0.5
"""How long shutdown waits for open requests; aiohttp waits twice."""
REQUEST_HEAD_TIMEOUT_S = 75.0
"""Longer than the keep-alive time-out of most proxies."""
RESPONSE_TIMEOUT_S = 60.0
LINGER_S = 1.0
"""How long the rest of a body is read after its response: closing a connection with unread data
resets it, and the client might not see the response."""
CONNECTIONS_MAX = 512
READ_BYTES = 16 * 1024
"""Bytes of a body after which a connection waits for its handler to take them."""
RECEIVE_BYTES = 32 * 1024
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


@asynccontextmanager
async def serving(application: web.Application, address: Address) -> AsyncIterator[Address]:
    """Serve `application` inside the context; yields the actual listen address.

    A request's handler is cancelled when its client disconnects.

    Raises:
        CannotRun: the address is in use, or does not belong to this host.
    """
    # The application's own server has no connections: it cannot be made to limit them.
    runner = web.AppRunner(application)
    await runner.setup()
    assert runner.server is not None
    server = _Server(runner.server.request_handler, request_factory=runner.server.request_factory)
    connections = web.ServerRunner(server, shutdown_timeout=SHUTDOWN_S)
    await connections.setup()
    try:
        async with _accepting(server, address) as listening:
            yield listening
    finally:
        await connections.cleanup()
        await runner.cleanup()


@asynccontextmanager
async def _accepting(server: _Server, address: Address) -> AsyncIterator[Address]:
    """Accept connections inside the context; yields the actual listen address."""
    loop = asyncio.get_running_loop()
    with ExitStack() as stack:
        listeners: list[socket.socket] = []
        with _as_cannot_listen(address):
            found = await loop.getaddrinfo(
                address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            for family, _, _, _, at in dict.fromkeys(found):
                listener = socket.create_server(at, family=family, backlog=BACKLOG)
                listeners.append(stack.enter_context(listener))
                listener.setblocking(False)
        tasks = [asyncio.ensure_future(server.accept(listener)) for listener in listeners]
        try:
            yield Address(address.host, listeners[0].getsockname()[1])
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


@contextmanager
def _as_cannot_listen(address: Address) -> Iterator[None]:
    try:
        yield
    except (OSError, OverflowError) as error:
        number = getattr(error, "errno", None) or 0
        reason = os.strerror(number) if number > 0 else str(error)
        raise CannotRun(f"cannot listen on {address}: {reason}; choose another") from error


class Awaited(Enum):
    """What the server waits for from the client of a connection."""

    FIRST_REQUEST = "first request"
    NEXT_REQUEST = "next request"
    BODY = "body"
    """Before or after the response."""
    READING = "reading"
    """That the client reads the response."""


class _Server(web.Server):
    """An aiohttp server with at most `CONNECTIONS_MAX` connections."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, handler_cancellation=True, **options)
        self._waiting: dict[tuple[str, Awaited], dict[_Connection, None]] = {}
        """The connections of each group, the longest waiting first."""
        self.turns = Turns(asyncio.get_running_loop())

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

    def __call__(self) -> web.RequestHandler:
        return _Connection(self)

    def wait(self, connection: _Connection, awaited: Awaited) -> None:
        """Begin to wait for a client."""
        self.stop_waiting(connection)
        if connection.transport is not None:
            connection.awaited = awaited
            self._waiting.setdefault((connection.address, awaited), {})[connection] = None

    def stop_waiting(self, connection: _Connection) -> None:
        """The client has done what was awaited, or is gone."""
        if connection.awaited is None:
            return
        group = connection.address, connection.awaited
        connection.awaited = None
        del self._waiting[group][connection]
        if not self._waiting[group]:
            del self._waiting[group]

    def enforce_limit(self) -> None:
        """Close a connection of the largest group if there are too many."""
        if len(self.connections) > CONNECTIONS_MAX:
            largest = max(self._waiting.values(), key=len)
            next(iter(largest)).abort()


class _Connection(web.RequestHandler):
    """A connection, which reports to its server what it waits for.

    The states of a request have no documented hooks.  Of the methods that are overridden, only
    `_handle_request` is private to aiohttp: it also covers the responses to malformed requests,
    which no handler sees.
    """

    __slots__ = ("address", "awaited", "opened", "server")

    def __init__(self, server: _Server) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # None: off.
            auto_decompress=False,
            keepalive_timeout=REQUEST_HEAD_TIMEOUT_S,
            lingering_time=0,  # See `_discard_body`.
            read_bufsize=READ_BYTES,
        )
        self.server = server
        self.address = ""
        self.awaited: Awaited | None = None
        self.opened: asyncio.Transport | None = None
        """The transport, also after aiohttp has closed it: it stays open until the client has read
        the rest."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.opened = self.transport
        transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES
        )
        peer = transport.get_extra_info("peername")
        self.address = address_key(peer[0]) if peer else ""
        self.server.wait(self, Awaited.FIRST_REQUEST)
        self.server.enforce_limit()

    def connection_lost(self, exc: BaseException | None) -> None:
        self.server.stop_waiting(self)
        super().connection_lost(exc)

    async def _handle_request(
        self, request: web.BaseRequest, start_time: float | None, request_handler: Any
    ) -> tuple[web.StreamResponse, bool]:
        def body_received() -> None:
            if self.awaited is Awaited.BODY:
                self.server.stop_waiting(self)

        if request.content.is_eof():
            self.server.stop_waiting(self)
        else:
            self.server.wait(self, Awaited.BODY)
            request.content.on_eof(body_received)
        try:
            await self.server.turns.wait()
            return await super()._handle_request(request, start_time, request_handler)
        finally:
            is_complete = request.content.is_eof()
            self.server.wait(self, Awaited.NEXT_REQUEST if is_complete else Awaited.BODY)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        # aiohttp's own error responses pass through this method as well.
        if not resp.prepared:
            for name, value in HEADERS.items():
                resp.headers.setdefault(name, value)
        self.server.wait(self, Awaited.READING)
        try:
            async with asyncio.timeout(RESPONSE_TIMEOUT_S):
                finished = await super().finish_response(request, resp, start_time)
        except TimeoutError:
            self.abort()
            return resp, True
        if not request.content.is_eof():
            await self._discard_body(request.content)
        return finished

    async def _discard_body(self, content: StreamReader) -> None:
        """Read the rest of a body that no handler wants, one part per turn."""
        self.server.wait(self, Awaited.BODY)
        with suppress(Exception):  # It is late, broken, or the client is gone.
            async with asyncio.timeout(LINGER_S):
                while not content.is_eof() and self.transport is not None:
                    await self.server.turns.wait()
                    await content.readany()

    def abort(self) -> None:
        """Close the connection without flushing data that the client does not read."""
        self.server.stop_waiting(self)
        self.force_close()
        if self.opened is not None:
            self.opened.abort()
