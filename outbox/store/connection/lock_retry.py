"""Messages that take locks, sent again until those are granted, and who holds them meanwhile."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import asyncpg

from outbox.core.model.sql_names import quote_literal
from outbox.errors import CannotRun, OutboxError
from outbox.store.connection.connect import CONNECTION_ERRORS
from outbox.store.schema import lock_attempts

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager
    from datetime import datetime

    from asyncpg import Connection

OBSERVE_EVERY_S = lock_attempts.MESSAGE_LOCK_TIMEOUT_S / 4

# Who holds what a session waits for, the oldest transaction first.  Every role sees the process,
# its user and its application; the rest requires pg_read_all_stats.  Process 0 is a prepared
# transaction.  The session is found by its application name, because behind a proxy its process
# is not known.
READ_HOLDERS = """
SELECT holder.pid, a.usename AS role, a.xact_start AS since,
       coalesce(nullif(a.application_name, ''), nullif(a.backend_type, 'client backend'))
           AS application
  FROM pg_stat_activity waiting
 CROSS JOIN LATERAL unnest(pg_blocking_pids(waiting.pid)) AS holder(pid)
  LEFT JOIN pg_stat_activity a ON a.pid = holder.pid
 WHERE waiting.application_name = $1 AND holder.pid IS DISTINCT FROM waiting.pid
 ORDER BY a.xact_start NULLS LAST, holder.pid
"""


@dataclass(frozen=True, slots=True)
class LockHolder:
    """A session that holds a lock."""

    pid: int
    """0: a prepared transaction."""
    application: str | None = None
    role: str | None = None
    since: datetime | None = None
    """When its transaction began; None: this role may not read it."""

    def __str__(self) -> str:
        if self.pid == 0:
            return "a prepared transaction"
        known = [f'application "{self.application}"'] if self.application else []
        if self.role:
            known.append(f"role {self.role}")
        if self.since:
            known.append(f"in a transaction since {self.since:%Y-%m-%d %H:%M:%S %Z}")
        return f"pid {self.pid}" + (f" ({', '.join(known)})" if known else "")

    @property
    def remedy(self) -> str:
        """How an operator ends it."""
        if self.pid == 0:
            return "end it with ROLLBACK PREPARED (see pg_prepared_xacts)"
        return f"wait for its end, or end it: SELECT pg_terminate_backend({self.pid})"


class LockRetry:
    """Sends messages until their locks are granted.

    Args:
        connection: outside of a transaction.
        open_observer: opens a second connection when a message waits, to find the session that
            holds the lock; None: errors do not name it.
    """

    def __init__(
        self,
        connection: Connection[Any],
        open_observer: Callable[[], AbstractAsyncContextManager[Connection[Any]]] | None = None,
    ) -> None:
        self._connection = connection
        self._open_observer = open_observer

    async def execute(self, statements: list[str], failure: str) -> None:
        """Execute statements in one message, all of them or none.

        Args:
            failure: what was not done if the locks are not granted, for the error.

        Raises:
            CannotRun: a lock was not granted within `RETRY_FOR_S`; nothing was changed.
            asyncpg.PostgresError, OSError: otherwise.
        """
        name = f"outbox-lock-retry:{secrets.token_hex(4)}"
        message = lock_attempts.lock_message(
            [f"SET LOCAL application_name = {quote_literal(name)}", *statements]
        )
        clock = asyncio.get_running_loop().time
        deadline = clock() + lock_attempts.RETRY_FOR_S
        async with AsyncExitStack() as stack:
            observer = holder = None
            while True:
                try:
                    async with _Observation(observer, name) as observed:
                        await self._connection.execute(message)
                except (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError):
                    # A deadlock, where deadlock_timeout is shorter than lock_timeout.
                    holder = observed.holder or holder
                    if clock() >= deadline:
                        known = () if holder is None else (str(holder), holder.remedy)
                        raise CannotRun(lock_attempts.lock_failure(failure, *known)) from None
                else:
                    return
                if observer is None and self._open_observer is not None:
                    with suppress(OutboxError):  # Such as: too many connections.
                        observer = await stack.enter_async_context(self._open_observer())
                await asyncio.sleep(lock_attempts.PAUSE_S)


class _Observation:
    """Reads who holds the awaited lock, for as long as the block runs."""

    def __init__(self, observer: Connection[Any] | None, name: str) -> None:
        self.holder: LockHolder | None = None
        self._observer = observer
        self._name = name
        self._ended = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> _Observation:
        if self._observer is not None:
            self._task = asyncio.create_task(self._observe(self._observer))
        return self

    async def __aexit__(self, *_: object) -> None:
        # Not cancelled: asyncpg would send a cancel request.
        self._ended.set()
        if self._task is not None:
            await self._task

    async def _observe(self, observer: Connection[Any]) -> None:
        with suppress(*CONNECTION_ERRORS):
            while not self._ended.is_set():
                if rows := await observer.fetch(READ_HOLDERS, self._name):
                    self.holder = LockHolder(**dict(rows[0]))
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._ended.wait(), OBSERVE_EVERY_S)
