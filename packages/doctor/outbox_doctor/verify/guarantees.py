"""Invariant checks of `outbox verify`.

Each check is one query that returns the violations of an invariant, as text.
"""

from __future__ import annotations

from outbox.core.sequencing.partition_window import WIDTH
from outbox.store.refused_rows import IS_REFUSED_SUCCESS
from outbox.store.sequencing.skipped_events import SKIPPED_EVENTS
from outbox.store.sql.expressions import RUN_LENGTH
from outbox.store.sql.type_match import FILTER_MET, MATCHES
from outbox_doctor.verify.audit_check import AuditCheck
from outbox_doctor.verify.feeds import FEED_CHECKS
from outbox_doctor.verify.inconsistent_rows import (
    ABANDONED_CLAIMS,
    DECIDED_BLOCKS,
    INCOMPLETE_ROWS,
    RESTORED_STATE,
    ROWS_OF_REMOVED_ENDPOINTS,
)
from outbox_doctor.verify.retained import FIRST_BATCH, FIRST_ID, KEPT, SEQUENCED

# A filter that could not be evaluated counts as matching, with a journal entry.  The journal is
# read last, and only for events that do not match.
_FILTER_MAY_MATCH = f"""
    ({FILTER_MET} IS NOT FALSE OR EXISTS (
        SELECT FROM journal j
         WHERE j.kind = 'filter_stopped' AND j.data ->> 'filter' = s.filter
           AND (j.data ->> 'from_batch')::bigint <= d.batch))
"""

# Matches subscriptions against distinct (tenant, type) pairs.  There are few pairs; matching
# every event against every subscription takes an hour instead of seconds.
_SUBSCRIBED = f"""
kinds AS MATERIALIZED (SELECT DISTINCT tenant, type FROM outbox),
subscribed AS MATERIALIZED (
    SELECT s.endpoint_id, s.from_batch, s.to_batch, s.filter, o.tenant, o.type
      FROM subscription s JOIN kinds o ON {MATCHES})
"""  # noqa: S608 (constants only)

RESTORE_ALL = (
    "restore the whole schema from one backup: a single table does not fit to the rest, and begins "
    "new lanes at best"
)
NEW_LANES = "start new lanes: outbox endpoint update NAME --lanes N"


CHECKS: tuple[AuditCheck, ...] = (
    AuditCheck(
        "lost",
        "no committed event was skipped as a rolled-back id",
        "run: outbox resequence; the next batches sequence these events, after newer ones",
        f"""
        SELECT format('event %s was skipped by batch %s', id, batch)
          FROM ({SKIPPED_EVENTS.format(examined="batch")}) skipped
        """,  # noqa: S608 (constants only)
    ),
    # The only check that does not trust the index, by which the relay reads: it counts the rows of
    # the table.
    AuditCheck(
        "all there",
        "every id is the id of an event, or proven dead",
        "fewer by the index: REINDEX TABLE outbox; fewer than expected: attach the partition that "
        "is detached, or restore the events; more: outbox resequence, and delete events with ids "
        "below 1",
        f"""
        WITH scope AS MATERIALIZED (
            SELECT accounted_ids() AS ids, open_ids() AS open),
        stored AS MATERIALIZED (
            SELECT o.id / {WIDTH} AS period, (o.id % {WIDTH}) >> 20 AS block, count(*) AS events
              FROM outbox o, scope s
             WHERE s.ids @> o.id AND NOT s.open @> o.id GROUP BY 1, 2),
        expected AS MATERIALIZED (SELECT * FROM expected_events('(,)'))
        SELECT format('ids %s to %s: %s, %s by the index, %s expected', lower(i.ids),
                      upper(i.ids) - 1, coalesce(s.events, 0), a.present, a.expected)
          FROM expected e FULL JOIN stored s USING (period, block)
         CROSS JOIN LATERAL block_ids(period, block) AS i(ids)
         CROSS JOIN LATERAL account(period, block) a
         WHERE coalesce(s.events, 0) <> a.expected OR a.present <> a.expected
        """,  # noqa: S608 (constants only)
        settings="SET LOCAL enable_indexscan = off; SET LOCAL enable_indexonlyscan = off; "
        "SET LOCAL enable_bitmapscan = off; SET LOCAL jit = off",
    ),
    AuditCheck(
        "assigned",
        "the id of every event was assigned by the sequence, which begins at 1",
        "publish the event again, and delete it; its content: outbox trace ID",
        "SELECT format('event %s has id %s', event_id, id) FROM outbox WHERE id < 1",
    ),
    # Expected and actual deliveries are aggregated instead of joined: the planner cannot estimate
    # the size of either, and a nested loop over them would not finish.
    AuditCheck(
        "complete",
        "each committed event has exactly one delivery per subscribed endpoint",
        "see outbox trace ID; publish an event without a delivery again",
        f"""
        WITH {SEQUENCED}, {_SUBSCRIBED}
        SELECT format('event %s has %s deliveries for endpoint %s', id, sum(actual),
                      (SELECT name FROM endpoint e WHERE e.id = endpoint_id))
          FROM (SELECT q.id, s.endpoint_id, q.batch, true AS expected, 0 AS actual
                  FROM sequenced q
                  JOIN subscribed s ON s.type = q.type
                   AND coalesce(s.tenant, '') = coalesce(q.tenant, '')
                   AND s.from_batch <= q.batch AND (s.to_batch IS NULL OR q.batch < s.to_batch)
                 WHERE s.filter IS NULL
                    OR (SELECT matches_filter(o.payload, s.filter) FROM outbox o WHERE o.id = q.id)
                UNION ALL
                SELECT d.outbox_id, l.endpoint_id, d.batch, false, 1
                  FROM delivery d JOIN lane l ON l.id = d.lane_id
                 WHERE num_nonnulls(d.replay_id, d.backfill_id, d.feed_id) = 0
                   AND d.batch >= {FIRST_BATCH} AND d.outbox_id >= {FIRST_ID}) expected_and_actual
         GROUP BY id, endpoint_id, batch HAVING bool_or(expected) AND sum(actual) <> 1
        """,  # noqa: S608 (constants only)
    ),
    AuditCheck(
        "real",
        "each delivery refers to a committed event that its endpoint subscribed to",
        f"{NEW_LANES}; see outbox trace ID",
        f"""
        WITH {KEPT}
        SELECT format('lane %s sequence %s: event %s', d.lane_id, d.seq, d.outbox_id)
          FROM delivery d
          JOIN lane l ON l.id = d.lane_id
          LEFT JOIN outbox o ON o.id = d.outbox_id
         WHERE num_nonnulls(d.replay_id, d.backfill_id, d.feed_id) = 0
           AND d.batch >= {FIRST_BATCH} AND d.outbox_id >= {FIRST_ID}
           AND NOT coalesce(EXISTS (
                 SELECT FROM subscription s
                  WHERE s.endpoint_id = l.endpoint_id AND s.from_batch <= d.batch
                    AND (s.to_batch IS NULL OR d.batch < s.to_batch) AND {MATCHES}
                    AND {_FILTER_MAY_MATCH}), false)
        """,  # noqa: S608 (constants only)
    ),
    AuditCheck(
        "once",
        "no event was sequenced twice for one endpoint, except by replays and backfills",
        "the receiver discards the duplicate by its X-Delivery; see outbox trace ID",
        """
        SELECT format('event %s was sequenced twice for endpoint %s: %s', d.outbox_id,
                      l.endpoint_id, string_agg(d.seq::text, ', '))
          FROM delivery d JOIN lane l ON l.id = d.lane_id
         WHERE d.replay_id IS NULL AND d.backfill_id IS NULL
         GROUP BY d.outbox_id, l.endpoint_id HAVING count(*) > 1
        """,
    ),
    *FEED_CHECKS,
    # LATERAL with OFFSET 0 forces an index scan per replay: the planner underestimates the rows,
    # and a join would be quadratic.
    AuditCheck(
        "replayed",
        "each replayed sequence has exactly one new delivery, of the same event, in order",
        "see outbox dead show ID; replay missing deliveries: outbox dead replay ID",
        f"""
        WITH {KEPT}
        SELECT format('replay %s: %s deliveries for %s sequences from %s', r.id, d.n,
                      r.next_seq - x.seq, x.seq)
          FROM replay r
         CROSS JOIN LATERAL (SELECT seq FROM dead_letter WHERE id = r.dead_id OFFSET 0) x
         CROSS JOIN LATERAL (
               SELECT count(*) AS n, count(DISTINCT replay_seq) AS sequences,
                      coalesce(min(replay_seq), r.next_seq) AS first, max(replay_seq) AS last
                 FROM delivery WHERE replay_id = r.id AND batch >= {FIRST_BATCH}) d
         WHERE d.n <> r.next_seq - d.first OR d.sequences <> d.n OR d.last >= r.next_seq
            OR NOT CASE {FIRST_BATCH} WHEN 0 THEN d.first = x.seq OR EXISTS (
                        SELECT FROM replay former
                         WHERE former.dead_id = r.dead_id AND former.id < r.id
                           AND former.to_seq + 1 = d.first)
                    ELSE d.first >= x.seq END
        UNION ALL
        SELECT format('lane %s sequence %s replaces sequence %s of replay %s', d.lane_id, d.seq,
                      d.replay_seq, d.replay_id)
          FROM (SELECT *, lag(replay_seq) OVER (
                       PARTITION BY replay_id, lane_id ORDER BY seq) AS replay_seq_before
                  FROM delivery WHERE replay_id IS NOT NULL) d
         CROSS JOIN LATERAL (SELECT endpoint_id FROM lane WHERE id = d.lane_id OFFSET 0) l
          LEFT JOIN LATERAL (
               SELECT x.*, r.endpoint_id AS its_endpoint
                 FROM replay r JOIN dead_letter x ON x.id = r.dead_id
                WHERE r.id = d.replay_id OFFSET 0) x ON true
          LEFT JOIN LATERAL (
               SELECT outbox_id + coalesce(offsets[d.replay_seq - seq + 1], 0) AS outbox_id,
                      backfill_id
                 FROM delivery_run
                WHERE x.outbox_id IS NULL AND lane_id = x.lane_id AND batch >= x.batch
                  AND seq <= d.replay_seq AND seq + {RUN_LENGTH} > d.replay_seq LIMIT 1) was ON true
         WHERE x.its_endpoint IS DISTINCT FROM l.endpoint_id
            OR d.replay_seq <= d.replay_seq_before
            OR (x.outbox_id IS NOT NULL OR was.outbox_id IS NOT NULL OR {FIRST_BATCH} = 0)
               AND (coalesce(x.outbox_id, was.outbox_id) IS DISTINCT FROM d.outbox_id
                    OR coalesce(x.backfill_id, was.backfill_id) IS DISTINCT FROM d.backfill_id)
        """,  # noqa: S608
    ),
    AuditCheck(
        "backfilled",
        "each backfill delivers every covered event exactly once, in order per lane",
        "see outbox replay show JOB; start a new backfill: outbox replay",
        f"""
        WITH {KEPT}
        SELECT format('backfill %s: %s deliveries instead of %s', p.job_id, d.n, p.taken)
          FROM replay_job_endpoint p
          JOIN replay_job j ON j.id = p.job_id AND j.kind = 'history'
         CROSS JOIN LATERAL (
               SELECT count(*) AS n FROM delivery
                WHERE backfill_id = p.job_id AND replay_id IS NULL
                  AND batch >= {FIRST_BATCH}) d
         WHERE d.n > p.taken OR d.n < p.taken AND {FIRST_BATCH} = 0
        UNION ALL
        SELECT format('lane %s sequence %s: event %s of backfill %s', d.lane_id, d.seq,
                      d.outbox_id, d.backfill_id)
          FROM (SELECT *, lag(outbox_id) OVER (
                          PARTITION BY backfill_id, lane_id ORDER BY seq) AS before,
                       count(*) OVER (PARTITION BY backfill_id, outbox_id) AS times
                  FROM delivery WHERE backfill_id IS NOT NULL AND replay_id IS NULL) d
         CROSS JOIN LATERAL (SELECT endpoint_id FROM lane WHERE id = d.lane_id OFFSET 0) l
          LEFT JOIN LATERAL (
               SELECT p.endpoint_id, p.first_id, p.next_id, j.gaps
                 FROM replay_job_endpoint p
                 JOIN replay_job j ON j.id = p.job_id AND j.kind = 'history'
                WHERE p.job_id = d.backfill_id OFFSET 0) p ON true
         WHERE p.endpoint_id IS DISTINCT FROM l.endpoint_id OR d.times > 1
            OR d.outbox_id <= d.before OR d.outbox_id < p.first_id OR d.outbox_id >= p.next_id
            OR p.gaps @> d.outbox_id
        """,  # noqa: S608
    ),
    AuditCheck(
        "contiguous",
        "the sequence numbers of each lane are 1, 2, 3, ... without holes",
        f"{NEW_LANES}, or {RESTORE_ALL}",
        f"""
        WITH {KEPT},
        run AS (
            SELECT lane_id, seq, seq + {RUN_LENGTH} AS next_seq,
                   lag(seq + {RUN_LENGTH}) OVER (PARTITION BY lane_id ORDER BY seq) AS expected
              FROM delivery_run WHERE batch >= {FIRST_BATCH}),
        numbers AS (
            SELECT lane_id, min(seq) AS seq, max(next_seq) AS next_seq,
                   sum(next_seq - seq) AS deliveries, bool_or(seq <> expected) AS broken
              FROM run GROUP BY lane_id)
        SELECT format('lane %s: counter %s, %s deliveries from %s to %s', c.lane_id, c.last_seq,
                      coalesce(n.deliveries, 0), n.seq, n.next_seq - 1)
          FROM lane_counter c JOIN lane_progress p ON p.lane_id = c.lane_id
          LEFT JOIN numbers n ON n.lane_id = c.lane_id
         WHERE n.broken OR n.next_seq <> c.last_seq + 1
            OR coalesce(n.seq, c.last_seq + 1)
               > CASE {FIRST_BATCH} WHEN 0 THEN 1 ELSE p.acked_seq + 1 END
        """,  # noqa: S608 (constants only)
    ),
    AuditCheck(
        "accounted",
        "each sequence at or below a checkpoint was either delivered or dead-lettered",
        "ask the receiver whether it has the sequence, and publish the event again if not; see "
        "outbox trace ID",
        # The ranges of a lane in a batch: those that were delivered, less those that were
        # acknowledged, are its dead letters.  Few lanes have some.  The journal has the attempts
        # that a trigger or constraint kept out of the log.
        f"""
        WITH {KEPT},
        given AS MATERIALIZED (
            SELECT d.lane_id, d.batch, range_agg(int8range(
                       d.seq, least(d.seq + {RUN_LENGTH}, p.acked_seq + 1))) AS seqs
              FROM lane_progress p
              JOIN delivery_run d ON d.lane_id = p.lane_id AND d.seq <= p.acked_seq
               AND d.batch >= {FIRST_BATCH}
             GROUP BY d.lane_id, d.batch),
        delivered AS MATERIALIZED (
            SELECT lane_id, batch, range_agg(int8range(seq, seq + count)) AS seqs
              FROM attempt_run WHERE outcome = 'd' AND batch >= {FIRST_BATCH}
             GROUP BY lane_id, batch),
        refused AS MATERIALIZED (
            SELECT (data ->> 'lane')::bigint AS lane_id,
                   range_agg(int8range((data ->> 'sequence')::bigint,
                                       (data ->> 'to_sequence')::bigint, '[]')) AS seqs
              FROM journal WHERE {IS_REFUSED_SUCCESS} GROUP BY 1),
        ended AS (
            SELECT g.lane_id, g.seqs, coalesce(a.seqs, '{{}}') AS delivered,
                   coalesce(x.seqs, '{{}}') AS dead, coalesce(r.seqs, '{{}}') AS refused
              FROM given g
              LEFT JOIN delivered a ON a.lane_id = g.lane_id AND a.batch = g.batch
              LEFT JOIN refused r ON r.lane_id = g.lane_id
              LEFT JOIN (SELECT DISTINCT lane_id FROM dead_letter) has ON has.lane_id = g.lane_id
              LEFT JOIN LATERAL (
                   SELECT range_agg(int8range(x.seq, x.to_seq, '[]')) AS seqs FROM dead_letter x
                    WHERE has.lane_id IS NOT NULL AND x.lane_id = g.lane_id
                      AND x.seq < upper(g.seqs)
                      AND x.seq >= coalesce((
                          SELECT max(y.seq) FROM dead_letter y
                           WHERE y.lane_id = g.lane_id AND y.seq <= lower(g.seqs)), 0)) x ON true)
        SELECT format('lane %s sequences %s to %s: neither delivered nor a dead letter', lane_id,
                      lower(n), upper(n) - 1)
          FROM ended, unnest(seqs - delivered - dead - refused) AS n
         UNION ALL
        SELECT format('lane %s sequences %s to %s: delivered, and a dead letter', lane_id,
                      lower(n), upper(n) - 1)
          FROM ended, unnest(seqs * delivered * dead) AS n
         UNION ALL
        SELECT format('lane %s sequence %s: two dead letters', lane_id, seq)
          FROM (SELECT lane_id, seq, lag(to_seq) OVER (PARTITION BY lane_id ORDER BY seq) AS before
                  FROM dead_letter) x WHERE seq <= before
        """,  # noqa: S608
    ),
    AuditCheck(
        "runs",
        "each row of a run says of each of its deliveries what it says of the first",
        RESTORE_ALL,
        """
        SELECT format('deliveries of lane %s batch %s from sequence %s', lane_id, batch, seq)
          FROM delivery_run
         WHERE offsets[1] <> 0 OR 0 > ANY (offsets) OR cardinality(offsets) = 0
            OR array_position(offsets, NULL) IS NOT NULL
            OR offsets IS NOT NULL AND coalesce(replay_id, backfill_id, copy_id) IS NOT NULL
         UNION ALL
        SELECT format('attempts of lane %s batch %s from sequence %s', lane_id, batch, seq)
          FROM (SELECT *, lag(seq + count) OVER (
                          PARTITION BY lane_id, batch, attempt, replica_id ORDER BY seq) AS next_seq
                  FROM attempt_run) a
         WHERE count <> coalesce(cardinality(starts_us), 1) OR starts_us[1] <> 0
            OR count <> coalesce(cardinality(elapses_ms), count) OR 0 > ANY (starts_us)
            OR array_position(starts_us, NULL) IS NOT NULL
            OR array_position(elapses_ms, NULL) IS NOT NULL
            OR count > 1 AND (outcome <> 'd' OR attempt <> 1) OR seq < next_seq
            OR jsonb_path_exists(
                   response, 'strict $.** ? (@.type() == "array" && ($n == 1 || @.size() != $n))',
                   jsonb_build_object('n', count))
        """,
    ),
    AuditCheck(
        "in order",
        "acknowledged sequences after a checkpoint are contiguous",
        f"{NEW_LANES}, or {RESTORE_ALL}",
        """
        SELECT format('lane %s: acknowledged %s after checkpoint %s', t.lane_id, t.seq, t.acked_seq)
          FROM (SELECT p.lane_id, p.acked_seq, a.seq,
                       dense_rank() OVER (PARTITION BY p.lane_id ORDER BY a.seq) AS nth
                  FROM lane_progress p
                  JOIN attempt a ON a.lane_id = p.lane_id AND a.batch >= p.floor_batch
                   AND a.seq > p.acked_seq AND a.outcome = 'delivered') t
         WHERE t.seq <> t.acked_seq + t.nth
        """,
    ),
    AuditCheck(
        "gaps",
        "open gaps are below the cursor and do not overlap",
        f"the leader removes a gap that it has read; if the violation remains, {RESTORE_ALL}",
        """
        WITH open AS (
            SELECT int8range(lo, hi, '[]') AS ids FROM gap
            UNION ALL
            SELECT r FROM (SELECT young FROM batch ORDER BY batch DESC LIMIT 1) b,
                          unnest(b.young) r)
        SELECT format('gap %s', a.ids) FROM open a
         WHERE upper(a.ids) > (SELECT max(high) FROM batch) + 1
            OR (SELECT count(*) FROM open b WHERE b.ids && a.ids) > 1
        """,
    ),
    AuditCheck(
        "owned",
        "the journal agrees with the tables about owners and endpoint states",
        "restart the relays; set the endpoint's state again: outbox endpoint pause, resume, "
        "enable or remove",
        """
        SELECT format('endpoint %s: epoch %s, journal %s', o.endpoint_id, o.epoch, j.epoch)
          FROM ownership o
          LEFT JOIN LATERAL (
               SELECT max((data ->> 'epoch')::bigint) AS epoch FROM journal j
                WHERE j.endpoint_id = o.endpoint_id
                  AND j.kind IN ('endpoint_claimed', 'endpoint_released')) j ON true
         WHERE o.epoch <> coalesce(j.epoch, 0)
        UNION ALL
        SELECT format('endpoint %s is %s, journal: %s', e.id, e.state, j.kind)
          FROM endpoint e
          LEFT JOIN LATERAL (
               SELECT kind FROM journal j
                WHERE j.endpoint_id = e.id AND j.kind IN (
                      'endpoint_added', 'endpoint_paused', 'endpoint_resumed', 'endpoint_enabled',
                      'endpoint_disabling', 'endpoint_disabled', 'endpoint_removing',
                      'endpoint_removed')
                ORDER BY j.id DESC LIMIT 1) j ON true
         WHERE NOT CASE j.kind
               WHEN 'endpoint_added' THEN e.state = 'active'
               WHEN 'endpoint_resumed' THEN e.state = 'active'
               WHEN 'endpoint_enabled' THEN e.state IN ('active', 'paused')
               ELSE 'endpoint_' || e.state = coalesce(j.kind, '') END
        """,
    ),
    AuditCheck(
        "whole",
        "no row that an endpoint or a lane requires is missing",
        f"remove the endpoint and add it again, or {RESTORE_ALL}",
        INCOMPLETE_ROWS,
    ),
    AuditCheck(
        "restored",
        "the relays of this database have written the sequence numbers that they continue",
        "finish the restore, and start a relay: it begins new lanes, and then this is resolved",
        RESTORED_STATE,
    ),
    AuditCheck(
        "decided",
        "a lane is blocked only by a dead letter that awaits a decision",
        "outbox endpoint resume NAME",
        DECIDED_BLOCKS,
    ),
    AuditCheck(
        "cleared",
        "no secret, subscription or replay is left of removed endpoints",
        "delete these rows in the database, as its owner: nothing uses them",
        ROWS_OF_REMOVED_ENDPOINTS,
    ),
    AuditCheck(
        "claimed",
        "no idempotency key has been claimed for over a day without an event",
        "outbox once reset KEY",
        ABANDONED_CLAIMS,
    ),
)
