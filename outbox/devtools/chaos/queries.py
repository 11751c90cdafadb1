"""What a proof asks of the database: its limits, its sessions, and the books of the relay.

The schema belongs to the run.  Of the server's sessions only those are ever
touched that went through the run's own proxies, which know their numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import asyncpg

from outbox.core.model.ids import lane_name
from outbox.core.model.sql_names import quote_ident
from outbox.errors import CannotRun
from outbox.store.replicas import SESSION_NAME

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID

    from asyncpg import Connection

DROP_LOCK_TIMEOUT = "10s"
DROP_ATTEMPTS = 3

FIND_SCHEMA = "SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = $1)"

FIND_RIGHT = "SELECT has_database_privilege(current_database(), 'CREATE')"

# Free for somebody without privileges: the reserved ones are not.
COUNT_FREE = """
SELECT current_setting('max_connections')::integer
       - current_setting('superuser_reserved_connections')::integer
       - (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend')
"""

# Of this role and database, and known by their number or by the port that they
# came from on this machine.
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
SELECT l.endpoint_id, l.generation, l.slot, d.seq, d.to_seq, d.reason
  FROM dead_letter d JOIN lane l ON l.id = d.lane_id
"""

READ_HANDS = """
SELECT endpoint_id, at, kind = 'endpoint_claimed' AS claimed,
       (data ->> 'replica')::bigint AS replica, coalesce(data ->> 'why', '') AS why
  FROM journal WHERE kind IN ('endpoint_claimed', 'endpoint_freed') ORDER BY id
"""

ANALYZE = """
ANALYZE outbox, batch, delivery, attempt, lane, lane_counter, lane_progress, subscription,
        endpoint, dead_letter, replay, replay_job, replay_part, journal, ownership
"""

# Every event has its numbers, no id is looked for any more, and every replay is made.
ALL_SEQUENCED = """
SELECT (SELECT coalesce(max(id), 0) FROM outbox) <= b.high
   AND b.young = '{}' AND NOT EXISTS (SELECT FROM gap)
   AND NOT EXISTS (SELECT FROM replay_part WHERE ended_at IS NULL)
  FROM batch b ORDER BY b.batch DESC LIMIT 1
"""

ALL_OWNED = "SELECT NOT EXISTS (SELECT FROM ownership WHERE replica_id IS NULL)"

READ_VERSION = "SELECT split_part(current_setting('server_version'), ' ', 1)"

READ_CLOCK = "SELECT extract(epoch FROM clock_timestamp())::float8"


@dataclass(frozen=True, slots=True)
class Session:
    """A database session of one of the run's relays."""

    pid: int
    name: str
    client_port: int | None


@dataclass(frozen=True, slots=True)
class LaneCounter:
    """How many numbers were given out in a lane."""

    endpoint_id: UUID
    name: str
    last_seq: int


@dataclass(frozen=True, slots=True)
class DeadNumbers:
    """Numbers of a lane that were given up."""

    lane: str
    seq: int
    to_seq: int
    reason: str


@dataclass(frozen=True, slots=True)
class ChangeOfHands:
    """An endpoint got an owner, or lost it."""

    endpoint_id: UUID
    at: datetime
    replica: int
    claimed: bool
    why: str


async def require_room(connection: Connection[Any], schema: str, connections: int) -> None:
    """Refuse to begin where the schema is there already, or connections are too few.

    Raises:
        CannotRun: with what to do.
    """
    if await connection.fetchval(FIND_SCHEMA, schema):
        raise CannotRun(
            f'the schema "{schema}" is there already, of an earlier run with this seed: '
            f"DROP SCHEMA {quote_ident(schema)} CASCADE, or take another --seed"
        )
    if not await connection.fetchval(FIND_RIGHT):
        raise CannotRun(
            "this role may not create a schema in this database: GRANT CREATE ON DATABASE to it, "
            "or use --embedded"
        )
    free: int = await connection.fetchval(COUNT_FREE)
    if free < connections:
        raise CannotRun(
            f"the server has {free} connections left, and this run may need {connections}: "
            "lower --replicas, or raise max_connections"
        )


async def drop_schema(connection: Connection[Any], schema: str) -> None:
    """Remove what the run made."""
    await connection.execute(f"SET lock_timeout = '{DROP_LOCK_TIMEOUT}'")
    for attempt in range(1, DROP_ATTEMPTS + 1):
        try:
            await connection.execute(f"DROP SCHEMA IF EXISTS {quote_ident(schema)} CASCADE")
        except asyncpg.LockNotAvailableError:
            # A session that was cut off is ended by the server sooner or later.
            if attempt == DROP_ATTEMPTS:
                raise
        else:
            return


async def sessions(
    connection: Connection[Any], pids: Sequence[int], ports: Sequence[int]
) -> list[Session]:
    """The relays' sessions among these backends and client ports."""
    rows = await connection.fetch(READ_SESSIONS, pids, ports)
    return [Session(r["pid"], r["application_name"], r["client_port"]) for r in rows]


async def terminate(
    connection: Connection[Any], session: Session, pids: Sequence[int], ports: Sequence[int]
) -> bool:
    """End a session of a relay; False when it is gone, or its number is another's by now."""
    return bool(await connection.fetchval(TERMINATE, pids, ports, session.pid))


async def lane_counters(connection: Connection[Any]) -> list[LaneCounter]:
    """Every lane there ever was."""
    return [
        LaneCounter(
            r["endpoint_id"],
            lane_name(r["endpoint_id"], r["generation"], r["slot"]),
            r["last_seq"],
        )
        for r in await connection.fetch(READ_LANES)
    ]


async def dead_numbers(connection: Connection[Any]) -> list[DeadNumbers]:
    """Everything that was given up."""
    return [
        DeadNumbers(
            lane_name(r["endpoint_id"], r["generation"], r["slot"]),
            r["seq"],
            r["to_seq"],
            r["reason"],
        )
        for r in await connection.fetch(READ_DEAD)
    ]


async def changes_of_hands(connection: Connection[Any]) -> list[ChangeOfHands]:
    """Who owned what and when, in order."""
    return [
        ChangeOfHands(r["endpoint_id"], r["at"], r["replica"], r["claimed"], r["why"])
        for r in await connection.fetch(READ_HANDS)
    ]


async def analyze(connection: Connection[Any]) -> None:
    """Let the server count, so that what is asked of the whole log is planned well.

    A run is shorter than autovacuum's pauses, and a crash throws away what that knew.
    """
    await connection.execute(ANALYZE)


async def all_sequenced(connection: Connection[Any]) -> bool:
    """Whether nothing waits for a number."""
    return bool(await connection.fetchval(ALL_SEQUENCED))


async def all_owned(connection: Connection[Any]) -> bool:
    """Whether every endpoint has a relay."""
    return bool(await connection.fetchval(ALL_OWNED))


async def server_version(connection: Connection[Any]) -> str:
    """The server's version, such as "18.4"."""
    version: str = await connection.fetchval(READ_VERSION)
    return version


async def clock(connection: Connection[Any]) -> float:
    """The database's time, in epoch seconds."""
    seconds: float = await connection.fetchval(READ_CLOCK)
    return seconds


def listens(session: Session) -> bool:
    """Whether it is the one for LISTEN."""
    return session.name.endswith(":listen")
