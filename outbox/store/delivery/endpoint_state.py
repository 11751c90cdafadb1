"""What the owner writes about an endpoint as a whole: circuit breaker, disabling, end."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeAlias

import orjson

from outbox.store.channels import NOTIFY_ALL
from outbox.store.cluster.replicas import OWN_ROW, fence
from outbox.store.connection.connect import map_errors
from outbox.store.database_stats import read_database_stats
from outbox.store.installation_history import add_interval
from outbox.store.operational_events import (
    HAS_OPERATIONAL_SUBSCRIBER,
    PUBLISH_ENDPOINT_DISABLED,
    PUBLISH_ENDPOINT_FAILING,
    PUBLISH_ENDPOINT_RECOVERED,
    PUBLISH_ENDPOINT_STALLED,
)
from outbox.store.routing_change import ADD_TO_JOURNAL, BEGIN_CHANGE
from outbox.store.sql.message import WriteStatement

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from uuid import UUID

    from outbox.core.delivery.circuit_breaker import BreakerRecord
    from outbox.core.delivery.endpoint import Endpoint
    from outbox.core.delivery.operational_events import ReportedState
    from outbox.store.connection.store_connection import StoreConnection
    from outbox.store.database_stats import DatabaseStats

CONDITION_EVERY_S = 60.0
"""Interval of the journal's entries while a condition lasts."""


class Condition(Enum):
    """What can be wrong with a relay: the kinds of the entries while it is so, and when it ends."""

    SEQUENCING = ("sequencing_stopped", "sequencing_resumed")
    """It sequences nothing."""
    RESOURCES = ("resources_exhausted", "resources_available")
    """Its process lacks resources for connections."""
    API = ("api_stopped", "api_resumed")
    """The API that it has started does not work."""


# Writes the circuit breaker's state; only in the owner's epoch, like a lane's progress.
#   health: the new rows, with the old ones locked, so that nothing is reported that is not
#     written.
#   reported: publishes the operational events; MATERIALIZED, so that each is published once.
#   written: updates the rows.  outbox.endpoint.failing is remembered only if it was published,
#     because only then is its end reported.
WRITE_HEALTH = WriteStatement(
    "write_health",
    f"""{fence("$3")},
health AS MATERIALIZED (
    SELECT v.*, h.reported_held_since AS was_held_since, h.reported_stalled_at AS was_stalled_at
      FROM fence, unnest($2::json[]) AS document, json_to_record(document)
           AS v(endpoint_id uuid, epoch bigint, resumes integer, state text, since timestamptz,
                held_until timestamptz, last_response jsonb, reported_held_since timestamptz,
                reported_stalled_at timestamptz, stalled_since timestamptz,
                disabled_at timestamptz)
      JOIN endpoint_health h ON h.endpoint_id = v.endpoint_id AND h.epoch = v.epoch
       FOR NO KEY UPDATE OF h),
reported AS MATERIALIZED (
    SELECT endpoint_id,
           CASE WHEN reported_held_since IS NOT NULL AND was_held_since IS NULL
                THEN {PUBLISH_ENDPOINT_FAILING} END AS failing,
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
           reported_held_since = CASE WHEN reported.failing OR health.was_held_since IS NOT NULL
                                  THEN health.reported_held_since END,
           failing_reported_at = CASE WHEN reported.failing THEN health.reported_held_since
                                      ELSE h.failing_reported_at END,
           reported_stalled_at = health.reported_stalled_at
      FROM health LEFT JOIN reported USING (endpoint_id)
     WHERE h.endpoint_id = health.endpoint_id
    RETURNING h.endpoint_id, h.state, h.last_response)
INSERT INTO journal (kind, actor, endpoint_id, data)
SELECT 'endpoint_health', 'replica ' || $1::bigint, endpoint_id,
       jsonb_strip_nulls(jsonb_build_object(
           'state', state, 'last_response', last_response - 'body' - 'headers'))
  FROM written WHERE state <> 'recovering'
""",  # noqa: S608 (constants only)
)

# Stores when receivers sent unsolicited data; only in the owner's epoch.
WRITE_UNSOLICITED = WriteStatement(
    "write_unsolicited",
    f"""{fence("$5")},
written AS (
    UPDATE endpoint_health h SET unsolicited_at = v.at
      FROM fence, unnest($2::uuid[], $3::bigint[], $4::timestamptz[]) AS v(endpoint_id, epoch, at)
     WHERE h.endpoint_id = v.endpoint_id AND h.epoch = v.epoch
    RETURNING h.endpoint_id)
INSERT INTO journal (kind, actor, endpoint_id, data)
SELECT 'endpoint_unsolicited_data', 'replica ' || $1::bigint, endpoint_id, '{{}}' FROM written
""",  # noqa: S608 (constants only)
)

# Whether one of these lanes has a pending ordinary event.
READ_HAS_PENDING_ORDINARY = """
SELECT bool_or(contains_ordinary_event(lane.id, lane.floor_batch, lane.acked_seq + 1, c.last_seq))
  FROM unnest($1::bigint[], $2::bigint[], $3::bigint[]) AS lane(id, floor_batch, acked_seq)
 CROSS JOIN LATERAL (
       SELECT last_seq FROM lane_counter
        WHERE lane_id = lane.id ORDER BY last_seq DESC LIMIT 1) c
"""

# Begins to disable an endpoint, in a message that changes routing.
#   owned: locks the ownership row, while this replica owns the endpoint and its lease runs.
#   disabling: the new state.  ended: its subscription ends with the batches so far.
#   stopped: or its feed, whose place stays.
# Aborts if its state or its owner has changed.
BEGIN_DISABLING = WriteStatement(
    "begin_disabling",
    f"""
WITH owned AS MATERIALIZED (
    SELECT o.endpoint_id
      FROM ownership o JOIN (SELECT id FROM replica WHERE {OWN_ROW.format("$3")}) r
        ON r.id = o.replica_id
     WHERE o.endpoint_id = $2 AND o.replica_id = $1
       FOR KEY SHARE),
disabling AS (
    UPDATE endpoint e
       SET state = 'disabling', state_at = clock_timestamp(), state_by = $4, state_comment = $5
      FROM owned WHERE e.id = owned.endpoint_id AND e.state IN ('active', 'paused')
    RETURNING e.id),
ended AS (
    UPDATE subscription s SET to_batch = (SELECT max(batch) + 1 FROM batch)
      FROM disabling WHERE s.endpoint_id = disabling.id AND s.to_batch IS NULL),
stopped AS (
    UPDATE feed f SET ended_at = clock_timestamp(), end_reason = 'disabled'
      FROM disabling WHERE f.endpoint_id = disabling.id AND f.ended_at IS NULL),
journalled AS (
    INSERT INTO journal (kind, actor, endpoint_id, data)
    SELECT 'endpoint_disabling', $4, id,
           $6::text::jsonb || jsonb_build_object('to_batch', (SELECT max(batch) + 1 FROM batch))
      FROM disabling)
SELECT abort_unless(EXISTS (SELECT FROM disabling))
""",  # noqa: S608 (constants only)
)

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

# Up to which sequence number each lane has deliveries sequenced more than $4 observed seconds ago.
#   old: the newest batch of that age; MATERIALIZED, so that it is read once.
READ_OVER_AGE = """
WITH old AS MATERIALIZED (
    SELECT batch FROM batch WHERE at < (SELECT observed_before($4))
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
    """The time since which a lane has had no success (epoch), if a stall is reported."""
    disabled_at: float | None = None
    """When the endpoint will be disabled (epoch), if a stall is reported and a relay runs."""


class EndpointStateStore:
    """Stores endpoint state, on one connection.

    Not safe for concurrent use; asyncpg's errors propagate.

    Args:
        server_fence: `server_fence()` when the replica registered; None: not known.
    """

    def __init__(
        self,
        connection: StoreConnection,
        schema: str,
        replica_id: int,
        server_fence: int | None = None,
    ) -> None:
        self._db = connection
        self._fence = server_fence
        self._schema = schema
        self._replica_id = replica_id
        self._actor = f"replica {replica_id}"

    async def write_health(self, rows: Sequence[EndpointState]) -> None:
        """Write and report the state of endpoints; skips those that this replica lost."""
        health: list[dict[str, Any]] = [
            {
                "endpoint_id": str(row.endpoint.id),
                "epoch": row.epoch,
                "resumes": row.endpoint.resumes,
                "state": row.health.state,
                "since": _time(row.health.since),
                "held_until": _time(row.health.held_until),
                "last_response": row.health.last_response,
                "reported_held_since": _time(row.reported.held_since),
                "reported_stalled_at": _time(row.reported.stalled_at),
                "stalled_since": _time(row.stalled_since),
                "disabled_at": _time(row.disabled_at),
            }
            for row in rows
        ]
        documents = [orjson.dumps(row).decode() for row in health]
        await self._db.write(WRITE_HEALTH, self._replica_id, documents, self._fence)

    async def write_unsolicited(self, rows: Sequence[tuple[UUID, int, float]]) -> None:
        """Write when receivers sent unsolicited data; skips endpoints that this replica lost.

        Args:
            rows: endpoint, epoch, and epoch seconds of the last sight.
        """
        await self._db.write(
            WRITE_UNSOLICITED,
            self._replica_id,
            [endpoint_id for endpoint_id, _, _ in rows],
            [epoch for _, epoch, _ in rows],
            [_time(at) for _, _, at in rows],
            self._fence,
        )

    async def disable(self, endpoint_id: UUID, reason: str, details: Mapping[str, Any]) -> bool:
        """Disable an endpoint from the next batch on; its owner dead-letters the backlog.

        Args:
            reason: the reason in the journal and the operational event.
            details: further fields of the journal entry.

        Returns:
            False when its state or its owner has changed.

        Raises:
            SchemaMissing, DatabaseUnavailable, CannotRun: as in `map_errors`.
        """
        response = details.get("last_response") or {}
        data = orjson.dumps({"reason": reason, **details}).decode()
        with map_errors(self._schema, "operator"):
            disabled = await self._db.write_unless_aborted(
                (BEGIN_CHANGE,),
                (
                    *(BEGIN_DISABLING, self._replica_id, endpoint_id, self._fence),
                    *(self._actor, reason, data),
                ),
                (
                    *(PUBLISH_ENDPOINT_DISABLED, endpoint_id),
                    *(response.get("status"), response.get("failure")),
                ),
                (NOTIFY_ALL,),
            )
        return bool(disabled)

    async def journal_condition(self, condition: Condition, problem: str | None) -> None:
        """Record what is wrong; None: nothing any more."""
        begins, ends = condition.value
        kind = ends if problem is None else begins
        data = orjson.dumps({"reason": problem}).decode()
        await self._db.write(ADD_TO_JOURNAL, kind, self._actor, None, data)

    async def read_database_stats(self) -> DatabaseStats:
        """Statistics of the database as a whole."""
        return await read_database_stats(self._db)

    async def add_interval(self, since_s: float | None) -> bool:
        """See `outbox.store.installation_history`."""
        return await add_interval(self._db, since_s)

    async def has_pending_ordinary(self, lanes: LanePositions) -> bool:
        """Whether one of these lanes has a pending ordinary event."""
        return bool(await self._db.fetchval(READ_HAS_PENDING_ORDINARY, *_columns(lanes)))

    async def read_over_count(self, lanes: LanePositions, excess: int) -> dict[int, int]:
        """The sequence number up to which each lane exceeds the backlog by `excess`."""
        rows = await self._db.fetch(READ_OVER_COUNT, *_columns(lanes), excess)
        return {r["lane_id"]: r["seq"] for r in rows}

    async def read_over_age(self, lanes: LanePositions, age_max_s: float) -> dict[int, int]:
        """The sequence number up to which each lane has deliveries older than `age_max_s`, in
        observed seconds.
        """
        rows = await self._db.fetch(READ_OVER_AGE, *_columns(lanes), age_max_s)
        return {r["lane_id"]: r["seq"] for r in rows}


def _time(at: float | None) -> datetime | None:
    return None if at is None else datetime.fromtimestamp(at, UTC)


def _columns(lanes: LanePositions) -> list[list[int]]:
    return [list(column) for column in zip(*lanes, strict=True)]
