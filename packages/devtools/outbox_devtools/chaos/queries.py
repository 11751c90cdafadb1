"""SQL of a chaos run: limits of the server, sessions of the relays, and the tables to check.

The schema belongs to the run.  Only sessions that were opened through the run's own proxies
are terminated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import asyncpg

import outbox
from outbox.core.model.ids import lane_name
from outbox.core.model.sql_names import quote_ident
from outbox.errors import CannotRun
from outbox.store.cluster.sessions import SESSION_NAME
from outbox_devtools.chaos.facts import DeadRange, LaneCount, OwnershipEvent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from uuid import UUID

    from asyncpg import Connection, Record

DROP_LOCK_TIMEOUT = "10s"
DROP_ATTEMPTS = 3

FIND_SCHEMA = "SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = $1)"

FIND_RIGHT = "SELECT has_database_privilege(current_database(), 'CREATE')"

# Connections available to an unprivileged role, without the reserved ones.
COUNT_FREE = """
SELECT current_setting('max_connections')::integer
       - current_setting('superuser_reserved_connections')::integer
       - (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend')
"""

# Relay sessions of this role and database, identified by backend pid or by client port on
# this machine.
_OURS = f"""
  FROM pg_stat_activity
 WHERE datname = current_database() AND usename = session_user
   AND application_name LIKE '{SESSION_NAME.rstrip(":")}%'
   AND (pid = ANY ($1::integer[]) OR (client_port = ANY ($2::integer[])
        AND client_addr IS NOT DISTINCT FROM inet_client_addr()))
"""

READ_SESSIONS = f"SELECT pid, application_name, client_port {_OURS}"

TERMINATE = f"SELECT count(pg_terminate_backend(pid)) {_OURS} AND pid = $3"

READ_LANES = """
SELECT l.endpoint_id, l.generation, l.slot, c.last_seq
  FROM lane l JOIN lane_counter c ON c.lane_id = l.id
"""

READ_DEAD = """
SELECT l.endpoint_id, l.generation, l.slot, d.seq, d.to_seq
  FROM dead_letter d JOIN lane l ON l.id = d.lane_id
"""

READ_OWNERSHIP = """
SELECT endpoint_id, at, kind = 'endpoint_claimed' AS claimed,
       (data ->> 'replica')::bigint AS replica, coalesce(data ->> 'reason', '') AS reason
  FROM journal WHERE kind IN ('endpoint_claimed', 'endpoint_released') ORDER BY id
"""

ANALYZE = """
ANALYZE outbox, batch, delivery, attempt, lane, lane_counter, lane_progress, subscription,
        endpoint, dead_letter, feed, feed_step, replay, replay_job, replay_job_endpoint, journal,
        ownership
"""

# Every event is sequenced, no gap is open, and every replay job and every feed has ended.
ALL_SEQUENCED = """
SELECT (SELECT coalesce(max(id), 0) FROM outbox) <= b.high
   AND b.young = '{}' AND NOT EXISTS (SELECT FROM gap)
   AND NOT EXISTS (SELECT FROM replay_job_endpoint WHERE ended_at IS NULL)
   AND NOT EXISTS (SELECT FROM feed WHERE ended_at IS NULL)
  FROM batch b ORDER BY b.batch DESC LIMIT 1
"""

ALL_OWNED = "SELECT NOT EXISTS (SELECT FROM ownership WHERE replica_id IS NULL)"

READ_SEEN = "SELECT event_id FROM outbox WHERE type = ANY ($1)"

READ_LEADER = "SELECT writer FROM cursor"

READ_VERSION = "SELECT split_part(current_setting('server_version'), ' ', 1)"

READ_CLOCK = "SELECT extract(epoch FROM clock_timestamp())::float8"


@dataclass(frozen=True, slots=True)
class Session:
    """A database session of a relay of the run."""

    pid: int
    name: str
    client_port: int | None


async def require_capacity(connection: Connection[Any], schema: str, connections: int) -> None:
    """Check that the schema does not exist yet and that enough connections are free.

    Raises:
        CannotRun: the message says what to do.
    """
    if await connection.fetchval(FIND_SCHEMA, schema):
        raise CannotRun(
            f'the schema "{schema}" already exists, from an earlier run with this seed: '
            f"DROP SCHEMA {quote_ident(schema)} CASCADE, or use another --seed"
        )
    if not await connection.fetchval(FIND_RIGHT):
        raise CannotRun(
            "this role may not create a schema in this database: GRANT CREATE ON DATABASE to it, "
            "or use --embedded"
        )
    free: int = await connection.fetchval(COUNT_FREE)
    if free < connections:
        raise CannotRun(
            f"the server has {free} free connections, and this run may need {connections}: "
            "lower --replicas, or raise max_connections"
        )


async def drop_schema(connection: Connection[Any], schema: str) -> None:
    """Drop the run's schema."""
    await connection.execute(f"SET lock_timeout = '{DROP_LOCK_TIMEOUT}'")
    for attempt in range(1, DROP_ATTEMPTS + 1):
        try:
            await connection.execute(f"DROP SCHEMA IF EXISTS {quote_ident(schema)} CASCADE")
        except asyncpg.LockNotAvailableError:
            # The server ends a half-open session eventually, which releases its locks.
            if attempt == DROP_ATTEMPTS:
                raise
        else:
            return


async def sessions(
    connection: Connection[Any], pids: Sequence[int], ports: Sequence[int]
) -> list[Session]:
    """Return the relays' sessions among these backend pids and client ports."""
    rows = await connection.fetch(READ_SESSIONS, pids, ports)
    return [Session(r["pid"], r["application_name"], r["client_port"]) for r in rows]


async def terminate(
    connection: Connection[Any], session: Session, pids: Sequence[int], ports: Sequence[int]
) -> bool:
    """Terminate a session of a relay; False if it has ended or its pid was reused."""
    return bool(await connection.fetchval(TERMINATE, pids, ports, session.pid))


async def take_snapshot(
    connection: Connection[Any], schema: str, types: Sequence[str]
) -> tuple[str, frozenset[bytes]]:
    """Take the position of a snapshot; returns the events of some types that it saw, too."""
    async with connection.transaction(isolation="repeatable_read"):
        position = await outbox.snapshot(connection, schema=schema)
        rows = await connection.fetch(READ_SEEN, types)
    return position, frozenset(row["event_id"].bytes for row in rows)


async def lane_counts(connection: Connection[Any], ids: Mapping[UUID, int]) -> list[LaneCount]:
    """Return all lanes, including those of older generations.

    Args:
        ids: number of each endpoint.
    """
    return [
        LaneCount(_lane(r), ids[r["endpoint_id"]], r["last_seq"])
        for r in await connection.fetch(READ_LANES)
    ]


async def dead_ranges(connection: Connection[Any]) -> list[DeadRange]:
    """Return all dead-lettered ranges."""
    return [DeadRange(_lane(r), r["seq"], r["to_seq"]) for r in await connection.fetch(READ_DEAD)]


async def ownership_events(
    connection: Connection[Any], ids: Mapping[UUID, int], clock_offset_s: float
) -> list[OwnershipEvent]:
    """Return the ownership history of all endpoints, in order.

    Args:
        ids: number of each endpoint.
        clock_offset_s: added to a database time to get the run's time.
    """
    return [
        OwnershipEvent(
            ids[r["endpoint_id"]],
            r["at"].timestamp() + clock_offset_s,
            r["replica"],
            r["claimed"],
            r["reason"],
        )
        for r in await connection.fetch(READ_OWNERSHIP)
    ]


async def analyze(connection: Connection[Any]) -> None:
    """Run ANALYZE, so that queries over the whole log get good plans.

    A run is shorter than autovacuum's interval, and a crash discards its statistics.
    """
    await connection.execute(ANALYZE)


async def all_sequenced(connection: Connection[Any]) -> bool:
    """Whether every event is sequenced, and delivered to endpoints that catch up."""
    return bool(await connection.fetchval(ALL_SEQUENCED))


async def all_owned(connection: Connection[Any]) -> bool:
    """Whether every endpoint has an owner."""
    return bool(await connection.fetchval(ALL_OWNED))


async def leader(connection: Connection[Any]) -> int | None:
    """Return the replica that leads; None: there is none."""
    replica: int | None = await connection.fetchval(READ_LEADER)
    return replica


async def server_version(connection: Connection[Any]) -> str:
    """Return the server's version, such as "18.4"."""
    version: str = await connection.fetchval(READ_VERSION)
    return version


async def clock(connection: Connection[Any]) -> float:
    """Return the database's time, in epoch seconds."""
    seconds: float = await connection.fetchval(READ_CLOCK)
    return seconds


def is_listener(session: Session) -> bool:
    """Whether this is the session for LISTEN."""
    return session.name.endswith(":listen")


def _lane(row: Record) -> str:
    return lane_name(row["endpoint_id"], row["generation"], row["slot"])
