"""HTTP server with limits against slow and idle clients.

A client must send a request's head within `REQUEST_HEAD_TIMEOUT_S` of the last response, and read
what a response has written within `RESPONSE_READ_TIMEOUT_S`; the handler limits the body.  A write
ends when the kernel has taken all of it, so the memory of a response that is not read is what its
handler writes at a time.

A listener has a maximum of connections.  One more closes another one for whose client the server
waits.  Connections are grouped by the client's address and by what the server waits for
(`Awaited`), and the longest waiting connection of the largest group is closed.  So a client that
holds many connections, in whatever state, takes them from itself, and a new connection is closed
only if all others wait for the server.

aiohttp limits idle connections only.  The protocol of a connection reports when its client is
behind, the request factory sees the beginning of each request, malformed ones included, and its
stream writer the response.

Requests that are not HTTP are counted in the log, at most once per `NOT_HTTP_LOG_EVERY_S`: what a
client without a token sends neither fills the log nor appears in it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from contextlib import ExitStack, asynccontextmanager, contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Any, cast

from aiohttp import web
from aiohttp.http import StreamWriter
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.log import server_logger

from outbox.core.model.text import count
from outbox.errors import CannotRun
from outbox.web.address import Address, address_key

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from aiohttp import StreamReader
    from multidict import CIMultiDict

log = logging.getLogger("outbox.web")

SHUTDOWN_S = 0.5
"""How long shutdown waits for open requests; aiohttp waits twice."""
REQUEST_HEAD_TIMEOUT_S = 75.0
"""Longer than the keep-alive time-out of most proxies."""
RESPONSE_READ_TIMEOUT_S = 60.0
CLOSE_LINGER_S = 1.0
"""How long the rest of a body is read after its response: closing a connection with unread data
resets it, and the client might not see the response."""
CLIENT_CONNECTIONS_MAX = 512
CLIENT_SEND_BYTES = 128 * 1024
"""Bytes that the kernel holds for a client that does not read, about.  The kernel doubles it, and
would let it grow to 4 MiB; connections inherit it from their listening socket."""
UNREAD_BODY_BYTES_MAX = 16 * 1024
"""Bytes of a body after which a connection waits for its handler to take them."""
NOT_HTTP_LOG_EVERY_S = 60.0

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
                made = socket.create_server(at, family=family)
                sockets.append(stack.enter_context(made))
                made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, CLIENT_SEND_BYTES)
                made.setblocking(False)
        except (OSError, OverflowError) as error:
            number = getattr(error, "errno", None) or 0
            reason = os.strerror(number) if number > 0 else str(error)
            raise CannotRun(f"cannot listen on {address}: {reason}; choose another") from error
        stack.pop_all()
    return sockets


@asynccontextmanager
async def serving(
    application: web.Application,
    sockets: list[socket.socket],
    *,
    connections_max: int = CLIENT_CONNECTIONS_MAX,
) -> AsyncIterator[Address]:
    """Serve `application` inside the context; yields the address of the first socket.

    A request's handler is cancelled when its client disconnects.

    Args:
        sockets: the result of `listen`; they are closed at the end.
    """
    loop = asyncio.get_running_loop()
    runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    assert runner.server is not None
    address = Address(*sockets[0].getsockname()[:2])
    connections = Connections(runner.server, connections_max, _Log(address))
    servers = [await loop.create_server(connections.accept, sock=each) for each in sockets]
    try:
        yield address
    finally:
        for server in servers:
            server.close()
        await runner.cleanup()
        connections.log.close()


class Awaited(Enum):
    """What the server waits for from the client of a connection."""

    FIRST_REQUEST = "first request"
    NEXT_REQUEST = "next request"
    BODY = "body"
    """The rest of the body, before or after the response."""
    READING = "reading"
    """The client reads the response."""
    SHARE = "share"
    """The client has used its share of the server's time."""


@contextmanager
def awaiting_share(request: web.BaseRequest) -> Iterator[None]:
    """While a request waits for its client's share, another connection may take its place.

    Otherwise those of one client that wait would take all places.
    """
    connection = request.protocol
    assert isinstance(connection, Connection)
    connection.wait(Awaited.SHARE)
    try:
        yield
    finally:
        if connection.awaited is Awaited.SHARE:
            connection.stop_waiting()
            if not request.content.is_eof():
                connection.wait(Awaited.BODY)


class _Log:
    """The logger that aiohttp gets: of requests that are not HTTP, it logs the number.

    Their exceptions have the bytes that the client sent, such as a token.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        self._not_http = 0
        self._next: asyncio.TimerHandle | None = None

    def debug(self, *_: object, exc_info: object = None, **__: object) -> None:
        """Count a request if it is not HTTP, such as one of TLS; aiohttp logs the rest here."""
        if isinstance(exc_info, HttpProcessingError):
            self._not_http += 1
            if self._next is None:
                self._report()

    def exception(
        self, message: str, *values: object, exc_info: BaseException | None = None, **_: object
    ) -> None:
        if isinstance(exc_info, HttpProcessingError):
            self.debug(exc_info=exc_info)
        else:
            server_logger.error(message, *values, exc_info=exc_info)

    def close(self) -> None:
        """Log the requests that have not been logged."""
        if self._next is not None:
            self._next.cancel()
            self._report()
            if self._next is not None:
                self._next.cancel()

    def _report(self) -> None:
        self._next = None
        if self._not_http:
            log.warning("not HTTP: %s at %s", count(self._not_http, "request"), self._address)
            self._not_http = 0
            self._next = asyncio.get_running_loop().call_later(NOT_HTTP_LOG_EVERY_S, self._report)


class Connections:
    """The connections of a listener, and those among them whose clients the server waits for.

    Args:
        server: serves their requests.
        connections_max: one more closes another one.
        log: what aiohttp logs of them.
    """

    def __init__(self, server: web.Server, connections_max: int, log: _Log) -> None:
        self.open: set[Connection] = set()
        self.waiting: dict[tuple[str, Awaited], dict[Connection, None]] = {}
        """The connections of each group, the longest waiting first."""
        self.log = log
        self._connections_max = connections_max
        self._server = server
        self._make_request = server.request_factory
        server.request_factory = self._begin_request

    def accept(self) -> Connection:
        return Connection(self, self._server)

    def _begin_request(
        self,
        message: Any,
        content: StreamReader,
        protocol: web.RequestHandler,
        _: Any,
        task: asyncio.Task[None],
    ) -> web.BaseRequest:
        assert isinstance(protocol, Connection)

        def body_received() -> None:
            if protocol.awaited is Awaited.BODY:
                protocol.stop_waiting()

        protocol.wait(Awaited.BODY)
        content.on_eof(body_received)  # At once if there is no body.
        writer = _Writer(protocol, content)
        return self._make_request(message, content, protocol, writer, task)

    def add(self, connection: Connection) -> None:
        """Count a connection, and close another one if there are too many."""
        self.open.add(connection)
        connection.wait(Awaited.FIRST_REQUEST, REQUEST_HEAD_TIMEOUT_S)
        if len(self.open) > self._connections_max:
            largest = max(self.waiting.values(), key=len)
            next(iter(largest)).abort()


class Connection(web.RequestHandler):
    """A connection, which knows what the server waits for from its client."""

    def __init__(self, connections: Connections, server: web.Server) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            logger=cast("Any", connections.log),
            access_log=None,  # type: ignore[arg-type]  # As `AppRunner` passes it.
            auto_decompress=False,
            lingering_time=CLOSE_LINGER_S,
            read_bufsize=UNREAD_BODY_BYTES_MAX,
        )
        self.awaited: Awaited | None = None
        self.connections = connections
        self.address = ""
        self.timeout: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(0)
        peer = transport.get_extra_info("peername")
        self.address = address_key(peer[0]) if peer else ""
        super().connection_made(transport)
        self.connections.add(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.stop_waiting()
        self.connections.open.discard(self)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.wait(Awaited.READING, RESPONSE_READ_TIMEOUT_S)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.stop_waiting()

    def wait(self, awaited: Awaited, timeout_s: float | None = None) -> None:
        """Begin to wait for the client, for at most `timeout_s`."""
        self.stop_waiting()
        if self in self.connections.open:
            self.awaited = awaited
            self.connections.waiting.setdefault((self.address, awaited), {})[self] = None
            if timeout_s is not None:
                self.timeout = asyncio.get_running_loop().call_later(timeout_s, self.abort)

    def stop_waiting(self) -> None:
        """The client has done what was awaited, or is gone."""
        if self.timeout is not None:
            self.timeout.cancel()
            self.timeout = None
        if self.awaited is not None:
            waiting, group = self.connections.waiting, (self.address, self.awaited)
            self.awaited = None
            del waiting[group][self]
            if not waiting[group]:
                del waiting[group]

    def abort(self) -> None:
        """Close the connection without flushing data that the client does not read.

        A closed transport stays open until the client has read the rest.
        """
        self.stop_waiting()
        self.connections.open.discard(self)
        self._transport.abort()


class _Writer(StreamWriter):
    """Writes the response to a request, aiohttp's own to a malformed one included."""

    def __init__(self, connection: Connection, content: StreamReader) -> None:
        super().__init__(connection, asyncio.get_running_loop())
        self.connection = connection
        self.content = content

    async def write_headers(self, status_line: str, headers: CIMultiDict[str]) -> None:
        headers.pop("Server", None)  # aiohttp's default.
        for name, value in HEADERS.items():
            headers.setdefault(name, value)
        await super().write_headers(status_line, headers)

    async def write_eof(self, chunk: bytes = b"") -> None:
        await super().write_eof(chunk)
        awaited = Awaited.NEXT_REQUEST if self.content.is_eof() else Awaited.BODY
        self.connection.wait(awaited, REQUEST_HEAD_TIMEOUT_S)
