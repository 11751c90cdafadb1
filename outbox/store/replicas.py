"""Replicas, leases and who owns which endpoint.

Every change of hands is one transaction, and journalled in it.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import asyncpg

from outbox.core.cluster.lease import Peer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from asyncpg import Connection

# A replica's own row, while its lease runs ($1 is the replica), on the server that
# it registered at: after a fail-over behind a proxy, its number may be another
# one's, and the lanes that it knows may owe something else.
OWN_ROW = """id = $1 AND expires_at > clock_timestamp()
       AND ({0}::bigint IS NULL OR server_timeline() = {0})"""


WORKERS = 8
"""Connections that a relay works on, each for one thing."""
CONNECTIONS_MAX = WORKERS + 2
"""And one to LISTEN, and one now and then to ask whether the server works for the others."""


def fence(timeline: str) -> str:
    """The beginning of whatever a replica writes: its own row, locked.

    Args:
        timeline: the parameter with the server's timeline, as of its registration.
    """
    return f"""
WITH fence AS MATERIALIZED (
    SELECT 1 FROM replica WHERE {OWN_ROW.format(timeline)} FOR KEY SHARE)"""  # noqa: S608


# Before it is registered, because its sessions are called by it.
RESERVE = "SELECT nextval(pg_get_serial_sequence('replica', 'id'))"

# Of the session that asked for it.
CALL_SESSION = "SELECT set_config('application_name', $1, false)"

# With the database's time, by which a relay goes.  Whoever buries a replica may end
# its backends: `pids`, the one that sequences first.
REGISTER = """
INSERT INTO replica (id, name, version, pids, lease_s, keys, expires_at) OVERRIDING SYSTEM VALUE
VALUES ($1, $2, $3, $4, $5, $6, clock_timestamp() + make_interval(secs => $5))
RETURNING extract(epoch FROM clock_timestamp())::float8 AS now
"""

# A lapsed lease is not renewed: the replica has to register anew.
RENEW = f"""
UPDATE replica
   SET renewals = renewals + 1,
       expires_at = clock_timestamp() + make_interval(secs => lease_s)
 WHERE {OWN_ROW.format("$2")}
RETURNING extract(epoch FROM clock_timestamp())::float8
"""  # noqa: S608 (constants only)

# FOR UPDATE waits for a group of acknowledgements that is being written just
# now, and shuts out every later one.  Whoever was judged by its counter ($2) is
# only buried while it stands there: the answer that told of it may be an old one.
LOCK_REPLICA = """
SELECT name FROM replica
 WHERE id = $1 AND renewals = coalesce($2, renewals) AND name = coalesce($3, name) FOR UPDATE
"""

BACKENDS = """
SELECT count(pg_terminate_backend(a.pid))
  FROM replica r JOIN pg_stat_activity a ON a.pid = ANY (r.pids)
 WHERE r.id = $1 AND a.application_name = $2 AND r.renewals = coalesce($3, r.renewals)
"""

# Of a replica that leaves, and whose row is gone: nobody buries it any more.  Who is in the
# middle of something when nobody wants anything of it, or has a lock, was asked by a
# connection that hangs.
END_SESSIONS = """
SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity a
 WHERE pid = ANY ($1) AND application_name = $2 AND pid <> pg_backend_pid()
   AND (state <> 'idle' OR EXISTS (SELECT FROM pg_locks l WHERE l.pid = a.pid))
"""

# Whoever locks several rows of ownership takes them in the order of their ids: a
# change of several endpoints locks some of them, too.
FREE_ALL = """
WITH mine AS MATERIALIZED (
    SELECT endpoint_id FROM ownership WHERE replica_id = $1
     ORDER BY endpoint_id FOR NO KEY UPDATE),
freed AS (
    UPDATE ownership o SET replica_id = NULL, epoch = epoch + 1
      FROM mine WHERE o.endpoint_id = mine.endpoint_id
    RETURNING o.endpoint_id, epoch)
INSERT INTO journal (kind, actor, endpoint_id, data)
SELECT 'endpoint_freed', $2, endpoint_id,
       jsonb_build_object('epoch', epoch, 'replica', $1::bigint, 'why', $3::text,
                          'relay', (SELECT name FROM replica WHERE id = $1))
  FROM freed
"""

REMOVE_REPLICA = "DELETE FROM replica WHERE id = $1"

FREE_SOME = f"""{fence("$5")},
mine AS MATERIALIZED (
    SELECT endpoint_id FROM ownership WHERE replica_id = $1 AND endpoint_id = ANY ($2)
     ORDER BY endpoint_id FOR NO KEY UPDATE),
freed AS (
    UPDATE ownership o SET replica_id = NULL, epoch = epoch + 1
      FROM fence, mine WHERE o.endpoint_id = mine.endpoint_id
    RETURNING o.endpoint_id, epoch)
INSERT INTO journal (kind, actor, endpoint_id, data)
SELECT 'endpoint_freed', $3, endpoint_id,
       jsonb_build_object('epoch', epoch, 'replica', $1::bigint, 'why', $4::text,
                          'relay', (SELECT name FROM replica WHERE id = $1))
  FROM freed
"""  # noqa: S608 (constants only)

# Everything that an owner looks at now and then, in one statement: all replicas,
# what nobody owns, and the version of who gets what.  Only what is free: an idle
# look must not cost more with every endpoint.
LOOK = """
SELECT c.version, c.erasures, r.ids, r.renewals, r.leases_s, r.cursor_pids,
       array(SELECT o.endpoint_id
               FROM ownership o JOIN endpoint e ON e.id = o.endpoint_id
                AND e.state NOT IN ('removed', 'disabled')
              WHERE o.replica_id IS NULL) AS free
  FROM cursor c,
       (SELECT array_agg(id) AS ids, array_agg(renewals) AS renewals,
               array_agg(lease_s) AS leases_s, array_agg(pids[1]) AS cursor_pids
          FROM replica) r
"""

CLAIM = f"""{fence("$4")},
unowned AS MATERIALIZED (
    SELECT endpoint_id FROM ownership WHERE replica_id IS NULL AND endpoint_id = ANY ($2)
     ORDER BY endpoint_id FOR NO KEY UPDATE),
claimed AS (
    UPDATE ownership o SET replica_id = $1, epoch = epoch + 1
      FROM fence, unowned u WHERE o.endpoint_id = u.endpoint_id AND o.replica_id IS NULL
    RETURNING o.endpoint_id, epoch),
told AS (
    INSERT INTO journal (kind, actor, endpoint_id, data)
    SELECT 'endpoint_claimed', $3, endpoint_id,
           jsonb_build_object('epoch', epoch, 'replica', $1::bigint,
                              'relay', (SELECT name FROM replica WHERE id = $1))
      FROM claimed)
SELECT endpoint_id, epoch FROM claimed
"""  # noqa: S608 (constants only)

# The epoch is *written* to every row that an owner writes before anything is
# read, so that a checkpoint of the last owner that is still under way cannot
# pass.  A statement of its own: the claim may have waited for a change of lanes,
# and only a later snapshot shows the new ones.
STAMP = """
WITH claimed AS (SELECT * FROM unnest($1::uuid[], $2::bigint[]) AS c(endpoint_id, epoch)),
known AS (
    UPDATE endpoint_health h SET epoch = c.epoch
      FROM claimed c WHERE h.endpoint_id = c.endpoint_id)
UPDATE lane_progress p SET epoch = c.epoch
  FROM claimed c WHERE p.endpoint_id = c.endpoint_id
"""


SESSION_NAME = "outbox-relay:"
LISTENER_SUFFIX = ":listen"


def application_name(replica_id: int) -> str:
    """What a replica's database sessions are called."""
    return f"{SESSION_NAME}{replica_id}"


def listener_name(replica_id: int) -> str:
    """What its connection for LISTEN is called, so that a dead one is noticed."""
    return application_name(replica_id) + LISTENER_SUFFIX


@dataclass(frozen=True, slots=True)
class Look:
    """What an owner sees at one moment."""

    version: int
    """Of who gets what; it rises with every change."""
    erasures: int
    """Rises when payloads were erased."""
    peers: list[Peer]
    """Every registered replica, whoever looks among them."""
    free: list[UUID]
    """Endpoints that nobody owns."""
    cursor_pids: set[int | None]
    """The backends by which the replicas sequence."""


class ReplicaStore:
    """Leases and ownership, on one connection.

    Not safe for concurrent use; asyncpg's errors pass through.

    Args:
        timeline: the server's, read before the replica registered; None: not known.
    """

    def __init__(self, connection: Connection[Any], timeline: int | None = None) -> None:
        self._db = connection
        self._timeline = timeline

    async def reserve(self) -> int:
        """An id for a replica that is not registered yet."""
        replica_id: int = await self._db.fetchval(RESERVE)
        return replica_id

    async def call_session(self, replica_id: int) -> None:
        """Call this session by the replica's id: who buries it ends only those of its name."""
        await self._db.execute(CALL_SESSION, application_name(replica_id))

    async def register(
        self,
        replica_id: int,
        name: str,
        version: str,
        lease_s: float,
        pids: Sequence[int] = (),
        keys: Sequence[str] = (),
    ) -> float:
        """A new replica under an id that was reserved for it; its lease begins now.

        Args:
            pids: the backends that write in its name.
            keys: the ids of those that it can decrypt with.

        Returns:
            The database's time in epoch seconds.
        """
        row = (replica_id, name, version, pids, lease_s, keys)
        now: float = await self._db.fetchval(REGISTER, *row)
        return now

    async def renew(self, replica_id: int) -> float | None:
        """Let the lease run anew, if it still ran.

        Returns:
            The database's time in epoch seconds; None: it had run out.
        """
        now: float | None = await self._db.fetchval(RENEW, replica_id, self._timeline)
        return now

    async def look(self) -> Look:
        """Everything that an owner looks at."""
        row = await self._db.fetchrow(LOOK)
        columns = (row["ids"] or (), row["renewals"] or (), row["leases_s"] or ())
        peers = [Peer(*each) for each in zip(*columns, strict=True)]
        return Look(
            row["version"],
            row["erasures"],
            peers,
            row["free"],
            set(row["cursor_pids"] or ()),
        )

    async def bury(
        self,
        replica_id: int,
        actor: str,
        lock_timeout_s: float,
        renewals: int | None = None,
        *,
        called: str | None = None,
    ) -> bool:
        """Free everything a dead replica owns, and fence it off.

        Args:
            renewals: the counter by which it was taken for dead; None: it is
                known to have ended.
            called: only if that is its name; after a fail-over its number may
                have been given to another replica.

        Returns:
            False when it is gone already, has renewed its lease since then, or
            when one of its sessions was in the way and has been ended: look again.
        """
        name = application_name(replica_id)
        try:
            async with self._db.transaction():
                await self._db.execute(f"SET LOCAL lock_timeout = {int(lock_timeout_s * 1000)}")
                locked = await self._db.fetchval(LOCK_REPLICA, replica_id, renewals, called)
                if locked is None:
                    return False
                # A frozen one may also be in the way where this lock does not tell:
                # in the middle of an answer that nobody takes, on the cursor row.
                with suppress(asyncpg.InsufficientPrivilegeError):
                    async with self._db.transaction():
                        await self._db.execute(BACKENDS, replica_id, name, renewals)
                await self._db.execute(FREE_ALL, replica_id, actor, "lease ran out")
                await self._db.execute(REMOVE_REPLICA, replica_id)
        except asyncpg.LockNotAvailableError:
            await self._db.execute(BACKENDS, replica_id, name, renewals)
            return False
        return True

    async def leave(self, replica_id: int, actor: str) -> None:
        """A clean stop: everything is free at once."""
        async with self._db.transaction():
            await self._db.execute(LOCK_REPLICA, replica_id, None, None)
            await self._db.execute(FREE_ALL, replica_id, actor, "clean stop")
            await self._db.execute(REMOVE_REPLICA, replica_id)

    async def end_sessions(self, replica_id: int, pids: Sequence[int]) -> None:
        """After a clean stop: end those of its backends that may still have a lock."""
        if pids:
            with suppress(asyncpg.InsufficientPrivilegeError):
                await self._db.execute(END_SESSIONS, pids, application_name(replica_id))

    async def claim(
        self, replica_id: int, endpoint_ids: Sequence[UUID], actor: str
    ) -> dict[UUID, int]:
        """Take free endpoints; returns the epoch of those that were got."""
        async with self._db.transaction(isolation="read_committed"):
            rows = await self._db.fetch(CLAIM, replica_id, endpoint_ids, actor, self._timeline)
            epochs: dict[UUID, int] = {r["endpoint_id"]: r["epoch"] for r in rows}
            await self._db.execute(STAMP, list(epochs), list(epochs.values()))
        return epochs

    async def release(
        self, replica_id: int, endpoint_ids: Sequence[UUID], actor: str, why: str
    ) -> None:
        """Hand endpoints back, after everything in their lanes is written."""
        await self._db.execute(FREE_SOME, replica_id, endpoint_ids, actor, why, self._timeline)
