"""What the owner writes about an endpoint as a whole: circuit breaker, disabling, end."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeAlias

import orjson

from outbox.store.database_stats import read_database_stats
from outbox.store.operational_events import (
    HAS_OPERATIONAL_SUBSCRIBER,
    PUBLISH_ENDPOINT_DISABLED,
    PUBLISH_ENDPOINT_HELD,
    PUBLISH_ENDPOINT_RECOVERED,
    PUBLISH_ENDPOINT_STALLED,
)
from outbox.store.replicas import OWN_ROW, fence
from outbox.store.routing_change import END_SUBSCRIPTION, routing_transaction, write_journal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from uuid import UUID

    from asyncpg import Connection

    from outbox.core.delivery.circuit_breaker import BreakerRecord
    from outbox.core.delivery.operational_events import ReportedState
    from outbox.store.database_stats import DatabaseStats
    from outbox.store.endpoints import Endpoint

# Writes the circuit breaker's state; only in the owner's epoch, like a lane's progress.
#   health: the new rows, with the old ones locked, so that nothing is reported that is not
#     written.
#   reported: publishes the operational events; MATERIALIZED, so that each is published once.
#   written: updates the rows.  outbox.endpoint.held is remembered only if it was published,
#     because only then its end is reported.
WRITE_HEALTH = f"""{fence("$13")},
health AS MATERIALIZED (
    SELECT v.*, h.reported_held_since AS was_held_since, h.reported_stalled_at AS was_stalled_at
      FROM fence, unnest($2::uuid[], $3::bigint[], $4::integer[], $5::text[], $6::timestamptz[],
                         $7::timestamptz[], $8::jsonb[], $9::timestamptz[], $10::timestamptz[],
                         $11::timestamptz[], $12::timestamptz[])
           AS v(endpoint_id, epoch, resumes, state, since, held_until, last_response,
                reported_held_since, reported_stalled_at, stalled_since, disabled_at)
      JOIN endpoint_health h ON h.endpoint_id = v.endpoint_id AND h.epoch = v.epoch
       FOR NO KEY UPDATE OF h),
reported AS MATERIALIZED (
    SELECT endpoint_id,
           CASE WHEN reported_held_since IS NOT NULL AND was_held_since IS NULL
                THEN {PUBLISH_ENDPOINT_HELD} END AS held,
           CASE WHEN reported_held_since IS NULL AND was_held_since IS NOT NULL
                THEN {PUBLISH_ENDPOINT_RECOVERED} END AS recovered,
           CASE WHEN reported_stalled_at IS NOT NULL AND stalled_since IS NOT NULL
                     AND reported_stalled_at IS DISTINCT FROM was_stalled_at
                THEN {PUBLISH_ENDPOINT_STALLED} END AS stalled
      FROM health WHERE {HAS_OPERATIONAL_SUBSCRIBER}),
written AS (
    UPDATE endpoint_health h
       SET state = health.state, since = health.since, held_until = health.held_until,
           last_response = health.last_response, resumes = health.resumes,
           reported_held_since = CASE WHEN reported.held OR health.was_held_since IS NOT NULL
                                  THEN health.reported_held_since END,
           reported_stalled_at = health.reported_stalled_at
      FROM health LEFT JOIN reported USING (endpoint_id)
     WHERE h.endpoint_id = health.endpoint_id
    RETURNING h.endpoint_id, h.state, h.last_response)
INSERT INTO journal (kind, actor, endpoint_id, data)
SELECT 'endpoint_health', 'replica ' || $1::bigint, endpoint_id,
       jsonb_strip_nulls(jsonb_build_object(
           'state', state, 'last_response', last_response - 'body' - 'headers'))
  FROM written WHERE state <> 'recovering'
"""  # noqa: S608 (constants only)

# Whether one of these lanes has a pending ordinary event.
READ_HAS_PENDING_ORDINARY = """
SELECT bool_or(contains_ordinary_event(lane.id, lane.floor_batch, lane.acked_seq + 1, c.last_seq))
  FROM unnest($1::bigint[], $2::bigint[], $3::bigint[]) AS lane(id, floor_batch, acked_seq)
 CROSS JOIN LATERAL (
       SELECT last_seq FROM lane_counter
        WHERE lane_id = lane.id ORDER BY last_seq DESC LIMIT 1) c
"""

# Locks the ownership row while this replica owns the endpoint and its lease runs.
LOCK_OWNERSHIP = f"""
SELECT 1
  FROM ownership o JOIN (SELECT id FROM replica WHERE {OWN_ROW.format("$3")}) r
    ON r.id = o.replica_id
 WHERE o.endpoint_id = $2 AND o.replica_id = $1
   FOR KEY SHARE
"""  # noqa: S608 (constants only)

# Begins to disable an endpoint.
BEGIN_DISABLING = """
UPDATE endpoint
   SET state = 'disabling', state_at = clock_timestamp(), state_by = $2, state_comment = $3
 WHERE id = $1 AND state IN ('active', 'paused')
RETURNING name
"""

# Up to which sequence number each lane must be dead-lettered to reduce the backlog by $4
# deliveries: the oldest of all lanes first.
READ_OVER_COUNT = """
SELECT lane_id, max(seq) AS seq
  FROM (SELECT lane.id AS lane_id, d.batch, d.seq
          FROM unnest($1::bigint[], $2::bigint[], $3::bigint[])
               AS lane(id, floor_batch, acked_seq)
         CROSS JOIN LATERAL (
               SELECT batch, seq FROM delivery
                WHERE lane_id = lane.id AND batch >= lane.floor_batch AND seq > lane.acked_seq
                ORDER BY batch, seq LIMIT $4) d
         ORDER BY d.batch, d.seq, lane.id LIMIT $4) oldest
 GROUP BY lane_id
"""

# Up to which sequence number each lane has deliveries sequenced more than $4 seconds ago.
# statement_timestamp(), because clock_timestamp() is volatile and cannot use an index.
#   old: the newest batch of that age; MATERIALIZED, so that it is read once.
READ_OVER_AGE = """
WITH old AS MATERIALIZED (
    SELECT batch FROM batch WHERE at < statement_timestamp() - make_interval(secs => $4)
     ORDER BY at DESC LIMIT 1)
SELECT lane.id AS lane_id, d.seq
  FROM old, unnest($1::bigint[], $2::bigint[], $3::bigint[]) AS lane(id, floor_batch, acked_seq)
 CROSS JOIN LATERAL (
       SELECT seq FROM delivery
        WHERE lane_id = lane.id AND batch BETWEEN lane.floor_batch AND old.batch
          AND seq > lane.acked_seq
        ORDER BY batch DESC, seq DESC LIMIT 1) d
"""


LanePositions: TypeAlias = "Sequence[tuple[int, int, int]]"
"""(lane, floor batch, acknowledged sequence number) of an endpoint's pending deliveries."""


@dataclass(frozen=True, slots=True)
class EndpointState:
    """State of an endpoint that is stored for its next owner."""

    endpoint: Endpoint
    epoch: int
    health: BreakerRecord
    reported: ReportedState
    stalled_since: float | None = None
    """When a stall is reported: the time since which a lane has had no success (epoch)."""


class EndpointStateStore:
    """Stores endpoint state, on one connection.

    Not safe for concurrent use; asyncpg's errors propagate.

    Args:
        timeline: the server's timeline when the replica registered; None: not known.
    """

    def __init__(
        self,
        connection: Connection[Any],
        schema: str,
        replica_id: int,
        timeline: int | None = None,
    ) -> None:
        self._db = connection
        self._timeline = timeline
        self._schema = schema
        self._replica_id = replica_id
        self._actor = f"replica {replica_id}"

    async def write_health(self, rows: Sequence[EndpointState]) -> None:
        """Write and report the state of endpoints; skips those that this replica lost."""
        await self._db.execute(
            WRITE_HEALTH,
            self._replica_id,
            [row.endpoint.id for row in rows],
            [row.epoch for row in rows],
            [row.endpoint.resumes for row in rows],
            [row.health.state for row in rows],
            [_time(row.health.since) for row in rows],
            [_time(row.health.held_until) for row in rows],
            [
                row.health.last_response and orjson.dumps(row.health.last_response).decode()
                for row in rows
            ],
            [_time(row.reported.held_since) for row in rows],
            [_time(row.reported.stalled_at) for row in rows],
            [_time(row.stalled_since) for row in rows],
            [
                row.stalled_since and _time(row.stalled_since + row.endpoint.disable_after_s)
                for row in rows
            ],
            self._timeline,
        )

    async def disable(self, endpoint_id: UUID, why: str, details: Mapping[str, Any]) -> bool:
        """Disable an endpoint from the next batch on; its owner dead-letters the backlog.

        Args:
            why: the reason, for the journal and the operational event.
            details: further fields of the journal entry.

        Returns:
            False when its state or its owner has changed.

        Raises:
            OutboxError: as in `routing_transaction`.
        """
        async with routing_transaction(self._db, self._schema) as from_batch:
            if not await self._db.fetchval(
                LOCK_OWNERSHIP, self._replica_id, endpoint_id, self._timeline
            ):
                return False
            name = await self._db.fetchval(BEGIN_DISABLING, endpoint_id, self._actor, why)
            if name is None:
                return False
            await self._db.execute(END_SUBSCRIPTION, endpoint_id, from_batch)
            data = {"why": why, "to_batch": from_batch, **details}
            await write_journal(self._db, "endpoint_disabling", self._actor, endpoint_id, data)
            response = details.get("last_response") or {}
            await self._db.execute(
                PUBLISH_ENDPOINT_DISABLED,
                endpoint_id,
                response.get("status"),
                response.get("failure"),
            )
        return True

    async def read_database_stats(self) -> DatabaseStats:
        """Statistics of the database as a whole."""
        return await read_database_stats(self._db)

    async def has_pending_ordinary(self, lanes: LanePositions) -> bool:
        """Whether one of these lanes has a pending ordinary event."""
        return bool(await self._db.fetchval(READ_HAS_PENDING_ORDINARY, *_columns(lanes)))

    async def read_over_count(self, lanes: LanePositions, excess: int) -> dict[int, int]:
        """The sequence number up to which each lane exceeds the backlog by `excess`."""
        rows = await self._db.fetch(READ_OVER_COUNT, *_columns(lanes), excess)
        return {r["lane_id"]: r["seq"] for r in rows}

    async def read_over_age(self, lanes: LanePositions, age_max_s: float) -> dict[int, int]:
        """The sequence number up to which each lane has deliveries older than `age_max_s`."""
        rows = await self._db.fetch(READ_OVER_AGE, *_columns(lanes), age_max_s)
        return {r["lane_id"]: r["seq"] for r in rows}


def _time(at: float | None) -> datetime | None:
    return None if at is None else datetime.fromtimestamp(at, UTC)


def _columns(lanes: LanePositions) -> list[list[int]]:
    return [list(column) for column in zip(*lanes, strict=True)]
