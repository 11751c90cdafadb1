"""The watchdog: ends a session one of whose connections hangs.

The lease bounds how long a replica may *send* while it cannot reach the
database.  It does not bound this: the lease is renewed, on a connection of its
own, while the one that reads lanes, or sequences, or writes acknowledgements
waits for an answer that never comes, because something on the way swallows what
it is given.  Endpoints would be owned and never served again, without a word.

No time-out on statements can tell that from a database that is slow, or from a
statement that waits for somebody's lock: too short a one repeats what it breaks
off for ever, too long a one is a silent stop.  So the server is asked, on a
connection opened for the question, whether the backend is at work.  One that is
not, in two looks at the same statement, has answered long ago or was never
asked.  Where nobody can say, time has to decide: behind a proxy that pools
transactions, which backend that would be is not known, and the question may need
a connection more than there are.

From the last sign of life to the end of the session that takes about one lease.
What is left to the lease alone, or has a bound of its own: the renewal, the
connection that listens, and whatever a session does before it has registered.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import structlog

from outbox.errors import DatabaseUnavailable, OutboxError
from outbox.store.connection.connect import TROUBLE, in_one_line

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping

log = structlog.get_logger("outbox.relay")

LOOKS_PER_LEASE = 5
PATIENCE_SHARE = 0.4
"""Of the lease; a statement that was answered sooner is never asked about."""
LOOK_MAX_S = 60.0
"""What was found at work is asked about again when it has taken twice as long, but
after this time at the latest."""
UNTOLD_MAX_S, UNTOLD_UPKEEP_MAX_S = 60.0, 3600.0
"""What takes longer hangs, if nobody can say.  Maintenance may wait for the longest
transaction in the database."""


class Watched(Protocol):
    """A connection, as the watchdog sees it."""

    @property
    def waiting_s(self) -> float:
        """How long the statement under way has had no answer; 0 when there is none."""

    @property
    def questions(self) -> int:
        """How many statements were begun."""

    def get_server_pid(self) -> int:
        """Its backend."""

    def terminate(self) -> None:
        """Cut it."""


class Watchdog:
    """Watches connections until cancelled.

    Args:
        watched: by what they are for.
        working: which of some backends are at work; None: nobody can say.
    """

    def __init__(
        self,
        watched: Mapping[str, Watched],
        working: Callable[[Collection[int]], Awaitable[set[int]]] | None,
        lease_s: float,
    ) -> None:
        self._watched = watched
        self._working = working
        self._patience_s = lease_s * PATIENCE_SHARE
        self._look_every_s = lease_s / LOOKS_PER_LEASE
        # By connection, the statement that nobody worked at in the last look.
        self._doubted: dict[str, int] = {}
        # By connection, a statement that was at work, and how old it may get unasked.
        self._trusted: dict[str, tuple[int, float]] = {}
        self._told = False

    async def run(self) -> None:
        """Watch.

        Raises:
            DatabaseUnavailable: one of them hangs.
        """
        while True:
            await asyncio.sleep(self._look_every_s)
            overdue = {
                name: c.questions for name, c in self._watched.items() if self._overdue(name)
            }
            if overdue:
                await self._look(overdue)
            else:
                self._doubted.clear()

    def _overdue(self, name: str) -> bool:
        connection = self._watched[name]
        question, until_s = self._trusted.get(name, (0, 0.0))
        patience_s = until_s if question == connection.questions else self._patience_s
        return connection.waiting_s > patience_s

    async def _look(self, overdue: Mapping[str, int]) -> None:
        pids = {name: self._watched[name].get_server_pid() for name in overdue}
        working = await self._who_works(pids.values())
        if working is None:
            for name in overdue:
                longest_s = UNTOLD_UPKEEP_MAX_S if name == "upkeep" else UNTOLD_MAX_S
                if self._watched[name].waiting_s > longest_s:
                    raise self._hangs(name, "nobody can say whether the server is at work")
            return
        doubted, self._doubted = self._doubted, {}
        for name, question in overdue.items():
            connection = self._watched[name]
            if connection.questions != question or not connection.waiting_s:
                continue
            if pids[name] in working:
                waited_s = connection.waiting_s
                self._trusted[name] = (question, waited_s + min(waited_s, LOOK_MAX_S))
            elif doubted.get(name) == question:
                raise self._hangs(name, "the server is not at work")
            else:
                self._doubted[name] = question

    async def _who_works(self, pids: Collection[int]) -> set[int] | None:
        """Those of the backends that are at work; None: there is no saying."""
        if self._working is None:
            return None
        try:
            return await self._working(pids)
        except (*TROUBLE, OutboxError) as error:
            if not self._told:
                why = in_one_line(error)
                log.warning("the database does not say whether it works for us", reason=why)
            self._told = True
            return None

    def _hangs(self, name: str, why: str) -> DatabaseUnavailable:
        waited_s = self._watched[name].waiting_s
        return DatabaseUnavailable(
            f"the connection for {name} hangs: no answer for {waited_s:.1f} s, and {why}"
        )


@contextmanager
def answering(connection: Watched, within_s: float, what: str) -> Iterator[None]:
    """Cut the connection if the block takes longer; for what comes before a watchdog.

    It is cut, rather than the block cancelled: a transaction that is left behind
    would wait to be rolled back.

    Raises:
        DatabaseUnavailable: it was cut.
    """
    cut = False

    def end() -> None:
        nonlocal cut
        cut = True
        connection.terminate()

    timer = asyncio.get_running_loop().call_later(within_s, end)
    try:
        yield
    except TROUBLE as error:
        if not cut:
            raise
        raise DatabaseUnavailable(f"no answer within {within_s:g} s to {what}") from error
    finally:
        timer.cancel()
