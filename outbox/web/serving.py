"""An HTTP server from its first request to its last."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

from aiohttp import web

from outbox.errors import CannotRun
from outbox.web.address import Address

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

Refusal: TypeAlias = Callable[[int, str], web.Response]

BACKLOG = 1024
SHUTDOWN_S = 0.5
"""For requests that are under way when it ends; aiohttp waits twice."""


@asynccontextmanager
async def serving(
    application: web.Application, address: Address, *, refusal: Refusal | None = None
) -> AsyncIterator[Address]:
    """Serve `application` while the context lasts; yields where it really listens.

    A request's handler is cancelled when its client hangs up.

    Args:
        refusal: answers what never becomes a request, because it is no good HTTP, given the
            status and what is wrong; None: aiohttp does, in plain text.

    Raises:
        CannotRun: the address is taken, or not ours.
    """
    runner = _Runner(
        application,
        refusal=refusal,
        access_log=None,
        auto_decompress=False,
        handler_cancellation=True,
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


class _Runner(web.AppRunner):
    """Makes servers whose connections refuse as they are told to."""

    def __init__(self, app: web.Application, *, refusal: Refusal | None, **options: Any) -> None:
        super().__init__(app, **options)
        self._refusal = refusal

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(made, self._refusal)


class _Server(web.Server):
    def __init__(self, made: web.Server, refusal: Refusal | None) -> None:
        super().__init__(
            made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            loop=made._loop,
            **made._kwargs,
        )
        self.refusal = refusal

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


class _Connection(web.RequestHandler):
    __slots__ = ("_refusal",)

    def __init__(self, manager: _Server, **options: Any) -> None:
        super().__init__(manager, **options)
        self._refusal = manager.refusal

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        usual = super().handle_error(request, status, exc, message)
        if self._refusal is None:
            return usual
        answer = self._refusal(status, message or "")
        answer.force_close()
        return answer
