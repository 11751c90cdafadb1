"""Replicas, leases and ownership of endpoints.

Every change of ownership is one transaction, and is journalled in it.
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

# A replica's own row, while its lease runs ($1 is the replica), on the server at which it
# registered: after a failover behind a proxy, its id may belong to another replica, and its
# lanes may have other pending deliveries.
OWN_ROW = """id = $1 AND expires_at > clock_timestamp()
       AND ({0}::bigint IS NULL OR server_timeline() = {0})"""


WORKERS = 8
"""Worker connections of a relay, each for one purpose."""
CONNECTIONS_MAX = WORKERS + 2
"""Plus one to LISTEN, and now and then one to check that the server processes the others'
statements."""


def fence(timeline: str) -> str:
    """The fence: the first CTE of every write of a replica locks its own row.

    MATERIALIZED: the lock is taken once.  FOR KEY SHARE: it conflicts with the deletion of
    the row (expiry), but not with the renewal of the lease.

    Args:
        timeline: the parameter with the server's timeline when the replica registered.
    """
    return f"""
WITH fence AS MATERIALIZED (
    SELECT 1 FROM replica WHERE {OWN_ROW.format(timeline)} FOR KEY SHARE)"""  # noqa: S608


# Reserves a replica id before registration, because sessions are named after it.
RESERVE_REPLICA_ID = "SELECT nextval(pg_get_serial_sequence('replica', 'id'))"

# Sets application_name of the current session.
NAME_SESSION = "SELECT set_config('application_name', $1, false)"

# Registers a replica; returns the database's time.  `pids`: the backends to terminate when it
# is expired, the sequencer's first.
REGISTER = """
INSERT INTO replica (id, name, version, pids, lease_s, keys, expires_at) OVERRIDING SYSTEM VALUE
VALUES ($1, $2, $3, $4, $5, $6, clock_timestamp() + make_interval(secs => $5))
RETURNING extract(epoch FROM clock_timestamp())::float8 AS now
"""

# Renews the lease; not one that has expired: the replica has to register again.
RENEW = f"""
UPDATE replica
   SET renewals = renewals + 1,
       expires_at = clock_timestamp() + make_interval(secs => lease_s)
 WHERE {OWN_ROW.format("$2")}
RETURNING extract(epoch FROM clock_timestamp())::float8
"""  # noqa: S608 (constants only)

# Locks the row of a replica that is to be expired.  FOR UPDATE waits for acknowledgements that
# are being written, and fences off all later writes.  $2 is the renewal counter by which the
# replica was considered dead: if it has advanced, the replica is alive.
LOCK_REPLICA = """
SELECT name FROM replica
 WHERE id = $1 AND renewals = coalesce($2, renewals) AND name = coalesce($3, name) FOR UPDATE
"""

# Terminates the backends of a replica that is being expired, by pid and session name, because
# a pid may have been reused.
TERMINATE_BACKENDS = """
SELECT count(pg_terminate_backend(a.pid))
  FROM replica r JOIN pg_stat_activity a ON a.pid = ANY (r.pids)
 WHERE r.id = $1 AND a.application_name = $2 AND r.renewals = coalesce($3, r.renewals)
"""

# Terminates sessions of a replica after its clean stop, when its row is already gone.  A
# session that is not idle, or holds a lock, belongs to a connection that hangs.
TERMINATE_BUSY_SESSIONS = """
SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity a
 WHERE pid = ANY ($1) AND application_name = $2 AND pid <> pg_backend_pid()
   AND (state <> 'idle' OR EXISTS (SELECT FROM pg_locks l WHERE l.pid = a.pid))
"""

# Releases all endpoints of a replica.
#   owned: its ownership rows, locked in endpoint order, as in every statement that locks
#     several (a change of several endpoints does, too), to avoid deadlocks.
#   released: clears the owner and increments the epoch.
RELEASE_ALL = """
WITH owned AS MATERIALIZED (
    SELECT endpoint_id FROM ownership WHERE replica_id = $1
     ORDER BY endpoint_id FOR NO KEY UPDATE),
released AS (
    UPDATE ownership o SET replica_id = NULL, epoch = epoch + 1
      FROM owned WHERE o.endpoint_id = owned.endpoint_id
    RETURNING o.endpoint_id, epoch)
INSERT INTO journal (kind, actor, endpoint_id, data)
SELECT 'endpoint_released', $2, endpoint_id,
       jsonb_build_object('epoch', epoch, 'replica', $1::bigint, 'why', $3::text,
                          'relay', (SELECT name FROM replica WHERE id = $1))
  FROM released
"""

# Deletes the row, which fences the replica off.
REMOVE_REPLICA = "DELETE FROM replica WHERE id = $1"

# Releases some endpoints, while the lease runs; CTEs as in RELEASE_ALL.
RELEASE_ENDPOINTS = f"""{fence("$5")},
owned AS MATERIALIZED (
    SELECT endpoint_id FROM ownership WHERE replica_id = $1 AND endpoint_id = ANY ($2)
     ORDER BY endpoint_id FOR NO KEY UPDATE),
released AS (
    UPDATE ownership o SET replica_id = NULL, epoch = epoch + 1
      FROM fence, owned WHERE o.endpoint_id = owned.endpoint_id
    RETURNING o.endpoint_id, epoch)
INSERT INTO journal (kind, actor, endpoint_id, data)
SELECT 'endpoint_released', $3, endpoint_id,
       jsonb_build_object('epoch', epoch, 'replica', $1::bigint, 'why', $4::text,
                          'relay', (SELECT name FROM replica WHERE id = $1))
  FROM released
"""  # noqa: S608 (constants only)

# Reads the cluster's state in one statement: all replicas, the unowned endpoints, and the
# routing version.  Only unowned endpoints: the cost of polling must not grow with the number
# of endpoints.
READ_CLUSTER = """
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

# Claims unowned endpoints and increments their epoch.
#   unowned: their ownership rows, locked in endpoint order to avoid deadlocks.
#   claimed, journalled: the new owner, and the journal entries.
CLAIM_ENDPOINTS = f"""{fence("$4")},
unowned AS MATERIALIZED (
    SELECT endpoint_id FROM ownership WHERE replica_id IS NULL AND endpoint_id = ANY ($2)
     ORDER BY endpoint_id FOR NO KEY UPDATE),
claimed AS (
    UPDATE ownership o SET replica_id = $1, epoch = epoch + 1
      FROM fence, unowned u WHERE o.endpoint_id = u.endpoint_id AND o.replica_id IS NULL
    RETURNING o.endpoint_id, epoch),
journalled AS (
    INSERT INTO journal (kind, actor, endpoint_id, data)
    SELECT 'endpoint_claimed', $3, endpoint_id,
           jsonb_build_object('epoch', epoch, 'replica', $1::bigint,
                              'relay', (SELECT name FROM replica WHERE id = $1))
      FROM claimed)
SELECT endpoint_id, epoch FROM claimed
"""  # noqa: S608 (constants only)

# Writes the epoch of claimed endpoints to every row that an owner writes, before anything is
# read, so that a checkpoint of the previous owner that is still in transit is rejected.  A
# separate statement: the claim may have waited for a change of lanes, and only a later
# snapshot contains the new ones.
WRITE_EPOCHS = """
WITH claimed AS (SELECT * FROM unnest($1::uuid[], $2::bigint[]) AS c(endpoint_id, epoch)),
health AS (
    UPDATE endpoint_health h SET epoch = c.epoch
      FROM claimed c WHERE h.endpoint_id = c.endpoint_id)
UPDATE lane_progress p SET epoch = c.epoch
  FROM claimed c WHERE p.endpoint_id = c.endpoint_id
"""


SESSION_NAME = "outbox-relay:"
LISTENER_SUFFIX = ":listen"


def application_name(replica_id: int) -> str:
    """application_name of a replica's database sessions."""
    return f"{SESSION_NAME}{replica_id}"


def listener_name(replica_id: int) -> str:
    """application_name of its LISTEN connection, so that a dead one can be detected."""
    return application_name(replica_id) + LISTENER_SUFFIX


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """The state of the cluster at one moment."""

    version: int
    """Routing version; it increases with every routing change."""
    erasures: int
    """Increases when payloads are erased."""
    peers: list[Peer]
    """Every registered replica, including this one."""
    free: list[UUID]
    """Unowned endpoints."""
    cursor_pids: set[int | None]
    """The backends of the replicas' sequencers."""


class ReplicaStore:
    """Leases and ownership, on one connection.

    Not safe for concurrent use; asyncpg's errors propagate.

    Args:
        timeline: the server's timeline when the replica registered; None: not known.
    """

    def __init__(self, connection: Connection[Any], timeline: int | None = None) -> None:
        self._db = connection
        self._timeline = timeline

    async def reserve_id(self) -> int:
        """Reserve an id for a replica that is not registered yet."""
        replica_id: int = await self._db.fetchval(RESERVE_REPLICA_ID)
        return replica_id

    async def name_session(self, replica_id: int) -> None:
        """Name this session after the replica: only sessions of that name are terminated."""
        await self._db.execute(NAME_SESSION, application_name(replica_id))

    async def register(
        self,
        replica_id: int,
        name: str,
        version: str,
        lease_s: float,
        pids: Sequence[int] = (),
        keys: Sequence[str] = (),
    ) -> float:
        """Register a replica under a reserved id; its lease begins now.

        Args:
            pids: its backends that write.
            keys: ids of its decryption keys.

        Returns:
            The database's time in epoch seconds.
        """
        row = (replica_id, name, version, pids, lease_s, keys)
        now: float = await self._db.fetchval(REGISTER, *row)
        return now

    async def renew(self, replica_id: int) -> float | None:
        """Renew the lease, unless it has expired.

        Returns:
            The database's time in epoch seconds; None: the lease had expired.
        """
        now: float | None = await self._db.fetchval(RENEW, replica_id, self._timeline)
        return now

    async def read_cluster(self) -> ClusterSnapshot:
        """Read the cluster's state."""
        row = await self._db.fetchrow(READ_CLUSTER)
        columns = (row["ids"] or (), row["renewals"] or (), row["leases_s"] or ())
        peers = [Peer(*each) for each in zip(*columns, strict=True)]
        return ClusterSnapshot(
            row["version"],
            row["erasures"],
            peers,
            row["free"],
            set(row["cursor_pids"] or ()),
        )

    async def expire_replica(
        self,
        replica_id: int,
        actor: str,
        lock_timeout_s: float,
        renewals: int | None = None,
        *,
        name: str | None = None,
    ) -> bool:
        """Expire a replica: release everything that it owns, and fence it off.

        Args:
            renewals: the renewal counter by which it was considered dead; None: it is known
                to have ended.
            name: expire it only if this is its name; after a failover its id may have been
                assigned to another replica.

        Returns:
            False when it is already gone, when it has renewed its lease, or when one of its
            sessions held a lock and was terminated: poll again.
        """
        session_name = application_name(replica_id)
        try:
            async with self._db.transaction():
                await self._db.execute(f"SET LOCAL lock_timeout = {int(lock_timeout_s * 1000)}")
                locked = await self._db.fetchval(LOCK_REPLICA, replica_id, renewals, name)
                if locked is None:
                    return False
                # A frozen replica may also block elsewhere, where this lock does not show it:
                # while sending a result that is not read, it may hold the cursor row.
                with suppress(asyncpg.InsufficientPrivilegeError):
                    async with self._db.transaction():
                        await self._db.execute(
                            TERMINATE_BACKENDS, replica_id, session_name, renewals
                        )
                await self._db.execute(RELEASE_ALL, replica_id, actor, "lease expired")
                await self._db.execute(REMOVE_REPLICA, replica_id)
        except asyncpg.LockNotAvailableError:
            await self._db.execute(TERMINATE_BACKENDS, replica_id, session_name, renewals)
            return False
        return True

    async def release_all(self, replica_id: int, actor: str) -> None:
        """Release everything on a clean stop."""
        async with self._db.transaction():
            await self._db.execute(LOCK_REPLICA, replica_id, None, None)
            await self._db.execute(RELEASE_ALL, replica_id, actor, "clean stop")
            await self._db.execute(REMOVE_REPLICA, replica_id)

    async def terminate_busy_sessions(self, replica_id: int, pids: Sequence[int]) -> None:
        """After a clean stop, terminate backends that may still hold a lock."""
        if pids:
            with suppress(asyncpg.InsufficientPrivilegeError):
                await self._db.execute(TERMINATE_BUSY_SESSIONS, pids, application_name(replica_id))

    async def claim(
        self, replica_id: int, endpoint_ids: Sequence[UUID], actor: str
    ) -> dict[UUID, int]:
        """Claim unowned endpoints; returns the epochs of those that were claimed."""
        async with self._db.transaction(isolation="read_committed"):
            rows = await self._db.fetch(
                CLAIM_ENDPOINTS, replica_id, endpoint_ids, actor, self._timeline
            )
            epochs: dict[UUID, int] = {r["endpoint_id"]: r["epoch"] for r in rows}
            await self._db.execute(WRITE_EPOCHS, list(epochs), list(epochs.values()))
        return epochs

    async def release(
        self, replica_id: int, endpoint_ids: Sequence[UUID], actor: str, why: str
    ) -> None:
        """Release endpoints, after everything in their lanes is written."""
        await self._db.execute(
            RELEASE_ENDPOINTS, replica_id, endpoint_ids, actor, why, self._timeline
        )
