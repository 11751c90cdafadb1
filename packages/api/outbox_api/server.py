"""The API server."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import structlog

from outbox.web.loopback_hosts import is_loopback
from outbox.web.serving import listen, serving
from outbox_api.app import application
from outbox_api.database import Database
from outbox_api.login_failures import FailedLogins
from outbox_api.shared import Shared

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from socket import socket

    from aiohttp import web

    from outbox.store.connection.current_settings import CurrentSettings
    from outbox.web.address import Address

log = structlog.get_logger("outbox.api")


@asynccontextmanager
async def running(
    current: CurrentSettings,
    address: Address,
    sockets: list[socket] | None = None,
    *,
    shared: Shared | None = None,
) -> AsyncIterator[Address]:
    """Serve the API while the context lasts; yields the bound address.

    Args:
        sockets: they listen there already; None: bind the address.
        shared: what it shares with other listeners of the process; None: there are none.

    Raises:
        CannotRun: the address cannot be bound.
    """
    shared = shared or Shared()

    def api(database: Database, failures: FailedLogins) -> web.Application:
        return application(current.settings, address, database, failures, shared)

    async with listening(current, address, sockets, shared, api) as at:
        log.info("the API listens", url=at.url)
        if not is_loopback(address.host):
            log.warning(
                "the API listens on a non-loopback address without TLS; "
                "put a TLS proxy in front of it"
            )
        yield at


@asynccontextmanager
async def listening(
    current: CurrentSettings,
    address: Address,
    sockets: list[socket] | None,
    shared: Shared,
    make: Callable[[Database, FailedLogins], web.Application],
) -> AsyncIterator[Address]:
    """Serve an application with its own connection pool and a log of failed logins.

    Raises:
        CannotRun: the address cannot be bound.
    """
    database = Database(current)
    shared.databases.append(database)
    failures = FailedLogins(database)
    async with database.opened():
        writing = asyncio.ensure_future(failures.run())
        try:
            sockets = sockets or await listen(address)
            async with serving(make(database, failures), sockets) as at:
                yield at
        finally:
            writing.cancel()
            await asyncio.wait([writing])
