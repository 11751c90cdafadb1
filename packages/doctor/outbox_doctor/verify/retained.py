"""The events and batches that are kept, which checks may count."""

from __future__ import annotations

from outbox.core.sequencing.partition_window import WIDTH

# Where the retained data begins; the partitions of a dropped period may remain for a while.
# The retained log covers events above its first `high`, and late ones.
KEPT = f"""
kept AS MATERIALIZED (
    SELECT e.id, l.number * {WIDTH} AS batch, l.high
      FROM period l, (SELECT min(number) * {WIDTH} AS id FROM period
                       WHERE kind = 'events' AND dropped_at IS NULL) e
     WHERE l.kind = 'log' AND l.dropped_at IS NULL ORDER BY l.number LIMIT 1)
"""  # noqa: S608 (constants only)
FIRST_ID, FIRST_BATCH = "(SELECT id FROM kept)", "(SELECT batch FROM kept)"

# The batch that sequenced each committed event: the one that found it late, or the one whose
# cursor passed it.  Ids in open gaps are not sequenced yet.
# width_bucket finds the batch by binary search; a join would be quadratic.
# MATERIALIZED prevents computing the batch again per subscription; the arrays are scalar
# subqueries, because each row of a join would carry a copy of them.
SEQUENCED = f"""
{KEPT},
late AS MATERIALIZED (
    SELECT b.batch, generate_series(lower(r), upper(r) - 1) AS id
      FROM batch b, unnest(b.found) r WHERE b.batch >= {FIRST_BATCH}),
open AS (
    SELECT int8range(lo, hi, '[]') AS ids FROM gap
    UNION ALL
    SELECT r FROM (SELECT young FROM batch ORDER BY batch DESC LIMIT 1) b, unnest(b.young) r),
passed AS (
    SELECT array_agg(high ORDER BY high) AS highs, array_agg(batch ORDER BY high) AS batches
      FROM (SELECT high, min(batch) AS batch FROM batch GROUP BY high) first),
reached AS MATERIALIZED (
    SELECT id, tenant, type,
           (SELECT batches FROM passed)[
               width_bucket(id - 1, (SELECT highs FROM passed)) + 1] AS batch
      FROM outbox WHERE id <= (SELECT max(high) FROM batch) AND id >= {FIRST_ID}),
sequenced AS MATERIALIZED (
    SELECT r.id, r.tenant, r.type, coalesce(late.batch, r.batch) AS batch
      FROM reached r LEFT JOIN late ON late.id = r.id
     WHERE NOT EXISTS (SELECT FROM open WHERE open.ids @> r.id)
       AND (late.id IS NOT NULL OR r.id > (SELECT high FROM kept)))
"""  # noqa: S608
