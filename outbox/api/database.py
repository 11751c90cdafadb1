"""The API's own connections: few, opened when they are needed, and bounded in time.

The relay's are not used, so that whatever is asked here takes nothing from a delivery.
When the database is away, requests are told so, and the next one tries again.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, cast

import asyncpg

from outbox.api.problem import unavailable
from outbox.store.connection.connect import TROUBLE, connect
from outbox.store.connection.migrate import require_current
from outbox.store.connection.pooled import PooledWorker
from outbox.store.connection.type_cache import KnowingConnection

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from asyncpg import Connection

    from outbox.config import Settings
    from outbox.store.connection.dsn import Dsn

APPLICATION_NAME = "outbox-admin"
REQUESTS_MAX, LONG_MAX = 4, 2
"""Connections for requests, and how many of them those may have that can take minutes."""
LOGINS_MAX = 1
"""A connection for tokens alone: whoever asks is told who he is, however busy the others are."""
IDLE_S = 30.0
"""A connection that nobody needs is closed after this."""
STATEMENT_TIMEOUT_S = 30.0
LOCK_TIMEOUT_S = 10.0
"""For a row that somebody else changes; the cursor's is held for milliseconds."""
WAIT_S = 10.0
"""For a connection to be free, or to be opened."""
RELEASE_S = 5.0
CLOSE_S = 1.0
"""For the connections of a kind, when the server ends."""

SESSION_SETTINGS = {
    "statement_timeout": str(int(STATEMENT_TIMEOUT_S * 1000)),
    "lock_timeout": str(int(LOCK_TIMEOUT_S * 1000)),
    "idle_in_transaction_session_timeout": str(int(STATEMENT_TIMEOUT_S * 1000)),
    "default_transaction_isolation": "read committed",
    "default_transaction_read_only": "off",
    # What is asked for differs from question to question, and is mostly left out.
    "plan_cache_mode": "force_custom_plan",
}


class Database:
    """Connections for requests; use it within `opened`."""

    def __init__(self, dsn: Dsn, settings: Settings) -> None:
        self._dsn = dsn
        self._settings = settings
        self._requests: Any = None
        self._logins: Any = None
        self._long = asyncio.Semaphore(LONG_MAX)

    @property
    def schema(self) -> str:
        """The schema of the outbox."""
        return self._settings.schema_name

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """While this lasts connections can be had; none is opened before one is asked for."""
        async with self._pool(REQUESTS_MAX) as requests, self._pool(LOGINS_MAX) as logins:
            self._requests, self._logins = requests, logins
            yield

    @asynccontextmanager
    async def connection(self, *, long: bool = False) -> AsyncIterator[Connection[Any]]:
        """A connection for a request; its schema is of this version.

        Args:
            long: it may take minutes.

        Raises:
            OutboxError: everything that `connect` and `require_current` raise.
            Problem: all connections are taken, or it does not answer.
        """
        async with (
            self._turn_of_long() if long else nullcontext(),
            self._taken(self._requests, REQUESTS_MAX) as connection,
        ):
            yield connection

    @asynccontextmanager
    async def login(self) -> AsyncIterator[Connection[Any]]:
        """A connection to look up a token; it raises what `connection` does."""
        async with self._taken(self._logins, LOGINS_MAX) as connection:
            yield connection

    @asynccontextmanager
    async def _turn_of_long(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(WAIT_S):
                await self._long.acquire()
        except TimeoutError:
            raise unavailable(
                f"{LONG_MAX} requests that take long are at work already; try again later"
            ) from None
        try:
            yield
        finally:
            self._long.release()

    @asynccontextmanager
    async def _pool(self, size_max: int) -> AsyncIterator[Any]:
        pool = asyncpg.create_pool(
            min_size=0,
            max_size=size_max,
            max_inactive_connection_lifetime=IDLE_S,
            connect=self._connect,
            # Behind a proxy there is no session of ours to reset.
            reset=_nothing if self._settings.pooled else None,
        )
        await pool
        try:
            yield pool
        finally:
            try:
                async with asyncio.timeout(CLOSE_S):
                    await pool.close()
            except TimeoutError:
                pool.terminate()

    @asynccontextmanager
    async def _taken(self, pool: Any, size_max: int) -> AsyncIterator[Connection[Any]]:
        try:
            async with asyncio.timeout(WAIT_S):
                connection = await pool.acquire()
        except TimeoutError:
            raise unavailable(
                f"the database did not answer within {WAIT_S:.0f} s, or the API has as many "
                f"requests at work as it may have, {size_max}; try again"
            ) from None
        try:
            yield cast("Connection[Any]", connection)
        finally:
            # What was asked is done, or has failed, by now: that the connection cannot be
            # reset any more, and is ended, is no other answer to it.
            with suppress(*TROUBLE):
                await pool.release(connection, timeout=RELEASE_S)

    async def _connect(self, *_: Any, **__: Any) -> Connection[Any]:
        pooled = self._settings.pooled
        connection: Any = await connect(
            self._dsn,
            schema=self.schema,
            application_name=APPLICATION_NAME,
            # Not the DSN's name: whoever looks at the server's sessions tells them apart by it.
            server_settings={**SESSION_SETTINGS, "application_name": APPLICATION_NAME},
            pooled=pooled,
            connection_class=PooledWorker if pooled else KnowingConnection,
        )
        try:
            await require_current(connection, self.schema)
            if pooled:
                connection.bring(self.schema, SESSION_SETTINGS)
        except BaseException:
            connection.terminate()
            raise
        return cast("Connection[Any]", connection)


async def _nothing(_: Any) -> None:
    """There is nothing to reset."""
