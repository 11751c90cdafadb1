"""Connections of a relay to its database, with the settings that its work depends on."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from outbox.errors import DatabaseUnavailable
from outbox.store.connection.connect import connect
from outbox.store.connection.pooled import PooledWorker, check_settings
from outbox.store.connection.type_cache import learn_types
from outbox.store.connection.worker import Worker, working
from outbox.store.replicas import listener_name

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection

    from asyncpg import Connection

    from outbox.config import Settings
    from outbox.store.connection.dsn import Dsn

IDLE_IN_TRANSACTION_SHARE = 0.8
"""Of the lease: a frozen replica must not sit on a row lock for longer."""

SESSION_SETTINGS = {
    # A success, a give-up or a batch that a crash of the server takes back
    # would turn the order around.
    "synchronous_commit": "on",
    "default_transaction_isolation": "read committed",
    "default_transaction_read_only": "off",
    # The lease bounds what has to be bounded; DETACH waits as long as it takes.
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_session_timeout": "0",
    # Everything large has its index.  A partition whose statistics are from its
    # first rows is otherwise read from end to end, once for every lane; and a lane
    # that owes more than most is read and sorted from end to end, in each helping.
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    # There is one good plan for each statement, whatever its arguments.  Left to
    # itself PostgreSQL thinks otherwise of those over partitions, and plans them anew
    # each time, which takes two thirds of a small batch.
    "plan_cache_mode": "force_generic_plan",
}
"""Whatever the role's or the database's defaults are."""


class Connections:
    """Opens them; whoever gets one ends it with `terminate`.

    asyncpg's errors, and those of `outbox.store.connection.connect.connect`, pass through.
    """

    def __init__(self, dsn: Dsn, settings: Settings) -> None:
        self._dsn = dsn
        self._settings = settings

    async def worker(self, name: str) -> Worker:
        """A connection to work on.

        Args:
            name: what its session is called.
        """
        settings = self._settings
        limit_ms = int(settings.lease_s * IDLE_IN_TRANSACTION_SHARE * 1000)
        bounded = {**SESSION_SETTINGS, "idle_in_transaction_session_timeout": str(limit_ms)}
        connection: Any = await connect(
            self._dsn,
            schema=settings.schema_name,
            application_name=name,
            connection_class=PooledWorker if settings.pooled else Worker,
            # Not the DSN's name: a burial finds our sessions by this one.
            server_settings={**bounded, "application_name": name},
            pooled=settings.pooled,
        )
        try:
            async with asyncio.timeout(self._dsn.connect_timeout_s):
                await learn_types(connection)
                if settings.pooled:
                    await check_settings(connection)
                    connection.bring(settings.schema_name, bounded)
        except BaseException as error:
            connection.terminate()
            if isinstance(error, TimeoutError):
                raise DatabaseUnavailable(f"{self._dsn} took a login and says nothing") from error
            raise
        worker: Worker = connection
        return worker

    @property
    def working(self) -> Callable[[Collection[int]], Awaitable[set[int]]] | None:
        """Tells which of some backends are at work; None where nobody can say."""
        return None if self._settings.pooled else self._ask

    async def _ask(self, pids: Collection[int]) -> set[int]:
        connection = await connect(
            self._dsn, schema=self._settings.schema_name, application_name="outbox-relay"
        )
        try:
            async with asyncio.timeout(self._dsn.connect_timeout_s):
                return await working(connection, pids)
        finally:
            connection.terminate()

    async def listener(self, replica_id: int) -> Connection[Any]:
        """A connection for LISTEN."""
        name = listener_name(replica_id)
        return await connect(
            self._dsn,
            schema=self._settings.schema_name,
            application_name=name,
            # Not the DSN's: `outbox doctor` looks for it by this name.
            server_settings={"application_name": name},
        )
