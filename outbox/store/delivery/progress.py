"""Progress of lanes: with the attempts of a group, and as checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.core.delivery.delivery_history import HISTORY_INTERVAL_S, INTERVALS
from outbox.store.cluster.replicas import fence
from outbox.store.delivery.attempt_runs import INSERT_ATTEMPTS
from outbox.store.sql.message import WriteStatement
from outbox.store.sql.row_params import composite_json, composite_number

if TYPE_CHECKING:
    from outbox.core.delivery.commands import Progress

# Writes a group of attempts with lane progress.
#   progress: the new progress of lanes.  MATERIALIZED: the array is parsed once.
#   moved: advances the progress of the lanes.  Fencing by epoch: for a lane that this
#     replica no longer owns, nothing at all is written.
#   logged: the attempts, except those of lanes that were not moved.
# One row for each lane that was moved.  It fails if a trigger suppresses the progress of a lane of
# this replica, or one of the $6 runs of attempts while all lanes are moved.
WRITE_PROGRESS = WriteStatement(
    "write_progress",
    f"""{fence("$5")},
progress AS MATERIALIZED (
    SELECT * FROM unnest($4::progress_row[])),
moved AS (
    UPDATE lane_progress p
       SET acked_seq = v.acked_seq, delivered_seq = v.delivered_seq,
           floor_batch = v.floor_batch, retry_seq = v.retry_seq, attempts = v.attempts,
           spent = v.spent, first_attempt_at = to_timestamp(v.first_attempt_at),
           next_attempt_at = to_timestamp(v.next_attempt_at), last_response = v.last_response,
           success_at = to_timestamp(v.success_at)
      FROM fence, progress v
     WHERE p.lane_id = v.lane_id AND p.epoch = v.epoch AND p.acked_seq <= v.acked_seq
    RETURNING p.lane_id),
logged AS ({INSERT_ATTEMPTS}
     WHERE a.lane_id NOT IN (SELECT lane_id FROM progress)
        OR a.lane_id IN (SELECT lane_id FROM moved)
    RETURNING 1)
SELECT FROM moved
 UNION ALL
SELECT FROM fence
 WHERE require_stored(
           (SELECT count(*) FROM logged) = $6::bigint
           OR (SELECT count(*) FROM moved) < (SELECT count(*) FROM progress), 'attempt_run') IS NULL
    OR require_stored(
           (SELECT count(*) FROM moved)
           = (SELECT count(*) FROM progress v JOIN lane_progress p ON p.lane_id = v.lane_id
               AND p.epoch = v.epoch AND p.acked_seq <= v.acked_seq), 'lane_progress') IS NULL
""",  # noqa: S608 (constants only)
)

MOVED = """
WITH moved AS MATERIALIZED (
    SELECT p.* FROM lane_progress p
      JOIN unnest($2::bigint[], $3::bigint[]) AS v(lane_id, epoch) USING (lane_id, epoch)
     WHERE age(p.xmin) <= 0)"""
"""The lanes $2 that `WRITE_PROGRESS` has moved in the same message, in the epochs $3.

The age of a row is 0 if its transaction has written it, and less if a subtransaction has, such as
that of an application's trigger, or a later transaction.  No other one moves a lane in its epoch.

The first CTE of the statements after it.  They have no fence of their own, whose condition is the
time: a lease that ends between two statements would leave progress without its dead letter.  The
lock on the replica's row, which the first statement took, is held until the commit.
"""

# Advances checkpoints of lanes: they only move forward, and only in the owner's epoch (fencing).
#   counted: adds to the delivery history, in the interval that the database's clock is in.  A row
#     of another day is replaced: it is of the day before, or a wrong clock wrote it.  In the order
#     of the endpoints, because replicas write the row of the sum, and an endpoint may have moved.
WRITE_LANE_CHECKPOINTS = WriteStatement(
    "write_lane_checkpoints",
    f"""{fence("$3")},
counted AS (
    INSERT INTO delivery_history AS h (endpoint_id, slot, began_at, successes, failures, latencies)
    SELECT v.endpoint_id, i.n % {INTERVALS}, to_timestamp(i.n * {HISTORY_INTERVAL_S}),
           v.successes, v.failures, v.latencies
      FROM fence,
           (SELECT floor(extract(epoch FROM clock_timestamp())
                         / {HISTORY_INTERVAL_S})::bigint AS n) i,
           unnest($4::json[]) AS document CROSS JOIN json_to_record(document)
           AS v(endpoint_id uuid, successes bigint, failures bigint, latencies bigint[])
     ORDER BY v.endpoint_id
        ON CONFLICT (endpoint_id, slot) DO UPDATE
       SET began_at = excluded.began_at,
           successes = excluded.successes + h.successes * (h.began_at = excluded.began_at)::int,
           failures = excluded.failures + h.failures * (h.began_at = excluded.began_at)::int,
           latencies = CASE WHEN h.began_at <> excluded.began_at THEN excluded.latencies
                ELSE (SELECT array_agg(was + added ORDER BY n)
                        FROM unnest(h.latencies, excluded.latencies)
                             WITH ORDINALITY AS bucket(was, added, n)) END)
UPDATE lane_progress p
   SET acked_seq = v.acked_seq, delivered_seq = v.delivered_seq, floor_batch = v.floor_batch,
       retry_seq = NULL, attempts = 0, spent = 0, first_attempt_at = NULL,
       next_attempt_at = NULL, last_response = NULL, success_at = to_timestamp(v.success_at)
  FROM fence, unnest($2::progress_row[]) AS v
 WHERE p.lane_id = v.lane_id AND p.epoch = v.epoch AND p.acked_seq < v.acked_seq
""",  # noqa: S608 (constants only)
)

# Which checkpoints of lanes were written, when not all were.
READ_LANE_CHECKPOINTS = """
SELECT lane_id FROM lane_progress
  JOIN unnest($1::bigint[], $2::bigint[], $3::bigint[]) AS v(lane_id, epoch, acked_seq)
       USING (lane_id, epoch, acked_seq)
"""


def progress_row(lane_id: int, epoch: int, p: Progress) -> str:
    """The fields in the order of the type `progress_row`."""
    return (
        f"({lane_id},{epoch},{p.acked_seq},{p.delivered_seq},{p.floor_batch},"
        f"{composite_number(p.retry_seq)},{p.attempts},{p.spent},"
        f"{composite_number(p.first_attempt_at)},{composite_number(p.next_attempt_at)},"
        f"{composite_json(p.last_response)},{composite_number(p.success_at)})"
    )
