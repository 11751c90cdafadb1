"""An HTTP server from its first request to its last, which strangers may talk to.

Nobody holds a connection for ever.  A request's head has to come within `HEAD_S`, counted
from the last answer, and what is answered has to be taken within `ANSWER_S`; for a body
its handler decides.  There are at most `CONNECTIONS_MAX`: one more ends the one that
has waited longest for a request, above all for its first, so that who opens many and says
nothing keeps out nobody.
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
"""For requests that are under way when it ends; aiohttp waits twice."""
HEAD_S = 75.0
"""Longer than most proxies keep a connection that nothing is asked on."""
ANSWER_S = 60.0
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
"""Of every answer, to whatever was asked and however wrong; a handler may say something else.
Nothing says that scripts of other origins may read it."""


@asynccontextmanager
async def serving(
    application: web.Application, address: Address, *, guarded: bool = True
) -> AsyncIterator[Address]:
    """Serve `application` while the context lasts; yields where it really listens.

    A request's handler is cancelled when its client hangs up.

    Args:
        guarded: against strangers, as above.

    Raises:
        CannotRun: the address is taken, or not ours.
    """
    runner = (_GuardedRunner if guarded else web.AppRunner)(
        application,
        access_log=None,
        auto_decompress=False,
        handler_cancellation=True,
        keepalive_timeout=HEAD_S,
        shutdown_timeout=SHUTDOWN_S,
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, address.host, address.port, backlog=BACKLOG)
        try:
            await site.start()
        except (OSError, OverflowError) as error:
            number = getattr(error, "errno", None) or 0
            why = os.strerror(number) if number > 0 else str(error)
            raise CannotRun(f"cannot listen on {address}: {why}; choose another") from error
        yield Address(address.host, runner.addresses[0][1])
    finally:
        await runner.cleanup()


class _GuardedRunner(web.AppRunner):
    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _GuardedServer(
            made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            **made._kwargs,
        )


class _GuardedServer(web.Server):
    """Has no more connections than it may."""

    def __call__(self) -> RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        if len(self._connections) > CONNECTIONS_MAX:
            waiting = (each for each in self._connections if not each._request_in_progress)
            # In the order in which they came; where all are at work, the newest goes.
            min(waiting, key=lambda each: each._request_count > 0).force_close()


class _Connection(RequestHandler):
    """One client."""

    __slots__ = ()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        # Here, because it is where errors of aiohttp's own come by, too.
        if not resp.prepared:
            for name, value in HEADERS.items():
                resp.headers.setdefault(name, value)
        try:
            async with asyncio.timeout(ANSWER_S):
                return await super().finish_response(request, resp, start_time)
        except TimeoutError:
            self._abort()
            return resp, True

    def _abort(self) -> None:
        """End it without waiting for what the client does not take."""
        transport: Any = self.transport
        self.force_close()
        if transport is not None:
            transport.abort()
