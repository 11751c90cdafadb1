"""The connections of all stores and operations, and those of a relay's session.

A connection can hang although both ends consider it open: something between them accepts and
acknowledges packets without forwarding them.  The client then waits for ever, and no TCP
time-out ends it.  A statement time-out cannot help: some statements rightly wait for the longest
transaction in the database.  But a connection measures how long its statement has been running,
and the server knows whether it is executing it.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

from asyncpg import (
    DuplicatePreparedStatementError,
    InsufficientPrivilegeError,
    InterfaceError,
    PostgresError,
    ProgramLimitExceededError,
)

from outbox.store.connection.row_security import RowSecurityError, explain_denial
from outbox.store.connection.type_cache import TypeCachingConnection
from outbox.store.sql.message import Private, SettingArgument, is_aborted, rows_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Sequence

    from asyncpg import Connection

    from outbox.store.sql.message import WriteCall, WriteStatement

SET_PRIVATE = (
    "SELECT set_config(name, value, false) FROM unnest($1::text[], $2::text[]) AS s(name, value)"
)


# The share of the server's notification queue that is in use.  Computing it removes what all
# listeners have read, which otherwise only a NOTIFY does, and none succeeds while the queue is
# full: it would stay full after the listener that did not read has ended.
TRIM_NOTIFICATION_QUEUE = "SELECT pg_notification_queue_usage()"

SENDING_MAX_S = 60
"""Maximum time for sending a large result over a slow line."""

# The backends that are executing a statement; not those that wait for the client to send more.
# A server that does not track sessions (track_activities) reports "disabled".
READ_BUSY_BACKENDS = f"""
SELECT pid FROM pg_stat_activity
 WHERE pid = ANY ($1)
   AND CASE WHEN state = 'disabled' THEN true
            WHEN wait_event = 'ClientWrite' THEN
                query_start BETWEEN clock_timestamp() - interval '{SENDING_MAX_S} s'
                                AND clock_timestamp()
            ELSE state = 'active' AND wait_event_type IS DISTINCT FROM 'Client' END
"""  # noqa: S608 (a constant only)


class StoreConnection(TypeCachingConnection):
    """A connection that sends a writing statement as one message.

    It measures how long its statement has been running, explains row security, and reports its
    loss as such.
    """

    __slots__ = ("_started_at", "reopen", "statements_started")
    message_settings: ClassVar[tuple[str, ...]] = ()
    """Statements that begin every message that writes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reopen: Callable[[], Awaitable[StoreConnection]] | None = None
        """Opens another connection like this one; None: it was not opened by `connect`."""
        self._started_at: float | None = None
        self.statements_started = 0
        """Number of statements started."""

    @property
    def waiting_s(self) -> float:
        """How long the running statement has had no result, in seconds.

        0 when there is none, and when the connection was lost: the caller gets an error then.
        """
        if self._started_at is None or self.is_closed():
            return 0.0
        return asyncio.get_running_loop().time() - self._started_at

    async def execute(self, *args: Any, **kwargs: Any) -> Any:
        return await self._run(super().execute(*args, **kwargs))

    async def fetch(self, *args: Any, **kwargs: Any) -> Any:
        return await self._run(super().fetch(*args, **kwargs))

    async def fetchval(self, *args: Any, **kwargs: Any) -> Any:
        return await self._run(super().fetchval(*args, **kwargs))

    async def fetchrow(self, *args: Any, **kwargs: Any) -> Any:
        return await self._run(super().fetchrow(*args, **kwargs))

    async def _run(self, statement: Awaitable[Any]) -> Any:
        self.statements_started += 1
        self._started_at = asyncio.get_running_loop().time()
        try:
            return await statement
        except AttributeError as error:
            # asyncpg drops its protocol object on a lost connection, and uses it unchecked.
            if self.is_closed():
                raise InterfaceError("connection was lost while a statement was running") from error
            raise
        except RowSecurityError:
            raise
        except InsufficientPrivilegeError as error:
            # Row security has the error code of a missing privilege.
            if self.is_in_transaction():
                raise
            raise await explain_denial(self, error) from error.__cause__
        finally:
            self._started_at = None

    async def write(
        self,
        statement: WriteStatement,
        *arguments: object,
        lock_timeout_s: float | None = None,
        durable: bool = True,
    ) -> int:
        """Execute a statement in one message; returns the number of rows in its command tag.

        Args:
            lock_timeout_s: limit for the wait for each lock; None: that of the session.
            durable: whether the commit waits until it is on disk.

        Raises:
            asyncpg.LockNotAvailableError: a lock was not granted in time; nothing was written.
            asyncpg.PostgresError, OSError: otherwise; whether it was written is unknown if the
                connection was lost.
        """
        return await self.write_together(
            (statement, *arguments), lock_timeout_s=lock_timeout_s, durable=durable
        )

    async def write_together(
        self, *calls: WriteCall, lock_timeout_s: float | None = None, durable: bool = True
    ) -> int:
        """Execute statements in one message, all of them or none; see `write`.

        Each has a snapshot of its own.  The result is that of the last one.
        """
        calls = await self._set_private(calls)
        parts = [await self._call(statement, arguments) for statement, *arguments in calls]
        if len(calls) > 1:
            # Whatever the session's default: otherwise all would share the first one's snapshot.
            parts.insert(0, "SET LOCAL transaction_isolation = 'read committed'")
        if lock_timeout_s is not None:
            parts.insert(0, f"SET LOCAL lock_timeout = {int(lock_timeout_s * 1000)}")
        if not durable:
            parts.insert(0, "SET LOCAL synchronous_commit = off")
        message = "; ".join([*self.message_settings, *parts])
        try:
            return rows_of(await self.execute(message))
        except ProgramLimitExceededError:
            if self.is_in_transaction():
                raise
            # The notification queue may be full.  Nothing was written, so it is safe to repeat.
            await self.execute(TRIM_NOTIFICATION_QUEUE)
            return rows_of(await self.execute(message))

    async def write_unless_aborted(self, *calls: WriteCall) -> int:
        """Like `write_together`; returns 0 if a statement aborted the message."""
        try:
            return await self.write_together(*calls)
        except PostgresError as error:
            if is_aborted(error):
                return 0
            raise

    async def _set_private(self, calls: tuple[WriteCall, ...]) -> tuple[WriteCall, ...]:
        """Replace private arguments by session settings, which hold their values."""
        private = list(dict.fromkeys(a for call in calls for a in call if isinstance(a, Private)))
        if not private:
            return calls
        settings = {each: SettingArgument(f"outbox.private_{i}") for i, each in enumerate(private)}
        names = [setting.name for setting in settings.values()]
        await self.fetch(SET_PRIVATE, names, [each.text for each in private])
        return tuple(
            (call[0], *(settings[a] if isinstance(a, Private) else a for a in call[1:]))
            for call in calls
        )

    async def _call(self, statement: WriteStatement, arguments: Sequence[object]) -> str:
        """The text that executes a statement."""
        return statement.inline(arguments)


class Worker(StoreConnection):
    """A connection that prepares writes."""

    __slots__ = ("_prepared_writes",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._prepared_writes: set[str] = set()

    @property
    def is_connected(self) -> bool:
        """Whether it is open."""
        return not self.is_closed()

    def reconnect(self) -> bool:
        """Whether another connection is opened in place of this one, if it hangs: no."""
        return False

    async def _call(self, statement: WriteStatement, arguments: Sequence[object]) -> str:
        """The text that executes a statement; it is prepared once, which keeps its plan."""
        if statement.name not in self._prepared_writes:
            # A message of its own: the failure of a later statement does not undo it.
            # It exists if the response to an earlier attempt was not awaited.
            with suppress(DuplicatePreparedStatementError):
                await self.execute(statement.prepare)
            self._prepared_writes.add(statement.name)
        return statement.execute(arguments)


async def read_busy_backends(connection: Connection[Any], pids: Collection[int]) -> set[int]:
    """Those of the backends that are executing a statement."""
    return {r["pid"] for r in await connection.fetch(READ_BUSY_BACKENDS, list(pids))}
