"""Our tables: whether they are cleaned, frozen, and how large they are.

Rows of `cursor`, `lane_counter`, `lane_progress`, `replica` and `endpoint_health` are
written over and over, and every version but the last one is dead.  What is partitioned
is only added to; its partitions are told of together, under their parent's name.
"""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Any

from outbox.operations.doctor.finding import ROWS_MAX, age, listed, many, ok, problem, warning

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from outbox.operations.doctor.finding import Look, Said

# Everybody may see all of it.
TABLES = """
WITH parts AS MATERIALIZED (
    SELECT c.oid, coalesce(p.relname, c.relname)::text AS name, c.relname::text AS part,
           pg_stat_get_live_tuples(c.oid) AS live, pg_stat_get_dead_tuples(c.oid) AS dead,
           greatest(pg_stat_get_last_vacuum_time(c.oid),
                    pg_stat_get_last_autovacuum_time(c.oid)) AS vacuumed_at,
           EXISTS (SELECT FROM pg_options_to_table(c.reloptions)
                    WHERE option_name = 'autovacuum_enabled' AND NOT option_value::boolean) AS off,
           greatest(age(c.relfrozenxid), age(t.relfrozenxid)) AS xids,
           greatest(mxid_age(c.relminmxid), mxid_age(t.relminmxid)) AS multixacts
      FROM pg_class c
      LEFT JOIN pg_class t ON t.oid = c.reltoastrelid
      LEFT JOIN pg_inherits i ON i.inhrelid = c.oid
      LEFT JOIN pg_class p ON p.oid = i.inhparent
     WHERE c.relnamespace = quote_ident(current_schema())::regnamespace AND c.relkind = 'r')
SELECT name, sum(live)::bigint AS live, sum(dead)::bigint AS dead,
       extract(epoch FROM clock_timestamp() - max(vacuumed_at))::float8 AS vacuumed_s,
       array_agg(part ORDER BY part) FILTER (WHERE off) AS off,
       max(xids) AS xids, (array_agg(part ORDER BY xids DESC))[1] AS oldest,
       max(multixacts) AS multixacts,
       (array_agg(part ORDER BY multixacts DESC))[1] AS oldest_by_multixacts
  FROM parts GROUP BY name ORDER BY name
"""

# Apart, because it waits for whoever holds a table for itself.
SIZES = """
SELECT coalesce(p.relname, c.relname)::text AS name,
       sum(pg_total_relation_size(c.oid))::bigint AS bytes
  FROM pg_class c
  LEFT JOIN pg_inherits i ON i.inhrelid = c.oid
  LEFT JOIN pg_class p ON p.oid = i.inhparent
 WHERE c.relnamespace = quote_ident(current_schema())::regnamespace AND c.relkind = 'r'
 GROUP BY 1 ORDER BY 2 DESC LIMIT $1
"""
SIZES_MAX = 3

SETTINGS = """
SELECT current_setting('autovacuum')::boolean AS autovacuum,
       current_setting('track_counts')::boolean AS track_counts,
       current_setting('autovacuum_freeze_max_age')::bigint AS xids_max,
       current_setting('autovacuum_multixact_freeze_max_age')::bigint AS multixacts_max
"""


async def autovacuum(look: Look) -> AsyncIterator[Said]:
    """Dead rows are cleaned away by themselves."""
    row = await look.db.fetchrow(SETTINGS)
    off = [name for name in ("autovacuum", "track_counts") if not row[name]]
    if off:
        yield warning(
            f"{' and '.join(off)} {'is' if len(off) == 1 else 'are'} off on this server: dead "
            "rows stay, and every look at our tables takes longer",
            f"set {' and '.join(f'{name} = on' for name in off)} in postgresql.conf, and reload",
        )
    tables = [part for row in await look.db.fetch(TABLES) for part in row["off"] or ()]
    if tables:
        yield warning(
            f"autovacuum is off for {listed(tables)}: dead rows stay there",
            f"ALTER TABLE {look.name(tables[0])} RESET (autovacuum_enabled)"
            + ("; and so for each" if len(tables) > 1 else ""),
        )
    if not off and not tables:
        yield ok("it is on, for the server and for each of our tables")


async def dead_rows(look: Look) -> AsyncIterator[Said]:
    """What was written over does not pile up."""
    rows = sorted(await look.db.fetch(TABLES), key=lambda row: -row["dead"])
    limits = look.limits
    bad = [
        row
        for row in rows
        if row["dead"] >= limits.dead_rows_min
        and row["dead"] >= limits.dead_rows_share * (row["dead"] + row["live"])
    ]
    for row in bad[:ROWS_MAX]:
        name = look.name(row["name"])
        yield warning(
            f"{name} has {many(row['dead'], 'dead row')} beside {many(row['live'], 'live one')}, "
            f"{_vacuumed(row)}: every look at it takes longer",
            f"end what keeps them (see horizon), then VACUUM {name}",
        )
    if not bad:
        most = rows[0]
        yield ok(
            f"{many(sum(row['dead'] for row in rows), 'dead row')} in all"
            + (
                f", {most['dead']} of them in {look.name(most['name'])}, {_vacuumed(most)}"
                if most["dead"]
                else ""
            )
        )


def _vacuumed(row: Any) -> str:
    if row["vacuumed_s"] is None:
        return "which was not vacuumed yet"
    return f"vacuumed {age(row['vacuumed_s'])} ago"


async def wraparound(look: Look) -> AsyncIterator[Said]:
    """Old rows are frozen long before the server runs out of transaction numbers."""
    settings = await look.db.fetchrow(SETTINGS)
    rows = await look.db.fetch(TABLES)
    overdue = False
    for what, number, oldest in (
        ("transaction", "xids", "oldest"),
        ("multixact", "multixacts", "oldest_by_multixacts"),
    ):
        row = max(rows, key=itemgetter(number))
        limit = settings[f"{number}_max"] * look.limits.freeze_overdue
        if row[number] < min(limit, look.limits.freeze_problem):
            continue
        overdue = True
        say = problem if row[number] >= look.limits.freeze_problem else warning
        yield say(
            f"{look.name(row[oldest])} has rows that are {many(row[number], what)} old and not "
            f"frozen, though autovacuum should begin at {settings[f'{number}_max']}; at some "
            "2,000,000,000 the server takes no writes",
            f"end what keeps them (see horizon), then VACUUM (FREEZE) {look.name(row[oldest])}",
        )
    if not overdue:
        most = max(row["xids"] for row in rows)
        yield ok(f"no row waits for long to be frozen; the oldest table is at {most} transactions")


async def size(look: Look) -> AsyncIterator[Said]:
    """How much room is taken, with indexes."""
    rows = await look.db.fetch(SIZES, None)
    total = _bytes(sum(row["bytes"] for row in rows))
    most = ", ".join(f"{row['name']} {_bytes(row['bytes'])}" for row in rows[:SIZES_MAX])
    yield ok(f"{total} in all: {most}")


def _bytes(number: int) -> str:
    for shift, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB")):
        if number >= 2 << shift:
            return f"{number / (1 << shift):.0f} {unit}"
    return f"{number / 1024:.0f} KiB"
