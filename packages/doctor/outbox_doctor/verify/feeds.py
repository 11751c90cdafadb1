"""Checks of feeds: what endpoints got of earlier batches, before they subscribed."""

from __future__ import annotations

from outbox.store.sql.type_match import MATCHES
from outbox_doctor.verify.audit_check import AuditCheck
from outbox_doctor.verify.retained import FIRST_BATCH, FIRST_ID, SEQUENCED

# Events of a batch can be counted as long as none is dropped.
_COUNTED_AFTER = f"""
greatest({FIRST_BATCH}, (SELECT max(last_batch) FROM period
                          WHERE kind = 'events' AND dropped_at IS NOT NULL))"""  # noqa: S608

FEED_CHECKS: tuple[AuditCheck, ...] = (
    AuditCheck(
        "counted",
        "each batch has as many events as it sequenced, so that a feed can tell what is missing",
        "restore the missing events, with their ids and event_id, from a backup",
        f"""
        WITH {SEQUENCED},
        counted AS MATERIALIZED (
            SELECT batch, count(*) AS events FROM sequenced GROUP BY batch)
        SELECT format('batch %s has %s of %s events', b.batch, coalesce(c.events, 0), b.events)
          FROM batch b LEFT JOIN counted c ON c.batch = b.batch
         WHERE b.batch > {_COUNTED_AFTER} AND b.events <> coalesce(c.events, 0)
        """,  # noqa: S608 (constants only)
    ),
    # An erased or expired event may have been sendable when it was passed, or not.
    AuditCheck(
        "fed",
        "each feed gave its endpoint every event that it passed, once, and no other",
        "see outbox trace ID; send what is missing again: outbox replay --endpoint NAME --event ID",
        f"""
        WITH {SEQUENCED},
        kinds AS MATERIALIZED (SELECT DISTINCT tenant, type FROM outbox),
        feeding AS MATERIALIZED (
            SELECT s.*, o.tenant AS of_tenant, o.type AS of_type
              FROM feed s JOIN kinds o ON {MATCHES})
        SELECT format('event %s has %s deliveries of feed %s for endpoint %s', outbox_id,
                      sum(actual), feed_id, (
               SELECT e.name FROM feed f JOIN endpoint e ON e.id = f.endpoint_id
                WHERE f.id = feed_id))
          FROM (SELECT f.id AS feed_id, q.id AS outbox_id, true AS allowed, 0 AS actual,
                       o.erased_at IS NULL AND o.expires_at IS NULL
                       AND (f.filter IS NULL OR f.filter_stopped_at IS NULL
                            AND matches_filter(o.payload, f.filter)) AS expected
                  FROM sequenced q
                  JOIN feeding f ON f.of_type = q.type
                   AND coalesce(f.of_tenant, '') = coalesce(q.tenant, '')
                   AND (q.batch, q.id) > (f.from_batch, f.from_id)
                   AND (q.batch, q.id) <= (f.batch, f.outbox_id) AND NOT f.seen @> q.id
                  JOIN outbox o ON o.id = q.id
                UNION ALL
                SELECT d.feed_id, d.outbox_id, false, 1, false
                  FROM delivery d JOIN sequenced q ON q.id = d.outbox_id
                 WHERE d.feed_id IS NOT NULL
                   AND d.batch >= {FIRST_BATCH} AND d.outbox_id >= {FIRST_ID}) each
         GROUP BY feed_id, outbox_id
        HAVING sum(actual) > 1 OR bool_or(expected) AND sum(actual) = 0 OR NOT bool_or(allowed)
        UNION ALL
        SELECT format('lane %s sequence %s: event %s of feed %s', lane_id, seq, outbox_id, feed_id)
          FROM (SELECT d.*, f.endpoint_id,
                       (q.batch, q.id) < lag((q.batch, q.id)) OVER (
                           PARTITION BY d.feed_id, d.lane_id ORDER BY d.seq) AS is_behind,
                       (SELECT batch FROM feed_step
                         WHERE feed_id = d.feed_id AND (to_batch, to_id) >= (q.batch, q.id)
                         ORDER BY to_batch, to_id LIMIT 1) AS step
                  FROM delivery d
                  JOIN sequenced q ON q.id = d.outbox_id
                  LEFT JOIN feed f ON f.id = d.feed_id
                 WHERE d.feed_id IS NOT NULL AND d.batch >= {FIRST_BATCH}) d
          JOIN lane l ON l.id = d.lane_id
         WHERE is_behind OR step IS DISTINCT FROM d.batch
            OR d.endpoint_id IS DISTINCT FROM l.endpoint_id
        """,  # noqa: S608 (constants only)
    ),
)
