"""Connection pools of the API: small, opened on demand, with bounded waits.

Each listener has its own, so that neither waits for the other, and so have the tokens of tenants,
which share theirs.
While the database is unavailable, requests fail with 503, and each new request retries.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import asyncpg
import structlog

from outbox.core.model.text import count
from outbox.errors import OutboxError
from outbox.store.connection.connect import CONNECTION_ERRORS, in_one_line, milliseconds
from outbox.store.connection.operator import connect_current
from outbox.store.connection.row_security import require_unprotected
from outbox.store.privileges import require_privileges
from outbox_api.limits import (
    CONNECTION_WAIT_S,
    LOCK_TIMEOUT_S,
    LONG_MAX,
    REQUESTS_MAX,
    STATEMENT_TIMEOUT_S,
    TENANT_LOCK_TIMEOUT_S,
    TENANT_LONG_MAX,
    TENANT_REQUESTS_MAX,
    TENANT_STATEMENT_TIMEOUT_S,
)
from outbox_api.problem import Problem, is_not_granted, unavailable
from outbox_api.slots import SharedSlots

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from asyncpg import Connection

    from outbox.config import Settings
    from outbox.store.connection.current_settings import CurrentSettings
    from outbox_api.rate_limit import Holder

log = structlog.get_logger("outbox.api")

PURPOSE = "api"
"""The purpose that the database role needs."""
APPLICATION_NAME = "outbox-admin"
LOGINS_MAX = 1
"""Separate connection for token lookups: authentication works while the others are busy."""
IDLE_S = 30.0
"""Idle connections are closed after this time."""
WATCH_EVERY_S = 10.0
RELEASE_S = 5.0
POOL_CLOSE_S = 1.0
"""Maximum wait for a pool to close at shutdown."""

SESSION_SETTINGS = {
    "statement_timeout": milliseconds(STATEMENT_TIMEOUT_S),
    "lock_timeout": milliseconds(LOCK_TIMEOUT_S),
    "default_transaction_isolation": "read committed",
    "default_transaction_read_only": "off",
    # Most filter parameters are NULL: a custom plan uses the given ones, a generic plan cannot.
    "plan_cache_mode": "force_custom_plan",
}
TENANT_SESSION_SETTINGS = {
    **SESSION_SETTINGS,
    "statement_timeout": milliseconds(TENANT_STATEMENT_TIMEOUT_S),
    "lock_timeout": milliseconds(TENANT_LOCK_TIMEOUT_S),
    # A tenant's request takes the processor time of one server process.
    "max_parallel_workers_per_gather": "0",
}


@dataclass(slots=True)
class _Pool:
    """Connections with the same settings."""

    size_max: int
    settings: Mapping[str, str]
    connections: Any = None
    """The pool of asyncpg, while it is open."""


class Database:
    """Connections for requests; valid within `opened`."""

    def __init__(self, current: CurrentSettings) -> None:
        self._current = current
        self._requests = _Pool(REQUESTS_MAX, SESSION_SETTINGS)
        self._logins = _Pool(LOGINS_MAX, SESSION_SETTINGS)
        self._long = asyncio.Semaphore(LONG_MAX)
        self._of_tenants = _Pool(TENANT_REQUESTS_MAX, TENANT_SESSION_SETTINGS)
        self._slots = SharedSlots(TENANT_REQUESTS_MAX, "database connection")
        # An erasure may take minutes, while its tenant publishes.
        self._long_of_tenants = _Pool(TENANT_LONG_MAX, SESSION_SETTINGS)
        self._long_slots = SharedSlots(TENANT_LONG_MAX, "slot for a long request")
        # Checked at the first request, and again after a refused statement.
        self._has_privileges = False
        self._refusal: str | None = None
        self._failure: str | None = None

    @property
    def problem(self) -> str | None:
        """Why requests cannot use the database, as far as it was tried; None: they can."""
        return self._refusal or self._failure

    def note(self, failure: str | None) -> None:
        """Note why the database could not be used; None: it was used.  Only changes are logged."""
        if failure == self._failure:
            return
        self._failure = failure
        if failure is not None:
            log.warning("the database is unavailable", reason=failure)
        else:
            log.info("the database is available again")

    async def watch(self) -> None:
        """Try the database from time to time, so that `problem` does not wait for a request."""
        while True:
            try:
                # The connection may have hung since it was used last.
                async with self.login() as connection, asyncio.timeout(CONNECTION_WAIT_S):
                    await connection.execute("SELECT")
                self.note(None)
            except TimeoutError:
                self.note(f"it did not respond within {CONNECTION_WAIT_S:g} s")
            except (OutboxError, Problem, *CONNECTION_ERRORS) as error:
                if not is_not_granted(error):
                    self.note(in_one_line(error))
            except asyncpg.PostgresError as error:
                self.note(in_one_line(error))
            await asyncio.sleep(WATCH_EVERY_S)

    @property
    def settings(self) -> Settings:
        """The settings, with secrets as their files were read last."""
        return self._current.settings

    @property
    def schema(self) -> str:
        return self.settings.schema_name

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Open the pools; the first connection is opened on demand."""
        async with AsyncExitStack() as stack:
            for pool in (self._requests, self._logins, self._of_tenants, self._long_of_tenants):
                await stack.enter_async_context(self._opened(pool))
            yield

    @asynccontextmanager
    async def connection(
        self, holder: Holder | None = None, *, long: bool = False
    ) -> AsyncIterator[Connection[Any]]:
        """Acquire a connection for a request; the schema version is checked.

        Args:
            holder: whose share of the tenants' connections it takes; None: a system token's.
            long: the request may take minutes.

        Raises:
            OutboxError: see `connect` and `require_current`.
            Problem: no connection is free, or the database does not respond, or too many
                requests of the holder wait.
        """
        if holder is None:
            slot, pool = self._long_slot() if long else nullcontext(), self._requests
        elif long:
            slot, pool = self._long_slots.slot(holder), self._long_of_tenants
        else:
            slot, pool = self._slots.slot(holder), self._of_tenants
        async with slot, self._acquired(pool) as connection:
            yield connection

    @asynccontextmanager
    async def login(self) -> AsyncIterator[Connection[Any]]:
        """Acquire the connection for token lookups; raises like `connection`."""
        async with self._acquired(self._logins) as connection:
            yield connection

    @asynccontextmanager
    async def _long_slot(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(CONNECTION_WAIT_S):
                await self._long.acquire()
        except TimeoutError:
            raise unavailable(
                f"{count(LONG_MAX, 'long request')} already running; try again later"
            ) from None
        try:
            yield
        finally:
            self._long.release()

    @asynccontextmanager
    async def _opened(self, pool: _Pool) -> AsyncIterator[None]:
        pool.connections = asyncpg.create_pool(
            min_size=0,
            max_size=pool.size_max,
            max_inactive_connection_lifetime=IDLE_S,
            connect=partial(self._connect, pool.settings),
            # Three statements for each request, although requests change settings only within
            # transactions: `test_journalled` shows that sessions stay as they are.
            reset=_skip_reset,
        )
        await pool.connections
        try:
            yield
        finally:
            try:
                async with asyncio.timeout(POOL_CLOSE_S):
                    await pool.connections.close()
            except TimeoutError:
                pool.connections.terminate()

    @asynccontextmanager
    async def _acquired(self, pool: _Pool) -> AsyncIterator[Connection[Any]]:
        try:
            async with self._connected(pool) as connection:
                if not self._has_privileges:
                    # The connection may have hung since it was opened.
                    async with asyncio.timeout(CONNECTION_WAIT_S):
                        await require_privileges(connection, self.schema, PURPOSE)
                    self._has_privileges, self._refusal = True, None
                yield connection
        except Exception as error:
            if is_not_granted(error):
                self._log_refusal(error)
                self._has_privileges = False
            raise

    def _log_refusal(self, error: Exception) -> None:
        """Log what the role lacks: once, not for each request."""
        # The message of a refused operation names the purpose of the command line.
        refused = error.__cause__ if self._has_privileges else error
        reason = in_one_line(refused or error)
        if reason != self._refusal:
            self._refusal = reason
            log.error("the database role of the API lacks a privilege", reason=reason)

    @asynccontextmanager
    async def _connected(self, pool: _Pool) -> AsyncIterator[Connection[Any]]:
        try:
            async with asyncio.timeout(CONNECTION_WAIT_S):
                connection = await pool.connections.acquire()
        except TimeoutError:
            raise unavailable(
                f"no database connection within {CONNECTION_WAIT_S:.0f} s: the database does not "
                f"respond, or {pool.size_max} requests are already running; try again"
            ) from None
        try:
            if self.settings.pooled:
                async with asyncio.timeout(CONNECTION_WAIT_S):
                    await require_unprotected(cast("Connection[Any]", connection))
            yield cast("Connection[Any]", connection)
        finally:
            # The request is complete: a failed reset closes the connection and must not
            # change the response.
            with suppress(*CONNECTION_ERRORS):
                await pool.connections.release(connection, timeout=RELEASE_S)

    async def _connect(self, session: Mapping[str, str], *_: Any, **__: Any) -> Connection[Any]:
        return await self._current.log_in(
            lambda address: connect_current(
                address,
                self.settings,
                APPLICATION_NAME,
                purpose=PURPOSE,
                # Overrides application_name of the DSN, so that pg_stat_activity shows the API.
                server_settings={**session, "application_name": APPLICATION_NAME},
            )
        )


async def _skip_reset(_: Any) -> None:
    """No session state to reset."""
