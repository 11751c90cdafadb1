"""Totals of the installation in intervals of ten seconds, for an hour, which the leader writes.

The counts of a row are the differences to the newest row, whichever leader wrote that one, and the
row has the time between the two.  If that time is not known well, there are no counts, so that no
reader computes a wrong rate: after a time without a leader, and when the clock was set.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.store.sql.message import WriteStatement

if TYPE_CHECKING:
    from outbox.store.connection.store_connection import StoreConnection

HISTORY_ROWS = 360
INTERVAL_MIN_S, INTERVAL_MAX_S = 5.0, 60.0
"""No row is written sooner after the newest one, and one that is written later has no counts."""
CLOCK_STEP_S = 2.0
"""A row has no counts if the clocks of leader and database disagree about its interval by more."""
HISTORY_TIMEOUT_MS = 1000
"""An interval whose row takes longer is counted in the next one."""

SET_HISTORY_TIMEOUT = WriteStatement(
    "set_history_timeout", "SELECT set_config('statement_timeout', $1, true)"
)

# Writes a row; $1 are the seconds since the leader wrote the last one, NULL: it is its first.
#   age: the time since the newest row, and whether the counts are those of that time.
#   totals: with the deliveries of removed lanes, so the sums only grow, except when transactions
#     were lost in a failover.  The lanes of removed endpoints have no pending deliveries.
# No row: the newest one is too young, such as that of the leader before.  Two leaders that write at
# once compute the same row.
ADD_INTERVAL = WriteStatement(
    "add_interval",
    f"""
WITH newest AS MATERIALIZED (
    SELECT * FROM installation_history ORDER BY n DESC LIMIT 1),
age AS MATERIALIZED (
    SELECT now.at, extract(epoch FROM now.at - newest.at)::float8 AS seconds
      FROM (SELECT clock_timestamp() AS at OFFSET 0) now LEFT JOIN newest ON true),
known AS MATERIALIZED (
    SELECT at, CASE WHEN seconds BETWEEN {INTERVAL_MIN_S} AND {INTERVAL_MAX_S}
                     AND abs(seconds - coalesce($1::float8, seconds)) <= {CLOCK_STEP_S}
                    THEN seconds END AS seconds
      FROM age WHERE (seconds >= 0 AND seconds < {INTERVAL_MIN_S}) IS NOT TRUE),
totals AS MATERIALIZED (
    SELECT at, seconds, coalesce((SELECT max(batch) FROM batch), 0) AS batch,
           r.deliveries + coalesce((SELECT sum(last_seq) FROM lane_counter), 0)::bigint
               AS sequenced,
           r.deliveries + coalesce((SELECT sum(acked_seq) FROM lane_progress), 0)::bigint
               AS acked
      FROM known, removed_lanes r)
INSERT INTO installation_history AS h
       (slot, n, at, seconds, events, deliveries, completed, pending, batch, sequenced, acked)
SELECT coalesce(b.n + 1, 0) % {HISTORY_ROWS}, coalesce(b.n + 1, 0), t.at, t.seconds,
       CASE WHEN t.seconds IS NOT NULL THEN (
           SELECT coalesce(sum(events), 0) FROM batch WHERE batch > b.batch) END,
       CASE WHEN t.seconds IS NOT NULL THEN greatest(t.sequenced - b.sequenced, 0) END,
       CASE WHEN t.seconds IS NOT NULL THEN greatest(t.acked - b.acked, 0) END,
       greatest(t.sequenced - t.acked, 0), t.batch, t.sequenced, t.acked
  FROM totals t LEFT JOIN newest b ON true
    ON CONFLICT (slot) DO UPDATE
   SET n = excluded.n, at = excluded.at, seconds = excluded.seconds, events = excluded.events,
       deliveries = excluded.deliveries, completed = excluded.completed,
       pending = excluded.pending, batch = excluded.batch, sequenced = excluded.sequenced,
       acked = excluded.acked
 WHERE h.n < excluded.n
""",  # noqa: S608 (constants only)
)


async def add_interval(connection: StoreConnection, since_s: float | None) -> bool:
    """Write the totals; returns whether they were written.

    Args:
        since_s: steady seconds since this leader wrote the last ones; None: it wrote none.

    Raises:
        asyncpg.QueryCanceledError: it took longer than `HISTORY_TIMEOUT_MS`.
        ResponseLost: the connection was lost, and whether they were written is unknown.
        asyncpg.PostgresError: as from any statement.
    """
    timeout = (SET_HISTORY_TIMEOUT, str(HISTORY_TIMEOUT_MS))
    # A crash may lose a row, which leaves a gap.
    return bool(await connection.write_together(timeout, (ADD_INTERVAL, since_s), durable=False))
