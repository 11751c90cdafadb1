"""Rows that are missing, or left, after a partial restore or an edit by hand.

For the checks of `outbox verify`: each statement returns the violations as text.
"""

from __future__ import annotations

UNUSED_CLAIM_S = 86400
"""Time after which a claimed idempotency key without an event is considered abandoned."""

# Listings and the sequencer join these tables, so a lane or endpoint with a missing row is
# skipped silently; and a lane whose checkpoint is beyond its counter sends nothing.
MISSING_ROWS = """
SELECT format('lane %s of endpoint %s has no counter or no checkpoint', l.id, e.name) AS what
  FROM lane l JOIN endpoint e ON e.id = l.endpoint_id
 WHERE NOT EXISTS (SELECT FROM lane_counter WHERE lane_id = l.id)
    OR NOT EXISTS (SELECT FROM lane_progress WHERE lane_id = l.id)
 UNION ALL
SELECT format('lane %s: checkpoint %s is beyond its counter %s', lane_id, acked_seq, last_seq)
  FROM lane_progress JOIN lane_counter USING (lane_id) WHERE acked_seq > last_seq
 UNION ALL
SELECT format('endpoint %s has no row in ownership', e.name)
  FROM endpoint e
 WHERE e.state <> 'removed' AND NOT EXISTS (SELECT FROM ownership WHERE endpoint_id = e.id)
 UNION ALL
SELECT format('endpoint %s: no row in endpoint_health', e.name)
  FROM endpoint e
 WHERE e.state <> 'removed' AND NOT EXISTS (SELECT FROM endpoint_health WHERE endpoint_id = e.id)
"""

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
