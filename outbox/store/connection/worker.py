"""Connections that know since when they wait, and what the server says of that.

A connection can hang although both ends believe in it: whatever stands between
them takes the packets, and acknowledges them, and passes nothing on.  The
client waits for ever then, and no time-out of TCP ends it.  How long an answer
may take cannot be said either: some statements wait, rightly, for the longest
transaction in the database.  But the server knows whether it works for us.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from asyncpg import InterfaceError

from outbox.store.connection.type_cache import KnowingConnection

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from asyncpg import Connection

SENDING_MAX_S = 60
"""A large answer may be on its way for so long, over a slow line."""

# Who waits for a client to say more does not work for it.  A server that keeps no
# track of its sessions (track_activities) says "disabled".
READ_WORKING = f"""
SELECT pid FROM pg_stat_activity
 WHERE pid = ANY ($1)
   AND CASE WHEN state = 'disabled' THEN true
            WHEN wait_event = 'ClientWrite' THEN
                query_start > clock_timestamp() - interval '{SENDING_MAX_S} s'
            ELSE state = 'active' AND wait_event_type IS DISTINCT FROM 'Client' END
"""  # noqa: S608 (a constant only)


class Worker(KnowingConnection):
    """A connection that tells since when it has been waiting for an answer."""

    __slots__ = ("_asked_at", "questions")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._asked_at: float | None = None
        self.questions = 0
        """How many statements were begun."""

    @property
    def waiting_s(self) -> float:
        """How long the statement under way has had no answer, in seconds.

        0 when there is none, and when the connection was cut: who asked hears of that.
        """
        if self._asked_at is None or self.is_closed():
            return 0.0
        return asyncio.get_running_loop().time() - self._asked_at

    async def execute(self, *args: Any, **kwargs: Any) -> Any:
        with self._asking():
            return await super().execute(*args, **kwargs)

    async def fetch(self, *args: Any, **kwargs: Any) -> Any:
        with self._asking():
            return await super().fetch(*args, **kwargs)

    async def fetchval(self, *args: Any, **kwargs: Any) -> Any:
        with self._asking():
            return await super().fetchval(*args, **kwargs)

    async def fetchrow(self, *args: Any, **kwargs: Any) -> Any:
        with self._asking():
            return await super().fetchrow(*args, **kwargs)

    @contextmanager
    def _asking(self) -> Iterator[None]:
        self.questions += 1
        self._asked_at = asyncio.get_running_loop().time()
        try:
            yield
        except AttributeError as error:
            # asyncpg has let go of the protocol, and does not look for that in between.
            if self.is_closed():
                raise InterfaceError("connection was cut in the middle of a question") from error
            raise
        finally:
            self._asked_at = None


async def working(connection: Connection[Any], pids: Collection[int]) -> set[int]:
    """Those of the backends that are busy with a statement."""
    return {r["pid"] for r in await connection.fetch(READ_WORKING, list(pids))}
