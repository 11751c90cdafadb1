"""The sessions of relays in pg_stat_activity, found by their label, and the end of those that hang.

The label is the `application_name` of a session from its first message on, so a session is found
as soon as its backend exists.  A proxy that pools transactions passes the label on with the
session's statements; an idle backend of a proxy has the label of its last client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncpg import Connection

WORKERS = 8
"""Worker connections of a relay, each for one purpose."""
CONNECTIONS_MAX = WORKERS + 2
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

# Terminates the sessions of a replica that is being expired.  Behind a proxy an idle backend has
# the label of its last client, so it is left alone.
TERMINATE_SESSIONS = f"""
SELECT count(pg_terminate_backend(a.pid))
  FROM (SELECT label, sequencer_pid FROM replica WHERE {EXPIRABLE}) r
  JOIN pg_stat_activity a ON a.application_name IN (r.label, r.label || '{LISTENER_SUFFIX}')
 WHERE a.datname = current_database() AND a.pid <> pg_backend_pid()
   AND (r.sequencer_pid IS NOT NULL OR a.state <> 'idle')
"""  # noqa: S608 (constants only)

# Terminates sessions of a replica after its clean stop, when its row is already gone.  A
# session that is not idle belongs to a connection that hangs.
TERMINATE_BUSY_SESSIONS = """
SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
 WHERE application_name = $1 AND datname = current_database() AND pid <> pg_backend_pid()
   AND state <> 'idle'
"""

# Terminates the former listeners of a replica, whose client has given them up.
TERMINATE_FORMER_LISTENERS = """
SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
 WHERE application_name = $1 AND datname = current_database() AND pid <> pg_backend_pid()
"""


async def terminate_former_listeners(connection: Connection[Any], name: str) -> None:
    """Terminate the other listeners with the `application_name` of this one."""
    await connection.execute(TERMINATE_FORMER_LISTENERS, name)
