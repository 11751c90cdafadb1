"""The connections of a relay's session, and whether the server still executes their statements.

A connection can hang although both ends consider it open: something between them accepts and
acknowledges packets without forwarding them.  The client then waits for ever, and no TCP
time-out ends it.  A statement time-out cannot help: some statements rightly wait for the longest
transaction in the database.  But the server knows whether it is executing the statement.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from asyncpg import DuplicatePreparedStatementError

from outbox.store.connection.store_connection import StoreConnection

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from asyncpg import Connection

    from outbox.store.sql.message import WriteStatement

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
