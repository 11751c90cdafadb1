"""Erasing payloads, headers and response bodies of events, in bounded steps.

`outbox erase` runs these steps for the events of a tenant or a key. Maintenance repeats them
for events erased lately, because a request in flight may have been recorded after the erasure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.core.sequencing.partition_window import WIDTH

if TYPE_CHECKING:
    from asyncpg import Connection

STEP_EVENTS = 2_000
"""Events that are looked at in one transaction."""

# The planner takes bloom filters for worse than they are.
PLAN_BY_INDEX = """
SET LOCAL enable_seqscan = off; SET LOCAL max_parallel_workers_per_gather = 0; SET LOCAL jit = off
"""

# All deliveries of some events: those of the batch that sequenced them, which is the
# first one that is as high, or the one that found them late; and those of replays.
_DELIVERIES = f"""
passed AS MATERIALIZED (
    SELECT e.id, b.batch, b.late
      FROM unnest($1::bigint[]) AS e(id)
     CROSS JOIN LATERAL (
           SELECT batch, young @> e.id OR batch > 0 AND batch = (
                      SELECT min(number) * {WIDTH} FROM period
                       WHERE kind = 'log' AND dropped_at IS NULL) AS late
             FROM batch WHERE high >= e.id ORDER BY high, batch LIMIT 1) b),
sequenced AS MATERIALIZED (
    SELECT batch FROM passed WHERE NOT late
     UNION
    SELECT b.batch FROM passed p CROSS JOIN LATERAL (
           SELECT batch FROM batch
            WHERE p.late AND batch > p.batch AND NOT isempty(found) AND found @> p.id
            ORDER BY batch LIMIT 1) b),
given AS MATERIALIZED (
    SELECT d.lane_id, d.batch, d.seq
      FROM sequenced s
     CROSS JOIN LATERAL (SELECT lanes FROM batch WHERE batch = s.batch LIMIT 1) b
     CROSS JOIN LATERAL unnest(b.lanes) AS lane(id)
     CROSS JOIN LATERAL (
           SELECT lane_id, batch, seq FROM delivery
            WHERE lane_id = lane.id AND batch = s.batch AND outbox_id = ANY ($1) OFFSET 0) d
     UNION
    SELECT lane_id, batch, seq FROM delivery
     WHERE outbox_id = ANY ($1) AND (replay_id IS NOT NULL OR backfill_id IS NOT NULL))
"""  # noqa: S608 (a constant only)

# Of what owners write to, only what nobody is writing just now: they wait for nobody,
# and what is left over is looked for again (`sweep`).
ERASE_ANSWERS = f"""
WITH {_DELIVERIES},
answered AS (
    UPDATE attempt a SET answer = a.answer - 'body' - 'headers'
      FROM given g
     WHERE a.lane_id = g.lane_id AND a.batch = g.batch AND a.seq = g.seq
       AND a.answer ?| '{{body,headers}}'
    RETURNING 1),
heads AS MATERIALIZED (
    SELECT p.lane_id FROM lane_progress p JOIN given g ON p.lane_id = g.lane_id
     WHERE p.head_seq = g.seq AND p.last_answer ?| '{{body,headers}}'
     ORDER BY p.lane_id FOR NO KEY UPDATE OF p SKIP LOCKED),
stripped AS (
    UPDATE lane_progress p SET last_answer = p.last_answer - 'body' - 'headers'
      FROM heads WHERE p.lane_id = heads.lane_id),
ill AS MATERIALIZED (
    SELECT h.endpoint_id FROM endpoint_health h
     WHERE h.last_answer ?| '{{body,headers}}' AND h.endpoint_id IN (
           SELECT l.endpoint_id FROM given g JOIN lane l ON l.id = g.lane_id)
     ORDER BY h.endpoint_id FOR NO KEY UPDATE OF h SKIP LOCKED),
told AS (
    UPDATE endpoint_health h SET last_answer = h.last_answer - 'body' - 'headers'
      FROM ill WHERE h.endpoint_id = ill.endpoint_id)
SELECT count(*) FROM answered
"""  # noqa: S608 (constants only)

# Locked in the order of their ids, as everybody does who locks several.
ERASE_DEAD = f"""
WITH found AS MATERIALIZED (
    SELECT id FROM dead_letter
     WHERE ($1::text IS NULL OR tenant = $1) AND ($2::text IS NULL OR key = $2)
       AND ($3::bigint[] IS NULL OR outbox_id = ANY ($3))
       AND (payload IS NOT NULL OR headers IS NOT NULL OR last_answer ?| '{{body,headers}}')
       AND outbox_id IS NOT NULL
     ORDER BY id LIMIT {STEP_EVENTS} FOR NO KEY UPDATE),
erased AS (
    UPDATE dead_letter d
       SET payload = NULL, headers = NULL, last_answer = last_answer - 'body' - 'headers'
      FROM found WHERE d.id = found.id
    RETURNING 1)
SELECT count(*) FROM erased
"""  # noqa: S608

READ_ERASED = """
SELECT id FROM outbox
 WHERE erased_at > statement_timestamp() - make_interval(secs => $1) AND id > $2
 ORDER BY id LIMIT $3
"""


async def sweep(connection: Connection[Any], within_s: float) -> int:
    """Erase what was still being written when its event was erased; returns how much.

    A request that was on its way then has ended by now, and what came of it was
    written afterwards.

    Args:
        within_s: of events that were erased in so many last seconds.
    """
    swept = after = 0
    while ids := [
        row["id"] for row in await connection.fetch(READ_ERASED, within_s, after, STEP_EVENTS)
    ]:
        after = ids[-1]
        async with connection.transaction(isolation="read_committed"):
            await connection.execute(PLAN_BY_INDEX)
            swept += await connection.fetchval(ERASE_ANSWERS, ids)
        swept += await erase_dead_letters(connection, None, None, ids)
    return swept


async def erase_dead_letters(
    connection: Connection[Any], tenant: str | None, key: str | None, ids: list[int] | None
) -> int:
    """Erase what dead letters hold, a step at a time."""
    erased, step = 0, STEP_EVENTS
    while step == STEP_EVENTS:
        step = await connection.fetchval(ERASE_DEAD, tenant, key, ids)
        erased += step
    return erased
