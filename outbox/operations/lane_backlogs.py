"""Lane backlogs: which lanes are behind, by what keys, and what goes before new lanes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.core.model.ids import lane_name
from outbox.operations.lanes import HEAD_ATTEMPTS, LANE_STATE, is_waited_for
from outbox.operations.rows import RowPage, from_row
from outbox.store.connection.connect import map_errors
from outbox.store.delivery.endpoints import FIND_ID, endpoint_not_found
from outbox.store.retention.erasure import PLAN_BY_INDEX

if TYPE_CHECKING:
    from uuid import UUID

    from asyncpg import Connection

KEYED_DELIVERIES_MAX = 200
"""The first pending deliveries of a lane whose keys are counted."""

# Of each lane with pending deliveries, the first one, and the most frequent key of the first ones.
READ_BACKLOGS = f"""
WITH lanes AS MATERIALIZED ({LANE_STATE} WHERE l.endpoint_id = $1),
waited_for AS MATERIALIZED (
    SELECT min(o.generation) AS generation FROM lanes o JOIN endpoint e ON e.id = o.endpoint_id
     WHERE {is_waited_for("o")})
SELECT s.endpoint_id, s.generation, s.slot, s.acked_seq + 1 AS sequence,
       s.last_seq - s.acked_seq AS pending, {HEAD_ATTEMPTS} AS attempts,
       CASE WHEN retry_seq = acked_seq + 1 THEN attempts - spent ELSE 0 END AS probes,
       b.seq IS NOT NULL AS blocked,
       coalesce(s.generation > (SELECT generation FROM waited_for), false) AS waits,
       first.event_id AS event, first.type, first.key,
       extract(epoch FROM clock_timestamp() - first.created_at)::float8 AS oldest_s,
       counted.key AS most_frequent_key, counted.deliveries AS of_key, counted.total AS counted
  FROM (SELECT * FROM lanes WHERE last_seq > acked_seq
         ORDER BY last_seq - acked_seq DESC, generation, slot LIMIT $2) s
  LEFT JOIN lane_block b ON b.lane_id = s.lane_id
  LEFT JOIN LATERAL (
       SELECT o.event_id, o.type, o.key, o.created_at
         FROM (SELECT outbox_id FROM delivery
                WHERE lane_id = s.lane_id AND batch >= s.floor_batch AND seq > s.acked_seq
                ORDER BY batch, seq LIMIT 1) d
         JOIN outbox o ON o.id = d.outbox_id) first ON true
  LEFT JOIN LATERAL (
       SELECT k.key, k.deliveries, k.total
         FROM (SELECT o.key, count(*) AS deliveries, sum(count(*)) OVER ()::bigint AS total
                 FROM (SELECT outbox_id FROM delivery
                        WHERE lane_id = s.lane_id AND batch >= s.floor_batch
                          AND seq > s.acked_seq
                        ORDER BY batch, seq LIMIT {KEYED_DELIVERIES_MAX}) d
                 JOIN outbox o ON o.id = d.outbox_id
                GROUP BY o.key) k
        WHERE k.key IS NOT NULL
        ORDER BY k.deliveries DESC, k.key LIMIT 1) counted ON true
 ORDER BY pending DESC, s.generation, s.slot
"""  # noqa: S608 (constants only)


RATE_S, RATE_RUNS_MAX = 30, 50
"""The present rate of a lane is that of its newest runs, as far as they are not older."""

READ_AHEAD = f"""
SELECT p.deliveries, p.lanes, p.deliveries / nullif(r.per_s, 0) AS seconds
  FROM (SELECT coalesce(sum(s.last_seq - s.acked_seq), 0)::bigint AS deliveries,
               count(*) FILTER (WHERE s.last_seq > s.acked_seq) AS lanes
          FROM ({LANE_STATE} WHERE l.endpoint_id = $1) s) p
 CROSS JOIN (
       SELECT sum(newest.per_s) AS per_s
         FROM lane l CROSS JOIN LATERAL (
              SELECT sum(count) / CASE count(*) WHEN {RATE_RUNS_MAX} THEN greatest(
                         extract(epoch FROM clock_timestamp() - min(started_at))::float8, 1)
                         ELSE {RATE_S} END AS per_s
                FROM (SELECT count, started_at FROM attempt_run
                       WHERE lane_id = l.id AND outcome = 'd'
                       ORDER BY batch DESC, seq DESC LIMIT {RATE_RUNS_MAX}) run
               WHERE started_at > clock_timestamp() - interval '{RATE_S} s') newest
        WHERE l.endpoint_id = $1
          AND l.generation >= (SELECT generation - 1 FROM endpoint WHERE id = $1)) r
"""  # noqa: S608 (constants only)


@dataclass(frozen=True, slots=True)
class PendingAhead:
    """What is pending in the lanes before a change of their number, and goes first."""

    deliveries: int
    lanes: int
    """The lanes that have pending deliveries."""
    seconds: float | None
    """How long they take at the present rate; null: nothing was delivered lately."""


@dataclass(frozen=True, slots=True)
class LaneBacklog:
    """A lane with pending deliveries."""

    lane: str
    pending: int
    oldest_s: float | None
    """Age of the first pending event, in seconds; None: the event is gone."""
    sequence: int
    """Sequence number of the first pending delivery, like its event, type and key."""
    event: UUID | None
    type: str | None
    key: str | None
    attempts: int
    """Attempts of the first pending delivery that failed, probes included."""
    probes: int
    blocked: bool
    """A dead letter blocks the lane until an operator decides."""
    waits: bool
    """Lanes of an older generation are delivered first."""
    most_frequent_key: str | None
    """The one that most of the first pending deliveries have; None: they have no keys."""
    of_key: int | None
    """Number of deliveries with this key, of the `counted` ones."""
    counted: int | None


async def list_backlogs(
    connection: Connection[Any], schema: str, name: str, *, limit: int = 100
) -> RowPage[LaneBacklog]:
    """List the lanes of an endpoint that have pending deliveries, the longest backlog first.

    Raises:
        NotFound: no endpoint has this name.
    """
    with map_errors(schema):
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            await connection.execute(PLAN_BY_INDEX)
            endpoint_id = await connection.fetchval(FIND_ID, name)
            if endpoint_id is None:
                raise await endpoint_not_found(connection, name)
            rows = await connection.fetch(READ_BACKLOGS, endpoint_id, limit + 1)
    return RowPage(map(_backlog, rows[:limit]), more=len(rows) > limit)


def _backlog(row: Any) -> LaneBacklog:
    lane = lane_name(row["endpoint_id"], row["generation"], row["slot"])
    return from_row(LaneBacklog, row, lane=lane)


async def read_ahead(connection: Connection[Any], endpoint_id: UUID) -> PendingAhead:
    """What goes before the deliveries of new lanes, in the transaction that adds them."""
    return PendingAhead(*await connection.fetchrow(READ_AHEAD, endpoint_id))
