"""Checks of tables: autovacuum, dead rows, wraparound and size.

Rows of `cursor`, `lane_counter`, `lane_progress`, `replica` and `endpoint_health` are updated
frequently, and each update leaves a dead row.  Partitioned tables are append-only; their
partitions are reported together, under the parent's name.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any

from outbox.core.model.duration import rounded
from outbox.core.model.text import count
from outbox_doctor.check import (
    ROWS_MAX,
    DoctorContext,
    Results,
    check,
    join_names,
    ok,
    problem,
    settings_off,
    warning,
)

# All roles may read these columns.
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

SETTINGS = """
SELECT current_setting('autovacuum')::boolean AS autovacuum,
       current_setting('track_counts')::boolean AS track_counts
"""


@check("autovacuum", passed="autovacuum is on for the server and for all tables")
async def autovacuum(context: DoctorContext) -> Results:
    """Autovacuum is enabled for the server and for all tables."""
    effect = " on this server: dead rows accumulate, and queries become slower"
    for result in settings_off(await context.db.fetchrow(SETTINGS), effect, ", and reload it"):
        yield result
    tables = [part for row in await context.db.fetch(TABLES) for part in row["off"] or ()]
    if tables:
        yield warning(
            f"autovacuum is off for {join_names(tables)}: dead rows accumulate",
            f"ALTER TABLE {context.qualify(tables[0])} RESET (autovacuum_enabled)"
            + ("; repeat for each table" if len(tables) > 1 else ""),
        )


@check("dead rows")
async def dead_rows(context: DoctorContext) -> Results:
    """Dead rows do not accumulate."""
    rows = sorted(await context.db.fetch(TABLES), key=lambda row: -row["dead"])
    limits = context.limits
    bad = [
        row
        for row in rows
        if row["dead"] >= limits.dead_rows_min
        and row["dead"] >= limits.dead_rows_share * (row["dead"] + row["live"])
    ]
    for row in bad[:ROWS_MAX]:
        name = context.qualify(row["name"])
        yield warning(
            f"{name} has {count(row['dead'], 'dead row')} and "
            f"{count(row['live'], 'live row')}, {_vacuumed(row)}: queries become slower",
            f"end what holds back VACUUM (see horizon), then VACUUM {name}",
        )
    if not bad:
        total, largest = sum(row["dead"] for row in rows), rows[0]
        most = f", {largest['dead']} of them in {context.qualify(largest['name'])}, "
        yield ok(
            f"{count(total, 'dead row')} in all"
            + (most + _vacuumed(largest) if largest["dead"] else "")
        )


def _vacuumed(row: Any) -> str:
    if row["vacuumed_s"] is None:
        return "never vacuumed"
    return f"vacuumed {rounded(row['vacuumed_s'])} ago"


FREEZE_AGES = """
SELECT current_setting('autovacuum_freeze_max_age')::bigint AS xids,
       current_setting('autovacuum_multixact_freeze_max_age')::bigint AS multixacts
"""


@check("wraparound")
async def wraparound(context: DoctorContext) -> Results:
    """Old rows are frozen long before transaction ids wrap around."""
    frozen_at = await context.db.fetchrow(FREEZE_AGES)
    rows = await context.db.fetch(TABLES)
    limits, overdue = context.limits, False
    for what, number, oldest in (
        ("transaction", "xids", "oldest"),
        ("multixact", "multixacts", "oldest_by_multixacts"),
    ):
        row = max(rows, key=itemgetter(number))
        age, table = row[number], context.qualify(row[oldest])
        if age < min(frozen_at[number] * limits.freeze_overdue, limits.freeze_problem):
            continue
        overdue = True
        make_result = problem if age >= limits.freeze_problem else warning
        yield make_result(
            f"{table} has rows that are {count(age, what)} old and not frozen, although "
            f"autovacuum should start at {frozen_at[number]}; at about 2,000,000,000 the server "
            "rejects writes",
            f"end what holds back VACUUM (see horizon), then VACUUM (FREEZE) {table}",
        )
    if not overdue:
        oldest_xids = max(row["xids"] for row in rows)
        yield ok(f"freezing is on time; the oldest table is {oldest_xids} transactions old")


# A separate statement, because pg_total_relation_size waits for ACCESS EXCLUSIVE locks.
SIZES = """
SELECT coalesce(p.relname, c.relname)::text AS name,
       sum(pg_total_relation_size(c.oid))::bigint AS bytes
  FROM pg_class c
  LEFT JOIN pg_inherits i ON i.inhrelid = c.oid
  LEFT JOIN pg_class p ON p.oid = i.inhparent
 WHERE c.relnamespace = quote_ident(current_schema())::regnamespace AND c.relkind = 'r'
 GROUP BY 1 ORDER BY 2 DESC
"""
SIZES_MAX = 3


@check("size")
async def size(context: DoctorContext) -> Results:
    """Size of the tables, including indexes."""
    rows = await context.db.fetch(SIZES)
    total = _bytes(sum(row["bytes"] for row in rows))
    sizes = ", ".join(f"{row['name']} {_bytes(row['bytes'])}" for row in rows[:SIZES_MAX])
    yield ok(f"{total} in all: {sizes}")


def _bytes(number: int) -> str:
    for shift, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB")):
        if number >= 2 << shift:
            return f"{number / (1 << shift):.0f} {unit}"
    return f"{number / 1024:.0f} KiB"
