"""Registering a replica: its connections, and its row.

All sessions of a replica carry its label, from the first connection on.  By it a session that
hangs is found and terminated, at the latest by the next replica of the same process.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog

from outbox.errors import DatabaseUnavailable
from outbox.relay.cluster.reopening import ReopeningConnection
from outbox.store.cluster.sessions import WORKERS, continue_session, session_label
from outbox.store.connection.connect import CONNECTION_ERRORS, in_one_line
from outbox.store.connection.response_deadline import ResponseOverdue, response_deadline
from outbox.store.errors import Fenced
from outbox.store.sequencing.stalls import CommitUnconfirmed

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from outbox.config import Settings
    from outbox.relay.cluster.connections import Connections
    from outbox.store.cluster.replicas import ClockReading, ReplicaStore
    from outbox.store.connection.secrets import Vault
    from outbox.store.connection.store_connection import Worker

log = structlog.get_logger("outbox.relay")

REGISTER_S = 30.0
"""Limit for the steps before registration."""
REOPEN_MIN_S, REOPEN_MAX_S = 0.1, 5.0
"""Delay before the next attempt to open a lost connection again, doubled each time."""


@dataclass(frozen=True, slots=True)
class Workers:
    """A session's connections, each with one user."""

    control: Worker
    """The connection for ownership and batches."""
    cursor: Worker
    renewal: Worker
    """The connection for the lease alone."""
    reader: Worker
    records: Worker
    endpoint_state: Worker
    schedules: Worker
    maintenance: Worker
    """Opened last, without a time limit: DETACH waits for the longest transaction."""


@dataclass(frozen=True, slots=True)
class Registered:
    """A newly registered replica."""

    replica_id: int
    label: str
    """The application_name of its sessions."""
    workers: Workers
    server_fence: int | None
    """The server's timeline and the incarnation, as one number; None: unknown."""
    started_at: float
    """The replica's steady clock before the registration was sent."""
    reading: ClockReading
    """The database's clock after the registration, and the odometer."""
    asked_at: float
    """The replica's steady clock before that time was asked for."""


class SessionConnections:
    """The connections of one session.

    A lost one is opened again while the session can be proven to continue: its lease runs, the
    server and its state are those of the registration, and another connection has survived.
    Otherwise all end.
    """

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._open: list[Worker] = []
        # Set when any connection was closed.
        self._closed = asyncio.Event()
        # Server fence and lease of the registered replica, whose connections are opened again.
        self._registered: tuple[int | None, float] | None = None

    async def connect(self, label: str, *, long: bool = False) -> Worker:
        """Open a connection, as `Connections.worker` does."""
        connection = await self._connections.worker(label, long=long)
        self._open.append(connection)
        connection.add_termination_listener(self._on_end)
        return connection

    def open_lost_again(
        self, workers: Workers, label: str, server_fence: int | None, lease_s: float
    ) -> Workers:
        """The connections of a registered replica, which are opened again, within a lease."""
        if not self._connections.reopens:
            return workers
        self._registered = server_fence, lease_s
        reopening: dict[str, Any] = {
            each.name: ReopeningConnection(
                getattr(workers, each.name),
                partial(self._reopen, label, long=each.name == "maintenance"),
            )
            for each in fields(workers)
        }
        self._open = list(reopening.values())
        for each in self._open:
            each.add_termination_listener(self._on_end)
        return Workers(**reopening)

    def _on_end(self, connection: object) -> None:
        # A connection that was lost after the registration is opened again.
        if self._registered is None or connection in self._open:
            self._closed.set()

    async def _reopen(self, label: str, lost_pid: int, *, long: bool) -> Worker | None:
        """Open a connection in place of a lost one; None: the session does not continue.

        Raises:
            Fenced, OutboxError, OSError, asyncpg.PostgresError: it cannot be opened.
        """
        assert self._registered is not None
        server_fence, lease_s = self._registered
        loop = asyncio.get_running_loop()
        until, delay_s = loop.time() + lease_s, REOPEN_MIN_S
        while others := [each.get_server_pid() for each in self._open if each.is_connected]:
            try:
                # Nothing waits for maintenance, so it is tried for ever; each time may hang.
                async with asyncio.timeout_at(loop.time() + lease_s if long else until):
                    return await self._continue(label, server_fence, lost_pid, others, long=long)
            except (*CONNECTION_ERRORS, DatabaseUnavailable) as error:
                if loop.time() >= until and not long:
                    raise
                log.warning("a lost connection cannot be opened yet", reason=in_one_line(error))
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, REOPEN_MAX_S)
        return None

    async def _continue(
        self, label: str, server_fence: int | None, lost_pid: int, others: list[int], *, long: bool
    ) -> Worker | None:
        connection = await self._connections.reopened(label, long=long)
        continues = False
        try:
            continues = await continue_session(connection, label, server_fence, lost_pid, others)
        finally:
            if not continues:
                connection.terminate()
        return connection if continues else None

    def terminate(self) -> None:
        """Terminate every connection; a graceful close could wait for ever."""
        for connection in self._open:
            connection.terminate()

    async def terminate_at_end(self) -> None:
        """Terminate all connections as soon as the task group of this task ends.

        A task that is cancelled inside a transaction waits for the response to its
        rollback, which an unreachable server never sends.
        """
        try:
            await asyncio.Event().wait()
        finally:
            self.terminate()

    async def watch(self) -> None:
        """End the session when one of its connections was closed.

        Otherwise an idle connection's loss is noticed only by its next statement: after
        a delivery that can then not be recorded.

        Raises:
            ConnectionResetError: a connection was closed.
        """
        await self._closed.wait()
        raise ConnectionResetError("a connection to the database was closed")


class Registration:
    """Registers replicas of one process.

    Args:
        former: labels of this process's earlier replicas, which may still be registered; their
            endpoints are released at once.  The new replica's label is added.
        clock: seconds of the steady clock, for the lease.
        rng: the source of the label.
    """

    def __init__(
        self,
        settings: Settings,
        connections: Connections,
        opened: SessionConnections,
        vault: Vault,
        name: str,
        version: str,
        former: list[str],
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self._settings = settings
        self._connections = connections
        self._opened = opened
        self._vault = vault
        self._name = name
        self._version = version
        self._former = former
        self._clock = clock
        self._rng = rng

    async def register_unless(self, stop: asyncio.Event) -> Registered | None:
        """Connect and register; None if `stop` is set first.

        Raises:
            ExceptionGroup: of asyncpg's errors, OSError, Fenced or OutboxError.
        """

        async def cancel_on_stop() -> None:
            await stop.wait()
            self._opened.terminate()
            raise _RegistrationCancelled

        try:
            async with asyncio.TaskGroup() as tasks:
                cancelling = tasks.create_task(cancel_on_stop())
                registered = await self._register()
                cancelling.cancel()
        except ExceptionGroup:
            # Any error of a registration that was cancelled by `stop`.
            if not stop.is_set():
                raise
            return None
        return registered

    async def _register(self) -> Registered:
        label = session_label(self._rng.getrandbits(32))
        try:
            return await self._register_as(label)
        except ResponseOverdue as error:
            wait = await self._connections.find_standby_wait(label)
            if wait is None:
                raise
            raise CommitUnconfirmed(str(error), wait) from error.__cause__

    async def _register_as(self, label: str) -> Registered:
        settings, clock, stores = self._settings, self._clock, self._connections.stores
        control = await self._opened.connect(label)
        with response_deadline(control, REGISTER_S, "register a replica"):
            await stores.require_current(control, settings.schema_name, "relay")
            await stores.require_privileges(control, settings.schema_name, "relay")
            # An earlier session may have ended because the queue was full.
            await stores.trim_notification_queue(control)
            # Before the first write: if a proxy switches to another server after this, or the
            # state is restored, the fence rejects the write.
            server_fence = await stores.read_server_fence(control)
        others = [
            await self._opened.connect(label, long=n == WORKERS - 1) for n in range(1, WORKERS)
        ]
        workers = Workers(*[control, *others])
        # A proxy shares its backends.
        sequencer_pid = None if settings.pooled else workers.cursor.get_server_pid()
        replicas = stores.replicas(control, server_fence)
        with response_deadline(control, settings.lease_s, "register a replica"):
            # Only the registered ones: while no replica can be registered, for hours on a standby,
            # each attempt adds a label.
            self._former[:] = await replicas.terminate_former_sessions(self._former)
            self._former.append(label)
            # Last, so that all connections for renewing the lease are open.
            started_at = clock()
            replica_id = await replicas.register(
                label,
                self._name,
                self._version,
                settings.lease_s,
                sequencer_pid,
                self._vault.key_ids,
            )
            # An incompatible migration may have ended the leases before this one began.
            await stores.require_current(control, settings.schema_name, "relay")
        with response_deadline(control, settings.lease_s, "expire a replica"):
            if self._former != [label]:
                await self._expire_former(replicas, label)
                started_at = clock()
                if not await replicas.renew(replica_id):
                    raise Fenced
            asked_at = clock()
            reading = await replicas.read_clock()
        workers = self._opened.open_lost_again(workers, label, server_fence, settings.lease_s)
        return Registered(replica_id, label, workers, server_fence, started_at, reading, asked_at)

    async def _expire_former(self, replicas: ReplicaStore, label: str) -> None:
        """Release the endpoints of this process's former replicas, whose sessions have ended."""
        lock_timeout_s = self._settings.lease_s / 2
        # The newest first: it may have hung while it expired the older ones.
        for former in reversed([former for former in self._former if former != label]):
            if not await replicas.expire_former(former, lock_timeout_s):
                # One of its sessions may have held a lock, and has been terminated.
                await replicas.expire_former(former, lock_timeout_s)
        self._former[:] = [label]


class _RegistrationCancelled(Exception):
    """Cancels a registration in progress."""
