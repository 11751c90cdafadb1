"""Checks of how events were sequenced, from the tables alone.

Everything is read in one snapshot, so it can run while sequencers and producers work; the result is
correct at every moment, not only at the end.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncpg import Connection

# Open gaps, and all that the batches recorded about ids.
_CURSOR = """
newest AS (SELECT high, young FROM relay.batch ORDER BY batch DESC LIMIT 1),
open AS (
    SELECT r AS ids FROM newest, unnest(young) r
    UNION ALL
    SELECT int8range(lo, hi, '[]') FROM relay.gap),
dead AS (SELECT r AS ids FROM relay.batch, unnest(dead) r)
"""

# An endpoint misses a committed event that the cursor has passed.
_LOST = f"""
WITH {_CURSOR},
missing AS (
    SELECT o.id, e.id AS endpoint_id
      FROM newest JOIN relay.outbox o ON o.id <= newest.high CROSS JOIN relay.endpoint e
    EXCEPT
    SELECT d.outbox_id, l.endpoint_id FROM relay.delivery d JOIN relay.lane l ON l.id = d.lane_id)
SELECT id FROM missing WHERE NOT EXISTS (SELECT FROM open WHERE ids @> id)
 UNION
SELECT o.id FROM dead JOIN relay.outbox o ON o.id >= lower(ids) AND o.id < upper(ids)
 ORDER BY id
"""

_DUPLICATED = """
SELECT d.outbox_id FROM relay.delivery d JOIN relay.lane l ON l.id = d.lane_id
 GROUP BY d.outbox_id, l.endpoint_id HAVING count(*) > 1 ORDER BY 1
"""

_ROLLED_BACK = """
SELECT outbox_id FROM relay.delivery EXCEPT SELECT id FROM relay.outbox ORDER BY 1
"""

# Producers increment `v` per key under a row lock.
_INVERTED = """
SELECT id FROM (
    SELECT o.id, (o.payload ->> 'v')::bigint AS v,
           max((o.payload ->> 'v')::bigint) OVER (
               PARTITION BY d.lane_id, o.key ORDER BY d.seq
               ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before
      FROM relay.delivery d JOIN relay.outbox o ON o.id = d.outbox_id
     WHERE o.payload ? 'v') event
 WHERE v < before ORDER BY id
"""

_MISNUMBERED = """
SELECT c.lane_id FROM relay.lane_counter c LEFT JOIN relay.delivery d ON d.lane_id = c.lane_id
 GROUP BY c.lane_id, c.last_seq
HAVING count(d.seq) <> c.last_seq OR count(DISTINCT d.seq) <> c.last_seq
    OR coalesce(min(d.seq), 1) <> 1 OR coalesce(max(d.seq), 0) <> c.last_seq
 ORDER BY 1
"""

# Every id up to `high` is delivered, in an open gap, or dead, and only one of these. As ranges,
# because ids may skip millions.
_UNACCOUNTED = f"""
WITH {_CURSOR},
delivered AS (SELECT DISTINCT outbox_id AS id FROM relay.delivery),
parts AS (
    SELECT int8range(id, id, '[]') AS ids FROM delivered
    UNION ALL SELECT ids FROM open
    UNION ALL SELECT ids FROM dead),
missing AS (
    SELECT int8multirange(int8range(1, high + 1)) - (
               SELECT coalesce(range_agg(ids), '{{}}') FROM parts) AS ids
      FROM newest),
twice AS (
    SELECT ids FROM (
        SELECT ids, max(upper(ids)) OVER (
                   ORDER BY lower(ids), upper(ids)
                   ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS reached
          FROM parts) p
     WHERE reached > lower(ids))
SELECT lower(r) FROM missing, unnest(ids) r
 UNION SELECT lower(ids) FROM twice
 UNION SELECT lower(ids) FROM open, newest WHERE upper(ids) - 1 > newest.high
 ORDER BY 1
"""

_QUERIES = {
    "lost": _LOST,
    "duplicated": _DUPLICATED,
    "rolled_back": _ROLLED_BACK,
    "inverted": _INVERTED,
    "misnumbered": _MISNUMBERED,
    "unaccounted": _UNACCOUNTED,
}

# The coverage of a run, because a run without gaps proves nothing.
_PROGRESS = """
SELECT (SELECT count(*) FROM relay.outbox) AS events,
       (SELECT count(*) FROM relay.outbox WHERE payload ? 'v') AS counted,
       (SELECT max(batch) FROM relay.batch) AS batches,
       (SELECT coalesce(sum(upper(r) - lower(r)), 0) FROM relay.batch, unnest(found) r)::bigint
           AS found_late,
       (SELECT coalesce(sum(upper(r) - lower(r)), 0) FROM relay.batch, unnest(dead) r)::bigint
           AS dead
"""


# All is sequenced, and no gap is open.
_FINISHED = """
SELECT isempty(b.young) AND NOT EXISTS (SELECT FROM relay.gap)
       AND b.high >= (SELECT coalesce(max(id), 0) FROM relay.outbox)
  FROM relay.batch b ORDER BY b.batch DESC LIMIT 1
"""


@dataclass(frozen=True, slots=True)
class CursorViolations:
    """Violations: ids of events, except `misnumbered`, which are lanes."""

    lost: tuple[int, ...] = ()
    duplicated: tuple[int, ...] = ()
    rolled_back: tuple[int, ...] = ()
    inverted: tuple[int, ...] = ()
    misnumbered: tuple[int, ...] = ()
    unaccounted: tuple[int, ...] = ()

    def kinds(self) -> set[str]:
        """The names of the violations."""
        return {field.name for field in fields(self) if getattr(self, field.name)}


NO_VIOLATIONS = CursorViolations()


@dataclass(frozen=True, slots=True)
class Progress:
    """The number of sequenced events, and the gaps that the cursor met."""

    events: int
    counted: int
    batches: int
    found_late: int
    dead: int


async def check_cursor(connection: Connection) -> CursorViolations:
    """All violations at this moment."""
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        return CursorViolations(
            **{
                kind: tuple(row[0] for row in await connection.fetch(query))
                for kind, query in _QUERIES.items()
            }
        )


async def progress(connection: Connection) -> Progress:
    """The progress of the cursor."""
    return Progress(**await connection.fetchrow(_PROGRESS))


async def finished(connection: Connection) -> bool:
    """Whether every committed event is sequenced and every gap has ended."""
    return bool(await connection.fetchval(_FINISHED))
