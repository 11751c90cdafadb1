"""Erasing stored responses and dead letters of events, in bounded steps.

`outbox.operations.events.erase` erases the events themselves, and then runs these steps for them.
Maintenance repeats the steps for events erased lately, because a request in flight may have been
recorded after the erasure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.store.sql.message import WriteStatement

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

# The owner's function: neither a relay nor an operator may write attempts.
ERASE_RESPONSES = WriteStatement(
    "erase_responses",
    f"SELECT FROM erase_responses($1::bigint[], {STEP_ATTEMPTS})",
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

# Recently erased events, in the order of their erasure: by id, the whole log would be read.  An
# event whose row is gone is found by its erased dead letters.
#   $2, $3: time and id that were read last; at first, no time
READ_ERASED = """
SELECT erased_at, id
  FROM (SELECT erased_at, id FROM outbox
         UNION ALL
        SELECT erased_at, outbox_id FROM dead_letter WHERE outbox_id IS NOT NULL) e
 WHERE erased_at IS NOT NULL
   AND (erased_at, id)
       > (coalesce($2, statement_timestamp() - make_interval(secs => $1)), $3::bigint)
 ORDER BY erased_at, id LIMIT $4
"""


async def erase_leftovers(connection: StoreConnection, within_s: float) -> int:
    """Erase data that was written after its event was erased; returns the number of rows.

    A request in flight at the time of the erasure has ended by now, and its result was written
    after the erasure.

    Args:
        within_s: covers events erased during the last `within_s` seconds.
    """
    erased, after = 0, (None, 0)
    while rows := await connection.fetch(READ_ERASED, within_s, *after, STEP_EVENTS):
        after = tuple(rows[-1])
        ids = sorted({row["id"] for row in rows})
        erased += await erase_responses(connection, ids)
        erased += await erase_dead_letters(connection, None, None, ids)
    return erased


async def erase_responses(connection: StoreConnection, ids: list[int]) -> int:
    """Erase the responses to some events, step by step; returns the number of attempts."""
    erased, step = 0, STEP_ATTEMPTS
    while step == STEP_ATTEMPTS:
        step = await connection.write(ERASE_RESPONSES, ids)
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
