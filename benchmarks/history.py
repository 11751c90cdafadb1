"""A database with a history: events, endpoints, deliveries and dead letters, written by SQL.

It contains what a relay would have written: event n was sent to the one endpoint that subscribes to
its type, and was delivered or dead-lettered. `outbox verify` finds no violation in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.stage import add_endpoint

if TYPE_CHECKING:
    from asyncpg import Connection

PER_BATCH = 100
TENANTS = 50

_EVENTS = "generate_series(0, $1::int - 1) AS i"
# The lane of event i, its batch and its sequence number; each endpoint has one lane.
_PLACE = f"1 + i % $2::int, i / {PER_BATCH} + 1, 1 + i / $2::int"
_IS_DEAD = "i % $3::int = 0"

EVENTS = f"""
INSERT INTO outbox (id, event_id, type, key, payload, created_at) OVERRIDING SYSTEM VALUE
SELECT i + 1, lpad(to_hex(i), 32, '0')::uuid, 't' || i % $2::int || '.made', 'k' || i / 2,
       jsonb_build_object('n', i, 'fill', repeat('x', 200)),
       now() - ($1::int - i) * interval '1 second'
  FROM {_EVENTS}
"""
DELIVERIES = f"""
INSERT INTO delivery_run (lane_id, batch, seq, outbox_id) SELECT {_PLACE}, i + 1 FROM {_EVENTS}
"""
ATTEMPTS = f"""
INSERT INTO attempt_run (lane_id, batch, seq, attempt, replica_id, outcome, status, started_at,
                         elapsed_ms, response)
SELECT {_PLACE}, 1, 1, CASE WHEN {_IS_DEAD} THEN 'f' ELSE 'd' END,
       CASE WHEN {_IS_DEAD} THEN 400 ELSE 200 END, now() - ($1::int - i) * interval '1 second', 3.5,
       CASE WHEN {_IS_DEAD} THEN '{{"version": 1, "status": 400, "body": "no"}}'::jsonb END
  FROM {_EVENTS}
"""
DEAD_LETTERS = f"""
INSERT INTO dead_letter (endpoint_id, lane_id, batch, seq, to_seq, outbox_id, event_id, type, key,
                         payload, published_at, reason, attempts, last_response, at, replica_id)
SELECT l.endpoint_id, l.id, i / {PER_BATCH} + 1, 1 + i / $2::int, 1 + i / $2::int, i + 1,
       lpad(to_hex(i), 32, '0')::uuid, 't' || i % $2::int || '.made', 'k' || i / 2,
       jsonb_build_object('n', i), now() - ($1::int - i) * interval '1 second', 'refused', 1,
       '{{"version": 1, "status": 400, "body": "no"}}',
       now() - ($1::int - i) * interval '1 second', 1
  FROM {_EVENTS} JOIN lane l ON l.id = 1 + i % $2::int WHERE {_IS_DEAD} ORDER BY i
"""
BATCHES = f"""
INSERT INTO batch (batch, high, events, deliveries, lanes, writer, at)
SELECT b + 1, least((b + 1) * {PER_BATCH}, $1::int), {PER_BATCH}, {PER_BATCH},
       array(SELECT DISTINCT 1 + i % $2::int
               FROM generate_series(b * {PER_BATCH}, least((b + 1) * {PER_BATCH}, $1::int) - 1) i),
       1, now() - ($1::int - b * {PER_BATCH}) * interval '1 second'
  FROM generate_series(0, ($1::int - 1) / {PER_BATCH}) b
"""
COUNTERS = """
UPDATE lane_counter
   SET last_seq = ($1::int - lane_id) / $2::int + 1, by_xid = txid_current()
"""
PROGRESS = f"""
UPDATE lane_progress
   SET acked_seq = ($1::int - lane_id) / $2::int + 1,
       delivered_seq = ($1::int - lane_id) / $2::int + 1,
       floor_batch = ($1::int - 1) / {PER_BATCH} + 1
"""
ONCE = """
INSERT INTO idempotency_key (key, event_id, expires_at)
SELECT 'order-' || i, lpad(to_hex(i), 32, '0')::uuid, now() + interval '30 days'
  FROM generate_series(0, $1::int - 1) i
"""


@dataclass(frozen=True, slots=True)
class Past:
    """The size of the history."""

    events: int
    endpoints: int
    dead_every: int
    """Every n-th event was refused."""


SMALL = Past(events=100, endpoints=10, dead_every=10)
LARGE = Past(events=1_000_000, endpoints=10_000, dead_every=10)
QUICK = Past(events=10_000, endpoints=200, dead_every=10)


async def write(connection: Connection[Any], url: str, past: Past) -> None:
    """Fill a new database."""
    for n in range(past.endpoints):
        await add_endpoint(connection, url, name=f"e{n}", types=(f"t{n}.made",))
    given = (past.events, past.endpoints)
    for sql in (EVENTS, DELIVERIES, BATCHES, COUNTERS, PROGRESS):
        await connection.execute(sql, *given[: 2 if "$2" in sql else 1], timeout=600)
    for sql in (ATTEMPTS, DEAD_LETTERS):
        await connection.execute(sql, *given, past.dead_every, timeout=600)
    await connection.execute(ONCE, past.events, timeout=600)
    await connection.execute("SELECT setval('outbox_id_seq', $1)", past.events)
    await connection.execute("VACUUM ANALYZE", timeout=600)
