"""Erasing stored responses and dead letters of events, in bounded steps.

`outbox.operations.erase` erases the events themselves, and then runs these steps for them.
Maintenance repeats the steps for events erased lately, because a request in flight may have been
recorded after the erasure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.core.sequencing.partition_window import WIDTH
from outbox.store.connection.message import WriteStatement

if TYPE_CHECKING:
    from outbox.store.connection.store_connection import StoreConnection

STEP_EVENTS = 2_000
"""Maximum number of events per message."""
STEP_ATTEMPTS = 2_000
"""Maximum number of attempts per message."""

# Settings of the planner until the end of the transaction: it overestimates the cost of BRIN
# bloom indexes.
PLAN_BY_INDEX = """
SELECT set_config('enable_seqscan', 'off', true), set_config('jit', 'off', true),
       set_config('max_parallel_workers_per_gather', '0', true)
"""
# The same before a statement of a message, which finds each row that it writes by index: any other
# join would read all partitions of a table.  A prepared statement keeps the plan that it was given
# first, whatever the settings are later, so such a statement always follows this one.
SET_PLANNER = WriteStatement(
    "set_planner",
    f"""{PLAN_BY_INDEX.rstrip()},
       set_config('enable_hashjoin', 'off', true), set_config('enable_mergejoin', 'off', true)
""",
)

# All deliveries of some events.
#   positions: for each event, the first batch with high >= id; `late` if the event was in a gap.
#   sequenced: the batches that contain them: that one, or the one that found a late event.
#   delivered: the deliveries in these batches, and those of replays.
# MATERIALIZED, OFFSET 0 and LIMIT 1 keep each step an index lookup.
_DELIVERIES = f"""
positions AS MATERIALIZED (
    SELECT e.id, b.batch, b.late
      FROM unnest($1::bigint[]) AS e(id)
     CROSS JOIN LATERAL (
           SELECT batch, young @> e.id OR batch > 0 AND batch = (
                      SELECT min(number) * {WIDTH} FROM period
                       WHERE kind = 'log' AND dropped_at IS NULL) AS late
             FROM batch WHERE high >= e.id ORDER BY high, batch LIMIT 1) b),
sequenced AS MATERIALIZED (
    SELECT batch FROM positions WHERE NOT late
     UNION
    SELECT b.batch FROM positions p CROSS JOIN LATERAL (
           SELECT batch FROM batch
            WHERE p.late AND batch > p.batch AND NOT isempty(found) AND found @> p.id
            ORDER BY batch LIMIT 1) b),
delivered AS MATERIALIZED (
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

# Erases response bodies and headers of some events; repeat it while it erases STEP_ATTEMPTS.  Rows
# that owners write are locked with SKIP LOCKED, so that owners do not wait; `erase_leftovers`
# erases what is skipped.
#   found, erased: stored responses of attempts.  The planner overestimates the deliveries, and
#     would read the whole log of attempts for them; LIMIT also limits its estimate.
#   retrying, cleared: the retry state of lanes.  failing, reset: endpoints' circuit breakers.
# Rows are locked in key order, as in every statement that locks several, to avoid deadlocks.
ERASE_RESPONSES = WriteStatement(
    "erase_responses",
    f"""
WITH {_DELIVERIES},
found AS MATERIALIZED (
    SELECT a.*
      FROM delivered g
     CROSS JOIN LATERAL (
           SELECT lane_id, batch, seq, attempt, replica_id FROM attempt
            WHERE lane_id = g.lane_id AND batch = g.batch AND seq = g.seq
              AND response ?| '{{body,headers}}' OFFSET 0) a
     LIMIT {STEP_ATTEMPTS}),
erased AS (
    UPDATE attempt a SET response = a.response - 'body' - 'headers'
      FROM found f
     WHERE a.lane_id = f.lane_id AND a.batch = f.batch AND a.seq = f.seq AND a.attempt = f.attempt
       AND a.replica_id = f.replica_id
    RETURNING 1),
retrying AS MATERIALIZED (
    SELECT p.lane_id FROM lane_progress p JOIN delivered g ON p.lane_id = g.lane_id
     WHERE p.retry_seq = g.seq AND p.last_response ?| '{{body,headers}}'
     ORDER BY p.lane_id FOR NO KEY UPDATE OF p SKIP LOCKED),
cleared AS (
    UPDATE lane_progress p SET last_response = p.last_response - 'body' - 'headers'
      FROM retrying WHERE p.lane_id = retrying.lane_id),
failing AS MATERIALIZED (
    SELECT h.endpoint_id FROM endpoint_health h
     WHERE h.last_response ?| '{{body,headers}}' AND h.endpoint_id IN (
           SELECT l.endpoint_id FROM delivered g JOIN lane l ON l.id = g.lane_id)
     ORDER BY h.endpoint_id FOR NO KEY UPDATE OF h SKIP LOCKED),
reset AS (
    UPDATE endpoint_health h SET last_response = h.last_response - 'body' - 'headers'
      FROM failing WHERE h.endpoint_id = failing.endpoint_id)
SELECT FROM erased
""",  # noqa: S608 (constants only)
)

# Erases dead letters of a tenant, a key or some events.
#   selected: rows with data, locked in id order, as in every statement that locks several.
ERASE_DEAD_LETTERS = WriteStatement(
    "erase_dead_letters",
    f"""
WITH selected AS MATERIALIZED (
    SELECT id FROM dead_letter
     WHERE ($1::text IS NULL OR tenant = $1) AND ($2::text IS NULL OR key = $2)
       AND ($3::bigint[] IS NULL OR outbox_id = ANY ($3))
       AND (num_nonnulls(payload, body, headers) > 0 OR last_response ?| '{{body,headers}}')
       AND outbox_id IS NOT NULL
     ORDER BY id LIMIT {STEP_EVENTS} FOR NO KEY UPDATE),
erased AS (
    UPDATE dead_letter d
       SET payload = NULL, body = NULL, content_type = NULL, headers = NULL,
           last_response = last_response - 'body' - 'headers', erased_at = clock_timestamp()
      FROM selected WHERE d.id = selected.id
    RETURNING 1)
SELECT FROM erased
""",  # noqa: S608
)

# Recently erased events.  An event whose row is gone is found by its erased dead letters.
READ_ERASED = """
SELECT id
  FROM (SELECT id FROM outbox WHERE erased_at > statement_timestamp() - make_interval(secs => $1)
         UNION
        SELECT outbox_id FROM dead_letter
         WHERE erased_at > statement_timestamp() - make_interval(secs => $1)) e
 WHERE id > $2 ORDER BY id LIMIT $3
"""


async def erase_leftovers(connection: StoreConnection, within_s: float) -> int:
    """Erase data that was written after its event was erased; returns the number of rows.

    A request in flight at the time of the erasure has ended by now, and its result was written
    after the erasure.

    Args:
        within_s: covers events erased during the last `within_s` seconds.
    """
    erased = after = 0
    while ids := [
        row["id"] for row in await connection.fetch(READ_ERASED, within_s, after, STEP_EVENTS)
    ]:
        after = ids[-1]
        erased += await erase_responses(connection, ids)
        erased += await erase_dead_letters(connection, None, None, ids)
    return erased


async def erase_responses(connection: StoreConnection, ids: list[int]) -> int:
    """Erase the responses to some events, step by step; returns the number of attempts."""
    erased, step = 0, STEP_ATTEMPTS
    while step == STEP_ATTEMPTS:
        step = await connection.write_together((SET_PLANNER,), (ERASE_RESPONSES, ids))
        erased += step
    return erased


async def erase_dead_letters(
    connection: StoreConnection, tenant: str | None, key: str | None, ids: list[int] | None
) -> int:
    """Erase the data of dead letters, step by step; returns the number of rows."""
    erased, step = 0, STEP_EVENTS
    while step == STEP_EVENTS:
        step = await connection.write(ERASE_DEAD_LETTERS, tenant, key, ids)
        erased += step
    return erased
