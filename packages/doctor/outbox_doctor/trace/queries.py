"""Event trace queries: the history of one event, read in one snapshot.

The statements read only the event's own rows: its batch through the highest ids of the
batches, its deliveries through the lanes named by its batch, its attempts by key.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias
from uuid import UUID

import orjson

from outbox.core.model.ids import delivery_id
from outbox.errors import NotFound
from outbox.operations.criteria import find_endpoint_ids
from outbox.operations.dead_letters.queries import LAST_REPLAY
from outbox.operations.events import queries as events
from outbox.operations.events.deliveries import NO_BATCH, READ_DELIVERIES, READ_SEQUENCED
from outbox.operations.events.future import NotPublishedYet
from outbox.operations.lanes import BLOCKED_BY, FAILING_LANES, HEALTH_SINCE, LANE_STATE, retry_state
from outbox.operations.pages import shorten_responses
from outbox.operations.rows import ID_MAX, encode_other, from_row
from outbox.store.connection.connect import map_errors
from outbox.store.delivery.lanes import lacks_end
from outbox.store.retention.erasure import PLAN_BY_INDEX
from outbox.store.routing_change import READ_NOW
from outbox.store.sql.expressions import PAYLOAD_SIZE, lease_runs
from outbox.store.sql.type_match import FILTER_MET, TENANT_MATCHES, TYPE_MATCHES
from outbox_doctor.trace.diagnosis import add_diagnosis
from outbox_doctor.trace.model import (
    EventTrace,
    LaneHead,
    PendingLaneState,
    SequencedBatch,
    SequencingProgress,
    TracedAttempt,
    TracedDeadLetter,
    TracedDelivery,
    TracedEvent,
    TraceReport,
    UnsentGroup,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncpg import Connection

# The event, or its copy in a dead letter after retention dropped it.
READ_EVENT = f"""
SELECT id AS outbox_id, event_id, type, tenant, key, created_at AS published_at, expires_at,
       erased_at, headers::text AS headers, {PAYLOAD_SIZE} AS payload_bytes, content_type,
       CASE WHEN $2 THEN payload::text END AS payload
  FROM outbox WHERE id = $1
 UNION ALL
(SELECT outbox_id, event_id, type, tenant, key, published_at, expires_at, NULL,
        headers::text, {PAYLOAD_SIZE}, content_type, CASE WHEN $2 THEN payload::text END
   FROM dead_letter WHERE outbox_id = $1 AND event_id IS NOT NULL ORDER BY id LIMIT 1)
 LIMIT 1
"""  # noqa: S608 (a constant only)

READ_SEQUENCING = f"""
SELECT b.high,
       EXISTS (SELECT FROM gap WHERE $1 BETWEEN lo AND hi) OR b.young @> $1::bigint AS in_gap,
       (SELECT count(*) FROM replica WHERE {lease_runs("replica")}) AS relays,
       (SELECT r.name FROM replica r JOIN cursor c ON c.writer = r.id) AS leader
  FROM (SELECT high, young FROM batch ORDER BY batch DESC LIMIT 1) b
"""  # noqa: S608 (constants only)

# The newest attempts of each delivery first, up to the limit $4: a retry policy may have 10,000.
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
       d.attempts, d.seq AS sequence, d.to_seq AS to_sequence
  FROM unnest($1::bigint[], $2::bigint[]) AS n(lane_id, seq)
 CROSS JOIN LATERAL (
       SELECT * FROM dead_letter
        WHERE lane_id = n.lane_id AND seq <= n.seq ORDER BY seq DESC LIMIT 1) d
{LAST_REPLAY}
 WHERE d.to_seq >= n.seq
"""  # noqa: S608 (constants only)

# State of the lanes that may have pending deliveries.
READ_LANE_STATES = f"""
SELECT s.lane_id, s.acked_seq, s.retry_seq, s.attempts, s.spent, s.next_attempt_at,
       {shorten_responses("s.last_response", "s.lane_id")} AS last_response,
       e.state, e.state_at, e.state_by, e.state_comment,
       coalesce(h.state, 'healthy') AS health,
       coalesce({HEALTH_SINCE}, e.created_at) AS health_since,
       h.held_until, b.at AS blocked_since, {BLOCKED_BY} AS blocked_by,
       (SELECT r.name FROM ownership o JOIN replica r ON r.id = o.replica_id
         WHERE o.endpoint_id = e.id AND {lease_runs("r")}) AS relay,
       {FAILING_LANES} AS failing_lanes, e.probes,
       older.pending AS older_pending, older.unended AS older_unended,
       (SELECT o.event_id FROM delivery d JOIN outbox o ON o.id = d.outbox_id
         WHERE d.lane_id = s.lane_id AND d.batch >= s.floor_batch AND d.seq = s.acked_seq + 1
         ORDER BY d.batch LIMIT 1) AS event_id
  FROM ({LANE_STATE} WHERE l.id = ANY ($1)) s
  JOIN endpoint e ON e.id = s.endpoint_id
  LEFT JOIN endpoint_health h ON h.endpoint_id = e.id
  LEFT JOIN lane_block b ON b.lane_id = s.lane_id
 CROSS JOIN LATERAL (
       SELECT coalesce(sum(old.last_seq - old.acked_seq), 0)::bigint AS pending,
              count(*) FILTER (WHERE {lacks_end("old")}) AS unended
         FROM ({LANE_STATE}) old
        WHERE old.endpoint_id = e.id AND old.generation < s.generation) older
"""  # noqa: S608

# Endpoints that the event was not sent to, by the first reason that applies.
READ_UNSENT = f"""
SELECT reason, count(*) AS endpoints, (array_agg(name ORDER BY name COLLATE "C"))[1:$4] AS examples
  FROM (SELECT e.name, CASE
               WHEN f.waits THEN 'feed'
               WHEN f.seen @> $1::bigint THEN 'seen'
               WHEN s.endpoint_id IS NULL AND v.from_batch > $2 THEN 'before'
               WHEN s.endpoint_id IS NULL THEN 'after'
               WHEN NOT {TYPE_MATCHES} THEN 'type'
               WHEN NOT {TENANT_MATCHES} THEN 'tenant'
               WHEN NOT coalesce({FILTER_MET}, true) THEN 'filter'
               WHEN f.is_passed AND (o.erased_at IS NOT NULL OR o.expires_at IS NOT NULL)
               THEN 'skipped'
               ELSE 'lost' END AS reason
          FROM endpoint e
          JOIN outbox o ON o.id = $1
          LEFT JOIN LATERAL (
               SELECT id, seen, ended_at IS NULL AND ($2, $1) > (batch, outbox_id) AS waits,
                      ($2, $1) <= (batch, outbox_id) AS is_passed
                 FROM feed WHERE endpoint_id = e.id AND ($2, $1) > (from_batch, from_id)
                ORDER BY id LIMIT 1) f ON true
          LEFT JOIN LATERAL (
               SELECT endpoint_id, types, tenant, all_tenants, filter FROM subscription
                WHERE endpoint_id = e.id AND from_batch <= $2
                  AND (to_batch IS NULL OR $2 < to_batch)
                UNION ALL
               SELECT endpoint_id, types, tenant, all_tenants, filter FROM feed
                WHERE f.is_passed AND id = f.id LIMIT 1) s ON true
          LEFT JOIN LATERAL (
               SELECT min(from_batch) AS from_batch FROM subscription
                WHERE endpoint_id = e.id) v ON true
         WHERE e.state <> 'removed' AND e.id <> ALL ($3)
           AND ($5::uuid[] IS NULL OR e.id = ANY ($5))) missed
 GROUP BY reason ORDER BY reason
"""  # noqa: S608

UNSENT_EXAMPLES_MAX = 3
TRACED_ATTEMPTS_MAX = 1000
"""Attempts in the trace of an event, of all its deliveries."""

Place: TypeAlias = tuple[int, int]
"""The id of a lane, and a sequence number."""


async def trace_events(
    connection: Connection[Any],
    schema: str,
    text: str,
    *,
    endpoint: str | None = None,
    limit: int = 5,
    below: int = ID_MAX,
    payload: bool = False,
    tenant: str | None = None,
    once_key: str | None = None,
    bytes_max: int | None = None,
) -> TraceReport:
    """Trace the events for an event id, X-Delivery, once key, key or outbox id.

    Args:
        endpoint: only deliveries to the endpoints that ever had this name; None: to all.
        limit, below, tenant, once_key: see `outbox.operations.events.queries.find_events`.
        payload: include the payloads.
        bytes_max: size of the report as JSON, which ends with the event that exceeds it.

    Raises:
        NotFound: no event matches, or no endpoint ever had this name.
    """
    endpoint_ids = await find_endpoint_ids(connection, endpoint, tenant)
    try:
        match = await events.find_events(
            connection, schema, text, limit=limit, below=below, tenant=tenant, once_key=once_key
        )
    except NotPublishedYet as found:
        return TraceReport(found.by, False, [], found.event)
    traces: list[EventTrace] = []
    traced_bytes = 0
    for outbox_id in match.outbox_ids:
        if bytes_max is not None and traced_bytes >= bytes_max:
            return TraceReport(match.by, True, traces)
        trace = await read_trace(
            connection, schema, outbox_id, endpoint_ids=endpoint_ids, payload=payload
        )
        traces.append(trace)
        traced_bytes += len(orjson.dumps(trace, encode_other))
    return TraceReport(match.by, match.more, traces)


async def trace_delivery(
    connection: Connection[Any], schema: str, x_delivery: str, *, tenant: str | None = None
) -> EventTrace:
    """Trace an event to the one endpoint of an X-Delivery.

    A dead letter and its replays have the same X-Delivery, so there may be several deliveries.

    Args:
        tenant: only its events, and only deliveries to its endpoints; None: all.

    Raises:
        NotFound: it is no X-Delivery, or its event is not found.
    """
    match = await events.find_events(connection, schema, x_delivery, tenant=tenant)
    if match.by != "X-Delivery":
        raise NotFound(f'"{x_delivery[:60]}" is not an X-Delivery; it is found as {match.by}')
    own = await find_endpoint_ids(connection, None, tenant)
    of = [each for each in match.endpoint_ids if own is None or each in own]
    (outbox_id,) = match.outbox_ids
    given = UUID(x_delivery)
    trace = await read_trace(connection, schema, outbox_id, endpoint_ids=of, limit=ID_MAX)
    deliveries = tuple(each for each in trace.deliveries if each.delivery_id == given)
    if not deliveries:
        raise NotFound(f"no delivery has the X-Delivery {given}")
    total = len(deliveries)
    return add_diagnosis(replace(trace, deliveries=deliveries, deliveries_total=total, missed=()))


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
            event = from_row(TracedEvent, row, parse=("headers",), embed=("payload",))
            row = await connection.fetchrow(READ_SEQUENCED, outbox_id)
            if row is None:
                progress = await connection.fetchrow(READ_SEQUENCING, outbox_id)
                if progress["in_gap"] or outbox_id > progress["high"]:
                    sequencing = from_row(SequencingProgress, progress)
                    return add_diagnosis(EventTrace(at, event, None, sequencing, False, (), 0, ()))
            sequenced = None if row is None else from_row(SequencedBatch, row)
            batch = NO_BATCH if sequenced is None else sequenced.batch
            rows = await connection.fetch(READ_DELIVERIES, outbox_id, batch, endpoint_ids)
            deliveries = await _read_deliveries(connection, event, rows[:limit])
            missed = []
            if sequenced is not None:
                recipients = {row["endpoint_id"] for row in rows}
                missed = await connection.fetch(
                    READ_UNSENT,
                    outbox_id,
                    batch,
                    list(recipients),
                    UNSENT_EXAMPLES_MAX,
                    endpoint_ids,
                )
    trace = EventTrace(
        at=at,
        event=event,
        sequenced=sequenced,
        sequencing=None,
        log_dropped=sequenced is None,
        deliveries=deliveries,
        deliveries_total=len(rows),
        missed=tuple(from_row(UnsentGroup, row, examples=tuple(row["examples"])) for row in missed),
    )
    return add_diagnosis(trace)


async def _read_deliveries(
    connection: Connection[Any], event: TracedEvent, rows: Sequence[Any]
) -> tuple[TracedDelivery, ...]:
    lanes = [row["lane_id"] for row in rows]
    batches = [row["batch"] for row in rows]
    sequences = [row["sequence"] for row in rows]
    places = list(zip(lanes, sequences, strict=True))
    attempts: dict[Place, list[TracedAttempt]] = {place: [] for place in places}
    for row in await connection.fetch(
        READ_ATTEMPTS, lanes, batches, sequences, TRACED_ATTEMPTS_MAX
    ):
        attempt = from_row(TracedAttempt, row, parse=("response",))
        attempts[row["lane_id"], row["seq"]].append(attempt)
    dead_letters = {
        (row["lane_id"], row["wanted_seq"]): from_row(TracedDeadLetter, row)
        for row in await connection.fetch(READ_DEAD_LETTERS, lanes, sequences)
    }
    pending = {
        place
        for place, made in attempts.items()
        if place not in dead_letters and not any(each.outcome == "delivered" for each in made)
    }
    states = await connection.fetch(READ_LANE_STATES, sorted({lane_id for lane_id, _ in pending}))
    lane_states = {
        place: _lane_state(row)
        for row in states
        for place in pending
        if place[0] == row["lane_id"] and place[1] > row["acked_seq"]
    }
    return tuple(
        from_row(
            TracedDelivery,
            row,
            delivery_id=delivery_id(
                row["endpoint_id"], event.outbox_id, event.event_id, row["backfill"]
            ),
            replay_of=None if row["was_lane"] is None else (row["was_lane"], row["replay_seq"]),
            attempts=tuple(attempts[place]),
            dead_letter=dead_letters.get(place),
            lane_state=lane_states.get(place),
            request=None,
        )
        for row, place in zip(rows, places, strict=True)
    )


def _lane_state(row: Any) -> PendingLaneState:
    sequence = row["acked_seq"] + 1
    retry = retry_state(row, failing=row["retry_seq"] == sequence)
    head = LaneHead(sequence, row["event_id"], **retry)
    return from_row(PendingLaneState, row, head=head)
