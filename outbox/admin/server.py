"""The API's server, which lives and dies with the relay."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import structlog

from outbox.store import dsn
from outbox.web.serving import serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from outbox.config import Settings
    from outbox.web.address import Address

log = structlog.get_logger("outbox.admin")


@asynccontextmanager
async def running(settings: Settings, address: Address) -> AsyncIterator[Address]:
    """Serve the API while the context lasts; yields where it really listens.

    Raises:
        CannotRun: the address is taken, or not ours.
    """
    # Imported here: a relay without the API need not know its routes.
    from outbox.admin.app import application
    from outbox.admin.database import Database
    from outbox.admin.failures import FailedLogins
    from outbox.admin.hosts import is_loopback

    database = Database(dsn.of(settings), settings)
    failures = FailedLogins(database)
    async with database.opened():
        writing = asyncio.ensure_future(failures.run())
        try:
            async with serving(application(settings, address, database, failures), address) as at:
                log.info("the API listens", url=at.url)
                if not is_loopback(address.host):
                    log.warning(
                        "the API can be reached from other machines, and tokens cross in clear; "
                        "put TLS in front of it"
                    )
                yield at
        finally:
            writing.cancel()
            await asyncio.wait([writing])
