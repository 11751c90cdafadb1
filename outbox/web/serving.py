"""HTTP server with limits against slow and idle clients.

A client must send a request's head within `REQUEST_HEAD_TIMEOUT_S` of the last response,
and read a response within `RESPONSE_TIMEOUT_S`; the handler limits the body.  At most
`CONNECTIONS_MAX` connections are open.  One more closes another one for whose client the
server waits.  Connections are grouped by the client's address and by what the server waits
for (`Awaited`), and the longest waiting connection of the largest group is closed.  So a
client that holds many connections, in whatever state, takes them from itself, and a new
connection is closed only if all others wait for the server.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import asynccontextmanager
from enum import Enum
from typing import TYPE_CHECKING, Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from outbox.core.admission.token_bucket import address_key
from outbox.errors import CannotRun
from outbox.web.address import Address

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

BACKLOG = 1024
SHUTDOWN_S = 0.5
"""How long shutdown waits for open requests; aiohttp waits twice."""
REQUEST_HEAD_TIMEOUT_S = 75.0
"""Longer than the keep-alive time-out of most proxies."""
RESPONSE_TIMEOUT_S = 60.0
LINGER_S = 1.0
"""How long the rest of a body is read after its response: closing a connection with unread data
resets it, and the client might not see the response."""
CONNECTIONS_MAX = 512

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
async def serving(
    application: web.Application, address: Address, *, guarded: bool = True
) -> AsyncIterator[Address]:
    """Serve `application` inside the context; yields the actual listen address.

    A request's handler is cancelled when its client disconnects.

    Args:
        guarded: apply the module's limits.

    Raises:
        CannotRun: the address is in use, or does not belong to this host.
    """
    runner = (_GuardedRunner if guarded else web.AppRunner)(
        application,
        access_log=None,
        auto_decompress=False,
        handler_cancellation=True,
        keepalive_timeout=REQUEST_HEAD_TIMEOUT_S,
        lingering_time=LINGER_S,
        shutdown_timeout=SHUTDOWN_S,
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, address.host, address.port, backlog=BACKLOG)
        try:
            await site.start()
        except (OSError, OverflowError) as error:
            number = getattr(error, "errno", None) or 0
            reason = os.strerror(number) if number > 0 else str(error)
            raise CannotRun(f"cannot listen on {address}: {reason}; choose another") from error
        yield Address(address.host, runner.addresses[0][1])
    finally:
        await runner.cleanup()


class _GuardedRunner(web.AppRunner):
    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        return _GuardedServer(
            server.request_handler,
            request_factory=server.request_factory,
            handler_cancellation=server.handler_cancellation,
            **server._kwargs,
        )


class Awaited(Enum):
    """What the server waits for from the client of a connection."""

    FIRST_REQUEST = "first request"
    NEXT_REQUEST = "next request"
    BODY = "body"
    """Before or after the response."""
    READING = "reading"
    """That the client reads the response."""


class _GuardedServer(web.Server):
    """An aiohttp server with at most `CONNECTIONS_MAX` connections."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._waiting: dict[tuple[str, Awaited], dict[_Connection, None]] = {}
        """The connections of each group, the longest waiting first."""

    def __call__(self) -> RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        assert isinstance(handler, _Connection)
        handler.opened = transport
        peer = transport.get_extra_info("peername")
        handler.address = address_key(peer[0]) if peer else ""
        self.wait(handler, Awaited.FIRST_REQUEST)
        if len(self._connections) > CONNECTIONS_MAX:
            largest = max(self._waiting.values(), key=len)
            next(iter(largest)).abort()

    def connection_lost(self, handler: RequestHandler, exc: BaseException | None = None) -> None:
        assert isinstance(handler, _Connection)
        self.stop_waiting(handler)
        super().connection_lost(handler, exc)

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


class _Connection(RequestHandler):
    __slots__ = ("address", "awaited", "opened")

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.address = ""
        self.awaited: Awaited | None = None
        self.opened: asyncio.Transport | None = None
        """The transport, also after aiohttp has closed it: it stays open until the client has read
        the rest."""

    def _wait(self, awaited: Awaited) -> None:
        if isinstance(self._manager, _GuardedServer):  # None: the connection is lost.
            self._manager.wait(self, awaited)

    def _stop_waiting(self) -> None:
        if isinstance(self._manager, _GuardedServer):
            self._manager.stop_waiting(self)

    async def _handle_request(
        self, request: web.BaseRequest, start_time: float | None, request_handler: Any
    ) -> tuple[web.StreamResponse, bool]:
        def body_received() -> None:
            if self.awaited is Awaited.BODY and self._current_request is request:
                self._stop_waiting()

        if request.content.is_eof():
            self._stop_waiting()
        else:
            self._wait(Awaited.BODY)
            request.content.on_eof(body_received)
        try:
            return await super()._handle_request(request, start_time, request_handler)
        finally:
            is_complete = request.content.is_eof()
            self._wait(Awaited.NEXT_REQUEST if is_complete else Awaited.BODY)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        # aiohttp's own error responses pass through this method as well.
        if not resp.prepared:
            for name, value in HEADERS.items():
                resp.headers.setdefault(name, value)
        self._wait(Awaited.READING)
        try:
            async with asyncio.timeout(RESPONSE_TIMEOUT_S):
                return await super().finish_response(request, resp, start_time)
        except TimeoutError:
            self.abort()
            return resp, True

    def abort(self) -> None:
        """Close the connection without flushing data that the client does not read."""
        self._stop_waiting()
        self.force_close()
        if self.opened is not None:
            self.opened.abort()
