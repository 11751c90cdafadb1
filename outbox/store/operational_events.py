"""SQL of operational events, as parts of the statements whose changes they report.

`publish_operational_event` (schema/0005_operational.sql) publishes one event and returns
whether an endpoint subscribes to it; `publish_operational_events` takes many.  They are called
only while at least one subscription selects operational events (`HAS_OPERATIONAL_SUBSCRIBER`),
so that a burst of dead letters does not cost twice as much without a subscriber.
An event never contains a payload, headers or a response body.
"""

from __future__ import annotations

from outbox.core.delivery.operational_events import (
    DEAD_LETTER_CREATED,
    ENDPOINT_DISABLED,
    ENDPOINT_FAILING,
    ENDPOINT_RECOVERED,
    ENDPOINT_STALLED,
    LANE_BLOCKED,
    LANE_STUCK,
    RELAY_LAGGING,
)
from outbox.store.sql.expressions import is_stream_held
from outbox.store.sql.message import WriteStatement
from outbox.store.sql.type_match import SUBSCRIBERS

# An uncorrelated subquery: evaluated once per statement, not per row.
HAS_OPERATIONAL_SUBSCRIBER = f"""(
    SELECT EXISTS (SELECT FROM {SUBSCRIBERS} s WHERE selects_operational_events(types)))"""  # noqa: S608 (constants only)

RESPONSE_FIELDS = (
    "'status', {0}.last_response -> 'status', 'failure', {0}.last_response -> 'failure'"
)

# Type, endpoint and details of the event for a dead letter `x` in its lane `l`.
DEAD_LETTER_CREATED_EVENT = f"""'{DEAD_LETTER_CREATED}', x.endpoint_id, jsonb_build_object(
               'dead_letter', x.id, 'lane', lane_name(x.endpoint_id, l.generation, l.slot),
               'sequence', x.seq, 'to_sequence', x.to_seq, 'event', x.event_id, 'type', x.type,
               'reason', x.reason, 'attempts', x.attempts, {RESPONSE_FIELDS.format("x")})"""

LANE_BLOCKED_EVENT = f"""'{LANE_BLOCKED}', x.endpoint_id, jsonb_build_object(
               'dead_letter', x.id, 'lane', lane_name(x.endpoint_id, l.generation, l.slot),
               'sequence', x.seq, 'reason', x.reason)"""

# For the progress `x` of a lane `l` of an endpoint `e`, whose next delivery, with the event `o`,
# fails again and again.
LANE_STUCK_EVENT = f"""'{LANE_STUCK}', x.endpoint_id, jsonb_build_object(
               'lane', lane_name(x.endpoint_id, l.generation, l.slot), 'sequence', x.retry_seq,
               'event', o.event_id, 'type', o.type, 'attempts', x.spent,
               'probes', x.attempts - x.spent, 'first_attempt_at', rfc3339(x.first_attempt_at),
               'next_attempt_at', rfc3339(x.next_attempt_at), {RESPONSE_FIELDS.format("x")},
               'skip', CASE WHEN {is_stream_held("x.last_response")} THEN NULL
                       ELSE 'outbox dead skip ' || CASE WHEN e.name ~ '^[A-Za-z0-9@%+=:,./_-]+$'
                       THEN e.name ELSE '''' || replace(e.name, '''', '''"''"''') || '''' END
                       || ' --lane '
                       || lane_name(x.endpoint_id, l.generation, l.slot)
                       || ' --sequence ' || x.retry_seq END)"""

# Publishes the rows of the CTE `reported`.
PUBLISH_REPORTED_EVENTS = """
       SELECT publish_operational_events(array_agg(type), array_agg(endpoint_id),
                                          array_agg(details))
         FROM reported HAVING count(*) > 0"""

# Whether the dead letter `x` concerns an ordinary event.  The dead letter of an erased event
# has no type, and a range covers events of many types: their deliveries are read.
IS_ORDINARY = """
    CASE WHEN x.type IS NULL THEN contains_ordinary_event(x.lane_id, x.batch, x.seq, x.to_seq)
         ELSE x.type NOT LIKE 'outbox.%' END"""

DEAD_LETTER_COLUMNS = """id, lane_id, endpoint_id, batch, seq, to_seq, event_id, type, reason,
              attempts, last_response"""
"""The columns that these expressions require; no payload."""

# Events for a row of the CTE `health`: the new state, and what was reported before (`was_…`).
PUBLISH_ENDPOINT_FAILING = f"""publish_operational_event(
               '{ENDPOINT_FAILING}', health.endpoint_id,
               jsonb_build_object('state', health.state,
                                  'since', rfc3339(health.reported_held_since),
                                  'held_until', rfc3339(health.held_until),
                                  {RESPONSE_FIELDS.format("health")}))"""

PUBLISH_ENDPOINT_RECOVERED = f"""publish_operational_event(
               '{ENDPOINT_RECOVERED}', health.endpoint_id,
               jsonb_build_object('held_since', rfc3339(health.was_held_since)))"""

PUBLISH_ENDPOINT_STALLED = f"""publish_operational_event('{ENDPOINT_STALLED}', health.endpoint_id,
               jsonb_build_object('since', rfc3339(health.stalled_since),
                                  'will_be_disabled_at', rfc3339(health.disabled_at)))"""

# Publishes outbox.endpoint.disabled, in the transaction that disables the endpoint, after its
# own subscription has ended.
PUBLISH_ENDPOINT_DISABLED = WriteStatement(
    "publish_endpoint_disabled",
    f"""
SELECT publish_operational_event('{ENDPOINT_DISABLED}', id, jsonb_build_object(
           'reason', state_comment, 'by', state_by, 'status', $2::integer, 'failure', $3::text))
  FROM endpoint WHERE id = $1
""",  # noqa: S608 (constants only)
)

# Publishes outbox.relay.lagging when events wait too long for sequencing.
#   report: the row of the report, unless it was made lately; it is not the cursor row, which the
#     session that is to blame may hold.  Only for the leader, or if there is such a session ($5).
#   late: the oldest unsequenced event, if it has waited longer than $2 seconds.
#   reported: publishes the event; MATERIALIZED, so that it is published exactly once.
PUBLISH_LAGGING = WriteStatement(
    "publish_lagging",
    f"""
WITH report AS MATERIALIZED (
    SELECT FROM lag_report
     WHERE NOT lagging
       AND (lagging_at IS NULL
            OR lagging_at NOT BETWEEN clock_timestamp() - make_interval(secs => $3)
                                  AND clock_timestamp())
       AND EXISTS (SELECT FROM cursor
                    WHERE (writer = $1 OR $5::text IS NOT NULL)
                      AND ($4::bigint IS NULL OR server_fence() = $4))
       FOR NO KEY UPDATE SKIP LOCKED),
late AS MATERIALIZED (
    SELECT extract(epoch FROM clock_timestamp() - o.created_at) AS waiting_s
      FROM report, (SELECT high FROM batch ORDER BY batch DESC LIMIT 1) b
     CROSS JOIN LATERAL (
           SELECT type, created_at FROM outbox WHERE id > b.high ORDER BY id LIMIT 1) o
     WHERE o.created_at < clock_timestamp() - make_interval(secs => $2)
       AND o.type NOT LIKE 'outbox.%'),
reported AS MATERIALIZED (
    SELECT publish_operational_event('{RELAY_LAGGING}', NULL,
                    jsonb_build_object('waiting_s', round(waiting_s::numeric, 1),
                                       'blocked_by', $5::text::jsonb)) AS published
      FROM late WHERE {HAS_OPERATIONAL_SUBSCRIBER})
UPDATE lag_report SET lagging = true, lagging_at = clock_timestamp() FROM reported WHERE published
""",  # noqa: S608 (constants only)
)

# Clears the lagging state, whichever replica reported it; SKIP LOCKED: another one writes it.
END_LAGGING = WriteStatement(
    "end_lagging",
    """
WITH report AS MATERIALIZED (
    SELECT lagging FROM lag_report WHERE EXISTS (SELECT FROM cursor WHERE writer = $1)
       FOR NO KEY UPDATE SKIP LOCKED),
ended AS (
    UPDATE lag_report SET lagging = false FROM report WHERE report.lagging)
SELECT FROM report
""",
)
