"""The connections of all stores and operations."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from asyncpg import DuplicatePreparedStatementError, PostgresError

from outbox.store.connection.message import is_aborted, rows_of
from outbox.store.connection.type_cache import TypeCachingConnection

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.store.connection.message import WriteCall, WriteStatement


class StoreConnection(TypeCachingConnection):
    """A connection that sends a writing statement as one message."""

    __slots__ = ("_prepared_writes",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._prepared_writes: set[str] = set()

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
        parts = [await self._call(statement, arguments) for statement, *arguments in calls]
        if len(calls) > 1:
            # Whatever the session's default: otherwise all would share the first one's snapshot.
            parts.insert(0, "SET LOCAL transaction_isolation = 'read committed'")
        if lock_timeout_s is not None:
            parts.insert(0, f"SET LOCAL lock_timeout = {int(lock_timeout_s * 1000)}")
        if not durable:
            parts.insert(0, "SET LOCAL synchronous_commit = off")
        return rows_of(await self.execute("; ".join(parts)))

    async def write_unless_aborted(self, *calls: WriteCall) -> int:
        """Like `write_together`; returns 0 if a statement aborted the message."""
        try:
            return await self.write_together(*calls)
        except PostgresError as error:
            if is_aborted(error):
                return 0
            raise

    async def _call(self, statement: WriteStatement, arguments: Sequence[object]) -> str:
        """The text that executes a statement; it is prepared once, which keeps its plan."""
        if statement.name not in self._prepared_writes:
            # A message of its own: the failure of a later statement does not undo it.
            # It exists if the response to an earlier attempt was not awaited.
            with suppress(DuplicatePreparedStatementError):
                await self.execute(statement.prepare)
            self._prepared_writes.add(statement.name)
        return statement.execute(arguments)
