"""Statements for the lanes of brokers: what the stream has, receipts, ends and repairs."""

from __future__ import annotations

from outbox.store.cluster.replicas import fence
from outbox.store.sql.message import WriteStatement

# Writes the receipts of brokers' lanes, after their checkpoints.  Fencing by epoch: a receipt that
# waits while the lane moves to another replica must not replace a later one.
WRITE_RECEIPTS = WriteStatement(
    "write_receipts",
    f"""{fence("$5")}
INSERT INTO lane_receipt (lane_id, receipt)
SELECT v.lane_id, v.receipt
  FROM fence, unnest($2::bigint[], $3::bigint[], $4::text[]) AS v(lane_id, epoch, receipt)
  JOIN lane_progress p ON p.lane_id = v.lane_id AND p.epoch = v.epoch
    ON CONFLICT (lane_id) DO UPDATE SET receipt = excluded.receipt
""",  # noqa: S608 (constants only)
    repeatable=True,
)

FOUND_DETAIL = "found in the stream when the lane was opened"

# Acknowledges the deliveries that a broker's stream has, although their responses were lost.
#   moved: advances the lane's progress, fenced by epoch.
#   unlogged, logged: an attempt for each of the deliveries, after those that were logged; if $8.
# One row, unless this replica is fenced.  It fails if a trigger suppresses an attempt.
WRITE_FOUND = WriteStatement(
    "write_found",
    f"""{fence("$7")},
moved AS (
    UPDATE lane_progress p
       SET acked_seq = $4, delivered_seq = $4, floor_batch = $5, retry_seq = NULL, attempts = 0,
           spent = 0, first_attempt_at = NULL, next_attempt_at = NULL, last_response = NULL,
           success_at = to_timestamp($6::float8)
      FROM fence, (SELECT floor_batch, acked_seq FROM lane_progress WHERE lane_id = $2) was
     WHERE p.lane_id = $2 AND p.epoch = $3 AND p.acked_seq < $4
    RETURNING was.floor_batch, was.acked_seq),
unlogged AS MATERIALIZED (
    SELECT d.batch, d.seq, coalesce(a.attempt, 0) + 1 AS attempt
      FROM moved
      JOIN delivery d ON d.lane_id = $2 AND d.batch >= moved.floor_batch
                     AND d.seq > moved.acked_seq AND d.seq <= $4
      LEFT JOIN LATERAL (
           SELECT max(attempt) AS attempt, bool_or(outcome = 'delivered') AS delivered
             FROM attempt WHERE lane_id = $2 AND batch = d.batch AND seq = d.seq) a ON true
     WHERE NOT coalesce(a.delivered, false) AND $8::boolean),
logged AS (
    INSERT INTO attempt_run (lane_id, batch, seq, attempt, outcome, error, started_at, elapsed_ms,
                             replica_id)
    SELECT $2, batch, seq, attempt, 'd', '{FOUND_DETAIL}', to_timestamp($6::float8), 0, $1
      FROM unlogged
    RETURNING 1)
SELECT require_stored((SELECT count(*) FROM logged) = (SELECT count(*) FROM unlogged),
                      'attempt_run') FROM moved
""",  # noqa: S608 (constants only)
    repeatable=True,
)

# Records that a broker's stream has the end entry of a lane, fenced by epoch.
# One row, unless this replica is fenced.
WRITE_END = WriteStatement(
    "write_end",
    f"""{fence("$5")}
UPDATE lane_progress p
   SET end_seq = $4, retry_seq = NULL, attempts = 0, spent = 0, first_attempt_at = NULL,
       next_attempt_at = NULL, last_response = NULL
  FROM fence WHERE p.lane_id = $2 AND p.epoch = $3
""",  # noqa: S608 (constants only)
    repeatable=True,
)

# Deletes the request for a lane that its owner has carried out, unless there is another one.
WRITE_REPAIRED = WriteStatement(
    "write_repaired",
    f"""{fence("$6")}
UPDATE lane l SET repair = NULL, repair_seq = NULL
  FROM fence, lane_progress p
 WHERE l.id = $2 AND p.lane_id = l.id AND p.epoch = $3 AND l.repair = $4 AND l.repair_seq = $5
""",  # noqa: S608 (constants only)
    repeatable=True,
)
