"""Statements of the delivery log.

The log is ordered by (batch, outbox id, lane, sequence number), newest first, across the lanes of
one or several endpoints.  Each lane is read by its primary key, in portions: of each lane the
batch of the n-th newest run is looked up in the index; what is in all lanes from the highest of
these on is read and sorted.  So a portion has at least n runs of one lane, it has everything
between its ends, and it costs about what it returns, however long the log is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from outbox.operations.dead_letters.queries import LAST_REPLAY
from outbox.operations.events.delivery_counts import BATCH_OF_EVENT, GIVEN_IN
from outbox.operations.lanes import HEAD_ATTEMPTS, LANE_STATE
from outbox.operations.tenancy import OWNS_RANGE
from outbox.store.sql.expressions import RUN_DELIVERIES_MAX
from outbox.store.sql.type_match import TYPE_MATCHES

if TYPE_CHECKING:
    from collections.abc import Callable

# The lanes of endpoints; all generations, whose deliveries stay in the log.
READ_LANES = """
SELECT id AS lane_id, 0::bigint AS floor_batch, 0::bigint AS above_seq FROM lane
 WHERE endpoint_id = ANY ($1)
"""

# Only those with pending deliveries, and where these begin.
READ_PENDING_LANES = f"""
SELECT lane_id, floor_batch, acked_seq AS above_seq
  FROM ({LANE_STATE} WHERE l.endpoint_id = ANY ($1) AND c.last_seq > p.acked_seq) s
 WHERE last_seq > acked_seq
"""  # noqa: S608 (constants only)

# The first batch at or after $1, and the last one before $2.
READ_BATCH_RANGE = """
SELECT coalesce((SELECT batch FROM batch WHERE at >= $1::timestamptz ORDER BY at LIMIT 1),
                CASE WHEN $1::timestamptz IS NULL THEN 0 ELSE 9223372036854775807 END) AS floor,
       CASE WHEN $2::timestamptz IS NULL THEN 9223372036854775807
            ELSE coalesce((SELECT batch FROM batch WHERE at < $2::timestamptz
                            ORDER BY at DESC LIMIT 1), -1) END AS top
"""

# What retention removed of the events or of the log, by its kind.
READ_REMOVED = """
SELECT ended_at AS before, dropped_at AS at FROM period
 WHERE kind = $1 AND dropped_at IS NOT NULL AND ended_at IS NOT NULL
 ORDER BY number DESC LIMIT 1
"""

# Dead letters of several deliveries; $4: of events that all were of this tenant.
COUNT_RANGES = f"""
SELECT count(*) FROM dead_letter d
 WHERE d.endpoint_id = ANY ($1) AND d.outbox_id IS NULL AND d.batch <= $2
   AND ($3::text IS NULL OR d.reason = $3)
   AND ($4::text IS NULL OR {OWNS_RANGE.format(tenant="$4")})
"""  # noqa: S608 (constants only)

# In `_walk`, `l` is a lane with its `floor_batch` and `above_seq`.  The position $10 begins with
# its batch; $11 is the number of runs of a lane.
_TOP = "($10::bigint[])[1]"
_PORTION = f"batch BETWEEN greatest(l.floor_batch, reached.batch) AND {_TOP}"


# The delivery of a place `p` with `lane_id`, `batch` and `seq`: the nearest run at or below its
# number is its own, because a lane has no holes.
_DELIVERY = f"""
     CROSS JOIN LATERAL (
           SELECT outbox_id + coalesce(offsets[p.seq - seq + 1], 0) AS outbox_id, backfill_id,
                  copy_id
             FROM delivery_run
            WHERE lane_id = p.lane_id AND batch = p.batch
              AND seq BETWEEN p.seq - {RUN_DELIVERIES_MAX - 1} AND p.seq
            ORDER BY seq DESC LIMIT 1) d"""  # noqa: S608 (constants only)


class _Source(NamedTuple):
    """Where a walk finds deliveries, as SQL about a lane `l`."""

    nth: str
    """The batch of the newest, or the n-th newest: after `{skipped}` others, from batch `{low}` on.
    Of several kinds of rows, that of each."""
    portion: str
    """The deliveries down to the batch `reached`."""


# Both functions in one list: a join with `unnest` costs more for a run of one.
_DELIVERIES = _Source(
    f"""
SELECT batch FROM delivery_run
 WHERE lane_id = l.lane_id AND batch BETWEEN {{low}} AND {_TOP}
 ORDER BY batch DESC, seq DESC OFFSET {{skipped}} LIMIT 1
""",  # noqa: S608
    f"""
SELECT lane_id, batch, seq + n - 1 AS seq, outbox_id + after AS outbox_id, backfill_id, copy_id
  FROM (SELECT lane_id, batch, seq, outbox_id, backfill_id, copy_id,
               unnest(coalesce(offsets, '{{0}}')) AS after,
               generate_subscripts(coalesce(offsets, '{{0}}'), 1) AS n
          FROM delivery_run WHERE lane_id = l.lane_id AND {_PORTION} OFFSET 0) r
 WHERE seq + n - 1 > l.above_seq
""",  # noqa: S608 (constants only)
)

_NTH_DEAD = f"""
SELECT batch, seq FROM dead_letter
 WHERE lane_id = l.lane_id AND outbox_id IS NOT NULL AND batch BETWEEN {{low}} AND {_TOP}
 ORDER BY batch DESC, seq DESC OFFSET {{skipped}} LIMIT 1
"""  # noqa: S608
_DEAD_PORTION = f"""
SELECT lane_id, batch, seq FROM dead_letter
 WHERE lane_id = l.lane_id AND outbox_id IS NOT NULL AND {_PORTION} AND seq > l.above_seq
"""  # noqa: S608

# A dead letter has failed, whether or not it was ever sent.
_FAILURES = _Source(
    f"""
(SELECT DISTINCT batch, seq FROM attempt_run
  WHERE lane_id = l.lane_id AND outcome <> 'd' AND batch BETWEEN {{low}} AND {_TOP}
  ORDER BY batch DESC, seq DESC OFFSET {{skipped}} LIMIT 1)
 UNION ALL
({_NTH_DEAD})
""",  # noqa: S608
    f"""
SELECT p.*, d.*
  FROM (SELECT lane_id, batch, seq FROM attempt_run
         WHERE lane_id = l.lane_id AND outcome <> 'd' AND {_PORTION} AND seq > l.above_seq
         UNION {_DEAD_PORTION}) p
{_DELIVERY}
""",  # noqa: S608
)
_DEAD = _Source(
    _NTH_DEAD,
    f"SELECT p.*, d.* FROM ({_DEAD_PORTION}) p {_DELIVERY}",  # noqa: S608
)

_STATUS_MATCHES = "status BETWEEN ($3::integer[])[1] AND ($3::integer[])[2]"


# Of scanned deliveries that lie side by side, those with an attempt of which this is true: what was
# sent is read by lanes.
def _tried_side_by_side(name: str, asked: str, condition: str) -> str:
    return f"""
{name} AS MATERIALIZED (
    SELECT lane_id, array_agg(seq) AS seqs
      FROM (SELECT l.lane_id, a.seq + generate_series(0, a.count - 1) AS seq
              FROM (SELECT lane_id, min(batch) AS low, max(batch) AS top
                      FROM scanned WHERE {asked} GROUP BY lane_id) l
             CROSS JOIN LATERAL (
                   SELECT seq, count FROM attempt_run
                    WHERE lane_id = l.lane_id AND batch BETWEEN l.low AND l.top AND {condition}
                   OFFSET 0) a) sent
     GROUP BY lane_id),"""  # noqa: S608 (constants only)


# The same of deliveries between which much may lie: the nearest success at or below a number is its
# own, if it reaches so far.
def _tried_each(name: str, asked: str, condition: str) -> str:
    return f"""
{name} AS MATERIALIZED (
    SELECT lane_id, array_agg(seq) AS seqs
      FROM scanned k
     WHERE {asked} AND (EXISTS (
           SELECT FROM (SELECT seq + count AS ends, status, outcome FROM attempt_run
                         WHERE lane_id = k.lane_id AND batch = k.batch AND outcome = 'd'
                           AND seq BETWEEN k.seq - {RUN_DELIVERIES_MAX - 1} AND k.seq
                         ORDER BY seq DESC LIMIT 1) nearest
            WHERE ends > k.seq AND {condition})
        OR EXISTS (
           SELECT FROM attempt_run
            WHERE lane_id = k.lane_id AND batch = k.batch AND seq = k.seq AND {condition}))
     GROUP BY lane_id),"""  # noqa: S608 (constants only)


# The conditions $1 to $5 of a filter on a delivery `k`, of which at most $6 are taken.  An event
# whose row is gone may have a copy in a dead letter.
#
# Events are read as a set, and each delivery is looked for in it (a hashed subplan, also where
# estimates are wrong: an array is taken to have ten elements).  One by one they cost twice as much.
def _matched(order: str, tried: Callable[[str, str, str], str] = _tried_each) -> str:
    by_event = "($1::text[] IS NOT NULL OR $2::text IS NOT NULL)"
    wanted = """
($1::text[] IS NULL OR type IN (SELECT type FROM wanted_type))
           AND ($2::text IS NULL OR tenant = $2)"""
    return f"""
event AS MATERIALIZED (
    SELECT id, type, tenant FROM outbox
     WHERE {by_event}
       AND id BETWEEN (SELECT min(outbox_id) FROM scanned) AND (SELECT max(outbox_id) FROM scanned)
       AND id = ANY (ARRAY(SELECT outbox_id FROM scanned))),
copy AS MATERIALIZED (
    SELECT k.lane_id, k.seq, x.type, x.tenant
      FROM scanned k
     CROSS JOIN LATERAL (
           SELECT type, tenant FROM dead_letter
            WHERE (id = k.copy_id OR lane_id = k.lane_id AND seq = k.seq)
              AND event_id IS NOT NULL LIMIT 1) x
     WHERE {by_event} AND k.outbox_id NOT IN (SELECT id FROM event)),
wanted_type AS MATERIALIZED (
    SELECT o.type
      FROM (SELECT type FROM event UNION SELECT type FROM copy) o, (SELECT $1::text[] AS types) s
     WHERE {TYPE_MATCHES}),
{tried("responded", "$3::integer[] IS NOT NULL", _STATUS_MATCHES)}
{tried("succeeded", "$4::boolean", "outcome = 'd'")}
matched AS MATERIALIZED (
    SELECT k.*
      FROM scanned k
     WHERE (NOT {by_event}
        OR k.outbox_id IN (SELECT id FROM event WHERE {wanted})
        OR (k.lane_id, k.seq) IN (SELECT lane_id, seq FROM copy WHERE {wanted}))
       AND ($3::integer[] IS NULL
        OR (k.lane_id, k.seq) IN (SELECT lane_id, unnest(seqs) FROM responded))
       AND (NOT $4::boolean
        OR (k.lane_id, k.seq) IN (SELECT lane_id, unnest(seqs) FROM succeeded)
        OR k.seq <= (SELECT acked_seq FROM lane_progress WHERE lane_id = k.lane_id)
           AND NOT coalesce((
               SELECT to_seq >= k.seq FROM dead_letter
                WHERE lane_id = k.lane_id AND seq <= k.seq ORDER BY seq DESC LIMIT 1), false))
       AND ($5::text IS NULL OR EXISTS (
           SELECT FROM dead_letter WHERE lane_id = k.lane_id AND seq = k.seq AND reason = $5))
     ORDER BY {order} LIMIT $6)
"""  # noqa: S608


_NEWEST_FIRST = "k.batch DESC, k.outbox_id DESC, k.lane_id DESC, k.seq DESC"


def _walk(source: _Source, tried: Callable[[str, str, str], str] = _tried_each) -> str:
    """The next portion of a walk over the lanes $7 from their batches $8 on, above the numbers $9.

    It goes down to the n-th newest run of the lane that has the newest one, or less far: until no
    lane has more than n, apart from the batch where it ends.  So what is old in a quiet lane costs
    nothing, and the portion is not larger than all lanes together have room for.

    Parameters: $1 to $6, see `_matched`; $10, the position at which it begins; $11, runs of a lane;
    $12, deliveries to scan.
    """
    newest = source.nth.format(low="l.floor_batch", skipped="0")
    nth = source.nth.format(low="l.floor_batch", skipped="$11::integer - 1")
    above = "greatest(l.floor_batch, coalesce(best.batch, -1) + 1)"
    return f"""
WITH given AS MATERIALIZED (
    SELECT * FROM unnest($7::bigint[], $8::bigint[], $9::bigint[])
                  AS l(lane_id, floor_batch, above_seq)),
newest AS MATERIALIZED (
    SELECT l.*, n.batch
      FROM given l CROSS JOIN LATERAL (SELECT max(batch) AS batch FROM ({newest}) each) n
     WHERE n.batch IS NOT NULL),
best AS MATERIALIZED (
    SELECT max(nth.batch) AS batch
      FROM (SELECT * FROM newest ORDER BY batch DESC, lane_id LIMIT 1) l
     CROSS JOIN LATERAL ({nth}) nth),
reached AS MATERIALIZED (
    SELECT greatest((SELECT batch FROM best), max(nth.batch)) AS batch
      FROM best CROSS JOIN newest l
     CROSS JOIN LATERAL ({source.nth.format(low=above, skipped="$11::integer - 1")}) nth
     WHERE l.batch > coalesce(best.batch, -1)),
scanned AS MATERIALIZED (
    SELECT p.* FROM reached CROSS JOIN newest l CROSS JOIN LATERAL ({source.portion}) p
     WHERE l.batch >= coalesce(reached.batch, 0)
       AND (p.batch, p.outbox_id, p.lane_id, p.seq)
           < ({_TOP}, ($10::bigint[])[2], ($10::bigint[])[3], ($10::bigint[])[4])
     ORDER BY p.batch DESC, p.outbox_id DESC, p.lane_id DESC, p.seq DESC LIMIT $12),
{_matched(_NEWEST_FIRST, tried)}
SELECT s.scanned, s.at, e.batch AS end_batch, e.outbox_id AS end_outbox_id,
       e.lane_id AS end_lane_id, e.seq AS end_seq, m.batch, m.outbox_id, m.lane_id, m.seq,
       m.backfill_id, m.copy_id, (SELECT batch FROM reached) AS reached
  FROM (SELECT count(*) AS scanned, (SELECT at FROM batch WHERE batch = min(scanned.batch)) AS at
          FROM scanned) s
  LEFT JOIN (SELECT * FROM scanned ORDER BY batch, outbox_id, lane_id, seq LIMIT 1) e ON true
  LEFT JOIN matched m ON true
 ORDER BY m.batch DESC, m.outbox_id DESC, m.lane_id DESC, m.seq DESC
"""  # noqa: S608


WALK_DELIVERIES = _walk(_DELIVERIES, _tried_side_by_side)
WALK_FAILURES = _walk(_FAILURES)
WALK_DEAD = _walk(_DEAD)

# What a page shows of deliveries: the nearest dead letter at or below a number may be a range that
# holds it; the attempt is the last one, which for a success may stand in a run.  LIMIT 1: each is
# looked up, whatever the statistics are.
READ_ROWS = f"""
SELECT e.id AS endpoint_id, e.name AS endpoint, p.outbox_id, p.backfill_id,
       coalesce(o.event_id, x.event_id) AS event, coalesce(o.type, x.type) AS type,
       coalesce(o.tenant, x.tenant) AS tenant, coalesce(o.key, x.key) AS key,
       lane_name(l.endpoint_id, l.generation, l.slot) AS lane, p.seq AS sequence,
       CASE WHEN d.id IS NOT NULL THEN coalesce(t.state, d.state)
            WHEN a.outcome = 'd' OR p.seq <= g.acked_seq THEN 'delivered'
            ELSE 'pending' END AS outcome,
       d.reason, d.id AS dead_letter, coalesce(a.attempt, own.attempts, 0) AS attempts,
       CASE WHEN a.attempt > 1 THEN (
                SELECT count(*) FROM attempt_run
                 WHERE lane_id = p.lane_id AND batch = p.batch AND seq = p.seq AND outcome = 'p')
            ELSE 0 END AS probes,
       coalesce(a.status, (own.last_response ->> 'status')::integer) AS status,
       CASE WHEN a.status IS NULL THEN coalesce(a.failure, own.last_response ->> 'failure')
       END AS failure,
       a.elapsed_ms, coalesce(a.started_at, d.at, b.at) AS at, b.at AS sequenced_at
  FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[])
       WITH ORDINALITY AS p(lane_id, batch, seq, outbox_id, backfill_id, copy_id, n)
 CROSS JOIN LATERAL (SELECT * FROM lane WHERE id = p.lane_id LIMIT 1) l
 CROSS JOIN LATERAL (SELECT id, name FROM endpoint WHERE id = l.endpoint_id LIMIT 1) e
 CROSS JOIN LATERAL (SELECT acked_seq FROM lane_progress WHERE lane_id = p.lane_id LIMIT 1) g
 CROSS JOIN LATERAL (SELECT at FROM batch WHERE batch = p.batch LIMIT 1) b
  LEFT JOIN LATERAL (
       SELECT event_id, type, tenant, key FROM outbox WHERE id = p.outbox_id LIMIT 1) o ON true
  LEFT JOIN LATERAL (
       SELECT * FROM (
           SELECT id, reason, state, at, attempts, last_response, seq, to_seq FROM dead_letter
            WHERE lane_id = p.lane_id AND seq <= p.seq ORDER BY seq DESC LIMIT 1) nearest
        WHERE to_seq >= p.seq) d ON true
  -- Of a range, only the first delivery may have been sent.
  LEFT JOIN LATERAL (
       SELECT d.attempts, d.last_response WHERE d.seq = p.seq) own ON true
  LEFT JOIN LATERAL (
       SELECT event_id, type, tenant, key FROM dead_letter
        WHERE o.event_id IS NULL AND id IN (p.copy_id, d.id) AND event_id IS NOT NULL
        LIMIT 1) x ON true
  LEFT JOIN LATERAL (
       SELECT * FROM (
           SELECT attempt, status, outcome, response ->> 'failure' AS failure,
                  started_at + coalesce(starts_us[p.seq - seq + 1], 0) * interval '1 microsecond'
                      AS started_at,
                  coalesce(elapses_ms[p.seq - seq + 1], elapsed_ms) AS elapsed_ms,
                  seq + count AS ends
             FROM attempt_run
            WHERE lane_id = p.lane_id AND batch = p.batch
              AND seq BETWEEN p.seq - {RUN_DELIVERIES_MAX - 1} AND p.seq
            ORDER BY seq DESC, attempt DESC LIMIT 1) nearest
        WHERE ends > p.seq) a ON true
{LAST_REPLAY}
 ORDER BY p.n
"""  # noqa: S608

# The deliveries of the events $7 in the lanes $8 (NULL: in all), after the position $9: from their
# batches, from feeds, replays and backfills.  As in `delivery_counts`, with index lookups only.
FIND_BY_EVENTS = f"""
WITH wanted AS MATERIALIZED (
    SELECT w.id, b.batch, b.lanes
      FROM unnest($7::bigint[]) AS w(id) {BATCH_OF_EVENT}),{GIVEN_IN},
scanned AS MATERIALIZED (
    SELECT d.* FROM (
        SELECT d.*
          FROM given_in w CROSS JOIN LATERAL unnest(w.lanes) AS lane(id)
         CROSS JOIN LATERAL (
               SELECT lane_id, batch, seq, outbox_id, backfill_id, copy_id FROM delivery
                WHERE lane_id = lane.id AND batch = w.batch AND outbox_id = w.id
                  AND replay_id IS NULL AND backfill_id IS NULL OFFSET 0) d
         WHERE $8::bigint[] IS NULL OR lane.id = ANY ($8)
         UNION ALL
        SELECT d.* FROM wanted w CROSS JOIN LATERAL (
               SELECT lane_id, batch, seq, outbox_id, backfill_id, copy_id FROM delivery_run
                WHERE outbox_id = w.id AND (replay_id IS NOT NULL OR backfill_id IS NOT NULL)
                  AND ($8::bigint[] IS NULL OR lane_id = ANY ($8))
               OFFSET 0) d) d
     WHERE (d.outbox_id, d.batch, d.lane_id, d.seq)
           < (($9::bigint[])[2], ($9::bigint[])[1], ($9::bigint[])[3], ($9::bigint[])[4])),
{_matched("k.outbox_id DESC, k.batch DESC, k.lane_id DESC, k.seq DESC")}
SELECT lane_id, batch, seq, outbox_id, backfill_id, copy_id FROM matched
 ORDER BY outbox_id DESC, batch DESC, lane_id DESC, seq DESC
"""  # noqa: S608

# How far each lane has come, and the attempts of its first pending delivery.
READ_LANE_ENDS = f"""
SELECT lane_id, floor_batch, acked_seq,
       {HEAD_ATTEMPTS} AS attempts
  FROM ({LANE_STATE} WHERE l.endpoint_id = ANY ($1)) s
"""  # noqa: S608 (constants only)

# The deliveries of the lanes $1 from their batches $2 on, above the numbers $3 and up to $4, at
# most $5 of each lane.
READ_ENDED = """
SELECT d.lane_id, d.batch, d.seq, d.outbox_id, d.backfill_id, d.copy_id
  FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::bigint[])
       AS l(lane_id, from_batch, after_seq, to_seq)
 CROSS JOIN LATERAL (
       SELECT * FROM delivery
        WHERE lane_id = l.lane_id AND batch >= l.from_batch AND seq > l.after_seq
          AND seq <= l.to_seq
        ORDER BY batch, seq LIMIT $5) d
"""
