"""Replicas, leases and ownership of endpoints.

Every change of ownership is one message, and is journalled in it.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import asyncpg
import structlog

from outbox.core.cluster.lease import Peer
from outbox.core.cluster.observed_time import MARK_EVERY_S
from outbox.store.channels import WAKE_ALL, WAKE_OWNERS
from outbox.store.cluster.sessions import (
    AWAIT_SESSIONS,
    BUSY_SESSION_END_MAX_S,
    COUNT_SESSIONS,
    EXPIRABLE,
    SESSION_END_MAX_S,
    TERMINATE_SESSIONS,
    StuckSession,
    StuckSessions,
    terminate_busy_sessions,
)
from outbox.store.connection.row_security import stop_empty
from outbox.store.refused_rows import is_refused, reason_of
from outbox.store.sql.expressions import SERVER_FENCE, lease_runs
from outbox.store.sql.message import WriteStatement

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from asyncpg import Connection

    from outbox.store.connection.store_connection import StoreConnection

log = structlog.get_logger("outbox.ownership")

# A replica's own row, while its lease runs ($1 is the replica), on the server and in the state in
# which it registered: after a failover behind a proxy, or a restore, its id may belong to another
# replica, and its lanes may have other pending deliveries.
OWN_ROW = f"""id = $1 AND expires_at > clock_timestamp()
       AND ({{0}}::bigint IS NULL OR {SERVER_FENCE} = {{0}})"""


def fence(server_fence: str) -> str:
    """The fence: the first CTE of a replica's write locks its own row.

    MATERIALIZED: the lock is taken once.  FOR KEY SHARE: it conflicts with the deletion of
    the row (expiry), but not with the renewal of the lease.

    Args:
        server_fence: the parameter with `server_fence()` when the replica registered.
    """
    return f"""
WITH fence AS MATERIALIZED (
    SELECT 1 FROM replica WHERE {OWN_ROW.format(server_fence)} FOR KEY SHARE)"""  # noqa: S608


# The ids of a database that was copied without its sequences would be used twice.
ADVANCE_SEQUENCES = WriteStatement("advance_sequences", "SELECT advance_sequences()")

# Registers a replica under the label that its sessions have had from their start.
REGISTER = WriteStatement(
    "register_replica",
    """
INSERT INTO replica (label, name, version, sequencer_pid, lease_s, keys, expires_at)
VALUES ($1, $2, $3, $4, $5, $6, clock_timestamp() + make_interval(secs => $5))
""",
)

READ_REGISTERED = "SELECT id FROM replica WHERE label = $1"

# Which of some labels belong to registered replicas, the newest last.
READ_REGISTERED_LABELS = "SELECT label FROM replica WHERE label = ANY ($1) ORDER BY id"

# The names of the replicas whose lease runs, in the order of their registration.
READ_NAMES = f"""
SELECT name FROM replica WHERE {lease_runs("replica")} ORDER BY id
"""  # noqa: S608 (constants only)

# Renews the lease, not one that has expired: the replica has to register again.  Adds $3 seconds to
# the odometer, if the replica is its adder.
#   meter: the odometer, if this replica is its adder, or becomes it, because it counts nothing yet
#     ($3 is NULL) and the lease of the adder has ended.  SKIP LOCKED: the lease must not wait for a
#     session that holds the row; its time is not counted.
#   last: the last mark.
#   marked: a mark once a minute, and when what follows would be counted from a time that is too
#     early (a new adder) or too late (the clock was set back).
# As many rows as a Renewal has.
RENEW = WriteStatement(
    "renew_lease",
    f"""
WITH renewed AS (
    UPDATE replica
       SET renewals = renewals + 1,
           expires_at = clock_timestamp() + make_interval(secs => lease_s)
     WHERE {OWN_ROW.format("$2")}
    RETURNING id),
meter AS MATERIALIZED (
    SELECT o.one, o.adder IS DISTINCT FROM renewed.id AS is_new
      FROM renewed, odometer o
     WHERE o.adder = renewed.id
        OR $3::float8 IS NULL AND NOT EXISTS (
             SELECT FROM replica r WHERE r.id = o.adder AND r.expires_at > clock_timestamp())
       FOR NO KEY UPDATE OF o SKIP LOCKED),
added AS (
    UPDATE odometer o SET seconds = o.seconds + coalesce($3::float8, 0), adder = renewed.id
      FROM meter, renewed WHERE o.one = meter.one
    RETURNING o.seconds),
last AS (SELECT seconds, at FROM odometer_mark ORDER BY seconds DESC LIMIT 1),
marked AS (
    INSERT INTO odometer_mark AS m (seconds, at)
    SELECT added.seconds, clock_timestamp() FROM added, meter LEFT JOIN last ON true
     WHERE meter.is_new OR last.at IS NULL
        OR last.at + make_interval(secs => added.seconds - last.seconds - 1) > clock_timestamp()
        OR added.seconds >= last.seconds + {MARK_EVERY_S}
        ON CONFLICT (seconds) DO UPDATE SET at = excluded.at)
SELECT FROM renewed UNION ALL SELECT FROM added
""",  # noqa: S608 (constants only)
)

# The database's time, the odometer's reading, and its marks from the reading $1 on.
READ_CLOCK = """
SELECT extract(epoch FROM clock_timestamp())::float8 AS now,
       coalesce((SELECT seconds FROM odometer), 0) AS observed_s, m.readings, m.times
  FROM (SELECT array_agg(seconds ORDER BY seconds) AS readings,
               array_agg(extract(epoch FROM at)::float8 ORDER BY seconds) AS times
          FROM odometer_mark WHERE seconds >= $1) m
"""

# Locks the row of a replica that is to be expired.  FOR UPDATE waits for acknowledgements that are
# being written, and fences off all later writes.
LOCK_REPLICA = WriteStatement(
    "lock_replica",
    f"SELECT FROM replica WHERE {EXPIRABLE} FOR UPDATE",
    repeatable=True,
)

# Releases all endpoints of a replica.
#   owned: its ownership rows, locked in endpoint order, as in every statement that locks
#     several (a change of several endpoints does, too), to avoid deadlocks.
#   leaving: the replica, whose row the same message has locked.
#   released: clears the owner and increments the epoch.
RELEASE_ALL = WriteStatement(
    "release_all_endpoints",
    f"""
WITH leaving AS MATERIALIZED (SELECT id, name FROM replica WHERE {EXPIRABLE}),
owned AS MATERIALIZED (
    SELECT endpoint_id FROM leaving JOIN ownership ON replica_id = leaving.id
     ORDER BY endpoint_id FOR NO KEY UPDATE OF ownership),
released AS (
    UPDATE ownership o SET replica_id = NULL, epoch = epoch + 1
      FROM owned WHERE o.endpoint_id = owned.endpoint_id
    RETURNING o.endpoint_id, epoch)
INSERT INTO journal (kind, actor, endpoint_id, data)
SELECT 'endpoint_released', coalesce($4, 'replica ' || leaving.id), endpoint_id,
       jsonb_build_object('epoch', epoch, 'replica', leaving.id, 'reason', $5::text,
                          'relay', leaving.name)
  FROM released, leaving
""",  # noqa: S608 (constants only)
    repeatable=True,
)

# Deletes the row, which fences the replica off.
REMOVE_REPLICA = WriteStatement(
    "remove_replica",
    f"DELETE FROM replica WHERE {EXPIRABLE}",  # noqa: S608 (constants only)
    repeatable=True,
)

# Releases some endpoints, while the lease runs; CTEs as in RELEASE_ALL.
RELEASE_ENDPOINTS = WriteStatement(
    "release_endpoints",
    f"""{fence("$5")},
owned AS MATERIALIZED (
    SELECT endpoint_id FROM ownership WHERE replica_id = $1 AND endpoint_id = ANY ($2)
     ORDER BY endpoint_id FOR NO KEY UPDATE),
released AS (
    UPDATE ownership o SET replica_id = NULL, epoch = epoch + 1
      FROM fence, owned WHERE o.endpoint_id = owned.endpoint_id
    RETURNING o.endpoint_id, epoch)
INSERT INTO journal (kind, actor, endpoint_id, data)
SELECT 'endpoint_released', $3, endpoint_id,
       jsonb_build_object('epoch', epoch, 'replica', $1::bigint, 'reason', $4::text,
                          'relay', (SELECT name FROM replica WHERE id = $1))
  FROM released
""",  # noqa: S608 (constants only)
    repeatable=True,
)

# The endpoints that an owner is needed for.
OWNABLE = """ownership o JOIN endpoint e ON e.id = o.endpoint_id
                    AND e.state NOT IN ('removed', 'disabled')"""

# Reads the cluster's state in one statement: all replicas, whether an endpoint is unowned, and
# the routing version.  The cost of polling must not grow with the number of endpoints.
READ_CLUSTER = f"""
SELECT c.version, c.erasures, r.ids, r.renewals, r.leases_s, r.sequencer_pids,
       EXISTS (SELECT FROM {OWNABLE} WHERE o.replica_id IS NULL) AS unowned
  FROM cursor c,
       (SELECT array_agg(id) AS ids, array_agg(renewals) AS renewals,
               array_agg(lease_s) AS leases_s, array_agg(sequencer_pid) AS sequencer_pids
          FROM replica) r
"""  # noqa: S608 (constants only)

# Reads how many endpoints each replica owns, and the ids of those without an owner and of those
# of the replica $1.
READ_OWNERSHIP = f"""
SELECT o.replica_id, count(*) AS endpoints,
       array_agg(o.endpoint_id) FILTER (WHERE o.replica_id IS NULL OR o.replica_id = $1) AS ids
  FROM {OWNABLE}
 GROUP BY o.replica_id
"""  # noqa: S608 (constants only)

# Claims unowned endpoints and increments their epoch.
#   unowned, lanes, health: the rows that an owner writes, locked in one order in every statement,
#     to avoid deadlocks.  SKIP LOCKED: one row that a hanging session holds must not keep this
#     replica from claiming the other endpoints.
#   claimable: the endpoints of which all rows were locked.  The next attempt finds the others.
#   claimed, and the final INSERT: the new owner, and the journal entries.
CLAIM_ENDPOINTS = WriteStatement(
    "claim_endpoints",
    f"""{fence("$4")},
unowned AS MATERIALIZED (
    SELECT endpoint_id FROM ownership WHERE replica_id IS NULL AND endpoint_id = ANY ($2)
     ORDER BY endpoint_id FOR NO KEY UPDATE SKIP LOCKED),
lanes AS MATERIALIZED (
    SELECT lane_id, endpoint_id FROM lane_progress
     WHERE endpoint_id IN (SELECT endpoint_id FROM unowned)
     ORDER BY lane_id FOR NO KEY UPDATE SKIP LOCKED),
health AS MATERIALIZED (
    SELECT endpoint_id FROM endpoint_health
     WHERE endpoint_id IN (SELECT endpoint_id FROM unowned)
     ORDER BY endpoint_id FOR NO KEY UPDATE SKIP LOCKED),
claimable AS MATERIALIZED (
    SELECT endpoint_id FROM unowned JOIN health USING (endpoint_id)
     WHERE (SELECT count(*) FROM lanes l WHERE l.endpoint_id = unowned.endpoint_id)
         = (SELECT count(*) FROM lane_progress p WHERE p.endpoint_id = unowned.endpoint_id)),
claimed AS (
    UPDATE ownership o SET replica_id = $1, epoch = epoch + 1
      FROM fence, claimable c WHERE o.endpoint_id = c.endpoint_id AND o.replica_id IS NULL
    RETURNING o.endpoint_id, epoch)
INSERT INTO journal (kind, actor, endpoint_id, data)
SELECT 'endpoint_claimed', $3, endpoint_id,
       jsonb_build_object('epoch', epoch, 'replica', $1::bigint,
                          'relay', (SELECT name FROM replica WHERE id = $1))
  FROM claimed
""",  # noqa: S608 (constants only)
    repeatable=True,
)

# Writes the epoch of claimed endpoints to every row that an owner writes, before anything is
# read, so that a checkpoint of the previous owner that is still in transit is rejected.  It fails
# if a trigger suppresses one of them: the owner's own writes would be rejected.  A
# separate statement of the same message: a change of lanes may have been committed just before
# the claim got its locks, and only a later snapshot contains the new ones.
WRITE_EPOCHS = WriteStatement(
    "write_epochs",
    f"""{fence("$3")},
claimed AS MATERIALIZED (
    SELECT endpoint_id, epoch FROM fence, ownership
     WHERE replica_id = $1 AND endpoint_id = ANY ($2)),
health AS (
    UPDATE endpoint_health h SET epoch = c.epoch
      FROM claimed c WHERE h.endpoint_id = c.endpoint_id
    RETURNING 1),
progress AS (
    UPDATE lane_progress p SET epoch = c.epoch
      FROM claimed c WHERE p.endpoint_id = c.endpoint_id
    RETURNING 1)
SELECT require_stored((SELECT count(*) FROM health)
                      = (SELECT count(*) FROM claimed JOIN endpoint_health USING (endpoint_id)),
                      'endpoint_health'),
       require_stored((SELECT count(*) FROM progress)
                      = (SELECT count(*) FROM claimed JOIN lane_progress USING (endpoint_id)),
                      'lane_progress')
  FROM claimed
""",  # noqa: S608 (constants only)
    repeatable=True,
)

READ_EPOCHS = """
SELECT endpoint_id, epoch FROM ownership WHERE replica_id = $1 AND endpoint_id = ANY ($2)
"""

CLAIM_LOCK_TIMEOUT_S = 1.0
"""Limit for the locks of a claim that are not skipped; the next poll claims again."""


class Renewal(IntEnum):
    """The result of the renewal of a lease."""

    FENCED = 0
    """The lease has expired."""
    RENEWED = 1
    ADDER = 2
    """It was renewed, and the replica is the odometer's adder."""


@dataclass(frozen=True, slots=True)
class ClockReading:
    """The database's time, and observed time."""

    now: float
    """Epoch seconds."""
    observed_s: float
    """The odometer's reading."""
    marks: list[tuple[float, float]]
    """Marks of the odometer: reading and epoch seconds."""


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """The state of the cluster at one moment."""

    version: int
    """Routing version; it increases with every routing change."""
    erasures: int
    """A number that increases when payloads are erased."""
    peers: list[Peer]
    """Every registered replica, including this one."""
    unowned: bool
    """Whether an endpoint has no owner."""
    sequencer_pids: set[int | None]
    """The backends of the replicas' sequencers; None: behind a proxy."""


@dataclass(frozen=True, slots=True)
class OwnershipSnapshot:
    """Who owns the endpoints at one moment; disabled and removed ones need no owner."""

    owned: dict[int, int]
    """How many endpoints a replica owns."""
    mine: set[UUID]
    """Endpoints of the replica that reads."""
    unowned: list[UUID]
    """Endpoints without an owner."""


async def read_names(connection: Connection[Any]) -> list[str]:
    """The names of the running replicas, the oldest first."""
    return [row["name"] for row in await connection.fetch(READ_NAMES)]


class ReplicaStore:
    """Leases and ownership, on one connection.

    Not safe for concurrent use; asyncpg's errors propagate.

    Args:
        server_fence: `server_fence()` when the replica registered; None: not known.
    """

    def __init__(self, connection: StoreConnection, server_fence: int | None = None) -> None:
        self._db = connection
        self._fence = server_fence
        self._stuck_sessions = StuckSessions(connection)

    async def register(
        self,
        label: str,
        name: str,
        version: str,
        lease_s: float,
        sequencer_pid: int | None = None,
        keys: Sequence[str] = (),
    ) -> int:
        """Register a replica; its lease begins now.

        Args:
            label: the application_name of its sessions (`session_label`).
            sequencer_pid: the backend that writes its batches; None behind a proxy.
            keys: ids of its decryption keys.

        Returns:
            The replica's id.
        """
        await self._db.write(ADVANCE_SEQUENCES)
        await self._db.write(REGISTER, label, name, version, sequencer_pid, lease_s, keys)
        replica_id: int = await self._db.fetchval(READ_REGISTERED, label)
        return replica_id

    async def renew(
        self, replica_id: int, observed_s: float | None = None, *, durable: bool = True
    ) -> Renewal:
        """Renew the lease, unless it has expired.

        Args:
            observed_s: what the replica adds to the odometer if it is the adder; None: it counts
                nothing yet, and may become the adder.
            durable: whether the commit waits for the disk.  A crash of the server that loses a
                renewal ends the replica's session as well, so the lease need not wait for it.
        """
        return Renewal(
            await self._db.write(RENEW, replica_id, self._fence, observed_s, durable=durable)
        )

    async def read_clock(self, marked_s: float = 0.0) -> ClockReading:
        """Read the database's time and the odometer.

        Args:
            marked_s: the reading from which on marks are read.
        """
        row = await self._db.fetchrow(READ_CLOCK, marked_s)
        marks = zip(row["readings"] or (), row["times"] or (), strict=True)
        return ClockReading(row["now"], row["observed_s"], list(marks))

    async def read_cluster(self) -> ClusterSnapshot:
        """Read the cluster's state."""
        row = await self._db.fetchrow(READ_CLUSTER)
        if row is None:
            await stop_empty(self._db, "cursor")
        columns = (row["ids"] or (), row["renewals"] or (), row["leases_s"] or ())
        peers = [Peer(*each) for each in zip(*columns, strict=True)]
        return ClusterSnapshot(
            row["version"],
            row["erasures"],
            peers,
            row["unowned"],
            set(row["sequencer_pids"] or ()),
        )

    async def read_ownership(self, replica_id: int) -> OwnershipSnapshot:
        """Read who owns how many endpoints, and which a replica owns; more than `read_cluster`."""
        rows = await self._db.fetch(READ_OWNERSHIP, replica_id)
        ids = {row["replica_id"]: row["ids"] for row in rows}
        owned = {row["replica_id"]: row["endpoints"] for row in rows if row["replica_id"]}
        return OwnershipSnapshot(owned, set(ids.get(replica_id) or ()), ids.get(None) or [])

    async def expire_replica(
        self,
        replica_id: int,
        actor: str,
        lock_timeout_s: float,
        renewals: int | None = None,
    ) -> bool:
        """Expire a replica: release everything that it owns, and fence it off.

        Args:
            renewals: the renewal counter by which it was considered dead; None: it is known
                to have ended.

        Returns:
            False when it is already gone, when it has renewed its lease, when one of its
            sessions has not ended, or when a lock was not granted in time: poll again.
        """
        return await self._expire((replica_id, renewals, None), actor, lock_timeout_s)

    async def expire_former(self, label: str, lock_timeout_s: float) -> bool:
        """Expire a former replica of this process, whose sessions were closed; see above."""
        return await self._expire((None, None, label), None, lock_timeout_s)

    async def _expire(
        self,
        expirable: tuple[int | None, int | None, str | None],
        actor: str | None,
        lock_timeout_s: float,
    ) -> bool:
        # A replica that hangs may hold any lock.  It is dead already, so nothing is lost if it
        # renews its lease now.
        if not await self._terminate_sessions(expirable):
            return False
        try:
            return await self._remove(expirable, actor, "lease expired", lock_timeout_s)
        except asyncpg.LockNotAvailableError:
            return False

    async def _terminate_sessions(
        self, expirable: tuple[int | None, int | None, str | None]
    ) -> bool:
        """Terminate the replica's sessions; returns False if one of them has not ended.

        The row is kept then, because by its label the session is found again.
        """
        with suppress(asyncpg.InsufficientPrivilegeError):
            if await self._db.fetchval(TERMINATE_SESSIONS, *expirable):
                await self._db.execute(AWAIT_SESSIONS, *expirable, int(SESSION_END_MAX_S * 1000))
                return not await self._db.fetchval(COUNT_SESSIONS, *expirable)
        return True

    async def terminate_stuck_sessions(self, lease_s: float) -> list[StuckSession]:
        """Terminate sessions of relays whose clients are silent while they hold something.

        A session is terminated if it was found twice; returns those.

        Args:
            lease_s: how long a client may be silent, unless its replica has a longer lease.
        """
        with suppress(asyncpg.InsufficientPrivilegeError):
            return await self._stuck_sessions.terminate(lease_s)
        return []

    async def release_all(self, replica_id: int, actor: str) -> None:
        """Release everything on a clean stop."""
        await self._remove((replica_id, None, None), actor, "clean stop", None)

    async def wake_all(self) -> None:
        """Notify every replica of a routing change."""
        await self._db.execute(WAKE_ALL)

    async def wake_owners(self, payload: str) -> None:
        """Notify the owners of endpoints of new batches."""
        await self._db.execute(WAKE_OWNERS, payload)

    async def _remove(
        self,
        expirable: tuple[int | None, int | None, str | None],
        actor: str | None,
        reason: str,
        lock_timeout_s: float | None,
    ) -> bool:
        removed = await self._db.write_together(
            (LOCK_REPLICA, *expirable),
            (RELEASE_ALL, *expirable, actor, reason),
            (REMOVE_REPLICA, *expirable),
            lock_timeout_s=lock_timeout_s,
        )
        return bool(removed)

    async def terminate_busy_sessions(self, label: str) -> None:
        """After a clean stop, terminate sessions that may still hold a lock."""
        await terminate_busy_sessions(self._db, [label], wait_s=0)

    async def terminate_former_sessions(self, labels: Sequence[str]) -> list[str]:
        """Terminate the busy sessions of this process's former replicas.

        A backend that waits for a lock, or for a synchronous standby, does not notice that its
        client has closed the connection; without this, each attempt to register would leave one.

        Returns:
            The labels of those that are registered, the newest last.
        """
        await terminate_busy_sessions(self._db, labels, wait_s=BUSY_SESSION_END_MAX_S)
        rows = await self._db.fetch(READ_REGISTERED_LABELS, labels)
        return [row["label"] for row in rows]

    async def claim(
        self, replica_id: int, endpoint_ids: Sequence[UUID], actor: str
    ) -> dict[UUID, int]:
        """Claim unowned endpoints, except those of which the database refuses a row.

        Returns:
            The epochs of those that were claimed.
        """
        try:
            written = await self._db.write_together(
                (CLAIM_ENDPOINTS, replica_id, endpoint_ids, actor, self._fence),
                (WRITE_EPOCHS, replica_id, endpoint_ids, self._fence),
                lock_timeout_s=CLAIM_LOCK_TIMEOUT_S,
            )
        except asyncpg.LockNotAvailableError:
            return {}
        except asyncpg.PostgresError as error:
            if not is_refused(error):
                raise
            if len(endpoint_ids) == 1:
                log.error(
                    "the database refuses that an endpoint is claimed, so nothing is sent to it",
                    endpoint_id=str(endpoint_ids[0]),
                    reason=reason_of(error),
                )
                return {}
            middle = len(endpoint_ids) // 2
            return {
                **await self.claim(replica_id, endpoint_ids[:middle], actor),
                **await self.claim(replica_id, endpoint_ids[middle:], actor),
            }
        if not written:
            return {}
        rows = await self._db.fetch(READ_EPOCHS, replica_id, endpoint_ids)
        return {r["endpoint_id"]: r["epoch"] for r in rows}

    async def release(
        self, replica_id: int, endpoint_ids: Sequence[UUID], actor: str, reason: str
    ) -> None:
        """Release endpoints, after everything in their lanes is written."""
        await self._db.write(
            RELEASE_ENDPOINTS, replica_id, endpoint_ids, actor, reason, self._fence
        )
