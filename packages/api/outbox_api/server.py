"""The API server, which runs inside the relay process."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import structlog

from outbox.web.serving import serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from aiohttp import web

    from outbox.store.connection.current_settings import CurrentSettings
    from outbox.web.address import Address
    from outbox_api.database import Database
    from outbox_api.login_failures import FailedLogins
    from outbox_api.meters import ApiMeters

log = structlog.get_logger("outbox.api")


@asynccontextmanager
async def running(
    current: CurrentSettings, address: Address, *, meters: ApiMeters | None = None
) -> AsyncIterator[Address]:
    """Serve the API while the context lasts; yields the bound address.

    Args:
        meters: those of the process; None: nothing reads them.

    Raises:
        CannotRun: the address cannot be bound.
    """
    # Imported here: a relay without the API does not load the routes.
    from outbox.web.loopback_hosts import is_loopback
    from outbox_api.app import application

    def api(database: Database, failures: FailedLogins) -> web.Application:
        return application(current.settings, address, database, failures, meters=meters)

    async with listening(current, address, api) as at:
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
    make: Callable[[Database, FailedLogins], web.Application],
) -> AsyncIterator[Address]:
    """Serve an application with its own connection pool and a log of failed logins.

    Raises:
        CannotRun: the address cannot be bound.
    """
    from outbox_api.database import Database
    from outbox_api.login_failures import FailedLogins

    database = Database(current)
    failures = FailedLogins(database)
    async with database.opened():
        writing = asyncio.ensure_future(failures.run())
        try:
            async with serving(make(database, failures), address) as at:
                yield at
        finally:
            writing.cancel()
            await asyncio.wait([writing])
