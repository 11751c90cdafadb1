"""An HTTP server from its first request to its last."""

from __future__ import annotations

import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from aiohttp import web

from outbox.errors import CannotRun
from outbox.web.address import Address

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

BACKLOG = 1024
SHUTDOWN_S = 0.5
"""For requests that are under way when it ends; aiohttp waits twice."""


@asynccontextmanager
async def serving(application: web.Application, address: Address) -> AsyncIterator[Address]:
    """Serve `application` while the context lasts; yields where it really listens.

    A request's handler is cancelled when its client hangs up.

    Raises:
        CannotRun: the address is taken, or not ours.
    """
    runner = web.AppRunner(
        application,
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
