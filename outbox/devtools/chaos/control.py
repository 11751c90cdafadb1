"""The run's own connection to the database, for orders and questions.

It goes straight there, not through a proxy, and comes back when the database
does.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from outbox.errors import DatabaseUnavailable
from outbox.store.connection.connect import TROUBLE, connect

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from asyncpg import Connection

    from outbox.store.connection.dsn import Dsn

RETRY_S = 0.25
STATEMENT_TIMEOUT = "60s"


class Control:
    """One connection, one user at a time."""

    def __init__(self, dsn: Dsn, schema: str) -> None:
        self._dsn = dsn
        self._schema = schema
        self._connection: Connection[Any] | None = None
        self._turn = asyncio.Lock()

    async def open(self) -> Connection[Any]:
        """Another connection, for who keeps it."""
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
        """The connection; what goes wrong with it closes it.

        Raises:
            DatabaseUnavailable: it was lost, or cannot be had just now.
        """
        async with self._turn:
            if self._connection is None or self._connection.is_closed():
                self._connection = await self.open()
            try:
                yield self._connection
            except TROUBLE as error:
                self._connection.terminate()
                raise DatabaseUnavailable(f"the connection was lost: {error}") from error

    @asynccontextmanager
    async def insist(self, timeout_s: float) -> AsyncIterator[Connection[Any]]:
        """The connection, as soon as it can be had.

        Raises:
            DatabaseUnavailable: not within this time, or lost afterwards.
        """
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + timeout_s
        while True:
            try:
                async with self.use() as connection:
                    await connection.fetchval("SELECT 1")
                break
            except DatabaseUnavailable:
                if loop.time() > give_up_at:
                    raise
                await asyncio.sleep(RETRY_S)
        async with self.use() as connection:
            yield connection

    def close(self) -> None:
        """The end."""
        if self._connection is not None:
            self._connection.terminate()
