"""Event trace queries: the history of one event, read in one snapshot.

The statements read only the event's own rows: its batch through the highest ids of the
batches, its deliveries through the lanes named by its batch, its attempts by key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from outbox.core.model.ids import delivery_id, lane_name
from outbox.core.sequencing.partition_window import WIDTH
from outbox.errors import NotFound
from outbox.operations.dead_letters import LAST_REPLAY
from outbox.operations.endpoints import LANE_STATE
from outbox.operations.event_trace import (
    EventTrace,
    LaneHead,
    PendingLaneState,
    SequencedBatch,
    SequencingProgress,
    TracedAttempt,
    TracedDeadLetter,
    TracedDelivery,
    TracedEvent,
    UnsentGroup,
)
from outbox.operations.page_bytes import shorten_responses
from outbox.store.connection.connect import map_errors
from outbox.store.erasure import PLAN_BY_INDEX
from outbox.store.routing_change import READ_NOW
from outbox.store.type_match import FILTER_MET, TENANT_MATCHES, TYPE_MATCHES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from uuid import UUID

    from asyncpg import Connection

# The event, or its copy in a dead letter after retention dropped it.
READ_EVENT = """
SELECT id, event_id, type, tenant, key, created_at AS published_at, expires_at, erased_at,
       headers::text AS headers, octet_length(payload::text) AS payload_bytes,
       CASE WHEN $2 THEN payload::text END AS payload
  FROM outbox WHERE id = $1
 UNION ALL
(SELECT outbox_id, event_id, type, tenant, key, published_at, expires_at, NULL,
        headers::text, NULL, CASE WHEN $2 THEN payload::text END
   FROM dead_letter WHERE outbox_id = $1 AND event_id IS NOT NULL ORDER BY id LIMIT 1)
 LIMIT 1
"""

READ_SEQUENCING = """
SELECT b.high,
       EXISTS (SELECT FROM gap WHERE $1 BETWEEN lo AND hi) OR b.young @> $1::bigint AS in_gap,
       (SELECT count(*) FROM replica WHERE expires_at > clock_timestamp()) AS relays,
       (SELECT r.name FROM replica r JOIN cursor c ON c.writer = r.id) AS leader
  FROM (SELECT high, young FROM batch ORDER BY batch DESC LIMIT 1) b
"""

# The first batch whose `high` reaches the event; or, if the event was an open gap then, the
# batch that found it, which follows the end of the producer's transaction closely.  The first
# batch of the kept log sequences nothing: an event that it is the first to pass was sequenced
# before it, or found later.
READ_SEQUENCED = f"""
WITH passed AS MATERIALIZED (
    SELECT batch, at, young @> $1::bigint OR batch > 0 AND batch = (
               SELECT min(number) * {WIDTH} FROM period
                WHERE kind = 'log' AND dropped_at IS NULL) AS late
      FROM batch WHERE high >= $1 ORDER BY high, batch LIMIT 1)
SELECT b.batch, b.at, true AS late
  FROM passed CROSS JOIN LATERAL (
       SELECT batch, at FROM batch
        WHERE passed.late AND batch > passed.batch
          AND NOT isempty(found) AND found @> $1::bigint ORDER BY batch LIMIT 1) b
 UNION ALL
SELECT batch, at, late FROM passed WHERE NOT late
"""  # noqa: S608 (a constant only)

# Deliveries of the event from its batch, from replays and from backfills.  OFFSET 0 forces one
# index scan per lane.
READ_DELIVERIES = """
WITH given AS MATERIALIZED (
    SELECT d.* FROM batch b CROSS JOIN LATERAL unnest(b.lanes) AS lane(id)
     CROSS JOIN LATERAL (
           SELECT lane_id, batch, seq, replay_id, replay_seq, backfill_id
             FROM delivery
            WHERE lane_id = lane.id AND batch = b.batch AND outbox_id = $1
              AND replay_id IS NULL AND backfill_id IS NULL OFFSET 0) d
     WHERE b.batch = $2
     UNION ALL
    SELECT lane_id, batch, seq, replay_id, replay_seq, backfill_id FROM delivery
     WHERE outbox_id = $1 AND (replay_id IS NOT NULL OR backfill_id IS NOT NULL))
SELECT g.*, l.endpoint_id, l.generation, l.slot, e.name AS endpoint, b.at AS sequenced_at,
       was.endpoint_id AS was_endpoint_id, was.generation AS was_generation,
       was.slot AS was_slot
  FROM given g
  JOIN lane l ON l.id = g.lane_id
  JOIN endpoint e ON e.id = l.endpoint_id AND ($3::uuid[] IS NULL OR e.id = ANY ($3))
  JOIN batch b ON b.batch = g.batch
  LEFT JOIN (replay r JOIN dead_letter x ON x.id = r.dead_id
             JOIN lane was ON was.id = x.lane_id)
    ON r.id = g.replay_id
 ORDER BY e.name COLLATE "C", g.batch, g.lane_id, g.seq
"""

# The newest attempts of each delivery first, up to the limit $4, and the responses of the newest
# ones up to the limit in bytes: a retry policy may have 10,000 attempts.
READ_ATTEMPTS = f"""
WITH newest AS MATERIALIZED (
    SELECT a.*, row_number() OVER (PARTITION BY a.lane_id, a.seq ORDER BY a.attempt DESC) AS age
      FROM unnest($1::bigint[], $2::bigint[], $3::bigint[]) AS d(lane_id, batch, seq)
     CROSS JOIN LATERAL (
           SELECT * FROM attempt
            WHERE lane_id = d.lane_id AND batch = d.batch AND seq = d.seq
            ORDER BY attempt DESC LIMIT $4) a
     ORDER BY age, a.lane_id, a.seq LIMIT $4)
SELECT lane_id, seq, attempt, replica_id, outcome, status, error, started_at, elapsed_ms,
       {shorten_responses("response", "age, lane_id, seq")} AS response
  FROM newest ORDER BY started_at, attempt
"""  # noqa: S608 (constants only)

# Only the nearest dead letter at or below a sequence number can contain it.
READ_DEAD_LETTERS = f"""
SELECT n.lane_id, n.seq AS wanted_seq, d.id, d.reason, coalesce(t.state, d.state) AS state, d.at,
       d.attempts, d.seq, d.to_seq
  FROM unnest($1::bigint[], $2::bigint[]) AS n(lane_id, seq)
 CROSS JOIN LATERAL (
       SELECT * FROM dead_letter
        WHERE lane_id = n.lane_id AND seq <= n.seq ORDER BY seq DESC LIMIT 1) d
{LAST_REPLAY}
 WHERE d.to_seq >= n.seq
"""  # noqa: S608 (constants only)

# State of the lanes that may have pending deliveries.
READ_LANE_STATES = f"""
SELECT s.*, {shorten_responses("s.last_response", "s.lane_id")} AS response,
       e.state, e.state_at, e.state_by, e.state_comment,
       coalesce(h.state, 'healthy') AS health, coalesce(h.since, e.created_at) AS health_since,
       h.held_until, b.at AS blocked_since,
       (SELECT x.id FROM dead_letter x
         WHERE x.lane_id = s.lane_id AND x.seq <= b.seq AND x.to_seq >= b.seq
         ORDER BY x.seq DESC LIMIT 1) AS blocked_by,
       (SELECT r.name FROM ownership o JOIN replica r ON r.id = o.replica_id
         WHERE o.endpoint_id = e.id AND r.expires_at > clock_timestamp()) AS relay,
       (SELECT coalesce(sum(old.last_seq - old.acked_seq), 0)::bigint
          FROM ({LANE_STATE}) old
         WHERE old.endpoint_id = e.id AND old.generation < s.generation) AS older_pending,
       (SELECT o.event_id FROM delivery d JOIN outbox o ON o.id = d.outbox_id
         WHERE d.lane_id = s.lane_id AND d.batch >= s.floor_batch AND d.seq = s.acked_seq + 1
         ORDER BY d.batch LIMIT 1) AS head_event
  FROM ({LANE_STATE} WHERE l.id = ANY ($1)) s
  JOIN endpoint e ON e.id = s.endpoint_id
  LEFT JOIN endpoint_health h ON h.endpoint_id = e.id
  LEFT JOIN lane_block b ON b.lane_id = s.lane_id
"""  # noqa: S608

# Endpoints that the event was not sent to, by the first reason that applies.
READ_UNSENT = f"""
SELECT reason, count(*) AS endpoints, (array_agg(name ORDER BY name COLLATE "C"))[1:$4] AS examples
  FROM (SELECT e.name, CASE
               WHEN s.endpoint_id IS NULL AND v.from_batch > $2 THEN 'before'
               WHEN s.endpoint_id IS NULL THEN 'after'
               WHEN NOT {TYPE_MATCHES} THEN 'type'
               WHEN NOT {TENANT_MATCHES} THEN 'tenant'
               WHEN NOT coalesce({FILTER_MET}, true) THEN 'filter'
               ELSE 'lost' END AS reason
          FROM endpoint e
          JOIN outbox o ON o.id = $1
          LEFT JOIN subscription s ON s.endpoint_id = e.id AND s.from_batch <= $2
                AND (s.to_batch IS NULL OR $2 < s.to_batch)
          LEFT JOIN LATERAL (
               SELECT min(from_batch) AS from_batch FROM subscription
                WHERE endpoint_id = e.id) v ON true
         WHERE e.state <> 'removed' AND e.id <> ALL ($3)
           AND ($5::uuid[] IS NULL OR e.id = ANY ($5))) missed
 GROUP BY reason ORDER BY reason
"""  # noqa: S608

EXAMPLES_MAX = 3
ATTEMPTS_MAX = 1000
"""Attempts in the trace of an event, of all its deliveries."""
NO_BATCH = -1


async def read_trace(
    connection: Connection[Any],
    schema: str,
    outbox_id: int,
    *,
    endpoint_ids: Sequence[UUID] | None = None,
    limit: int = 100,
    payload: bool = False,
) -> EventTrace:
    """Read the trace of an event in one snapshot.

    Args:
        endpoint_ids: only deliveries to these endpoints; None: to all.
        limit: maximum number of deliveries.
        payload: include the payload.

    Raises:
        NotFound: no event has this outbox id.
    """
    with map_errors(schema):
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            await connection.execute(PLAN_BY_INDEX)
            at = await connection.fetchval(READ_NOW)
            row = await connection.fetchrow(READ_EVENT, outbox_id, payload)
            if row is None:
                raise NotFound(f"there is no event with the outbox id {outbox_id}")
            event = _event(row)
            row = await connection.fetchrow(READ_SEQUENCED, outbox_id)
            if row is None:
                progress = await connection.fetchrow(READ_SEQUENCING, outbox_id)
                sequencing = SequencingProgress(**dict(progress))
                if progress["in_gap"] or outbox_id > progress["high"]:
                    return EventTrace(at, event, None, sequencing, False, (), 0, ())
            sequenced = None if row is None else SequencedBatch(**dict(row))
            batch = NO_BATCH if sequenced is None else sequenced.batch
            rows = await connection.fetch(READ_DELIVERIES, outbox_id, batch, endpoint_ids)
            deliveries = await _deliveries(connection, event, rows[:limit])
            recipients = {row["endpoint_id"] for row in rows}
            missed = (
                []
                if sequenced is None
                else await connection.fetch(
                    READ_UNSENT, outbox_id, batch, list(recipients), EXAMPLES_MAX, endpoint_ids
                )
            )
    return EventTrace(
        at=at,
        event=event,
        sequenced=sequenced,
        sequencing=None,
        log_dropped=sequenced is None,
        deliveries=deliveries,
        deliveries_total=len(rows),
        missed=tuple(
            UnsentGroup(m["reason"], m["endpoints"], tuple(m["examples"])) for m in missed
        ),
    )


async def _deliveries(
    connection: Connection[Any], event: TracedEvent, rows: Sequence[Any]
) -> tuple[TracedDelivery, ...]:
    lanes = [row["lane_id"] for row in rows]
    sequences = [row["seq"] for row in rows]
    attempts: dict[tuple[int, int], list[TracedAttempt]] = {}
    for row in await connection.fetch(
        READ_ATTEMPTS, lanes, [row["batch"] for row in rows], sequences, ATTEMPTS_MAX
    ):
        attempts.setdefault((row["lane_id"], row["seq"]), []).append(_attempt(row))
    dead_letters = {
        (row["lane_id"], row["wanted_seq"]): _dead_letter(row)
        for row in await connection.fetch(READ_DEAD_LETTERS, lanes, sequences)
    }
    lane_states = await _read_lane_states(connection, rows, attempts, dead_letters)
    return tuple(
        TracedDelivery(
            endpoint=row["endpoint"],
            endpoint_id=row["endpoint_id"],
            lane=_lane(row),
            sequence=row["seq"],
            delivery_id=delivery_id(
                row["endpoint_id"], event.outbox_id, event.event_id, row["backfill_id"]
            ),
            sequenced_at=row["sequenced_at"],
            replay_of=_replay_of(row),
            backfill=row["backfill_id"],
            attempts=tuple(attempts.get((row["lane_id"], row["seq"]), ())),
            dead_letter=dead_letters.get((row["lane_id"], row["seq"])),
            lane_state=lane_states.get((row["lane_id"], row["seq"])),
        )
        for row in rows
    )


async def _read_lane_states(
    connection: Connection[Any],
    rows: Iterable[Any],
    attempts: Mapping[tuple[int, int], Collection[TracedAttempt]],
    dead_letters: Collection[tuple[int, int]],
) -> dict[tuple[int, int], PendingLaneState]:
    """Lane states of the deliveries that are neither delivered nor dead-lettered, by place."""
    pending = [
        (row["lane_id"], row["seq"])
        for row in rows
        if (place := (row["lane_id"], row["seq"])) not in dead_letters
        and not any(a.outcome == "delivered" for a in attempts.get(place, ()))
    ]
    lanes = sorted({lane_id for lane_id, _ in pending})
    states = {row["lane_id"]: row for row in await connection.fetch(READ_LANE_STATES, lanes)}
    return {
        (lane_id, seq): _lane_state(states[lane_id])
        for lane_id, seq in pending
        if seq > states[lane_id]["acked_seq"]
    }


def _lane_state(row: Any) -> PendingLaneState:
    sequence = row["acked_seq"] + 1
    failing = row["retry_seq"] == sequence
    return PendingLaneState(
        state=row["state"],
        state_at=row["state_at"],
        state_by=row["state_by"],
        state_comment=row["state_comment"],
        health=row["health"],
        health_since=row["health_since"],
        held_until=row["held_until"],
        relay=row["relay"],
        head=LaneHead(
            sequence=sequence,
            event_id=row["head_event"],
            attempts=row["attempts"] if failing else 0,
            probes=row["attempts"] - row["spent"] if failing else 0,
            next_attempt_at=row["next_attempt_at"] if failing else None,
            last_response=_json(row["response"]) if failing else None,
        ),
        blocked_since=row["blocked_since"],
        blocked_by=row["blocked_by"],
        older_pending=row["older_pending"],
    )


def _event(row: Any) -> TracedEvent:
    return TracedEvent(
        outbox_id=row["id"],
        event_id=row["event_id"],
        type=row["type"],
        tenant=row["tenant"],
        key=row["key"],
        published_at=row["published_at"],
        expires_at=row["expires_at"],
        headers=_json(row["headers"]),
        payload_bytes=row["payload_bytes"],
        erased_at=row["erased_at"],
        payload=_json(row["payload"]),
    )


def _attempt(row: Any) -> TracedAttempt:
    return TracedAttempt(
        attempt=row["attempt"],
        replica_id=row["replica_id"],
        outcome=row["outcome"],
        status=row["status"],
        error=row["error"],
        started_at=row["started_at"],
        elapsed_ms=row["elapsed_ms"],
        response=_json(row["response"]),
    )


def _dead_letter(row: Any) -> TracedDeadLetter:
    return TracedDeadLetter(
        id=row["id"],
        reason=row["reason"],
        state=row["state"],
        at=row["at"],
        attempts=row["attempts"],
        sequence=row["seq"],
        to_sequence=row["to_seq"],
    )


def _lane(row: Any) -> str:
    return lane_name(row["endpoint_id"], row["generation"], row["slot"])


def _replay_of(row: Any) -> tuple[str, int] | None:
    if row["was_slot"] is None:
        return None
    was = lane_name(row["was_endpoint_id"], row["was_generation"], row["was_slot"])
    return was, row["replay_seq"]


def _json(text: str | None) -> Any:
    return None if text is None else orjson.loads(text)
