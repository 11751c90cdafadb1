"""The settings of a process whose secrets may be rotated while it runs.

OUTBOX_DSN_FILE, OUTBOX_KEY_FILE and the files that libpq's parameters name
(service, password, certificates) are read when the process starts, when a session of the relay
begins, and after a refused login.  So a new password in the file is enough: nothing is restarted.

What cannot be used changes nothing: a file may be read while it is written, and the old secret may
still be valid.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import asyncpg
import structlog

from outbox.config import reread_secrets
from outbox.errors import DatabaseUnavailable, OutboxError
from outbox.store.connection import dsn

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from outbox.config import Settings
    from outbox.store.connection.dsn import Dsn

C = TypeVar("C")

log = structlog.get_logger("outbox.settings")


class CurrentSettings:
    """The settings, and the database's address, as their files were read last."""

    def __init__(self, settings: Settings, address: Dsn) -> None:
        self.settings = settings
        self.address = address
        # An application may change its environment after the start.
        self._environment = {
            name: value
            for name, value in os.environ.items()
            if name.startswith("PG") or name == "HOME"
        }
        # Why the files could not be used the last time.
        self._problem: str | None = None

    def reread(self, *, within_session: bool = False) -> None:
        """Read secrets again.

        Args:
            within_session: keep the old ones if they name another server or database, because all
                connections of a session lead to the same one.
        """
        try:
            settings = reread_secrets(self.settings)
            address = self._parse(settings)
        except OutboxError as error:
            if str(error) != self._problem:
                self._problem = str(error)
                log.error("secrets cannot be read again; the old ones are used", reason=str(error))
            return
        self._problem = None
        if within_session and _database_of(address) != _database_of(self.address):
            return
        before, self.settings = self.settings, settings
        was, self.address = self.address, address
        changed = [name for name in settings.secret_files if _differs(name, before, settings)]
        if changed or was != address:
            log.info("secrets were read again", changed=changed or [address.source])

    def _parse(self, settings: Settings) -> Dsn:
        """The address, whose host is the same if none is named.

        While a local server restarts, another one may be found in its place.
        """
        if not settings.dsn_source:
            return self.address
        address = dsn.from_settings(settings, self._environment)
        if address.names_host or self.address.names_host:
            return address
        return replace(address, addresses=self.address.addresses)

    async def log_in(self, connect: Callable[[Dsn], Awaitable[C]]) -> C:
        """Connect; if the login is refused and the secrets have changed, once more with those.

        Raises:
            OutboxError: see `outbox.store.connection.connect.connect`.
        """
        tried = self.address
        try:
            return await connect(tried)
        except DatabaseUnavailable as error:
            if not isinstance(error.__cause__, asyncpg.InvalidAuthorizationSpecificationError):
                raise
            self.reread(within_session=True)
            # Another connection may have read them meanwhile.
            if self.address == tried:
                raise
        return await connect(self.address)


def _database_of(address: Dsn) -> tuple[object, ...]:
    return address.addresses, address.database, address.target_session_attrs


def _differs(name: str, before: Settings, after: Settings) -> bool:
    return bool(getattr(before, name) != getattr(after, name))
