"""One look at everything: who sequences, what is owed, what is failing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from outbox.core.identity import lane_name
from outbox.store.connect import map_errors
from outbox.store.endpoints import LANE_STATE

if TYPE_CHECKING:
    from datetime import datetime

    from asyncpg import Connection

# The newest batch, and the first event it has not seen.  The sequence tells how
# many ids were given out; some of those above `high` may be rolled back.
CURSOR = """
SELECT b.batch, b.high, b.at,
       coalesce(pg_sequence_last_value(pg_get_serial_sequence('outbox', 'id')::regclass), 0)
           AS last_id,
       (SELECT extract(epoch FROM clock_timestamp() - o.created_at)::float8
          FROM outbox o WHERE o.id > b.high ORDER BY o.id LIMIT 1) AS waiting_s
  FROM batch b ORDER BY b.batch DESC LIMIT 1
"""

# Open gaps: ids that were given out and may still appear.
GAPS = """
SELECT count(*) AS gaps, coalesce(sum(hi - lo + 1), 0)::bigint AS ids FROM (
    SELECT lower(r) AS lo, upper(r) - 1 AS hi
      FROM (SELECT young FROM batch ORDER BY batch DESC LIMIT 1) b, unnest(b.young) AS r
    UNION ALL
    SELECT lo, hi FROM gap) g
"""

REPLICAS = """
SELECT r.id, r.name, r.version, r.started_at, r.expires_at > clock_timestamp() AS alive,
       (SELECT count(*) FROM ownership o WHERE o.replica_id = r.id) AS endpoints
  FROM replica r ORDER BY r.id
"""

# Every endpoint, the ones that owe most first.  The lane that waits longest
# speaks for its endpoint, by its retry state and the age of what it owes.
ENDPOINTS = f"""
WITH lanes AS MATERIALIZED (SELECT s.* FROM ({LANE_STATE}) s
                              JOIN endpoint e ON e.id = s.endpoint_id
                             WHERE e.state <> 'removed'),
totals AS (
    SELECT endpoint_id, sum(last_seq - acked_seq)::bigint AS owed,
           count(*) FILTER (WHERE attempts > 0 AND head_seq = acked_seq + 1) AS failing_lanes
      FROM lanes GROUP BY endpoint_id)
SELECT e.id, e.name, e.url, e.state, e.lanes, t.owed, t.failing_lanes, r.name AS replica,
       (SELECT count(*) FROM dead_letter d WHERE d.endpoint_id = e.id AND d.state = 'dead')
           AS dead_letters,
       f.generation, f.slot, f.head_seq, f.attempts, f.next_attempt_at,
       f.last_answer::text AS last_answer,
       CASE WHEN t.owed > 0 THEN (
           SELECT extract(epoch FROM clock_timestamp() - min(oldest.created_at))::float8
             FROM lanes l CROSS JOIN LATERAL (
                  SELECT o.created_at FROM delivery d JOIN outbox o ON o.id = d.outbox_id
                   WHERE d.lane_id = l.lane_id AND d.batch >= l.floor_batch
                     AND d.seq > l.acked_seq
                   ORDER BY d.batch, d.seq LIMIT 1) oldest
            WHERE l.endpoint_id = e.id AND l.last_seq > l.acked_seq) END AS oldest_s
  FROM endpoint e
  JOIN totals t ON t.endpoint_id = e.id
  LEFT JOIN ownership w ON w.endpoint_id = e.id
  LEFT JOIN replica r ON r.id = w.replica_id
  LEFT JOIN LATERAL (
       SELECT * FROM lanes l
        WHERE l.endpoint_id = e.id AND l.attempts > 0 AND l.head_seq = l.acked_seq + 1
        ORDER BY l.attempts DESC, l.lane_id LIMIT 1) f ON true
 ORDER BY t.owed DESC, e.name COLLATE "C" LIMIT $1
"""  # noqa: S608 (constants only)

COUNT_ENDPOINTS = "SELECT count(*) FROM endpoint WHERE state <> 'removed'"

DEAD_LETTERS = "SELECT state, count(*) AS letters FROM dead_letter GROUP BY state"


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where sequencing is."""

    batch: int
    high: int
    last_id: int
    at: datetime
    waiting_s: float | None
    """Age of the oldest event that is not sequenced yet."""

    @property
    def lag(self) -> int:
        """Ids given out above the highest one sequenced."""
        return max(self.last_id - self.high, 0)


@dataclass(frozen=True, slots=True)
class Replica:
    """A registered relay."""

    id: int
    name: str
    version: str
    alive: bool
    """Its lease runs, by the database's clock."""
    endpoints: int
    started_at: datetime


@dataclass(frozen=True, slots=True)
class Head:
    """The delivery that a lane is held up by."""

    lane: str
    sequence: int
    attempts: int
    next_attempt_at: datetime | None
    last_answer: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class EndpointStatus:
    """How an endpoint is doing."""

    name: str
    url: str
    state: str
    lanes: int
    owed: int
    oldest_s: float | None
    """Age of the oldest event it is owed."""
    failing_lanes: int
    failing: Head | None
    """Of the failing lanes' heads, the one tried most often."""
    dead_letters: int
    replica: str | None
    """Who delivers to it; None: nobody does just now."""


@dataclass(frozen=True, slots=True)
class Overview:
    """Everything that `outbox status` shows, of one moment."""

    cursor: Cursor
    gaps: int
    gap_ids: int
    replicas: tuple[Replica, ...]
    endpoints: tuple[EndpointStatus, ...]
    endpoints_total: int
    dead_letters: dict[str, int]
    """By state."""


async def read(connection: Connection[Any], schema: str, *, limit: int = 100) -> Overview:
    """Look at everything, in one snapshot; at most `limit` endpoints.

    Raises:
        SchemaMissing, DatabaseUnavailable, CannotRun: as in `map_errors`.
    """
    with map_errors(schema):
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            cursor = await connection.fetchrow(CURSOR)
            gaps = await connection.fetchrow(GAPS)
            replicas = await connection.fetch(REPLICAS)
            endpoints = await connection.fetch(ENDPOINTS, limit)
            endpoints_total: int = await connection.fetchval(COUNT_ENDPOINTS)
            dead = await connection.fetch(DEAD_LETTERS)
    return Overview(
        cursor=Cursor(**dict(cursor)),
        gaps=gaps["gaps"],
        gap_ids=gaps["ids"],
        replicas=tuple(Replica(**dict(row)) for row in replicas),
        endpoints=tuple(_endpoint(row) for row in endpoints),
        endpoints_total=endpoints_total,
        dead_letters={row["state"]: row["letters"] for row in dead},
    )


def _endpoint(row: Any) -> EndpointStatus:
    failing = None
    if row["head_seq"] is not None:
        failing = Head(
            lane=lane_name(row["id"], row["generation"], row["slot"]),
            sequence=row["head_seq"],
            attempts=row["attempts"],
            next_attempt_at=row["next_attempt_at"],
            last_answer=orjson.loads(row["last_answer"]) if row["last_answer"] else None,
        )
    return EndpointStatus(
        name=row["name"],
        url=row["url"],
        state=row["state"],
        lanes=row["lanes"],
        owed=row["owed"],
        oldest_s=row["oldest_s"],
        failing_lanes=row["failing_lanes"],
        failing=failing,
        dead_letters=row["dead_letters"],
        replica=row["replica"],
    )
