"""Repair rules of `outbox verify --repair`: for each kind of damage, a finder and a repair.

Damage results from a partial restore, from tables edited by hand, or from interrupted
maintenance.  A rule repairs only values that the other tables determine.  A finder returns what
is wrong, the endpoint, and the value before and after; the repair statement takes some of the
finder's columns as arrays.

A finder reads whole logs, so it runs without locks.  Under the locks of a repair only what was
found is read again: the finder's conditions in `/*: :*/` limit it to some rows, by index.
"""

from __future__ import annotations

from outbox.operations.verify.repair_rule import Repair
from outbox.store.skipped_events import IDS_MAX, SKIPPED_EVENTS

UNUSED_CLAIM_S = 86400
"""After this time a claimed idempotency key without an event is considered abandoned."""

# Sequence numbers of each lane according to other tables: the highest sequenced, attempted,
# delivered and dead-lettered.  Aggregated once, because the planner cannot estimate the rows.
_KNOWN = """
sequenced AS MATERIALIZED (
    SELECT lane_id, max(seq) AS highest, min(seq) AS first FROM delivery
     WHERE true /*: AND lane_id = ANY ($1::bigint[]) :*/ GROUP BY lane_id),
attempted AS MATERIALIZED (
    SELECT lane_id, max(seq) AS attempted,
           max(seq) FILTER (WHERE outcome = 'delivered') AS delivered
      FROM attempt WHERE true /*: AND lane_id = ANY ($1::bigint[]) :*/ GROUP BY lane_id),
dead_lettered AS MATERIALIZED (
    SELECT lane_id, max(to_seq) AS dead_lettered FROM dead_letter
     WHERE true /*: AND lane_id = ANY ($1::bigint[]) :*/ GROUP BY lane_id),
known AS MATERIALIZED (
    SELECT l.id AS lane_id, l.endpoint_id, d.highest, d.first, a.attempted, a.delivered,
           x.dead_lettered, c.last_seq, p.acked_seq
      FROM lane l
      LEFT JOIN sequenced d ON d.lane_id = l.id
      LEFT JOIN attempted a ON a.lane_id = l.id
      LEFT JOIN dead_lettered x ON x.lane_id = l.id
      LEFT JOIN lane_counter c ON c.lane_id = l.id
      LEFT JOIN lane_progress p ON p.lane_id = l.id
     WHERE true /*: AND l.id = ANY ($1::bigint[]) :*/)
"""

# Checkpoint of each lane: a lane completes a delivery before it sends the next one, so the
# highest delivered or dead-lettered sequence is the checkpoint.  Retention may have dropped
# everything below.
_REACHED = """
reached AS MATERIALIZED (
    SELECT *, coalesce(greatest(delivered, dead_lettered), first - 1, last_seq) AS acked,
           coalesce(delivered, first - 1, last_seq) AS delivered_seq
      FROM known),
holed AS MATERIALIZED (
    SELECT p.lane_id
      FROM lane_progress p
      JOIN attempt a ON a.lane_id = p.lane_id AND a.batch >= p.floor_batch
       AND a.seq > p.acked_seq AND a.outcome = 'delivered'
     WHERE true /*: AND p.lane_id = ANY ($1::bigint[]) :*/
     GROUP BY p.lane_id, p.acked_seq
    HAVING max(a.seq) - p.acked_seq > count(DISTINCT a.seq)),
wrong AS MATERIALIZED (
    SELECT r.*, coalesce(acked > acked_seq, false) AS behind
      FROM reached r LEFT JOIN holed h ON h.lane_id = r.lane_id
     WHERE acked_seq IS NULL AND acked IS NOT NULL
        OR acked_seq > highest AND acked < acked_seq
        OR h.lane_id IS NOT NULL AND acked > acked_seq)
"""

_EPOCHS = """
SELECT e.id AS endpoint_id, o.epoch AS was, coalesce(j.epoch, 0) AS journal_epoch,
       format('endpoint %s: %s', e.name,
              CASE WHEN o.endpoint_id IS NULL THEN 'no row in ownership'
                   ELSE format('epoch %s, journal %s', o.epoch, j.epoch) END) AS what,
       greatest(o.epoch, j.epoch, h.epoch, p.epoch, 0) + 1 AS epoch,
       to_jsonb(o.epoch) AS before,
       to_jsonb(greatest(o.epoch, j.epoch, h.epoch, p.epoch, 0) + 1) AS after
  FROM endpoint e
  LEFT JOIN ownership o ON o.endpoint_id = e.id
  LEFT JOIN endpoint_health h ON h.endpoint_id = e.id
 CROSS JOIN LATERAL (
       SELECT max((data ->> 'epoch')::bigint) AS epoch FROM journal
        WHERE endpoint_id = e.id AND kind IN ('endpoint_claimed', 'endpoint_released')) j
 CROSS JOIN LATERAL (SELECT max(epoch) AS epoch FROM lane_progress WHERE endpoint_id = e.id) p
"""

_SKIPPED = SKIPPED_EVENTS.format(
    examined="(SELECT batch, dead FROM batch WHERE true /*: AND batch = ANY ($1::bigint[]) :*/)"
)


REPAIRS: tuple[Repair, ...] = (
    Repair(
        "owners",
        "release the endpoint under a new epoch",
        f"""{_EPOCHS}
         WHERE (e.state <> 'removed' AND o.endpoint_id IS NULL
                OR o.epoch <> coalesce(j.epoch, 0)) /*: AND e.id = ANY ($1::uuid[]) :*/""",
        """
        WITH freed AS (
            INSERT INTO ownership AS o (endpoint_id, epoch)
            SELECT * FROM unnest($1::uuid[], $2::bigint[])
            ON CONFLICT (endpoint_id) DO UPDATE SET replica_id = NULL, epoch = excluded.epoch
            RETURNING o.endpoint_id, o.epoch)
        INSERT INTO journal (kind, actor, endpoint_id, data)
        SELECT 'endpoint_released', 'outbox verify', endpoint_id,
               jsonb_build_object('epoch', epoch, 'reason', 'repaired')
          FROM freed
        """,
        ("endpoint_id", "epoch"),
        key="endpoint_id",
        check="owned",
        expires_replicas=True,
    ),
    Repair(
        "health",
        "add the circuit breaker state of the endpoint, as healthy",
        """
        SELECT e.id AS endpoint_id, o.epoch, NULL::jsonb AS before,
               jsonb_build_object('state', 'healthy') AS after,
               format('endpoint %s: no row in endpoint_health', e.name) AS what
          FROM endpoint e
          LEFT JOIN ownership o ON o.endpoint_id = e.id
         WHERE e.state <> 'removed'
           AND NOT EXISTS (SELECT FROM endpoint_health WHERE endpoint_id = e.id)
        """,
        """
        INSERT INTO endpoint_health (endpoint_id, epoch)
        SELECT endpoint_id, coalesce(epoch, 0)
          FROM unnest($1::uuid[], $2::bigint[]) AS e(endpoint_id, epoch)
        """,
        ("endpoint_id", "epoch"),
        expires_replicas=True,
    ),
    Repair(
        "progress",
        "set the checkpoint to the last delivered or dead-lettered sequence",
        f"""
        WITH {_KNOWN}, {_REACHED}
        SELECT w.endpoint_id, w.lane_id, w.acked, w.delivered_seq AS delivered, o.epoch,
               coalesce((SELECT min(batch) FROM delivery
                          WHERE lane_id = w.lane_id AND seq > w.acked),
                        (SELECT max(batch) + 1 FROM batch)) AS floor_batch,
               to_jsonb(w.acked_seq) AS before, to_jsonb(w.acked) AS after,
               format('lane %s: checkpoint %s, last completed sequence %s', w.lane_id,
                      coalesce(w.acked_seq::text, 'missing'), w.acked) AS what
          FROM wrong w
          LEFT JOIN ownership o ON o.endpoint_id = w.endpoint_id
         -- A pending delivery must not be skipped.
         WHERE NOT w.behind OR NOT EXISTS (
               SELECT FROM delivery n
                WHERE n.lane_id = w.lane_id AND n.seq > w.acked_seq AND n.seq <= w.acked
                  AND NOT EXISTS (SELECT FROM attempt
                                   WHERE lane_id = n.lane_id AND batch = n.batch
                                     AND seq = n.seq AND outcome = 'delivered')
                  AND NOT EXISTS (SELECT FROM dead_letter
                                   WHERE lane_id = n.lane_id AND n.seq BETWEEN seq AND to_seq))
        """,  # noqa: S608 (constants only)
        """
        INSERT INTO lane_progress (lane_id, endpoint_id, acked_seq, delivered_seq, floor_batch,
                                   epoch)
        SELECT lane_id, endpoint_id, acked, delivered, floor_batch, coalesce(epoch, 0)
          FROM unnest($1::bigint[], $2::uuid[], $3::bigint[], $4::bigint[], $5::bigint[],
                      $6::bigint[])
               AS v(lane_id, endpoint_id, acked, delivered, floor_batch, epoch)
        ON CONFLICT (lane_id) DO UPDATE
           SET acked_seq = excluded.acked_seq, delivered_seq = excluded.delivered_seq,
               floor_batch = excluded.floor_batch, retry_seq = NULL, attempts = 0, spent = 0,
               first_attempt_at = NULL, next_attempt_at = NULL, last_response = NULL
        """,
        ("lane_id", "endpoint_id", "acked", "delivered", "floor_batch", "epoch"),
        key="lane_id",
        check="in order",
        expires_replicas=True,
    ),
    Repair(
        "counters",
        "set the counter to the highest sequence",
        f"""
        WITH {_KNOWN}
        SELECT endpoint_id, lane_id, top, to_jsonb(last_seq) AS before, to_jsonb(top) AS after,
               format('lane %s: counter %s, highest sequence %s', lane_id,
                      coalesce(last_seq::text, 'missing'), top) AS what
          FROM known CROSS JOIN LATERAL (
               SELECT coalesce(highest, greatest(acked_seq, dead_lettered, 0)) AS top) t
         WHERE acked_seq IS NOT NULL AND last_seq IS DISTINCT FROM top
           AND greatest(attempted, dead_lettered, 0) <= top
        """,  # noqa: S608 (constants only)
        """
        WITH wrong AS (DELETE FROM lane_counter WHERE lane_id = ANY ($1::bigint[]))
        INSERT INTO lane_counter (lane_id, last_seq)
        SELECT * FROM unnest($1::bigint[], $2::bigint[])
        """,
        ("lane_id", "top"),
        key="lane_id",
        check="contiguous",
        expires_replicas=True,
    ),
    Repair(
        "blocks",
        "unblock the lane, because its dead letter is decided",
        """
        SELECT l.endpoint_id, b.lane_id, to_jsonb(b.seq) AS before, NULL::jsonb AS after,
               format('lane %s is blocked by sequence %s, which %s', b.lane_id, b.seq,
                      coalesce('is ' || x.state, 'is not a dead letter')) AS what
          FROM lane_block b
          JOIN lane l ON l.id = b.lane_id
          LEFT JOIN LATERAL (
               SELECT state FROM dead_letter
                WHERE lane_id = b.lane_id AND b.seq BETWEEN seq AND to_seq
                ORDER BY seq DESC LIMIT 1) x ON true
         WHERE x.state IS DISTINCT FROM 'dead'
        """,
        "DELETE FROM lane_block WHERE lane_id = ANY ($1::bigint[])",
        ("lane_id",),
    ),
    Repair(
        "replays",
        "cancel replays for a removed endpoint",
        """
        SELECT e.id AS endpoint_id, r.id AS replay_id, r.dead_id,
               coalesce(r.next_seq > x.seq, true) AS begun,
               to_jsonb(r.to_seq) AS before, to_jsonb(r.next_seq - 1) AS after,
               format('replay %s is for endpoint %s, which is removed', r.id, e.name) AS what
          FROM replay r
          LEFT JOIN dead_letter x ON x.id = r.dead_id
          JOIN endpoint e ON e.id = r.endpoint_id AND e.state = 'removed'
         WHERE r.next_seq <= r.to_seq
        """,
        """
        WITH cancelled AS (
            SELECT * FROM unnest($1::bigint[], $2::bigint[], $3::boolean[])
                   AS r(id, dead_id, begun)),
        cut AS (
            UPDATE replay r SET to_seq = r.next_seq - 1
              FROM cancelled WHERE r.id = cancelled.id AND cancelled.begun),
        preempted AS (
            DELETE FROM replay r USING cancelled WHERE r.id = cancelled.id AND NOT cancelled.begun)
        UPDATE dead_letter SET state = 'dead' WHERE id IN (SELECT dead_id FROM cancelled)
        """,
        ("replay_id", "dead_id", "begun"),
    ),
    Repair(
        "secrets",
        "delete the signing secrets of a removed endpoint",
        """
        SELECT e.id AS endpoint_id, s.id AS secret_id, to_jsonb(s.id) AS before,
               NULL::jsonb AS after,
               format('endpoint %s is removed, but not its secret %s', e.name, s.id) AS what
          FROM endpoint_secret s JOIN endpoint e ON e.id = s.endpoint_id AND e.state = 'removed'
        """,
        """
        DELETE FROM endpoint_secret s
         USING unnest($1::uuid[], $2::integer[]) AS v(endpoint_id, id)
         WHERE s.endpoint_id = v.endpoint_id AND s.id = v.id
        """,
        ("endpoint_id", "secret_id"),
    ),
    # No event was sequenced for the endpoint after its removal, whatever the row says.
    Repair(
        "subscriptions",
        "end the subscription of a removed endpoint with the batch of its removal",
        """
        SELECT e.id AS endpoint_id, s.from_batch, j.to_batch, NULL::jsonb AS before,
               to_jsonb(j.to_batch) AS after,
               format('endpoint %s is removed, but its subscription is current', e.name) AS what
          FROM subscription s
          JOIN endpoint e ON e.id = s.endpoint_id AND e.state = 'removed'
         CROSS JOIN LATERAL (
               SELECT (data ->> 'to_batch')::bigint AS to_batch FROM journal
                WHERE endpoint_id = e.id AND kind = 'endpoint_removing'
                ORDER BY id DESC LIMIT 1) j
         WHERE s.to_batch IS NULL AND j.to_batch >= s.from_batch
        """,
        """
        UPDATE subscription s SET to_batch = v.to_batch
          FROM unnest($1::uuid[], $2::bigint[], $3::bigint[])
               AS v(endpoint_id, from_batch, to_batch)
         WHERE s.endpoint_id = v.endpoint_id AND s.from_batch = v.from_batch
        """,
        ("endpoint_id", "from_batch", "to_batch"),
    ),
    # An open gap lets the next batches find the events, as late ones; but not those that have
    # deliveries, which would get new ones.
    Repair(
        "skipped events",
        "sequence the skipped events with the next batches",
        f"""
        WITH skipped AS MATERIALIZED (
            SELECT batch, id FROM ({_SKIPPED}) s),
        sequenced AS MATERIALIZED (
            SELECT DISTINCT outbox_id FROM delivery
             WHERE replay_id IS NULL AND backfill_id IS NULL
               AND outbox_id IN (SELECT id FROM skipped))
        SELECT NULL::uuid AS endpoint_id, batch, ids::text AS ids, lacking::text AS lacking,
               jsonb_build_object('events', events, 'first_ids', first_ids) AS before,
               NULL::jsonb AS after,
               format('batch %s skipped %s events: %s', batch, events, left(ids::text, 100)) AS what
          FROM (SELECT batch, count(*) AS events,
                       (array_agg(id ORDER BY id))[:{IDS_MAX}] AS first_ids,
                       range_agg(int8range(id, id, '[]')) AS ids,
                       coalesce(range_agg(int8range(id, id, '[]')) FILTER (
                           WHERE id NOT IN (SELECT outbox_id FROM sequenced)), '{{}}') AS lacking
                  FROM skipped GROUP BY batch) found
         ORDER BY batch
        """,  # noqa: S608 (constants only)
        """
        WITH skipped AS (
            SELECT * FROM unnest($1::bigint[], $2::text[]::int8multirange[],
                                 $3::text[]::int8multirange[]) AS v(batch, ids, lacking)),
        corrected AS (
            UPDATE batch b SET dead = b.dead - s.ids FROM skipped s WHERE b.batch = s.batch)
        INSERT INTO gap (lo, hi)
        SELECT lower(open), upper(open) - 1
          FROM (SELECT range_agg(lacking) AS ids FROM skipped) missing, unnest(missing.ids) open
        """,
        ("batch", "ids", "lacking"),
        key="batch",
        recheck_sql=f"SELECT batch, id FROM ({_SKIPPED}) s",  # noqa: S608 (constants only)
        check="lost",
        expires_replicas=True,
    ),
    # Ids above the cursor are read anyway, young gaps are in the batch row, and ids with
    # deliveries are not missing: read again, they would get new deliveries.
    Repair(
        "gaps",
        "remove open gaps that overlap, are above the cursor or were sequenced",
        """
        WITH newest AS (SELECT high, young FROM batch ORDER BY batch DESC LIMIT 1),
        old AS (
            SELECT coalesce(range_agg(int8range(lo, hi, '[]')), '{}') AS ids, count(*) AS rows,
                   coalesce(sum(hi - lo + 1), 0) AS numbers
              FROM gap),
        late AS MATERIALIZED (
            SELECT o.id FROM gap CROSS JOIN LATERAL (
                   SELECT id FROM outbox WHERE id BETWEEN gap.lo AND gap.hi OFFSET 0) o),
        found AS (
            SELECT coalesce(range_agg(int8range(outbox_id, outbox_id, '[]')), '{}') AS ids
              FROM delivery
             WHERE replay_id IS NULL AND backfill_id IS NULL
               AND outbox_id IN (SELECT id FROM late)),
        right_ones AS (
            SELECT old.ids * int8multirange(int8range(NULL, high, '[]')) - young - found.ids AS ids
              FROM old, newest, found)
        SELECT NULL::uuid AS endpoint_id, ids.before, ids.after, lower(r) AS lo, upper(r) - 1 AS hi,
               format('open gaps %s should be %s', ids.before, ids.after) AS what
          FROM (SELECT to_jsonb((SELECT string_agg(format('%s-%s', lo, hi), ' ' ORDER BY lo)
                                   FROM gap)) AS before,
                       to_jsonb(right_ones.ids::text) AS after, right_ones.ids
                  FROM old, right_ones
                 WHERE old.ids <> right_ones.ids
                    OR old.numbers <> (SELECT coalesce(sum(upper(r) - lower(r)), 0)
                                         FROM unnest(old.ids) r)) ids
          LEFT JOIN LATERAL unnest(ids.ids) r ON true
        """,
        """
        WITH deleted AS (
            DELETE FROM gap
             WHERE NOT EXISTS (SELECT FROM unnest($1::bigint[]) AS kept(lo) WHERE kept.lo = gap.lo))
        INSERT INTO gap (lo, hi)
        SELECT lo, hi FROM unnest($1::bigint[], $2::bigint[]) AS v(lo, hi) WHERE lo IS NOT NULL
        ON CONFLICT (lo) DO UPDATE SET hi = excluded.hi
        """,
        ("lo", "hi"),
        # The leader removes a gap together with the ids that it finds there.
        recheck_sql="SELECT lo, hi FROM gap",
        check="gaps",
        expires_replicas=True,
    ),
    Repair(
        "claims",
        "release once keys without an event that were claimed over a day ago",
        f"""
        SELECT NULL::uuid AS endpoint_id, key, to_jsonb(claimed_at) AS before,
               NULL::jsonb AS after,
               format('once key "%s" is claimed without an event', key) AS what
          FROM idempotency_key
         WHERE event_id IS NULL AND expires_at > now()
           AND claimed_at < now() - interval '{UNUSED_CLAIM_S} s'
           /*: AND key = ANY ($1::text[]) :*/
        """,  # noqa: S608 (constants only)
        """
        UPDATE idempotency_key SET expires_at = clock_timestamp(), resets = resets + 1
         WHERE key = ANY ($1::text[]) AND event_id IS NULL
        """,
        ("key",),
        key="key",
    ),
)

# Listings and the sequencer join these tables, so a lane or endpoint with a missing row is
# skipped silently; and a lane whose checkpoint is beyond its counter sends nothing.
_INCOMPLETE = """
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
"""

INCONSISTENT_ROWS = " UNION ALL ".join(
    [
        f"SELECT what FROM ({found}) found"  # noqa: S608 (constants only)
        for found in (_INCOMPLETE, *(r.find_sql for r in REPAIRS if r.check is None))
    ]
)
"""All damage that no other check finds."""
