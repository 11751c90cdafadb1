"""Putting together the story of an event: one look at everything that happened to it.

Nothing here reads more than the event's own rows.  Its batch is found through the
batches' highest ids, its deliveries through the lanes that its batch names, and its
attempts by their key.
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
    Attempt,
    Delivery,
    Event,
    Head,
    Letter,
    Missed,
    Sequenced,
    Sequencing,
    Standing,
    Story,
)
from outbox.store.connection.connect import map_errors
from outbox.store.erasure import PLAN_BY_INDEX
from outbox.store.routing_change import READ_NOW
from outbox.store.type_match import FILTER_MET, TENANT_MATCHES, TYPE_MATCHES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from uuid import UUID

    from asyncpg import Connection

# The event itself, or what a dead letter keeps of it when it is gone.
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

# The first batch that is as high; or, if the event was a gap then, the one that found
# it, which is never far behind the end of the producer that held it open.  The batch
# that the kept log begins with holds nothing: what it is the first to pass was
# sequenced before it, or found later.
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

# Where the event went in its batch, and where replays and backfills took it.  OFFSET 0
# keeps it to a look at each lane.
READ_DELIVERIES = """
WITH given AS MATERIALIZED (
    SELECT d.* FROM batch b CROSS JOIN LATERAL unnest(b.lanes) AS lane(id)
     CROSS JOIN LATERAL (
           SELECT lane_id, batch, seq, replay_id, replay_seq, backfill_id, was_backfill_id
             FROM delivery
            WHERE lane_id = lane.id AND batch = b.batch AND outbox_id = $1
              AND replay_id IS NULL AND backfill_id IS NULL OFFSET 0) d
     WHERE b.batch = $2
     UNION ALL
    SELECT lane_id, batch, seq, replay_id, replay_seq, backfill_id, was_backfill_id FROM delivery
     WHERE outbox_id = $1 AND (replay_id IS NOT NULL OR backfill_id IS NOT NULL))
SELECT g.*, l.endpoint_id, l.generation, l.slot, e.name AS endpoint, b.at AS numbered_at,
       was.endpoint_id AS was_endpoint_id, was.generation AS was_generation,
       was.slot AS was_slot
  FROM given g
  JOIN lane l ON l.id = g.lane_id
  JOIN endpoint e ON e.id = l.endpoint_id AND ($3::uuid[] IS NULL OR e.id = ANY ($3))
  JOIN batch b ON b.batch = g.batch
  LEFT JOIN (replay r JOIN replay_job j ON j.id = r.job_id
             LEFT JOIN dead_letter x ON x.id = r.dead_id
             JOIN lane was ON was.id = coalesce(j.lane_id, x.lane_id))
    ON r.id = g.replay_id
 ORDER BY e.name COLLATE "C", g.batch, g.lane_id, g.seq
"""

READ_ATTEMPTS = """
SELECT d.lane_id, d.seq, a.attempt, a.replica_id, a.outcome, a.status, a.error, a.started_at,
       a.elapsed_ms, a.answer::text AS answer
  FROM unnest($1::bigint[], $2::bigint[], $3::bigint[]) AS d(lane_id, batch, seq)
 CROSS JOIN LATERAL (
       SELECT * FROM attempt
        WHERE lane_id = d.lane_id AND batch = d.batch AND seq = d.seq OFFSET 0) a
 ORDER BY a.started_at, a.attempt
"""

# The nearest dead letter below a number is the only one that can hold it.
READ_LETTERS = f"""
SELECT n.lane_id, n.seq AS number, d.id, d.reason, coalesce(t.state, d.state) AS state, d.at,
       d.attempts, d.seq, d.to_seq
  FROM unnest($1::bigint[], $2::bigint[]) AS n(lane_id, seq)
 CROSS JOIN LATERAL (
       SELECT * FROM dead_letter
        WHERE lane_id = n.lane_id AND seq <= n.seq ORDER BY seq DESC LIMIT 1) d
{LAST_REPLAY}
 WHERE d.to_seq >= n.seq
"""  # noqa: S608 (constants only)

# How things stand with lanes that may owe something.
READ_STANDINGS = f"""
SELECT s.*, s.last_answer::text AS answer, e.state, e.state_at, e.state_by, e.state_why,
       coalesce(h.state, 'healthy') AS health, coalesce(h.since, e.created_at) AS health_since,
       h.held_until, b.at AS blocked_since,
       (SELECT x.id FROM dead_letter x
         WHERE x.lane_id = s.lane_id AND x.seq <= b.seq AND x.to_seq >= b.seq
         ORDER BY x.seq DESC LIMIT 1) AS blocked_by,
       (SELECT r.name FROM ownership o JOIN replica r ON r.id = o.replica_id
         WHERE o.endpoint_id = e.id AND r.expires_at > clock_timestamp()) AS relay,
       (SELECT coalesce(sum(old.last_seq - old.acked_seq), 0)::bigint
          FROM ({LANE_STATE}) old
         WHERE old.endpoint_id = e.id AND old.generation < s.generation) AS older_owed,
       (SELECT o.event_id FROM delivery d JOIN outbox o ON o.id = d.outbox_id
         WHERE d.lane_id = s.lane_id AND d.batch >= s.floor_batch AND d.seq = s.acked_seq + 1
         ORDER BY d.batch LIMIT 1) AS head_event
  FROM ({LANE_STATE} WHERE l.id = ANY ($1)) s
  JOIN endpoint e ON e.id = s.endpoint_id
  LEFT JOIN endpoint_health h ON h.endpoint_id = e.id
  LEFT JOIN lane_block b ON b.lane_id = s.lane_id
"""  # noqa: S608

# Who did not get it, by the first reason that there is.
READ_MISSED = f"""
SELECT why, count(*) AS endpoints, (array_agg(name ORDER BY name COLLATE "C"))[1:$4] AS examples
  FROM (SELECT e.name, CASE
               WHEN s.endpoint_id IS NULL AND v.from_batch > $2 THEN 'before'
               WHEN s.endpoint_id IS NULL THEN 'after'
               WHEN NOT {TYPE_MATCHES} THEN 'type'
               WHEN NOT {TENANT_MATCHES} THEN 'tenant'
               WHEN NOT coalesce({FILTER_MET}, true) THEN 'filter'
               ELSE 'lost' END AS why
          FROM endpoint e
          JOIN outbox o ON o.id = $1
          LEFT JOIN subscription s ON s.endpoint_id = e.id AND s.from_batch <= $2
                AND (s.to_batch IS NULL OR $2 < s.to_batch)
          LEFT JOIN LATERAL (
               SELECT min(from_batch) AS from_batch FROM subscription
                WHERE endpoint_id = e.id) v ON true
         WHERE e.state <> 'removed' AND e.id <> ALL ($3)
           AND ($5::uuid[] IS NULL OR e.id = ANY ($5))) missed
 GROUP BY why ORDER BY why
"""  # noqa: S608

EXAMPLES_MAX = 3
NO_BATCH = -1


async def read(
    connection: Connection[Any],
    schema: str,
    outbox_id: int,
    *,
    endpoint_ids: Sequence[UUID] | None = None,
    limit: int = 100,
    payload: bool = False,
) -> Story:
    """Everything that happened to an event, in one snapshot.

    Args:
        endpoint_ids: only what these got.
        limit: at most so many deliveries.
        payload: the payload, too.

    Raises:
        NotFound: there is no such event.
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
                standing = await connection.fetchrow(READ_SEQUENCING, outbox_id)
                sequencing = Sequencing(**dict(standing))
                if standing["in_gap"] or outbox_id > standing["high"]:
                    return Story(at, event, None, sequencing, False, (), 0, ())
            sequenced = None if row is None else Sequenced(**dict(row))
            batch = NO_BATCH if sequenced is None else sequenced.batch
            rows = await connection.fetch(READ_DELIVERIES, outbox_id, batch, endpoint_ids)
            deliveries = await _deliveries(connection, event, rows[:limit])
            got = {row["endpoint_id"] for row in rows}
            missed = (
                []
                if sequenced is None
                else await connection.fetch(
                    READ_MISSED, outbox_id, batch, list(got), EXAMPLES_MAX, endpoint_ids
                )
            )
    return Story(
        at=at,
        event=event,
        sequenced=sequenced,
        sequencing=None,
        log_dropped=sequenced is None,
        deliveries=deliveries,
        deliveries_total=len(rows),
        missed=tuple(Missed(m["why"], m["endpoints"], tuple(m["examples"])) for m in missed),
    )


async def _deliveries(
    connection: Connection[Any], event: Event, rows: Sequence[Any]
) -> tuple[Delivery, ...]:
    lanes = [row["lane_id"] for row in rows]
    numbers = [row["seq"] for row in rows]
    attempts: dict[tuple[int, int], list[Attempt]] = {}
    for row in await connection.fetch(
        READ_ATTEMPTS, lanes, [row["batch"] for row in rows], numbers
    ):
        attempts.setdefault((row["lane_id"], row["seq"]), []).append(_attempt(row))
    letters = {
        (row["lane_id"], row["number"]): _letter(row)
        for row in await connection.fetch(READ_LETTERS, lanes, numbers)
    }
    standings = await _standings(connection, rows, attempts, letters)
    return tuple(
        Delivery(
            endpoint=row["endpoint"],
            endpoint_id=row["endpoint_id"],
            lane=_lane(row),
            sequence=row["seq"],
            delivery_id=delivery_id(
                row["endpoint_id"],
                event.outbox_id,
                event.event_id,
                row["backfill_id"],
                row["was_backfill_id"],
            ),
            numbered_at=row["numbered_at"],
            replay_of=_replay_of(row),
            backfill=row["backfill_id"],
            attempts=tuple(attempts.get((row["lane_id"], row["seq"]), ())),
            letter=letters.get((row["lane_id"], row["seq"])),
            standing=standings.get((row["lane_id"], row["seq"])),
        )
        for row in rows
    )


async def _standings(
    connection: Connection[Any],
    rows: Iterable[Any],
    attempts: Mapping[tuple[int, int], Collection[Attempt]],
    letters: Collection[tuple[int, int]],
) -> dict[tuple[int, int], Standing]:
    """How things stand with those that neither succeeded nor were given up."""
    open_ones = [
        (row["lane_id"], row["seq"])
        for row in rows
        if (place := (row["lane_id"], row["seq"])) not in letters
        and not any(a.outcome == "delivered" for a in attempts.get(place, ()))
    ]
    lanes = sorted({lane_id for lane_id, _ in open_ones})
    found = {row["lane_id"]: row for row in await connection.fetch(READ_STANDINGS, lanes)}
    return {
        (lane_id, seq): _standing(found[lane_id])
        for lane_id, seq in open_ones
        if seq > found[lane_id]["acked_seq"]
    }


def _standing(row: Any) -> Standing:
    sequence = row["acked_seq"] + 1
    failing = row["head_seq"] == sequence
    return Standing(
        state=row["state"],
        state_at=row["state_at"],
        state_by=row["state_by"],
        state_why=row["state_why"],
        health=row["health"],
        health_since=row["health_since"],
        held_until=row["held_until"],
        relay=row["relay"],
        head=Head(
            sequence=sequence,
            event_id=row["head_event"],
            attempts=row["attempts"] if failing else 0,
            probes=row["attempts"] - row["spent"] if failing else 0,
            next_attempt_at=row["next_attempt_at"] if failing else None,
            last_answer=_json(row["answer"]) if failing else None,
        ),
        blocked_since=row["blocked_since"],
        blocked_by=row["blocked_by"],
        older_owed=row["older_owed"],
    )


def _event(row: Any) -> Event:
    return Event(
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


def _attempt(row: Any) -> Attempt:
    return Attempt(
        attempt=row["attempt"],
        replica_id=row["replica_id"],
        outcome=row["outcome"],
        status=row["status"],
        error=row["error"],
        started_at=row["started_at"],
        elapsed_ms=row["elapsed_ms"],
        answer=_json(row["answer"]),
    )


def _letter(row: Any) -> Letter:
    return Letter(
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
