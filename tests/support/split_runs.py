"""The log as if each delivery and attempt were a run of its own, for tests that change rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncpg import Connection

SPLIT_RUNS = """
WITH gone AS (DELETE FROM relay.delivery_run WHERE offsets IS NOT NULL RETURNING *)
INSERT INTO relay.delivery_run (lane_id, batch, seq, outbox_id)
SELECT g.lane_id, g.batch, g.seq + u.n - 1, g.outbox_id + u.after
  FROM gone g CROSS JOIN LATERAL unnest(g.offsets) WITH ORDINALITY AS u(after, n);
WITH gone AS (DELETE FROM relay.attempt_run WHERE count > 1 RETURNING *)
INSERT INTO relay.attempt_run (lane_id, batch, seq, replica_id, started_at, attempt, elapsed_ms,
                               status, outcome, error, response)
SELECT g.lane_id, g.batch, g.seq + u.n - 1, g.replica_id,
       g.started_at + u.after_us * interval '1 microsecond', g.attempt,
       coalesce(g.elapses_ms[u.n], g.elapsed_ms), g.status, g.outcome, g.error,
       relay.response_of(g.response, u.n)
  FROM gone g CROSS JOIN LATERAL unnest(g.starts_us) WITH ORDINALITY AS u(after_us, n);
"""


async def split_runs(connection: Connection[Any]) -> None:
    """Replace each run by runs of one, which change nothing for whoever reads the log."""
    await connection.execute(SPLIT_RUNS)
