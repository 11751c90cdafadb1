"""The run's own database connection, for operator commands and queries.

It is direct, not through a proxy, and reconnects after an outage.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from outbox.errors import DatabaseUnavailable
from outbox.store.connection.connect import CONNECTION_ERRORS, connect

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from asyncpg import Connection

    from outbox.store.connection.dsn import Dsn

RETRY_S = 0.25
STATEMENT_TIMEOUT = "60s"


class ControlConnection:
    """One connection, used by one task at a time."""

    def __init__(self, dsn: Dsn, schema: str) -> None:
        self._dsn = dsn
        self._schema = schema
        self._connection: Connection[Any] | None = None
        self._lock = asyncio.Lock()

    async def open(self) -> Connection[Any]:
        """Open a separate connection, which the caller closes."""
        return await connect(
            self._dsn,
            schema=self._schema,
            application_name="outbox-prove",
            server_settings={
                "statement_timeout": STATEMENT_TIMEOUT,
                "synchronous_commit": "on",
                "idle_in_transaction_session_timeout": "0",
            },
        )

    @asynccontextmanager
    async def use(self) -> AsyncIterator[Connection[Any]]:
        """Use the connection; an error closes it.

        Raises:
            DatabaseUnavailable: the connection was lost, or cannot be opened.
        """
        async with self._lock:
            if self._connection is None or self._connection.is_closed():
                self._connection = await self.open()
            try:
                yield self._connection
            except CONNECTION_ERRORS as error:
                self._connection.terminate()
                raise DatabaseUnavailable(f"the connection was lost: {error}") from error

    @asynccontextmanager
    async def use_within(self, timeout_s: float) -> AsyncIterator[Connection[Any]]:
        """Use the connection; waits until the database is available.

        Raises:
            DatabaseUnavailable: not within `timeout_s`, or lost afterwards.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            try:
                async with self.use() as connection:
                    await connection.fetchval("SELECT 1")
                break
            except DatabaseUnavailable:
                if loop.time() > deadline:
                    raise
                await asyncio.sleep(RETRY_S)
        async with self.use() as connection:
            yield connection

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.terminate()
