"""What keeps events from being sequenced, and the reports of it.

The session that holds the cursor row is found without extra privileges: every role sees the
transaction id that locked a row, the locks of all sessions, and their names.  What a session
of another role is doing is visible to members of pg_read_all_stats only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import orjson

from outbox.core.delivery.operational_events import LAGGING_EVERY_S, LAGGING_S
from outbox.core.model.sql_names import quote_literal
from outbox.errors import DatabaseUnavailable
from outbox.store.operational_events import END_LAGGING, PUBLISH_LAGGING

if TYPE_CHECKING:
    from asyncpg import Connection

    from outbox.store.connection.store_connection import StoreConnection

# A session by its lock `l`.  A prepared transaction has no process; the lock on its transaction id
# leads to its name.
SESSION_COLUMNS = """
SELECT l.pid, x.gid AS prepared_transaction, coalesce(a.usename, x.owner)::text AS role,
       nullif(a.application_name, '') AS application, a.state,
       round(extract(epoch FROM clock_timestamp() - coalesce(a.xact_start, x.prepared)), 1)::float8
           AS since_s"""
SESSION_JOINS = """
  LEFT JOIN pg_stat_activity a ON a.pid = l.pid
  LEFT JOIN LATERAL (
       SELECT p.* FROM pg_locks t JOIN pg_prepared_xacts p ON p.transaction = t.transactionid
        WHERE l.pid IS NULL AND t.pid IS NULL AND t.locktype = 'transactionid'
          AND t.virtualtransaction = l.virtualtransaction) x ON true
"""

# The session that locks the whole cursor table, so that the relay's statements wait.  This
# query does not read the table, and so waits for nothing.
READ_TABLE_BLOCKER = f"""{SESSION_COLUMNS}
  FROM pg_locks l {SESSION_JOINS}
 WHERE l.locktype = 'relation' AND l.granted AND l.relation = 'cursor'::regclass
   AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
   AND l.mode IN ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
   AND l.pid IS DISTINCT FROM pg_backend_pid()
 ORDER BY since_s DESC NULLS LAST LIMIT 1
"""  # noqa: S608 (constants only)

# The session that holds the cursor row.
#   holders: first the transaction that locked or changed the row (xmax).  That of a released
#     savepoint has no lock any more; then a transaction with an id that has used the table to
#     lock or change rows, and waits for nothing.
READ_ROW_BLOCKER = f"""
WITH holders AS (
    SELECT t.pid, t.virtualtransaction, 1 AS choice
      FROM cursor c JOIN pg_locks t
        ON t.locktype = 'transactionid' AND t.granted AND t.transactionid = c.xmax
     UNION ALL
    SELECT u.pid, u.virtualtransaction, 2
      FROM pg_locks u
     WHERE u.locktype = 'relation' AND u.granted AND u.relation = 'cursor'::regclass
       AND u.database = (SELECT oid FROM pg_database WHERE datname = current_database())
       AND u.mode IN ('RowShareLock', 'RowExclusiveLock')
       AND EXISTS (SELECT FROM pg_locks t
                    WHERE t.virtualtransaction = u.virtualtransaction
                      AND t.locktype = 'transactionid' AND t.mode = 'ExclusiveLock')
       AND NOT EXISTS (SELECT FROM pg_locks w WHERE w.pid = u.pid AND NOT w.granted))
{SESSION_COLUMNS} FROM holders l {SESSION_JOINS}
 WHERE l.pid IS DISTINCT FROM pg_backend_pid()
 ORDER BY choice, since_s DESC NULLS LAST LIMIT 1
"""  # noqa: S608 (constants only)


# The session for which a session waits.
READ_WAITS_FOR = f"""{SESSION_COLUMNS}
  FROM (SELECT b.pid, NULL::text AS virtualtransaction
          FROM unnest(pg_blocking_pids($1)) AS b(pid)
         WHERE b.pid > 0 AND b.pid <> pg_backend_pid() LIMIT 1) l {SESSION_JOINS}
"""  # noqa: S608 (constants only)

# The session for which ordinary statements on a table of the outbox wait, such as VACUUM FULL,
# or a dump behind which it waits.
READ_LOCK_BLOCKER = f"""{SESSION_COLUMNS}
  FROM (SELECT b.pid, NULL::text AS virtualtransaction
          FROM pg_locks w CROSS JOIN LATERAL unnest(pg_blocking_pids(w.pid)) AS b(pid)
         WHERE w.locktype = 'relation' AND NOT w.granted
           AND w.mode IN ('AccessShareLock', 'RowShareLock', 'RowExclusiveLock')
           AND w.waitstart NOT BETWEEN clock_timestamp() - make_interval(secs => $1)
                                   AND clock_timestamp()
           AND w.database = (SELECT oid FROM pg_database WHERE datname = current_database())
           AND w.relation IN (
               SELECT oid FROM pg_class
                WHERE relnamespace = (SELECT relnamespace FROM pg_class
                                       WHERE oid = 'cursor'::regclass))
           AND b.pid > 0 AND b.pid <> pg_backend_pid()
         ORDER BY w.waitstart LIMIT 1) l {SESSION_JOINS}
"""  # noqa: S608 (constants only)
# A commit of a backend, or of the sessions with a label, that waits for a synchronous standby.  It
# goes on waiting after its client has closed the connection.
READ_STANDBY_WAIT = """
SELECT current_setting('synchronous_standby_names') FROM pg_stat_activity
 WHERE (pid = $1 OR application_name = $2) AND wait_event = 'SyncRep' LIMIT 1
"""
BLOCKER_AGE_MIN_S = 1.0
CHAIN_MAX = 10
"""Sessions that wait for each other are followed that far."""


@dataclass(frozen=True, slots=True)
class Blocker:
    """A session, or a prepared transaction, for which sequencing waits.

    It holds the cursor row or a table lock, or it blocks the session that holds one of these.
    """

    pid: int | None
    """The session's process id; None: it is a prepared transaction."""
    prepared_transaction: str | None
    """Its name; None: it is a session."""
    role: str | None
    application: str | None
    state: str | None
    """The session's state as in pg_stat_activity; None: it is not visible to this role."""
    since_s: float | None
    """Age of its transaction; None: not visible to this role."""
    end_command: str = field(init=False, default="")
    """The SQL command that ends it."""

    def __post_init__(self) -> None:
        if self.pid is None:
            name = quote_literal(self.prepared_transaction or "").strip()
            end_command = f"ROLLBACK PREPARED {name}"
        else:
            end_command = f"SELECT pg_terminate_backend({self.pid})"
        object.__setattr__(self, "end_command", end_command)

    def describe(self, *, names: bool = True) -> str:
        """What it is, for a message.

        Args:
            names: whether it has the names of roles and applications.
        """
        since = "" if self.since_s is None else f" for {self.since_s:.0f} s"
        if self.pid is None:
            named = f' "{self.prepared_transaction}" of {self.role}' if names else ""
            return f"a prepared transaction{named}, prepared{since}"
        of = [f"role {self.role}"] if names and self.role else []
        of += [f'application "{self.application}"'] if names and self.application else []
        who = f"pid {self.pid}" + (f" ({', '.join(of)})" if of else "")
        if self.state is None:
            return f"{who}, whose state only members of pg_read_all_stats can see"
        state = "in a transaction" if self.state == "active" else self.state
        return f"{who}, {state}{since}"


@dataclass(frozen=True, slots=True)
class StandbyWait:
    """A commit that waits for a synchronous standby."""

    standbys: str
    """The setting synchronous_standby_names."""
    end_command: ClassVar[str] = (
        "bring back a standby of synchronous_standby_names, or change that setting"
    )

    def describe(self, *, names: bool = True) -> str:
        """What it waits for, for a message.

        Args:
            names: whether it has the names of the standbys.
        """
        of = f" (synchronous_standby_names: {self.standbys})" if names else ""
        return f"a synchronous standby that confirms no commit{of}"


class CommitUnconfirmed(DatabaseUnavailable):
    """A commit waits for a synchronous standby.

    Args:
        overdue: what was waited for, and how long.
    """

    def __init__(self, overdue: str, wait: StandbyWait) -> None:
        self.public_reason = f"{overdue}, blocked by {wait.describe(names=False)}"
        """The reason without the names of standbys."""
        super().__init__(f"{overdue}, blocked by {wait.describe()}; to end it: {wait.end_command}")


WaitReason: TypeAlias = Blocker | StandbyWait
"""What a backend waits for."""


async def read_cursor_blocker(
    connection: Connection[Any], *, age_min_s: float = BLOCKER_AGE_MIN_S
) -> Blocker | None:
    """The session that keeps others from the cursor row; None: none does.

    Args:
        age_min_s: a younger transaction is not to blame, such as that of a batch; its age is
            visible to its own role only, or with pg_read_all_stats.
    """
    row = await connection.fetchrow(READ_TABLE_BLOCKER)
    if row is None:
        row = await connection.fetchrow(READ_ROW_BLOCKER)
    blocker = await _follow_chain(connection, row)
    if blocker is not None and blocker.since_s is not None and blocker.since_s < age_min_s:
        return None
    return blocker


async def read_lock_blocker(
    connection: Connection[Any], *, wait_min_s: float = BLOCKER_AGE_MIN_S
) -> Blocker | None:
    """The session for which statements wait to use a table of the outbox; None: none does.

    It reads no table of the outbox, and so does not wait itself.

    Args:
        wait_min_s: shorter waits are ordinary.
    """
    return await _follow_chain(connection, await connection.fetchrow(READ_LOCK_BLOCKER, wait_min_s))


async def read_wait_of(connection: Connection[Any], pid: int) -> WaitReason | None:
    """The session or standby for which a backend waits; None: it waits for neither."""
    row = await connection.fetchrow(READ_WAITS_FOR, pid)
    return await _follow_chain(connection, row) or await read_standby_wait(connection, pid=pid)


async def read_standby_wait(
    connection: Connection[Any], *, pid: int | None = None, label: str | None = None
) -> StandbyWait | None:
    """The standby for which a commit waits; None: there is no such commit.

    Args:
        pid: a backend.
        label: the application_name of a replica's sessions.
    """
    standbys = await connection.fetchval(READ_STANDBY_WAIT, pid, label)
    return None if standbys is None else StandbyWait(standbys)


async def _follow_chain(connection: Connection[Any], row: Any) -> Blocker | None:
    """The session for which a session waits in the end; None: it has ended meanwhile."""
    for _ in range(CHAIN_MAX):
        if row is None or row["pid"] is None:
            break
        earlier = await connection.fetchrow(READ_WAITS_FOR, row["pid"])
        if earlier is None:
            break
        row = earlier
    return None if row is None or row["state"] == "idle" else Blocker(**dict(row))


class StallStore:
    """Finds and reports what keeps events from being sequenced, on one connection.

    Not safe for concurrent use; asyncpg's errors propagate.

    Args:
        server_fence: `server_fence()` when the replica registered; None: not known.
    """

    def __init__(self, connection: StoreConnection, server_fence: int | None = None) -> None:
        self._db = connection
        self._fence = server_fence

    async def read_blocker(self) -> Blocker | None:
        """See `read_cursor_blocker`."""
        return await read_cursor_blocker(self._db)

    async def publish_lagging(self, replica_id: int, blocker: Blocker | None = None) -> bool:
        """Publish outbox.relay.lagging if events wait too long; returns whether it did.

        Not if another replica leads and there is no blocker, nor soon after the last report.
        It does not need the cursor row.
        """
        details = None if blocker is None else orjson.dumps(blocker).decode()
        published = await self._db.write(
            PUBLISH_LAGGING, replica_id, LAGGING_S, LAGGING_EVERY_S, self._fence, details
        )
        return bool(published)

    async def end_lagging(self, leader: int) -> bool:
        """Clear the lagging state; returns False if another replica leads or writes it."""
        return bool(await self._db.write(END_LAGGING, leader))
