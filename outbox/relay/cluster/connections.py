"""Connections of a relay to its database, with the settings that its work depends on."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from outbox.errors import CannotRun, DatabaseUnavailable, OutboxError
from outbox.relay.cluster.stores import Stores
from outbox.store.cluster.sessions import LISTENER_SUFFIX, WATCHDOG_NAME, terminate_former_listeners
from outbox.store.connection.connect import (
    CONNECTION_ERRORS,
    TRANSACTION_TIMEOUT_S,
    connect,
    milliseconds,
    transaction_settings,
)
from outbox.store.connection.pgbouncer import PooledWorker, check_settings
from outbox.store.connection.store_connection import Worker, read_busy_backends
from outbox.store.connection.type_cache import load_types
from outbox.store.sequencing.stalls import read_standby_wait, read_wait_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping

    from asyncpg import Connection

    from outbox.config import Settings
    from outbox.store.connection.current_settings import CurrentSettings
    from outbox.store.connection.dsn import Dsn
    from outbox.store.sequencing.stalls import StandbyWait, WaitReason

IDLE_IN_TRANSACTION_SHARE = 0.8
"""Share of the lease.  A frozen replica must not sit on a row lock for longer."""

SESSION_SETTINGS = {
    # A crash that loses a committed success, dead letter or batch would break the order.
    "synchronous_commit": "on",
    "default_transaction_isolation": "read committed",
    "default_transaction_read_only": "off",
    # The lease and the watchdog bound statements; those of maintenance may take any time.
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_session_timeout": "0",
    # Every large table has its index.  Otherwise a partition with statistics of its
    # first rows is scanned once per lane, and a lane with an unusually large backlog
    # is scanned and sorted for every chunk.
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    # One generic plan suits each statement.  By default PostgreSQL plans statements on
    # partitioned tables at each execution, which takes two thirds of a small batch.
    "plan_cache_mode": "force_generic_plan",
    # A generic plan of a range of ids expects a fixed share of the table.  Of millions of rows, it
    # would start processes for each read of a few.
    "max_parallel_workers_per_gather": "0",
}
"""These override the defaults of the role and the database."""

MAINTENANCE_LOCK_TIMEOUT_S = 10.0
"""DETACH waits for every transaction that uses the table, such as a dump of hours: maintenance
goes on without it, and repeats it.  Behind a transaction-pooling proxy there is no such limit."""


class Connections:
    """Opens connections; the caller closes them with `terminate`.

    asyncpg's errors, and those of `outbox.store.connection.connect.connect`, pass through.
    """

    def __init__(self, current: CurrentSettings) -> None:
        self._current = current
        self._settings = current.settings
        self.stores = Stores()
        """Stores of the sessions on these connections."""

    def reread_secrets(self) -> Settings:
        """Read secrets again for a new session, and return the settings with them."""
        self._current.reread()
        return self._current.settings

    @property
    def reopens(self) -> bool:
        """Whether a lost connection can be told from the loss of the server: not behind a proxy."""
        return not self._settings.pooled

    async def reopened(self, name: str, *, long: bool) -> Worker:
        """Open a `worker` in place of a lost one, which may be older than the password."""
        return await self._current.log_in(lambda _: self.worker(name, long=long))

    async def worker(self, name: str, *, long: bool = False) -> Worker:
        """Open a connection for statements.

        Args:
            name: the connection's `application_name`.
            long: whether its transactions may take any time, but not wait for a lock that long.
        """
        settings = self._settings
        idle_s = settings.lease_s * IDLE_IN_TRANSACTION_SHARE
        transaction_timeout_s = None if long else TRANSACTION_TIMEOUT_S
        bounded = {**SESSION_SETTINGS, "idle_in_transaction_session_timeout": milliseconds(idle_s)}
        if long:
            bounded["lock_timeout"] = milliseconds(MAINTENANCE_LOCK_TIMEOUT_S)
        # If the login is refused, the next session reads all secrets again.
        connection: Any = await connect(
            self._current.address,
            schema=settings.schema_name,
            application_name=name,
            connection_class=PooledWorker if settings.pooled else Worker,
            # Overrides the DSN's name: expiring a replica finds its sessions by this one.
            server_settings={**bounded, "application_name": name},
            pooled=settings.pooled,
            send_timeout_s=settings.lease_s,
            transaction_timeout_s=transaction_timeout_s,
        )
        try:
            async with asyncio.timeout(self._current.address.connect_timeout_s):
                await load_types(connection)
                if settings.pooled:
                    await check_settings(connection)
                    bounded |= transaction_settings(connection, transaction_timeout_s)
                    connection.set_transaction_settings(settings.schema_name, bounded)
                else:
                    await _require_direct(connection, self._current.address)
        except BaseException as error:
            connection.terminate()
            if isinstance(error, TimeoutError):
                raise DatabaseUnavailable(
                    f"{self._current.address} does not respond after login"
                ) from error
            raise
        worker: Worker = connection
        return worker

    async def _connect(self, **options: Any) -> Connection[Any]:
        """Open a further connection of a session, which may be older than the password."""
        return await self._current.log_in(lambda address: connect(address, **options))

    @property
    def find_busy_backends(
        self,
    ) -> Callable[[Collection[int]], Awaitable[Mapping[int, WaitReason | None]]] | None:
        """Finds the busy ones among some backends, and what they wait for.

        None behind a proxy, which hides them.
        """
        return None if self._settings.pooled else self._query_busy_backends

    async def _query_busy_backends(self, pids: Collection[int]) -> Mapping[int, WaitReason | None]:
        async with self._watching() as connection:
            busy = await read_busy_backends(connection, pids)
            return {pid: await read_wait_of(connection, pid) for pid in busy}

    async def find_standby_wait(self, label: str) -> StandbyWait | None:
        """The standby for which a commit of a replica's sessions waits; None: unknown, or none."""
        try:
            async with self._watching() as connection:
                return await read_standby_wait(connection, label=label)
        except (*CONNECTION_ERRORS, OutboxError):
            return None

    @asynccontextmanager
    async def _watching(self) -> AsyncIterator[Connection[Any]]:
        """Open a connection beside those of a session, for a few reads."""
        connection = await self._connect(
            schema=self._settings.schema_name,
            application_name=WATCHDOG_NAME,
            server_settings={"application_name": WATCHDOG_NAME},
            send_timeout_s=self._settings.lease_s,
        )
        try:
            async with asyncio.timeout(self._current.address.connect_timeout_s):
                yield connection
        finally:
            connection.terminate()

    async def listener(self, label: str) -> Connection[Any]:
        """Open a connection for LISTEN, for the replica with that label.

        A listener whose client does not read keeps the server's notification queue from being
        trimmed; when it is full, commits fail, producers' included.  So the server ends a
        listener that is silent for one lease, and the next one ends its predecessor.
        """
        name, lease_s = label + LISTENER_SUFFIX, self._settings.lease_s
        connection = await self._connect(
            schema=self._settings.schema_name,
            application_name=name,
            # Overrides the DSN's name: `outbox doctor` finds the connection by this one.
            server_settings={
                "application_name": name,
                "idle_session_timeout": milliseconds(lease_s),
                # Those of the role would interrupt LISTEN.
                "statement_timeout": "0",
                "lock_timeout": "0",
            },
            send_timeout_s=lease_s,
        )
        try:
            async with asyncio.timeout(self._current.address.connect_timeout_s):
                await terminate_former_listeners(connection, name)
        except BaseException:
            connection.terminate()
            raise
        return connection


async def _require_direct(connection: Connection[Any], dsn: Dsn) -> None:
    """Require a session of its own: a pooler hides the crash of a server from its client.

    A pooler gives its clients keys of their own, with which they cancel statements; the process id
    in it is not that of the server's backend.
    """
    if await connection.fetchval("SELECT pg_backend_pid()") != connection.get_server_pid():
        raise CannotRun(f"{dsn} is a pooler; set OUTBOX_POOLED=true, or connect to the server")
