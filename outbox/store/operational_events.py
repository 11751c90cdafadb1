"""The SQL of operational events, as parts of the statements whose changes they tell of.

`announce` (schema/0005_operational.sql) writes one and says whether somebody wanted
it, `announce_all` many at once.  They are called only while somebody wants any at all
(`WANTED`), so that what a mass of dead letters costs is not doubled for nobody.
Nothing of an event's payload, of headers or of a receiver's body gets into one.
"""

from __future__ import annotations

from outbox.core.delivery.operational_events import (
    DEAD_LETTER_CREATED,
    ENDPOINT_DISABLED,
    ENDPOINT_HELD,
    ENDPOINT_RECOVERED,
    ENDPOINT_STALLED,
    LANE_BLOCKED,
    RELAY_LAGGING,
)

# Asked once in a statement, not for each row.
WANTED = """(
    SELECT EXISTS (SELECT FROM subscription WHERE to_batch IS NULL AND names_operational(types)))"""

ANSWER = "'status', {0}.last_answer -> 'status', 'failure', {0}.last_answer -> 'failure'"

# Of a dead letter `x` in its lane `l`: the type, the endpoint, and what is said.
LETTER_CREATED = f"""'{DEAD_LETTER_CREATED}', x.endpoint_id, jsonb_build_object(
               'dead_letter', x.id, 'lane', lane_name(x.endpoint_id, l.generation, l.slot),
               'sequence', x.seq, 'to_sequence', x.to_seq, 'event', x.event_id, 'type', x.type,
               'reason', x.reason, 'attempts', x.attempts, {ANSWER.format("x")})"""

LANE_IS_BLOCKED = f"""'{LANE_BLOCKED}', x.endpoint_id, jsonb_build_object(
               'dead_letter', x.id, 'lane', lane_name(x.endpoint_id, l.generation, l.slot),
               'sequence', x.seq, 'reason', x.reason)"""

# Writes such rows of `news`.
TELL_NEWS = """
       SELECT announce_all(array_agg(type), array_agg(about), array_agg(told))
         FROM news HAVING count(*) > 0"""

# Of an event that was erased its letter does not know the type, and a range has many.
IS_ORDINARY = """
    CASE WHEN x.type IS NULL THEN holds_ordinary(x.lane_id, x.batch, x.seq, x.to_seq)
         ELSE x.type NOT LIKE 'outbox.%' END"""

LETTER_COLUMNS = """id, lane_id, endpoint_id, batch, seq, to_seq, event_id, type, reason,
              attempts, last_answer"""
"""What the two need, and no payload."""

# Rows `w` of endpoints' health as it is written, with what was told before.
ENDPOINT_IS_HELD = f"""announce('{ENDPOINT_HELD}', w.endpoint_id, jsonb_build_object(
               'state', w.state, 'since', rfc3339(w.told_held_since),
               'held_until', rfc3339(w.held_until), {ANSWER.format("w")}))"""

ENDPOINT_HAS_RECOVERED = f"""announce('{ENDPOINT_RECOVERED}', w.endpoint_id,
               jsonb_build_object('held_since', rfc3339(w.was_held_since)))"""

ENDPOINT_HAS_STALLED = f"""announce('{ENDPOINT_STALLED}', w.endpoint_id, jsonb_build_object(
               'since', rfc3339(w.stalled_since), 'will_be_disabled_at', rfc3339(w.disabled_at)))"""

# In the transaction that disables, after the endpoint's own subscription has ended.
TELL_DISABLED = f"""
SELECT announce('{ENDPOINT_DISABLED}', id, jsonb_build_object(
           'why', state_why, 'by', state_by, 'status', $2::integer, 'failure', $3::text))
  FROM endpoint WHERE id = $1
"""  # noqa: S608 (constants only)

# Events have waited too long: told by the leader, and remembered on the cursor row,
# so that whoever leads next does not tell it again.  Nobody waits for that row.
TELL_LAGGING = f"""
WITH held AS MATERIALIZED (
    SELECT FROM cursor
     WHERE writer = $1 AND ($4::bigint IS NULL OR server_timeline() = $4) AND NOT lagging
       AND (lagging_at IS NULL OR lagging_at < clock_timestamp() - make_interval(secs => $3))
       FOR NO KEY UPDATE SKIP LOCKED),
late AS MATERIALIZED (
    SELECT extract(epoch FROM clock_timestamp() - o.created_at) AS waiting_s
      FROM held, (SELECT high FROM batch ORDER BY batch DESC LIMIT 1) b
     CROSS JOIN LATERAL (
           SELECT type, created_at FROM outbox WHERE id > b.high ORDER BY id LIMIT 1) o
     WHERE o.created_at < clock_timestamp() - make_interval(secs => $2)
       AND o.type NOT LIKE 'outbox.%'),
told AS MATERIALIZED (
    SELECT announce('{RELAY_LAGGING}', NULL,
                    jsonb_build_object('waiting_s', round(waiting_s::numeric, 1))) AS wanted
      FROM late WHERE {WANTED})
UPDATE cursor SET lagging = true, lagging_at = clock_timestamp() FROM told WHERE wanted
RETURNING 1
"""  # noqa: S608 (constants only)

# Nothing waits any more; also if somebody else told that it did.
END_LAGGING = """
WITH held AS MATERIALIZED (
    SELECT lagging FROM cursor WHERE writer = $1 FOR NO KEY UPDATE SKIP LOCKED),
over AS (
    UPDATE cursor SET lagging = false FROM held WHERE held.lagging)
SELECT 1 FROM held
"""
