"""HTTP server with limits against slow and idle clients.

A client must send a request's head within `REQUEST_HEAD_TIMEOUT_S` of the last response,
and read a response within `RESPONSE_TIMEOUT_S`; the handler limits the body.  At most
`CONNECTIONS_MAX` connections are open.  One more closes the oldest idle connection,
preferring one that has not sent a request yet, so a client that opens many idle
connections cannot lock out others.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

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


class _GuardedServer(web.Server):
    """An aiohttp server with at most `CONNECTIONS_MAX` connections."""

    def __call__(self) -> RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        if len(self._connections) > CONNECTIONS_MAX:
            waiting = (each for each in self._connections if not each._request_in_progress)
            # The connections are in order of arrival; `waiting` is never empty, because the
            # new connection has no request yet.
            min(waiting, key=lambda each: each._request_count > 0).force_close()


class _Connection(RequestHandler):
    __slots__ = ()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        # aiohttp's own error responses pass through this method as well.
        if not resp.prepared:
            for name, value in HEADERS.items():
                resp.headers.setdefault(name, value)
        try:
            async with asyncio.timeout(RESPONSE_TIMEOUT_S):
                return await super().finish_response(request, resp, start_time)
        except TimeoutError:
            self._abort()
            return resp, True

    def _abort(self) -> None:
        """Close the connection without flushing data that the client does not read."""
        transport: Any = self.transport
        self.force_close()
        if transport is not None:
            transport.abort()
