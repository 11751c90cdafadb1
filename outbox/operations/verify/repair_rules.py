"""What `outbox verify --repair` can mend: how each damage is found, and what is done.

Such damage comes of a partial restore, of tables edited by hand, or of maintenance
that was interrupted.  Only that is mended of which the other tables tell for certain
how it has to be.  A finder says what is wrong, whose it is, and how it was and will
be; a mend gets some of its columns as arrays.
"""

from __future__ import annotations

from dataclasses import dataclass

from outbox.store.partitions import PARENTS, UPKEEP_KEY

PARTITIONED = [parent for parents in PARENTS.values() for parent in parents]

UNUSED_CLAIM_S = 86400
"""A key that was claimed so long ago, and published nothing, is not going to."""

# What other tables know of the numbers of each lane: which were given out, tried,
# delivered and given up.  Added up once: the planner cannot know how many there are.
_KNOWN = """
given AS MATERIALIZED (
    SELECT lane_id, max(seq) AS given, min(seq) AS first FROM delivery GROUP BY lane_id),
tried AS MATERIALIZED (
    SELECT lane_id, max(seq) AS tried, max(seq) FILTER (WHERE outcome = 'delivered') AS delivered
      FROM attempt GROUP BY lane_id),
given_up AS MATERIALIZED (
    SELECT lane_id, max(to_seq) AS given_up FROM dead_letter GROUP BY lane_id),
known AS MATERIALIZED (
    SELECT l.id AS lane_id, l.endpoint_id, d.given, d.first, a.tried, a.delivered, x.given_up,
           c.last_seq, p.acked_seq
      FROM lane l
      LEFT JOIN given d ON d.lane_id = l.id
      LEFT JOIN tried a ON a.lane_id = l.id
      LEFT JOIN given_up x ON x.lane_id = l.id
      LEFT JOIN lane_counter c ON c.lane_id = l.id
      LEFT JOIN lane_progress p ON p.lane_id = l.id)
"""

# How far each lane is: it passes a number before it sends the next one, so the highest
# that was delivered or given up tells.  What lies below may be gone with its retention.
_REACHED = """
reached AS MATERIALIZED (
    SELECT *, coalesce(greatest(delivered, given_up), first - 1, last_seq) AS acked,
           coalesce(delivered, first - 1, last_seq) AS delivered_seq
      FROM known),
holed AS MATERIALIZED (
    SELECT p.lane_id
      FROM lane_progress p
      JOIN attempt a ON a.lane_id = p.lane_id AND a.batch >= p.floor_batch
       AND a.seq > p.acked_seq AND a.outcome = 'delivered'
     GROUP BY p.lane_id, p.acked_seq
    HAVING max(a.seq) - p.acked_seq > count(DISTINCT a.seq)),
wrong AS MATERIALIZED (
    SELECT r.*, coalesce(acked > acked_seq, false) AS behind
      FROM reached r LEFT JOIN holed h ON h.lane_id = r.lane_id
     WHERE acked_seq IS NULL AND acked IS NOT NULL
        OR acked_seq > given AND acked < acked_seq
        OR h.lane_id IS NOT NULL AND acked > acked_seq)
"""

_EPOCHS = """
SELECT e.id AS endpoint_id, o.epoch AS was, coalesce(j.epoch, 0) AS told,
       format('endpoint %s: %s', e.name,
              CASE WHEN o.endpoint_id IS NULL THEN 'it cannot be owned'
                   ELSE format('epoch %s, journal %s', o.epoch, j.epoch) END) AS what,
       greatest(o.epoch, j.epoch, h.epoch, p.epoch, 0) + 1 AS epoch,
       to_jsonb(o.epoch) AS before,
       to_jsonb(greatest(o.epoch, j.epoch, h.epoch, p.epoch, 0) + 1) AS after
  FROM endpoint e
  LEFT JOIN ownership o ON o.endpoint_id = e.id
  LEFT JOIN endpoint_health h ON h.endpoint_id = e.id
 CROSS JOIN LATERAL (
       SELECT max((data ->> 'epoch')::bigint) AS epoch FROM journal
        WHERE endpoint_id = e.id AND kind IN ('endpoint_claimed', 'endpoint_freed')) j
 CROSS JOIN LATERAL (SELECT max(epoch) AS epoch FROM lane_progress WHERE endpoint_id = e.id) p
"""


@dataclass(frozen=True, slots=True)
class Repair:
    """A kind of damage, and what mends it."""

    name: str
    does: str
    """In words, for whoever is asked whether to go on."""
    find: str
    """Gives `what`, `endpoint_id`, `before`, `after` and the columns that are taken."""
    mend: str
    takes: tuple[str, ...]
    check: str | None = None
    """Which check of the audit finds it besides; None: only this finder does."""
    forgets: bool = False
    """Relays hold in memory what is mended, so they have to begin anew."""


REPAIRS: tuple[Repair, ...] = (
    Repair(
        "owners",
        "free the endpoint, under a later epoch than any that is known",
        f"""{_EPOCHS}
         WHERE e.state <> 'removed' AND o.endpoint_id IS NULL
            OR o.epoch <> coalesce(j.epoch, 0)""",
        """
        WITH freed AS (
            INSERT INTO ownership AS o (endpoint_id, epoch)
            SELECT * FROM unnest($1::uuid[], $2::bigint[])
            ON CONFLICT (endpoint_id) DO UPDATE SET replica_id = NULL, epoch = excluded.epoch
            RETURNING o.endpoint_id, o.epoch)
        INSERT INTO journal (kind, actor, endpoint_id, data)
        SELECT 'endpoint_freed', 'outbox verify', endpoint_id,
               jsonb_build_object('epoch', epoch, 'why', 'repaired')
          FROM freed
        """,
        ("endpoint_id", "epoch"),
        check="owned",
        forgets=True,
    ),
    Repair(
        "health",
        "take the endpoint for healthy until its owner knows better",
        """
        SELECT e.id AS endpoint_id, o.epoch, NULL::jsonb AS before,
               jsonb_build_object('state', 'healthy') AS after,
               format('endpoint %s: nothing is known of its health', e.name) AS what
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
        forgets=True,
    ),
    Repair(
        "progress",
        "go on behind the last number that was delivered or given up",
        f"""
        WITH {_KNOWN}, {_REACHED}
        SELECT w.endpoint_id, w.lane_id, w.acked, w.delivered_seq AS delivered, o.epoch,
               coalesce((SELECT min(batch) FROM delivery
                          WHERE lane_id = w.lane_id AND seq > w.acked),
                        (SELECT max(batch) + 1 FROM batch)) AS floor_batch,
               to_jsonb(w.acked_seq) AS before, to_jsonb(w.acked) AS after,
               format('lane %s: checkpoint %s, delivered or given up is number %s', w.lane_id,
                      coalesce(w.acked_seq::text, 'missing'), w.acked) AS what
          FROM wrong w
          LEFT JOIN ownership o ON o.endpoint_id = w.endpoint_id
         -- What was neither delivered nor given up must not be passed over.
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
               floor_batch = excluded.floor_batch, head_seq = NULL, attempts = 0, spent = 0,
               first_attempt_at = NULL, next_attempt_at = NULL, last_answer = NULL
        """,
        ("lane_id", "endpoint_id", "acked", "delivered", "floor_batch", "epoch"),
        check="in order",
        forgets=True,
    ),
    Repair(
        "counters",
        "count on from the highest number that was given out",
        f"""
        WITH {_KNOWN}
        SELECT endpoint_id, lane_id, top, to_jsonb(last_seq) AS before, to_jsonb(top) AS after,
               format('lane %s: counter %s, the highest number is %s', lane_id,
                      coalesce(last_seq::text, 'missing'), top) AS what
          FROM known CROSS JOIN LATERAL (
               SELECT coalesce(given, greatest(acked_seq, given_up, 0)) AS top) t
         WHERE acked_seq IS NOT NULL AND last_seq IS DISTINCT FROM top
           AND greatest(tried, given_up, 0) <= top
        """,  # noqa: S608 (constants only)
        """
        WITH wrong AS (DELETE FROM lane_counter WHERE lane_id = ANY ($1::bigint[]))
        INSERT INTO lane_counter (lane_id, last_seq)
        SELECT * FROM unnest($1::bigint[], $2::bigint[])
        """,
        ("lane_id", "top"),
        check="numbered",
        forgets=True,
    ),
    Repair(
        "blocks",
        "let the lane go on, because what it waits for is decided",
        """
        SELECT l.endpoint_id, b.lane_id, to_jsonb(b.seq) AS before, NULL::jsonb AS after,
               format('lane %s waits for a decision about number %s, which %s', b.lane_id, b.seq,
                      coalesce('is ' || x.state, 'was not given up')) AS what
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
        "call off what a removed endpoint would be sent again",
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
        WITH asked AS (
            SELECT * FROM unnest($1::bigint[], $2::bigint[], $3::boolean[])
                   AS r(id, dead_id, begun)),
        cut AS (
            UPDATE replay r SET to_seq = r.next_seq - 1
              FROM asked WHERE r.id = asked.id AND asked.begun),
        called_off AS (
            DELETE FROM replay r USING asked WHERE r.id = asked.id AND NOT asked.begun)
        UPDATE dead_letter SET state = 'dead' WHERE id IN (SELECT dead_id FROM asked)
        """,
        ("replay_id", "dead_id", "begun"),
    ),
    Repair(
        "secrets",
        "forget the signing secrets of a removed endpoint",
        """
        SELECT e.id AS endpoint_id, s.id AS secret_id, to_jsonb(s.id) AS before,
               NULL::jsonb AS after,
               format('endpoint %s is removed, and its secret %s is kept', e.name, s.id) AS what
          FROM endpoint_secret s JOIN endpoint e ON e.id = s.endpoint_id AND e.state = 'removed'
        """,
        """
        DELETE FROM endpoint_secret s
         USING unnest($1::uuid[], $2::integer[]) AS v(endpoint_id, id)
         WHERE s.endpoint_id = v.endpoint_id AND s.id = v.id
        """,
        ("endpoint_id", "secret_id"),
    ),
    # Nothing was sequenced for it since it was removed, whatever the row says.
    Repair(
        "subscriptions",
        "end the subscription with the batch that its endpoint was removed with",
        """
        SELECT e.id AS endpoint_id, s.from_batch, j.to_batch, NULL::jsonb AS before,
               to_jsonb(j.to_batch) AS after,
               format('endpoint %s is removed, and its subscription goes on', e.name) AS what
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
    # What lies above the cursor is read anyway, young gaps stand in the batch, and what
    # has deliveries is not missing: read again, it would get new ones.
    Repair(
        "gaps",
        "keep each open id once, none above the cursor, and none that was sequenced",
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
              FROM delivery WHERE replay_id IS NULL AND outbox_id IN (SELECT id FROM late)),
        right_ones AS (
            SELECT old.ids * int8multirange(int8range(NULL, high, '[]')) - young - found.ids AS ids
              FROM old, newest, found)
        SELECT NULL::uuid AS endpoint_id, ids.before, ids.after, lower(r) AS lo, upper(r) - 1 AS hi,
               format('open gaps %s are %s', ids.before, ids.after) AS what
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
        WITH gone AS (
            DELETE FROM gap
             WHERE NOT EXISTS (SELECT FROM unnest($1::bigint[]) AS kept(lo) WHERE kept.lo = gap.lo))
        INSERT INTO gap (lo, hi)
        SELECT lo, hi FROM unnest($1::bigint[], $2::bigint[]) AS v(lo, hi) WHERE lo IS NOT NULL
        ON CONFLICT (lo) DO UPDATE SET hi = excluded.hi
        """,
        ("lo", "hi"),
        check="gaps",
        forgets=True,
    ),
    Repair(
        "claims",
        "free once keys for which nothing was published within a day",
        f"""
        SELECT NULL::uuid AS endpoint_id, key, to_jsonb(claimed_at) AS before,
               NULL::jsonb AS after,
               format('once key "%s" is claimed, and nothing was published for it', key) AS what
          FROM once
         WHERE event_id IS NULL AND expires_at > now()
           AND claimed_at < now() - interval '{UNUSED_CLAIM_S} s'
        """,  # noqa: S608 (constants only)
        """
        UPDATE once SET expires_at = clock_timestamp(), resets = resets + 1
         WHERE key = ANY ($1::text[]) AND event_id IS NULL
        """,
        ("key",),
    ),
)

# A table that was cut off to be made a partition again, and never was.  Not a damage,
# because a relay that maintains just now makes such ones; so only while none does.
LOOSE_PARTITIONS = f"""
SELECT c.relname::text AS name
  FROM pg_class c
 WHERE c.relnamespace = quote_ident(current_schema())::regnamespace AND c.relkind = 'r'
   AND c.relname ~ '^({"|".join(PARTITIONED)})_[0-9]+$' AND NOT c.relispartition
   AND pg_try_advisory_xact_lock({UPKEEP_KEY})
 ORDER BY c.relname
"""  # noqa: S608

# Whoever lists or sequences joins these, so what lacks one is passed over in silence; and
# nothing is sent from a lane that believes to be further than it can be.
_INCOMPLETE = """
SELECT format('lane %s of endpoint %s has no counter, or no checkpoint', l.id, e.name) AS what
  FROM lane l JOIN endpoint e ON e.id = l.endpoint_id
 WHERE NOT EXISTS (SELECT FROM lane_counter WHERE lane_id = l.id)
    OR NOT EXISTS (SELECT FROM lane_progress WHERE lane_id = l.id)
 UNION ALL
SELECT format('lane %s: checkpoint %s is beyond its counter %s', lane_id, acked_seq, last_seq)
  FROM lane_progress JOIN lane_counter USING (lane_id) WHERE acked_seq > last_seq
 UNION ALL
SELECT format('endpoint %s cannot be owned', e.name)
  FROM endpoint e
 WHERE e.state <> 'removed' AND NOT EXISTS (SELECT FROM ownership WHERE endpoint_id = e.id)
"""

WHOLE = " UNION ALL ".join(
    [
        f"SELECT what FROM ({found}) found"  # noqa: S608 (constants only)
        for found in (_INCOMPLETE, *(r.find for r in REPAIRS if r.check is None))
    ]
)
"""Every damage that no other check of the audit finds."""
