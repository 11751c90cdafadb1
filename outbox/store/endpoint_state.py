"""What an owner writes about an endpoint as a whole: its health, and its end."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeAlias

import orjson

from outbox.store.database_stats import survey
from outbox.store.operational_events import (
    ENDPOINT_HAS_RECOVERED,
    ENDPOINT_HAS_STALLED,
    ENDPOINT_IS_HELD,
    TELL_DISABLED,
    WANTED,
)
from outbox.store.replicas import OWN_ROW, fence
from outbox.store.routing_change import END_SUBSCRIPTION, change, write_journal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from uuid import UUID

    from asyncpg import Connection

    from outbox.core.delivery.circuit_breaker import HealthRecord
    from outbox.core.delivery.operational_events import Told
    from outbox.store.database_stats import Survey
    from outbox.store.endpoints import Endpoint

# Only in the owner's epoch, like a lane's progress.  The rows are locked before anything
# is told of them, so that nothing is told that is not written then.  That an endpoint is
# held is remembered only if somebody wanted to hear it, because only then its end is
# told, too.
WRITE_HEALTH = f"""{fence("$13")},
w AS MATERIALIZED (
    SELECT v.*, h.told_held_since AS was_held_since, h.told_stalled_at AS was_stalled_at
      FROM fence, unnest($2::uuid[], $3::bigint[], $4::integer[], $5::text[], $6::timestamptz[],
                         $7::timestamptz[], $8::jsonb[], $9::timestamptz[], $10::timestamptz[],
                         $11::timestamptz[], $12::timestamptz[])
           AS v(endpoint_id, epoch, resumes, state, since, held_until, last_answer,
                told_held_since, told_stalled_at, stalled_since, disabled_at)
      JOIN endpoint_health h ON h.endpoint_id = v.endpoint_id AND h.epoch = v.epoch
       FOR NO KEY UPDATE OF h),
told AS MATERIALIZED (
    SELECT endpoint_id,
           CASE WHEN told_held_since IS NOT NULL AND was_held_since IS NULL
                THEN {ENDPOINT_IS_HELD} END AS held,
           CASE WHEN told_held_since IS NULL AND was_held_since IS NOT NULL
                THEN {ENDPOINT_HAS_RECOVERED} END AS recovered,
           CASE WHEN told_stalled_at IS NOT NULL AND told_stalled_at IS DISTINCT FROM was_stalled_at
                     AND stalled_since IS NOT NULL
                THEN {ENDPOINT_HAS_STALLED} END AS stalled
      FROM w WHERE {WANTED}),
written AS (
    UPDATE endpoint_health h
       SET state = w.state, since = w.since, held_until = w.held_until,
           last_answer = w.last_answer, resumes = w.resumes,
           told_held_since = CASE WHEN told.held OR w.was_held_since IS NOT NULL
                                  THEN w.told_held_since END,
           told_stalled_at = w.told_stalled_at
      FROM w LEFT JOIN told USING (endpoint_id)
     WHERE h.endpoint_id = w.endpoint_id
    RETURNING h.endpoint_id, h.state, h.last_answer)
INSERT INTO journal (kind, actor, endpoint_id, data)
SELECT 'endpoint_health', 'replica ' || $1::bigint, endpoint_id,
       jsonb_strip_nulls(jsonb_build_object(
           'state', state, 'last_answer', last_answer - 'body' - 'headers'))
  FROM written WHERE state <> 'recovering'
"""  # noqa: S608 (constants only)

# Whether one of these lanes owes an ordinary event.
READ_OWES_ORDINARY = """
SELECT bool_or(holds_ordinary(lane.id, lane.floor_batch, lane.acked_seq + 1, c.last_seq))
  FROM unnest($1::bigint[], $2::bigint[], $3::bigint[]) AS lane(id, floor_batch, acked_seq)
 CROSS JOIN LATERAL (
       SELECT last_seq FROM lane_counter
        WHERE lane_id = lane.id ORDER BY last_seq DESC LIMIT 1) c
"""

# The owner itself, while its lease runs.
LOCK_OWNERSHIP = f"""
SELECT 1
  FROM ownership o JOIN (SELECT id FROM replica WHERE {OWN_ROW.format("$3")}) r
    ON r.id = o.replica_id
 WHERE o.endpoint_id = $2 AND o.replica_id = $1
   FOR KEY SHARE
"""  # noqa: S608 (constants only)

BEGIN_DISABLING = """
UPDATE endpoint SET state = 'disabling', state_at = clock_timestamp(), state_by = $2, state_why = $3
 WHERE id = $1 AND state IN ('active', 'paused')
RETURNING name
"""

# How far each lane has to be given up so that at most so many deliveries are
# left: the oldest over all lanes first.
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

# And so that none was numbered longer ago than so many seconds.  Not
# clock_timestamp(), which may change from row to row, and so cannot use an index.
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


Lanes: TypeAlias = "Sequence[tuple[int, int, int]]"
"""(lane, floor batch, acked number) of what an endpoint owes."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What is kept of an endpoint for its next owner."""

    endpoint: Endpoint
    epoch: int
    health: HealthRecord
    told: Told
    stalled_since: float | None = None
    """With the news of a stall: since when a lane has had no success, in epoch seconds."""


class CareStore:
    """Endpoints as their owner looks after them, on one connection.

    Not safe for concurrent use; asyncpg's errors pass through.

    Args:
        timeline: the server's, read before the replica registered; None: not known.
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
        self._me = replica_id
        self._actor = f"replica {replica_id}"

    async def write_health(self, rows: Sequence[Kept]) -> None:
        """Keep how endpoints are; of a lost one nothing is written, nor told."""
        await self._db.execute(
            WRITE_HEALTH,
            self._me,
            [row.endpoint.id for row in rows],
            [row.epoch for row in rows],
            [row.endpoint.resumes for row in rows],
            [row.health.state for row in rows],
            [_time(row.health.since) for row in rows],
            [_time(row.health.held_until) for row in rows],
            [
                row.health.last_answer and orjson.dumps(row.health.last_answer).decode()
                for row in rows
            ],
            [_time(row.told.held_since) for row in rows],
            [_time(row.told.stalled_at) for row in rows],
            [_time(row.stalled_since) for row in rows],
            [
                row.stalled_since and _time(row.stalled_since + row.endpoint.disable_after_s)
                for row in rows
            ],
            self._timeline,
        )

    async def disable(self, endpoint_id: UUID, why: str, told: Mapping[str, Any]) -> bool:
        """Let an endpoint get nothing from the next batch on; its owner gives up the rest.

        Returns:
            False when it changed its state, or its owner, first.

        Raises:
            OutboxError: as in `changes.change`.
        """
        async with change(self._db, self._schema) as from_batch:
            if not await self._db.fetchval(LOCK_OWNERSHIP, self._me, endpoint_id, self._timeline):
                return False
            name = await self._db.fetchval(BEGIN_DISABLING, endpoint_id, self._actor, why)
            if name is None:
                return False
            await self._db.execute(END_SUBSCRIPTION, endpoint_id, from_batch)
            data = {"why": why, "to_batch": from_batch, **told}
            await write_journal(self._db, "endpoint_disabling", self._actor, endpoint_id, data)
            answer = told.get("last_answer") or {}
            await self._db.execute(
                TELL_DISABLED, endpoint_id, answer.get("status"), answer.get("failure")
            )
        return True

    async def survey(self) -> Survey:
        """A look at the database as a whole."""
        return await survey(self._db)

    async def owes_ordinary(self, lanes: Lanes) -> bool:
        """Whether one of these lanes owes an ordinary event."""
        return bool(await self._db.fetchval(READ_OWES_ORDINARY, *_columns(lanes)))

    async def over_count(self, lanes: Lanes, excess: int) -> dict[int, int]:
        """Up to which number each lane must go so that `excess` deliveries fewer are owed."""
        rows = await self._db.fetch(READ_OVER_COUNT, *_columns(lanes), excess)
        return {r["lane_id"]: r["seq"] for r in rows}

    async def over_age(self, lanes: Lanes, age_max_s: float) -> dict[int, int]:
        """Up to which number each lane owes what is older than that."""
        rows = await self._db.fetch(READ_OVER_AGE, *_columns(lanes), age_max_s)
        return {r["lane_id"]: r["seq"] for r in rows}


def _time(at: float | None) -> datetime | None:
    return None if at is None else datetime.fromtimestamp(at, UTC)


def _columns(lanes: Lanes) -> list[list[int]]:
    return [list(column) for column in zip(*lanes, strict=True)]
