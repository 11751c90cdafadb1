"""SQL of lanes: pending deliveries, retry state, blocks, and the condition of their endpoint.

The status, the page, listings of endpoints, traces and the doctor select from it.
"""

from __future__ import annotations

from typing import Any

from outbox.core.model.endpoint_condition import endpoint_condition
from outbox.operations.rows import parse_json
from outbox.store.delivery.lanes import lacks_end


def _select_lanes(acked_seq: str) -> str:
    return f"""
SELECT l.endpoint_id, l.id AS lane_id, l.generation, l.slot, c.last_seq, p.floor_batch,
       p.retry_seq, p.attempts, p.spent, p.first_attempt_at, p.next_attempt_at, p.last_response,
       p.end_seq, {acked_seq} AS acked_seq
  FROM lane l
  JOIN lane_counter c ON c.lane_id = l.id
  JOIN lane_progress p ON p.lane_id = l.id
"""  # noqa: S608 (constants only)


LANE_CHECKPOINT = _select_lanes("p.acked_seq")
"""Progress of each lane as its owner last stored it, which is at most a second old."""
LANE_STATE = _select_lanes("""CASE WHEN c.last_seq = p.acked_seq THEN p.acked_seq
            ELSE greatest(p.acked_seq, (
           SELECT a.seq FROM attempt a
            WHERE a.lane_id = l.id AND a.batch >= p.floor_batch AND a.seq > p.acked_seq
              AND a.outcome = 'delivered'
            ORDER BY a.batch DESC, a.seq DESC LIMIT 1)) END""")
"""Progress of each lane: its checkpoint, or a later acknowledgement, which is looked up only for a
lane with a pending delivery by its checkpoint.  ORDER BY ... LIMIT 1 reads the newest
acknowledgement from the end of the index; max() would not, where the statistics are from a time
with few lanes."""

PENDING = f"""
       (SELECT coalesce(sum(s.last_seq - s.acked_seq), 0)::bigint FROM ({LANE_STATE}) s
         WHERE s.endpoint_id = e.id)"""  # noqa: S608
"""Pending deliveries of an endpoint `e`."""
DEAD_LETTERS = """
       (SELECT count(*) FROM dead_letter d WHERE d.endpoint_id = e.id AND d.state = 'dead')"""
"""Dead letters of an endpoint `e`."""
FED = """EXISTS (
           SELECT FROM feed f WHERE f.endpoint_id = e.id AND f.ended_at IS NULL)"""
"""Whether an endpoint `e` is fed what earlier batches sequenced, before it subscribes."""
SUBSCRIBED = f"""(EXISTS (
           SELECT FROM subscription s WHERE s.endpoint_id = e.id AND s.to_batch IS NULL)
        OR {FED})"""
"""Whether an endpoint `e` has a current subscription, or will have one when it was fed."""
BLOCKED = """EXISTS (
           SELECT FROM lane l JOIN lane_block b ON b.lane_id = l.id WHERE l.endpoint_id = e.id)"""
"""Whether a lane of an endpoint `e` is blocked."""
BLOCKED_BY = """
       (SELECT d.id FROM dead_letter d
         WHERE d.lane_id = b.lane_id AND d.seq <= b.seq AND d.to_seq >= b.seq
         ORDER BY d.seq DESC LIMIT 1)"""
"""The dead letter of a block `b`, which may be a range that includes its sequence number."""
FAILING = "l.attempts > 0 AND l.retry_seq = l.acked_seq + 1"
"""Whether the first pending delivery of a lane `l` has failed at least once."""
HEAD_ATTEMPTS = "CASE WHEN retry_seq = acked_seq + 1 THEN attempts ELSE 0 END"
"""Attempts of the first pending delivery of a lane; what is stored of an earlier one is stale."""
FAILING_LANES = f"""
       (SELECT count(*) FROM lane_progress l WHERE l.endpoint_id = e.id AND {FAILING})"""  # noqa: S608
"""Number of failing lanes of an endpoint `e`, as their owner last stored their progress."""
FIRST_ATTEMPT_AT = """coalesce(
           (SELECT a.started_at FROM attempt_run a
             WHERE a.lane_id = l.lane_id AND a.batch >= l.floor_batch AND a.seq = l.retry_seq
             ORDER BY a.batch, a.attempt LIMIT 1),
           l.first_attempt_at)"""
"""The first attempt of the first pending delivery of a failing lane `l`.  It is read from the log,
because the retry budget may begin with a later one (`first_attempt_at`)."""


def failing_since(first_attempt_at: str) -> str:
    """When an endpoint with the health `h` began to fail; NULL: it does not.

    It is the first attempt of the delivery whose retry budget began first, or when the circuit
    breaker opened, if that was earlier.
    """
    return f"""least({first_attempt_at},
           CASE WHEN h.state IN ('failing', 'rejecting') THEN h.since END)"""


FAILING_SINCE = failing_since(
    f"""(
           SELECT {FIRST_ATTEMPT_AT} FROM lane_progress l
            WHERE l.endpoint_id = e.id AND {FAILING} ORDER BY l.first_attempt_at LIMIT 1)"""  # noqa: S608
)
"""`failing_since` of an endpoint `e`, as the owner of its lanes last stored their progress."""
HEALTH_SINCE = f"""
       CASE WHEN h.state IN ('failing', 'rejecting') THEN {FAILING_SINCE} ELSE h.since END"""
"""Since when the health `h` of an endpoint `e` is as it is; NULL: it has none."""
OLDEST_S = """(
           SELECT extract(epoch FROM clock_timestamp() - o.created_at)::float8
             FROM delivery d JOIN outbox o ON o.id = d.outbox_id
            WHERE d.lane_id = l.lane_id AND d.batch >= l.floor_batch AND d.seq > l.acked_seq
            ORDER BY d.batch, d.seq LIMIT 1)"""
"""Age of the first pending event of a lane `l`, in seconds; costly without a pending delivery."""
BACKLOG = f"""
       (SELECT ARRAY[coalesce(sum(l.last_seq - l.acked_seq), 0)::float8,
                     max(CASE WHEN l.last_seq > l.acked_seq THEN {OLDEST_S} END)]
          FROM ({LANE_STATE} WHERE l.endpoint_id = e.id OFFSET 0) l)"""  # noqa: S608
"""Pending deliveries of an endpoint `e`, and the age of the oldest event among them, in seconds.
Both at once, so that each lane is read once."""


def is_waited_for(lane: str) -> str:
    """Whether a lane's generation is older than the endpoint's and not complete: newer lanes wait.

    Args:
        lane: the alias of its LANE_STATE; `e` is that of its endpoint.
    """
    return (
        f"({lane}.generation < e.generation"
        f" AND ({lane}.last_seq > {lane}.acked_seq OR {lacks_end(lane)}))"
    )


RANK = 'fails DESC, pending DESC, e.name COLLATE "C"'


def rank_endpoints(lanes: str, tenant: str, limit: str) -> str:
    """The CTEs of the endpoints that fail, and of those with the most pending deliveries.

    `lanes` has the lanes with pending deliveries, and those that newer lanes wait for; `totals` has
    one row per endpoint, and `shown` the first `limit` of them in the order of `RANK`.  Of other
    lanes only the counters are compared.

    Args:
        lanes: LANE_STATE or LANE_CHECKPOINT.
        tenant: only the endpoints of this tenant; NULL: all.
    """
    # Without the responses, which may be large.
    columns = """l.endpoint_id, l.lane_id, l.generation, l.slot, l.last_seq, l.acked_seq,
           l.floor_batch, l.retry_seq, l.attempts, l.spent, l.first_attempt_at, l.next_attempt_at"""
    of_tenant = f"e.state <> 'removed' AND ({tenant}::text IS NULL OR e.tenant = {tenant})"
    return f"""
WITH unfinished AS MATERIALIZED (
    SELECT {columns}, l.generation < e.generation AS ended, {lacks_end("l")} AS unended
      FROM ({lanes} WHERE c.last_seq > p.acked_seq) l JOIN endpoint e ON e.id = l.endpoint_id
     WHERE {of_tenant}
     UNION ALL
    SELECT {columns}, true, true
      FROM ({lanes} WHERE c.last_seq = p.acked_seq) l JOIN endpoint e ON e.id = l.endpoint_id
     WHERE {of_tenant} AND {is_waited_for("l")}),
lanes AS MATERIALIZED (
    SELECT l.*, {FAILING} AS failing, ended AND (last_seq > acked_seq OR unended) AS old
      FROM unfinished l),
counts AS MATERIALIZED (
    SELECT endpoint_id, sum(last_seq - acked_seq)::bigint AS pending,
           count(*) FILTER (WHERE failing) AS failing_lanes,
           count(*) FILTER (WHERE old) AS old_lanes,
           coalesce(sum(last_seq - acked_seq) FILTER (WHERE old), 0)::bigint AS old_pending
      FROM lanes GROUP BY endpoint_id),
totals AS MATERIALIZED (
    SELECT e.id AS endpoint_id, e.name, e.state,
           coalesce(c.pending, 0) AS pending, coalesce(c.failing_lanes, 0) AS failing_lanes,
           coalesce(c.old_lanes, 0) AS old_lanes, coalesce(c.old_pending, 0) AS old_pending
      FROM endpoint e LEFT JOIN counts c ON c.endpoint_id = e.id
     WHERE {of_tenant}),
shown AS MATERIALIZED (
    SELECT e.endpoint_id, e.pending, e.failing_lanes, e.old_lanes, e.old_pending,
           e.state = 'active' AND (e.failing_lanes > 0 OR h.state <> 'healthy'
                OR e.endpoint_id IN (SELECT l.endpoint_id FROM lane_block b
                                       JOIN lane l ON l.id = b.lane_id)) AS fails
      FROM totals e LEFT JOIN endpoint_health h ON h.endpoint_id = e.endpoint_id
     ORDER BY {RANK} LIMIT {limit})"""  # noqa: S608


def condition_of(row: Any) -> str:
    """The condition of an endpoint: a row with its state, health, `blocked`, `failing_lanes` and
    `subscribed`.
    """
    return endpoint_condition(
        row["state"],
        row["health"],
        blocked=row["blocked"],
        failing=row["failing_lanes"] > 0,
        subscribed=row["subscribed"],
    )


def retry_state(row: Any, *, failing: bool) -> dict[str, Any]:
    """The retry state of a lane's next delivery; what is stored of an earlier one is stale."""
    return {
        "attempts": row["attempts"] if failing else 0,
        "probes": row["attempts"] - row["spent"] if failing else 0,
        "next_attempt_at": row["next_attempt_at"] if failing else None,
        "last_response": parse_json(row["last_response"]) if failing else None,
    }
