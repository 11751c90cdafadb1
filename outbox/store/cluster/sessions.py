"""The sessions of relays in pg_stat_activity, found by their label, and the end of those that hang.

The label is the `application_name` of a session from its first message on, so a session is found
as soon as its backend exists.  A proxy that pools transactions passes the label on with the
session's statements; an idle backend of a proxy has the label of its last client.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import asyncpg

from outbox.errors import DatabaseUnavailable
from outbox.store.connection.store_connection import SENDING_MAX_S
from outbox.store.errors import Fenced
from outbox.store.sql.message import WriteStatement

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from asyncpg import Connection

    from outbox.store.connection.store_connection import StoreConnection

WORKERS = 8
"""Worker connections of a relay, each for one purpose."""
RELAY_CONNECTIONS_MAX = WORKERS + 2
"""Plus one to LISTEN, and now and then one to check that the server processes the others'
statements."""


SESSION_NAME = "outbox-relay:"
LISTENER_SUFFIX = ":listen"
WATCHDOG_NAME = f"{SESSION_NAME}watchdog"


def session_label(random_bits: int) -> str:
    """A label for a replica, the `application_name` of all its sessions from their start."""
    return f"{SESSION_NAME}{random_bits & 0xFFFFFFFF:08x}"


# The row of a replica that is to be expired, by its id ($1) or label ($3).  $2 is the renewal
# counter by which it was considered dead: if it has advanced, the replica is alive.
EXPIRABLE = "(id = $1 OR label = $3) AND renewals = coalesce($2, renewals)"

# The sessions of a replica that is being expired, as far as this role may terminate them.  Behind
# a proxy an idle backend has the label of its last client, so it is left alone.
_SESSIONS_OF_EXPIRABLE = f"""
  FROM (SELECT label, sequencer_pid FROM replica WHERE {EXPIRABLE}) r
  JOIN pg_stat_activity a ON a.application_name IN (r.label, r.label || '{LISTENER_SUFFIX}')
 WHERE a.datname = current_database() AND a.pid <> pg_backend_pid()
   AND pg_has_role(a.usesysid, 'USAGE')
   AND (r.sequencer_pid IS NOT NULL OR a.state <> 'idle')
"""  # noqa: S608 (constants only)

TERMINATE_SESSIONS = f"SELECT count(pg_terminate_backend(a.pid)) {_SESSIONS_OF_EXPIRABLE}"

# Terminates them again and waits for each, at most $4 milliseconds.
AWAIT_SESSIONS = f"SELECT count(pg_terminate_backend(a.pid, $4)) {_SESSIONS_OF_EXPIRABLE}"

COUNT_SESSIONS = f"SELECT count(*) {_SESSIONS_OF_EXPIRABLE}"
SESSION_END_MAX_S = 1.0
"""Limit of the wait for a terminated session to end."""
BUSY_SESSION_END_MAX_S = 0.1
"""The limit for a session of this process: a replica that starts must not wait for long."""

# Terminates sessions of replicas of this process that have ended, whether or not they have a row,
# and waits for each, at most $2 milliseconds.  A session that is not idle belongs to a connection
# that hangs.  Of its own role only: any role can use the same name.
TERMINATE_BUSY_SESSIONS = """
SELECT count(pg_terminate_backend(pid, $2)) FROM pg_stat_activity
 WHERE application_name = ANY ($1) AND usename = session_user AND datname = current_database()
   AND pid <> pg_backend_pid() AND state <> 'idle'
"""

# A session of this role, by label ($1) and backend ($2).
_SESSION = """
  FROM pg_stat_activity
 WHERE application_name = $1 AND pid = $2 AND usename = session_user
   AND datname = current_database() AND pid <> pg_backend_pid()
"""

# Whether a lease runs that was registered with this label ($1), on the server and in the state of
# the registration ($2).
READ_REGISTRATION_HOLDS = """
SELECT EXISTS (SELECT FROM replica
                WHERE label = $1 AND expires_at > clock_timestamp()
                  AND ($2::bigint IS NULL OR server_fence() = $2))
"""

# Whether one of the other sessions ($2) with the label $1 has lived on.
READ_SURVIVES = """
SELECT EXISTS (SELECT FROM pg_stat_activity
                WHERE application_name = $1 AND pid = ANY ($2) AND usename = session_user
                  AND datname = current_database() AND pid <> pg_backend_pid())
"""

# Terminates a lost session, waits for its end, at most $3 milliseconds, and reads whether it lives.
END_LOST_SESSION = f"SELECT count(pg_terminate_backend(pid, $3)) {_SESSION}"
READ_SESSION_LIVES = f"SELECT EXISTS (SELECT {_SESSION})"

REPLACE_SEQUENCER = WriteStatement(
    "replace_sequencer",
    "UPDATE replica SET sequencer_pid = $3 WHERE label = $1 AND sequencer_pid = $2",
    repeatable=True,
)

# Sessions of relays of this role for which the server has waited longer than a lease ($1, or the
# replica's own) while they hold something: a transaction, or what is notified to a listener.
# A time in the future is that of a clock that was set back: how long the session has waited is not
# known, so it counts as long.  Slow clients get more time to read a result.  Those that were found
# the last time ($2 and $3) and have not changed since are terminated: a backend may wait for its
# client for a moment after a long statement.
TERMINATE_STUCK_SESSIONS = f"""
SELECT a.pid, a.application_name AS label, a.state, a.state_change,
       extract(epoch FROM clock_timestamp() - a.state_change)::float8 AS waiting_s,
       CASE WHEN (a.pid, a.state_change) IN (SELECT * FROM unnest($2::int[], $3::timestamptz[]))
            THEN pg_terminate_backend(a.pid) ELSE false END AS terminated
  FROM pg_stat_activity a
  LEFT JOIN replica r ON a.application_name IN (r.label, r.label || '{LISTENER_SUFFIX}')
 WHERE a.application_name LIKE '{SESSION_NAME}%' AND a.usename = session_user
   AND a.datname = current_database() AND a.pid <> pg_backend_pid()
   AND a.wait_event_type = 'Client'
   AND a.state_change NOT BETWEEN clock_timestamp() - make_interval(secs => greatest($1, r.lease_s))
                              AND clock_timestamp()
   AND CASE WHEN a.wait_event = 'ClientWrite' THEN
                a.state = 'idle'
                OR a.state_change NOT BETWEEN clock_timestamp() - interval '{SENDING_MAX_S} s'
                                          AND clock_timestamp()
            ELSE a.state <> 'idle' END
"""  # noqa: S608 (constants only)

# Terminates the former listeners of a replica, whose client has given them up.
TERMINATE_FORMER_LISTENERS = """
SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
 WHERE application_name = $1 AND usename = session_user AND datname = current_database()
   AND pid <> pg_backend_pid()
"""


@dataclass(frozen=True, slots=True)
class StuckSession:
    """A session of a relay whose client was silent while it held something."""

    pid: int
    label: str
    state: str
    waiting_s: float
    """How long the server has waited for the client."""


class StuckSessions:
    """Finds sessions that hang, and terminates those that still hang the next time.

    Args:
        connection: one of a relay.
    """

    def __init__(self, connection: Connection[Any]) -> None:
        self._db = connection
        self._found: list[tuple[int, datetime]] = []

    async def terminate(self, lease_s: float) -> list[StuckSession]:
        """Returns those that were terminated."""
        pids = [pid for pid, _ in self._found]
        changes = [changed_at for _, changed_at in self._found]
        rows = await self._db.fetch(TERMINATE_STUCK_SESSIONS, lease_s, pids, changes)
        self._found = [(r["pid"], r["state_change"]) for r in rows if not r["terminated"]]
        return [
            StuckSession(r["pid"], r["label"], r["state"], r["waiting_s"])
            for r in rows
            if r["terminated"]
        ]


async def terminate_former_listeners(connection: Connection[Any], name: str) -> None:
    """Terminate the other listeners with the `application_name` of this one."""
    await connection.execute(TERMINATE_FORMER_LISTENERS, name)


async def continue_session(
    connection: StoreConnection,
    label: str,
    server_fence: int | None,
    lost_pid: int,
    others: Sequence[int],
) -> bool:
    """Continue a replica's session on a new connection, and end the lost one.

    Args:
        server_fence: `server_fence()` when the replica registered; None: not known.
        others: the backends of the replica's other sessions.

    Returns:
        False if none of the others lives: the server may have crashed, and have lost renewals that
        were not on disk.

    Raises:
        Fenced: the lease has ended, or the server or its state is another one.
        DatabaseUnavailable: the lost session has not ended yet.
    """
    if not await connection.fetchval(READ_REGISTRATION_HOLDS, label, server_fence):
        raise Fenced
    if not await connection.fetchval(READ_SURVIVES, label, others):
        return False
    await connection.fetchval(END_LOST_SESSION, label, lost_pid, int(SESSION_END_MAX_S * 1000))
    if await connection.fetchval(READ_SESSION_LIVES, label, lost_pid):
        raise DatabaseUnavailable("the backend of a lost connection has not ended")
    # Not durable: the renewal of the lease, which updates the same row, must not wait for a disk or
    # a standby.
    pid = connection.get_server_pid()
    await connection.write(REPLACE_SEQUENCER, label, lost_pid, pid, durable=False)
    return True


async def terminate_busy_sessions(
    connection: Connection[Any], labels: Sequence[str], *, wait_s: float
) -> None:
    """Terminate the sessions of ended replicas that are not idle; wait up to `wait_s` for each."""
    with suppress(asyncpg.InsufficientPrivilegeError):
        await connection.execute(TERMINATE_BUSY_SESSIONS, labels, int(wait_s * 1000))
