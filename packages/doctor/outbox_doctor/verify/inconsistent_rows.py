"""Rows that are missing, or left, after a partial restore or an edit by hand.

For the checks of `outbox verify`: each statement returns the violations as text.
"""

from __future__ import annotations

from outbox.store.cluster.timeline import INCARNATION, MISSING_ROWS
from outbox.store.sql.expressions import proves_itself
from outbox_doctor.schema import EMPTIED

UNUSED_CLAIM_S = 86400
"""Time after which a claimed idempotency key without an event is considered abandoned."""

# A lane whose checkpoint is beyond its counter sends nothing.
INCOMPLETE_ROWS = f"""
SELECT format('the table %s was emptied', name) FROM unnest(({EMPTIED})) AS e(name)
 UNION ALL
{MISSING_ROWS}
 UNION ALL
SELECT format('lane %s: checkpoint %s is beyond its counter %s', lane_id, acked_seq, last_seq)
  FROM lane_progress JOIN lane_counter USING (lane_id) WHERE acked_seq > last_seq
"""  # noqa: S608 (constants only)

# Only the lanes into which the next batches are sequenced: the counters of older ones stay.
RESTORED_STATE = f"""
SELECT 'this state was restored: its incarnation was not written here'
 WHERE {INCARNATION} IS NOT TRUE
 UNION ALL
SELECT format('the counter of lane %s of endpoint %s was restored, or changed by hand', l.id,
              e.name)
  FROM endpoint e
  JOIN lane l ON l.endpoint_id = e.id AND l.generation = e.generation
  JOIN lane_counter c ON c.lane_id = l.id AND NOT {proves_itself("c")}
 WHERE e.state NOT IN ('removing', 'removed')
"""  # noqa: S608 (constants only)

DECIDED_BLOCKS = """
SELECT format('lane %s is blocked by sequence %s, which %s', b.lane_id, b.seq,
              coalesce('is ' || x.state, 'is not a dead letter'))
  FROM lane_block b
  LEFT JOIN LATERAL (
       SELECT state FROM dead_letter
        WHERE lane_id = b.lane_id AND b.seq BETWEEN seq AND to_seq
        ORDER BY seq DESC LIMIT 1) x ON true
 WHERE x.state IS DISTINCT FROM 'dead'
"""

ROWS_OF_REMOVED_ENDPOINTS = """
SELECT format('replay %s is for endpoint %s, which is removed', r.id, e.name)
  FROM replay r JOIN endpoint e ON e.id = r.endpoint_id AND e.state = 'removed'
 WHERE r.next_seq <= r.to_seq
 UNION ALL
SELECT format('endpoint %s is removed, but not its secret %s', e.name, s.id)
  FROM endpoint_secret s JOIN endpoint e ON e.id = s.endpoint_id AND e.state = 'removed'
 UNION ALL
SELECT format('endpoint %s is removed, but its subscription is current', e.name)
  FROM subscription s JOIN endpoint e ON e.id = s.endpoint_id AND e.state = 'removed'
 WHERE s.to_batch IS NULL
"""

ABANDONED_CLAIMS = f"""
SELECT format('once key "%s" is claimed without an event', key)
  FROM idempotency_key
 WHERE event_id IS NULL AND expires_at > now()
   AND claimed_at < now() - interval '{UNUSED_CLAIM_S} s'
"""  # noqa: S608 (constants only)
