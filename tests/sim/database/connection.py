"""The client's side of a session, as asyncpg shows it to the stores.

Every statement travels to the server and its answer back, each for a random time;
the connection may be cut, or swallow everything from some moment on, without
either side being told.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import asyncpg

from tests.sim.database.backend import Backend, Client
from tests.sim.database.statements import answer

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.sim.clockwork import Process
    from tests.sim.database.engine import Row, Transaction
    from tests.sim.database.tables import Database

LOST = "connection was closed in the middle of operation"


class Connection(Client):
    """One connection of a process.

    Args:
        backend: its session on the server.
    """

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
        self._asked_at: float | None = None
        self.questions = 0
        """How many statements were begun."""

    @property
    def waiting_s(self) -> float:
        """How long the statement under way has had no answer; 0 when there is none."""
        return 0.0 if self._asked_at is None else self._world.now - self._asked_at

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
        trip_s = self._database.network_s(self.process.name, answers=True)
        self._to_client_at = max(self._to_client_at, self._world.now + trip_s)
        self._world.at(self._to_client_at, self.process, self._at_client, callback, args)

    def _at_client(self, callback: Callable[..., None], args: Any) -> None:
        if not self.hangs:
            callback(*args)

    async def open(self) -> None:
        """Connect; raises what asyncpg raises when there is no server."""
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

    def abandon(self) -> None:
        """The process is gone: the system closes its side."""
        if self.backend is not None:
            self._to_server(self.backend.client_closed)
        self._closed = True

    def hang(self, *, half_asked: bool = False) -> None:
        """From now on nothing arrives, in either direction.

        Args:
            half_asked: of a question the first half did.
        """
        self.hangs = True
        if self.backend is not None:
            self.backend.half_asked |= half_asked

    def cut(self) -> None:
        """Somebody on the way resets the connection: both sides see its end."""
        if self.backend is not None:
            self._to_server(self.backend.client_closed)
        self._to_client(self._lost)

    # ------------------------------------------------------- from the server

    def answer(self, result: Any, error: Exception | None) -> None:
        self._to_client(self._answered, result, error)

    def _answered(self, result: Any, error: Exception | None) -> None:
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

    # ------------------------------------------------- what the stores call

    async def ask(self, run: Callable[[Backend], None]) -> Any:
        """Have the server do something, and wait for what it says."""
        self.questions += 1
        self._asked_at = self._world.now
        try:
            return await self._answered_to(run)
        finally:
            self._asked_at = None

    async def _answered_to(self, run: Callable[[Backend], None]) -> Any:
        if self._pending is not None and self._pending.cancelled():
            # A statement that nobody waits for any more has to end first.
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
        return await pending

    async def run(self, make: Callable[[Transaction], Any]) -> Any:
        """A statement that is not one of the stores'."""
        return await self.ask(lambda backend: backend.execute(make))

    async def _statement(self, sql: str, args: tuple[Any, ...], within_s: float | None) -> Any:
        make = answer(self._database, sql, args)
        asked = self.ask(lambda backend: backend.execute(make))
        if within_s is None:
            return await asked
        async with asyncio.timeout(within_s):
            return await asked

    async def fetch(self, sql: str, *args: Any, timeout: float | None = None) -> list[Row]:  # noqa: ASYNC109
        rows: list[Row] = await self._statement(sql, args, timeout)
        return rows

    async def fetchrow(self, sql: str, *args: Any, timeout: float | None = None) -> Row | None:  # noqa: ASYNC109
        rows = await self.fetch(sql, *args, timeout=timeout)
        return rows[0] if rows else None

    async def fetchval(self, sql: str, *args: Any, timeout: float | None = None) -> Any:  # noqa: ASYNC109
        rows = await self.fetch(sql, *args, timeout=timeout)
        return next(iter(rows[0].values())) if rows else None

    async def execute(self, sql: str, *args: Any, timeout: float | None = None) -> str:  # noqa: ASYNC109
        return str(await self._statement(sql, args, timeout))

    def transaction(self, **_: Any) -> TransactionBlock:
        return TransactionBlock(self)

    def get_server_pid(self) -> int:
        assert self.backend is not None
        return self.backend.pid

    def is_closed(self) -> bool:
        return self._closed

    def terminate(self) -> None:
        """Close at once."""
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
            backend.client.answer("LISTEN", None)

        await self.ask(listen)

    async def remove_listener(self, channel: str, callback: Callable[..., None]) -> None:
        self._listeners[channel].remove(callback)

        def unlisten(backend: Backend) -> None:
            self._database.unlisten(backend, channel)
            backend.client.answer("UNLISTEN", None)

        await self.ask(unlisten)

    # ---------------------------------------------------------- transactions

    async def control(self, what: str) -> None:
        """BEGIN, COMMIT, ROLLBACK, and the same of a savepoint."""
        await self.ask(lambda backend: _control(backend, what))


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
            tx.explicit = False  # What fails from here on takes it back.
            backend.commit(tx)
            return
        case "COMMIT" | "ROLLBACK":
            if tx is not None:
                backend.engine.abort(tx)
            backend.end_transaction()
    backend.client.answer(what, None)


class TransactionBlock:
    """asyncpg's transaction: BEGIN … COMMIT, or a savepoint inside of one."""

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
