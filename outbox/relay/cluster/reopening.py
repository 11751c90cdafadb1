"""A connection of a relay's session that is opened again when it is lost.

The other connections of the session, its lease and its lanes stay.  The owner proves first that the
new connection continues the session (`SessionConnections`), and has the lost one's backend ended:
from then on the table shows whether the statement was executed whose response was lost.

- A statement that reads is repeated.  So is a write whose statements are all `repeatable`.  DDL is
  not: its time limits may be settings of the session that was lost.
- Any other write raises ResponseLost, and its caller reads what became of it.
- If no other connection can be opened, this one ends, and with it the session.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import structlog

from outbox.store.connection.connect import CONNECTION_ERRORS, LOST_ERRORS, in_one_line
from outbox.store.errors import ResponseLost

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from outbox.store.connection.store_connection import Worker
    from outbox.store.sql.message import WriteCall, WriteStatement

log = structlog.get_logger("outbox.relay")


class ReopeningConnection:
    """Stands in for a `Worker`.

    Args:
        reopen: opens a connection in place of the one with a backend; None: it cannot.
    """

    message_settings: tuple[str, ...] = ()

    def __init__(
        self, connection: Worker, reopen: Callable[[int], Awaitable[Worker | None]]
    ) -> None:
        self._reopen = reopen
        self._connection = connection
        self._pid: int = connection.get_server_pid()
        self._earlier_statements: int = 0
        self._reopening: asyncio.Task[None] | None = None
        self._closed = False
        # Why it could not be opened again.
        self._error: Exception | None = None
        # The connection of the transaction, on which alone its statements are executed.
        self._transaction: Worker | None = None
        self._on_end: list[Callable[[Any], object]] = []
        self._watch(connection)
        if connection.is_closed():
            self._lose(connection)

    # ------------------------------------------------------------ statements

    async def execute(self, *args: Any, **kwargs: Any) -> Any:
        is_ddl = args[0].startswith(("ALTER", "DROP"))
        return await self._repeat("execute", args, kwargs, repeatable=not is_ddl)

    async def fetch(self, *args: Any, **kwargs: Any) -> Any:
        return await self._repeat("fetch", args, kwargs)

    async def fetchval(self, *args: Any, **kwargs: Any) -> Any:
        return await self._repeat("fetchval", args, kwargs)

    async def fetchrow(self, *args: Any, **kwargs: Any) -> Any:
        return await self._repeat("fetchrow", args, kwargs)

    async def write(self, statement: WriteStatement, *arguments: object, **options: Any) -> int:
        return await self.write_together((statement, *arguments), **options)

    async def write_together(self, *calls: WriteCall, **options: Any) -> int:
        repeatable = all(call[0].repeatable for call in calls)
        rows: int = await self._repeat("write_together", calls, options, repeatable=repeatable)
        return rows

    async def write_unless_aborted(self, *calls: WriteCall) -> int:
        rows: int = await self._repeat("write_unless_aborted", calls, {}, repeatable=False)
        return rows

    @asynccontextmanager
    async def transaction(self, **options: Any) -> AsyncIterator[None]:
        """A transaction; if the connection is lost in it, it raises ResponseLost."""
        connection = self._transaction = await self._current()
        try:
            async with connection.transaction(**options):
                yield
        except CONNECTION_ERRORS as error:
            if await self._is_replaced(connection, error):
                raise ResponseLost from error
            raise
        finally:
            self._transaction = None

    def is_in_transaction(self) -> bool:
        return self._transaction is not None

    async def _repeat(
        self, method: str, args: Any, kwargs: dict[str, Any], *, repeatable: bool = True
    ) -> Any:
        while True:
            connection = self._transaction or await self._current()
            try:
                return await getattr(connection, method)(*args, **kwargs)
            except CONNECTION_ERRORS as error:
                if not await self._is_replaced(connection, error):
                    raise
                if self._transaction is not None or not repeatable:
                    raise ResponseLost from error

    async def _current(self) -> Worker:
        """The connection, as soon as it is open.

        Raises:
            Exception: it could not be opened again.
        """
        if self._reopening is not None:
            await asyncio.wait([self._reopening])
        if self._error is not None:
            raise self._error
        return self._connection

    async def _is_replaced(self, connection: Worker, error: Exception) -> bool:
        """Whether a statement failed because its connection was lost, and there is another one."""
        if not (isinstance(error, LOST_ERRORS) or connection.is_closed()):
            return False
        # The error may arrive before the end of the stream.
        connection.terminate()
        self._lose(connection)
        return await self._current() is not connection

    # ----------------------------------------------------------- connections

    def _watch(self, connection: Worker) -> None:
        connection.add_termination_listener(lambda _: self._lose(connection))

    def _lose(self, connection: Worker) -> None:
        if connection is self._connection and self._reopening is None and not self._closed:
            self._reopening = asyncio.create_task(self._open_again())

    async def _open_again(self) -> None:
        lost, connection = self._connection, None
        try:
            connection = await self._reopen(self._pid)
        except Exception as error:
            self._error = error
            log.warning("a lost connection cannot be opened again", reason=in_one_line(error))
        self._reopening = None
        if connection is None:
            self.terminate()
            return
        log.warning("a lost connection was opened again", pid=self._pid)
        self._earlier_statements += lost.statements_started
        self._connection, self._pid = connection, connection.get_server_pid()
        self._watch(connection)

    def reconnect(self) -> bool:
        """Close the connection, because it hangs; returns whether to go on with another one."""
        if self._closed:
            return False
        self._connection.terminate()
        self._lose(self._connection)
        return True

    def terminate(self) -> None:
        """Close it for good."""
        if self._closed:
            return
        self._closed = True
        if self._reopening is not None:
            self._reopening.cancel()
        self._connection.terminate()
        for callback in self._on_end:
            callback(self)

    def add_termination_listener(self, callback: Callable[[Any], object]) -> None:
        """Call this at the end, not when it is opened again."""
        self._on_end.append(callback)

    def is_closed(self) -> bool:
        return self._closed

    @property
    def is_connected(self) -> bool:
        """Whether it is not being opened again."""
        return not self._closed and self._reopening is None and not self._connection.is_closed()

    def get_server_pid(self) -> int:
        return self._pid

    @property
    def waiting_s(self) -> float:
        """See `Worker`."""
        return self._connection.waiting_s

    @property
    def statements_started(self) -> int:
        """See `Worker`."""
        return self._earlier_statements + int(self._connection.statements_started)
