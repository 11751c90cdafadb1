"""The watchdog: ends a connection that hangs, or the session, if it cannot be opened again.

The lease bounds how long a replica may *send* while it cannot reach the database.
It does not cover this case: the lease is renewed on its own connection while
another one, which reads lanes, sequences or writes acknowledgements, waits for a
response that the network dropped.  The endpoints would be owned and never served.

No statement time-out can distinguish that from a slow database or a lock wait: a
short one repeats the same statement for ever, a long one stops deliveries silently.
So the watchdog opens a connection and asks the server whether the backend is busy.
A backend that is idle in two checks of the same statement has responded already, or
never received the statement.  Behind a proxy that pools transactions the backend is
unknown, and the check may need more connections than there are; then a time limit
decides.

Detection takes about one lease from the last response.  Not covered, because bounded
by the lease or by their own limits: the renewal, the listening connection, and a
session's steps before its registration.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

import structlog

from outbox.errors import DatabaseUnavailable, OutboxError
from outbox.store.connection.connect import CONNECTION_ERRORS, in_one_line
from outbox.store.sequencing.stalls import StandbyWait

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping

    from outbox.store.sequencing.stalls import WaitReason

log = structlog.get_logger("outbox.relay")

WATCHDOG_CHECKS_PER_LEASE = 5
PATIENCE_SHARE = 0.4
"""Share of the lease; statements that complete sooner are never checked."""
RECHECK_MAX_S = 60.0
"""A busy backend is checked again when its statement has taken twice as long, at the
latest after this time."""
UNKNOWN_STATE_MAX_S, UNKNOWN_STATE_MAINTENANCE_MAX_S = 60.0, 3600.0
"""Limits when the state of the backend is unknown.  Maintenance may wait for the longest
transaction in the database."""


class Watched(Protocol):
    """The part of a connection that the watchdog uses."""

    @property
    def waiting_s(self) -> float:
        """Age of the running statement, in seconds; 0: no statement runs."""

    @property
    def statements_started(self) -> int:
        """Number of statements started."""

    def get_server_pid(self) -> int:
        """The process id of its backend."""

    def terminate(self) -> None:
        """Close it without waiting."""

    def reconnect(self) -> bool:
        """Close it; returns whether another one is opened in its place."""


class Watchdog:
    """Watches connections until cancelled.

    Args:
        watched: connections by purpose.
        find_busy_backends: finds the busy ones among some backends, and the sessions or standbys
            for which they wait; None: unknown (proxy).
    """

    def __init__(
        self,
        watched: Mapping[str, Watched],
        find_busy_backends: Callable[[Collection[int]], Awaitable[Mapping[int, WaitReason | None]]]
        | None,
        lease_s: float,
    ) -> None:
        self._watched = watched
        self._find_busy_backends = find_busy_backends
        self._lease_s = lease_s
        self._patience_s = lease_s * PATIENCE_SHARE
        self._check_every_s = lease_s / WATCHDOG_CHECKS_PER_LEASE
        # By connection, the statement whose backend was idle in the last check.
        self._idle_statements: dict[str, int] = {}
        # By connection, a statement whose backend was busy, and its age at the next check.
        self._busy_statements: dict[str, tuple[int, float]] = {}
        # By connection, a statement that waits for a session or a standby, and which one.
        self._blockers: dict[str, tuple[int, WaitReason]] = {}
        self._warned = False

    def blocker(self, name: str) -> WaitReason | None:
        """What a connection's statement waits for, as of its last check."""
        question, blocker = self._blockers.get(name, (0, None))
        connection = self._watched[name]
        waits = connection.waiting_s and question == connection.statements_started
        return blocker if waits else None

    async def run(self) -> None:
        """Watch until cancelled.

        Raises:
            DatabaseUnavailable: a connection hangs, and cannot be opened again.
        """
        while True:
            await asyncio.sleep(self._check_every_s)
            overdue = {
                name: c.statements_started
                for name, c in self._watched.items()
                if self._overdue(name)
            }
            if overdue:
                await self._check(overdue)
            else:
                self._idle_statements.clear()

    def _overdue(self, name: str) -> bool:
        connection = self._watched[name]
        question, until_s = self._busy_statements.get(name, (0, 0.0))
        patience_s = until_s if question == connection.statements_started else self._patience_s
        return connection.waiting_s > patience_s

    async def _check(self, overdue: Mapping[str, int]) -> None:
        pids = {name: self._watched[name].get_server_pid() for name in overdue}
        working = await self._busy_backends(pids.values())
        if working is None:
            for name in overdue:
                longest_s = (
                    UNKNOWN_STATE_MAINTENANCE_MAX_S
                    if name == "maintenance"
                    else UNKNOWN_STATE_MAX_S
                )
                if self._watched[name].waiting_s > longest_s:
                    self._end(name, "whether the server is still working on it is unknown")
            return
        suspected, self._idle_statements = self._idle_statements, {}
        for name, question in overdue.items():
            connection = self._watched[name]
            if connection.statements_started != question or not connection.waiting_s:
                continue
            if pids[name] in working:
                waited_s = connection.waiting_s
                self._busy_statements[name] = (question, waited_s + min(waited_s, RECHECK_MAX_S))
                self._record_blocker(name, question, working[pids[name]])
            elif suspected.get(name) == question:
                self._end(name, "its backend is idle")
            else:
                self._idle_statements[name] = question

    def _record_blocker(self, name: str, question: int, blocker: WaitReason | None) -> None:
        self._blockers.pop(name, None)
        if blocker is None:
            return
        self._blockers[name] = (question, blocker)
        waited_s = self._watched[name].waiting_s
        # Maintenance may wait for the longest transaction in the database.
        if waited_s >= self._lease_s and name != "maintenance":
            log.warning(
                "a commit waits for a synchronous standby"
                if isinstance(blocker, StandbyWait)
                else "a statement waits for another session",
                connection=name,
                waited_s=round(waited_s, 1),
                blocked_by=blocker.describe(),
                action=blocker.end_command,
            )

    async def _busy_backends(self, pids: Collection[int]) -> Mapping[int, WaitReason | None] | None:
        """The busy ones among the backends, and what they wait for; None: unknown."""
        if self._find_busy_backends is None:
            return None
        try:
            return await self._find_busy_backends(pids)
        except (*CONNECTION_ERRORS, OutboxError) as error:
            if not self._warned:
                reason = in_one_line(error)
                log.warning("the state of the relay's backends cannot be read", reason=reason)
            self._warned = True
            return None

    def _end(self, name: str, reason: str) -> None:
        """End a connection that hangs, or the session, if it cannot be opened again."""
        connection = self._watched[name]
        hangs = (
            f"the connection for {name} hangs: no response for {connection.waiting_s:.1f} s, "
            f"and {reason}"
        )
        if not connection.reconnect():
            raise DatabaseUnavailable(hangs)
        log.warning("a connection is opened again", reason=hangs)
