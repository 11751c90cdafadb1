"""The client's side of a session, with asyncpg's transactions, listeners and errors.

Every statement takes a random time to the server, and so does its response.  The
connection may be cut, or may lose all messages from some moment on, without an error on
either side.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, overload

import asyncpg

from tests.sim.database.backend import Backend, Client

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.sim.clockwork import Process
    from tests.sim.database.engine import Steps, Transaction
    from tests.sim.database.tables import Database

P = ParamSpec("P")
R = TypeVar("R")

LOST = "connection was closed in the middle of operation"


class Connection(Client):
    """One connection of a process."""

    def __init__(self, database: Database, process: Process, name: str) -> None:
        self._database = database
        self._world = database.world
        self.process = process
        self.name = name
        self.backend: Backend | None = None
        self.hangs = False
        self._pending: asyncio.Future[Any] | None = None
        self._closed = False
        self._to_server_at = self._to_client_at = 0.0
        self._listeners: dict[str, list[Callable[..., None]]] = {}
        self._on_end: list[Callable[[Any], None]] = []
        self._transactions = 0
        self._started_at: float | None = None
        self.statements_started = 0
        """Number of statements that were sent."""
        self.last_step = ""
        """The name of the step that was last sent."""
        self.statement_at = 0.0
        """When the last statement is at the server, unless the connection hangs."""

    @property
    def now(self) -> float:
        """The virtual time."""
        return self._world.now

    @property
    def waiting_s(self) -> float:
        """Seconds since the current statement was sent; 0 when there is none."""
        return 0.0 if self._started_at is None else self._world.now - self._started_at

    # ------------------------------------------------------------- the wire

    def _to_server(self, callback: Callable[..., None], *args: Any) -> None:
        if self.hangs:
            return
        trip_s = self._database.network_s(self.process.name)
        self._to_server_at = max(self._to_server_at, self._world.now + trip_s)
        self._world.at(self._to_server_at, None, self._at_server, callback, args)

    def _at_server(self, callback: Callable[..., None], args: Any) -> None:
        if not self.hangs:
            callback(*args)

    def _to_client(self, callback: Callable[..., None], *args: Any) -> None:
        if self.hangs or self.process.dead:
            return
        trip_s = self._database.network_s(self.process.name, responses=True)
        self._to_client_at = max(self._to_client_at, self._world.now + trip_s)
        self._world.at(self._to_client_at, self.process, self._at_client, callback, args)

    def _at_client(self, callback: Callable[..., None], args: Any) -> None:
        if not self.hangs:
            callback(*args)

    async def open(self) -> None:
        """Connect; raises ConnectionRefusedError if there is no server."""
        loop = asyncio.get_running_loop()
        opened = loop.create_future()

        def at_server() -> None:
            if self._database.up:
                self.backend = Backend(self._database, self.name, self)
                self._to_client(accepted)
            else:
                self._to_client(refused)

        def accepted() -> None:
            if not opened.done():
                opened.set_result(None)

        def refused() -> None:
            if not opened.done():
                opened.set_exception(ConnectionRefusedError("no server listens there"))

        self.process.on_death.append(self.abandon)
        self._database.connections.append(self)
        self._to_server(at_server)
        await opened

    async def reopen(self) -> Connection:
        """Open another connection of the same process."""
        other = Connection(self._database, self.process, self.name)
        await other.open()
        return other

    def abandon(self) -> None:
        """Close the client's side after the process has died."""
        if self.backend is not None:
            self._to_server(self.backend.client_closed)
        self._closed = True

    def hang(self, *, half_sent: bool = False) -> None:
        """Deliver no message in either direction from now on.

        Args:
            half_sent: the first half of a statement arrived.
        """
        self.hangs = True
        if self.backend is not None:
            self.backend.half_sent |= half_sent
            self.backend.quiet_since = self._world.now

    def cut(self) -> None:
        """Reset the connection: both sides see its end."""
        if self.backend is not None:
            self._to_server(self.backend.client_closed)
        self._to_client(self._lost)

    # ------------------------------------------------------- from the server

    def response(self, result: Any, error: Exception | None) -> None:
        self._to_client(self._on_result, result, error)

    def _on_result(self, result: Any, error: Exception | None) -> None:
        pending, self._pending = self._pending, None
        if pending is None or pending.done():
            return
        if error is not None:
            pending.set_exception(error)
        else:
            pending.set_result(result)

    def notification(self, channel: str, pid: int, payload: str) -> None:
        self._to_client(self._notified, channel, pid, payload)

    def _notified(self, channel: str, pid: int, payload: str) -> None:
        for callback in self._listeners.get(channel, ()):
            callback(self, pid, channel, payload)

    def closed(self) -> None:
        self._to_client(self._lost)

    def _lost(self) -> None:
        if self._closed:
            return
        self._closed = True
        pending, self._pending = self._pending, None
        if pending is not None and not pending.done():
            pending.set_exception(asyncpg.ConnectionDoesNotExistError(LOST))
        for callback in self._on_end:
            callback(self)

    # ------------------------------------------------------------- statements

    async def run_on_server(self, run: Callable[[Backend], None]) -> Any:
        """Execute a function on the server, and wait for its response."""
        self.statements_started += 1
        self._started_at = self._world.now
        try:
            return await self._execute(run)
        finally:
            self._started_at = None

    async def _execute(self, run: Callable[[Backend], None]) -> Any:
        if self._pending is not None and self._pending.cancelled():
            # A statement whose caller was cancelled has to end first.
            self._pending = asyncio.get_running_loop().create_future()
            with suppress(asyncpg.PostgresError):
                await self._pending
        if self._closed:
            raise asyncpg.InterfaceError("the underlying connection is closed")
        if self._pending is not None:
            raise asyncpg.InterfaceError("cannot perform operation: another one is in progress")
        assert self.backend is not None
        pending = self._pending = asyncio.get_running_loop().create_future()
        self._to_server(_if_alive, run, self.backend)
        self.statement_at = self._to_server_at
        return await pending

    @overload
    async def call(
        self,
        step: Callable[Concatenate[Database, Transaction, P], Steps[R]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R: ...

    @overload
    async def call(
        self,
        step: Callable[Concatenate[Database, Transaction, P], R],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R: ...

    async def call(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Execute one statement on the server, a step of a store, and wait for its result."""
        self.last_step = step.__name__

        def begin(tx: Transaction) -> Any:
            watcher = self._database.before_step.get(step.__name__)
            if watcher is not None:
                watcher(self)
            return step(self._database, tx, *args, **kwargs)

        return await self.run_on_server(lambda backend: backend.execute(begin))

    def transaction(self) -> TransactionBlock:
        return TransactionBlock(self)

    def get_server_pid(self) -> int:
        assert self.backend is not None
        return self.backend.pid

    def is_closed(self) -> bool:
        return self._closed

    def reconnect(self) -> bool:
        return False

    def terminate(self) -> None:
        """Close without waiting."""
        if self._closed or self.process.dead:
            return
        self._closed = True
        if self.backend is not None:
            self._to_server(self.backend.client_closed)
        pending, self._pending = self._pending, None
        if pending is not None and not pending.done():
            pending.set_exception(asyncpg.ConnectionDoesNotExistError(LOST))
        for callback in self._on_end:
            callback(self)

    def add_termination_listener(self, callback: Callable[[Any], None]) -> None:
        self._on_end.append(callback)

    async def add_listener(self, channel: str, callback: Callable[..., None]) -> None:
        self._listeners.setdefault(channel, []).append(callback)

        def listen(backend: Backend) -> None:
            self._database.listen(backend, channel)
            backend.client.response("LISTEN", None)

        await self.run_on_server(listen)

    async def remove_listener(self, channel: str, callback: Callable[..., None]) -> None:
        self._listeners[channel].remove(callback)

        def unlisten(backend: Backend) -> None:
            self._database.unlisten(backend, channel)
            backend.client.response("UNLISTEN", None)

        await self.run_on_server(unlisten)

    # ---------------------------------------------------------- transactions

    async def control(self, what: str) -> None:
        """Execute BEGIN, COMMIT or ROLLBACK, or one of the statements of a savepoint."""
        await self.run_on_server(lambda backend: _control(backend, what))


def _if_alive(run: Callable[[Backend], None], backend: Backend) -> None:
    if backend.alive:
        run(backend)


def _control(backend: Backend, what: str) -> None:
    tx = backend.transaction
    match what:
        case "BEGIN":
            backend.begin()
        case "SAVEPOINT":
            assert tx is not None
            tx.savepoint()
        case "RELEASE":
            assert tx is not None
            tx.savepoints.pop()
        case "ROLLBACK TO":
            assert tx is not None
            tx.roll_back_to_savepoint()
            tx.savepoints.pop()
        case "COMMIT" if tx is not None and not tx.failed:
            backend.end_transaction()
            tx.explicit = False  # An error from here on rolls it back.
            backend.commit(tx)
            return
        case "COMMIT" | "ROLLBACK":
            if tx is not None:
                backend.engine.abort(tx)
            backend.end_transaction()
    backend.client.response(what, None)


class ListenerConnection(Connection):
    """A connection for LISTEN, whose only other statement is a heartbeat."""

    async def fetchval(self, _statement: str, *, timeout: float) -> None:  # noqa: ASYNC109
        async with asyncio.timeout(timeout):
            await self.call(_read_nothing)


def _read_nothing(db: Database, tx: Transaction) -> None:
    """A round trip."""


class TransactionBlock:
    """A transaction as asyncpg has it, or a savepoint inside of one."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._nested = False

    async def start(self) -> None:
        self._nested = self._connection._transactions > 0
        self._connection._transactions += 1
        await self._connection.control("SAVEPOINT" if self._nested else "BEGIN")

    async def commit(self) -> None:
        self._connection._transactions -= 1
        await self._connection.control("RELEASE" if self._nested else "COMMIT")

    async def rollback(self) -> None:
        self._connection._transactions -= 1
        await self._connection.control("ROLLBACK TO" if self._nested else "ROLLBACK")

    async def __aenter__(self) -> TransactionBlock:
        await self.start()
        return self

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:
            await self.commit()
        else:
            await self.rollback()
