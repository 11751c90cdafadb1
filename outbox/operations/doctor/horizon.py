"""Doctor check of the xmin horizon: what keeps VACUUM from removing dead rows.

VACUUM removes a dead row when no snapshot can see it any more.  An older transaction, a
prepared transaction, a replication slot, or a standby with hot_standby_feedback can hold back
the horizon, and with it the dead rows that each update of `cursor` or `lane_progress` leaves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.core.model.sql_names import quote_literal
from outbox.operations.doctor.finding import (
    MAY_READ_STATS,
    ROWS_MAX,
    format_age,
    format_count,
    missing_privilege,
    ok,
    report_remaining,
    warning,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from outbox.operations.doctor.finding import CheckResult, DoctorContext

QUERY_CHARS_MAX = 60

# What holds back the horizon: sessions of this database, prepared transactions, slots, and
# standbys (their WAL senders belong to no database).  VACUUM ignores its own snapshot.  A slot
# reports for its reader, and holds back the same without a reader.
PINS = f"""
WITH pins AS MATERIALIZED (
    SELECT 'session' AS kind, a.pid, NULL::text AS name, a.usename::text AS role,
           a.application_name AS application, a.state,
           left(regexp_replace(a.query, '\\s+', ' ', 'g'), {QUERY_CHARS_MAX + 1}) AS query,
           false AS catalog_only,
           extract(epoch FROM clock_timestamp() - a.xact_start)::float8 AS since_s,
           greatest(age(a.backend_xmin), age(a.backend_xid)) AS xids
      FROM pg_stat_activity a
     WHERE a.datname = current_database() AND a.pid <> pg_backend_pid()
       AND (a.backend_xmin IS NOT NULL OR a.backend_xid IS NOT NULL)
       AND NOT EXISTS (SELECT FROM pg_stat_progress_vacuum v WHERE v.pid = a.pid)
     UNION ALL
    SELECT 'prepared', NULL, x.gid, x.owner::text, NULL, NULL, NULL, false,
           extract(epoch FROM clock_timestamp() - x.prepared)::float8, age(x.transaction)
      FROM pg_prepared_xacts x WHERE x.database = current_database()
     UNION ALL
    SELECT 'slot', s.active_pid, s.slot_name::text, NULL, s.plugin::text, NULL, NULL,
           s.xmin IS NULL, NULL, greatest(age(s.xmin), age(s.catalog_xmin))
      FROM pg_replication_slots s WHERE s.xmin IS NOT NULL OR s.catalog_xmin IS NOT NULL
     UNION ALL
    SELECT 'standby', r.pid, NULL, r.usename::text, r.application_name, r.state, NULL, false,
           NULL, age(r.backend_xmin)
      FROM pg_stat_replication r WHERE r.backend_xmin IS NOT NULL)
SELECT *, coalesce(since_s >= $2, xids >= $3) AS old,
       count(*) FILTER (WHERE coalesce(since_s >= $2, xids >= $3)) OVER () AS total
  FROM pins ORDER BY old DESC, xids DESC LIMIT $1
"""  # noqa: S608 (constants only)

# A slot without a reader also retains the write-ahead log that was not read.
IDLE_SLOTS = """
SELECT s.slot_name AS name, pg_wal_lsn_diff(pg_current_wal_lsn(), s.restart_lsn)::bigint AS bytes,
       s.xmin IS NOT NULL AS rows, count(*) OVER () AS total
  FROM pg_replication_slots s
 WHERE NOT s.active AND (s.restart_lsn IS NOT NULL OR s.xmin IS NOT NULL)
 ORDER BY s.restart_lsn LIMIT $1
"""

SEE = "see pg_stat_activity, pg_prepared_xacts, pg_replication_slots, pg_stat_replication"


async def check_horizon(context: DoctorContext) -> AsyncIterator[CheckResult]:
    """No old transaction, slot or standby holds back the xmin horizon."""
    limits = context.limits
    pins = await context.db.fetch(PINS, ROWS_MAX, limits.transaction_s, limits.horizon_transactions)
    idle = await context.db.fetch(IDLE_SLOTS, ROWS_MAX)
    idle_names = {row["name"] for row in idle}
    old = [row for row in pins if row["old"]]
    for row in old:
        if not (row["kind"] == "slot" and row["name"] in idle_names):
            yield warning(f"{_describe_pin(row)} {_describe_kept_rows(row)}", _end_command(row))
    for row in idle:
        kept = f"{(row['bytes'] or 0) / (1 << 20):.0f} MiB of write-ahead log"
        yield warning(
            f'replication slot "{row["name"]}" is not in use, and retains {kept}'
            + (" and dead rows" if row["rows"] else ""),
            f"start its reader, or drop it: {_drop_slot_command(row['name'])}",
        )
    for result in (*report_remaining(old, SEE), *report_remaining(idle, SEE)):
        yield result
    allowed = await context.db.fetchrow(MAY_READ_STATS)
    if not allowed["seen"]:
        yield missing_privilege("how old other sessions' transactions are", allowed["role"])
    elif not old and not idle:
        yield ok(
            f"no old transaction holds back VACUUM; the oldest is {_describe_pin(pins[0])} "
            f"{format_count(pins[0]['xids'], 'transaction')} back"
            if pins
            else "nothing holds back VACUUM"
        )


def _describe_pin(row: Any) -> str:
    application = f', application "{row["application"]}"' if row["application"] else ""
    match row["kind"]:
        case "prepared":
            return (
                f'the prepared transaction "{row["name"]}" of {row["role"]}, prepared '
                f"{format_age(row['since_s'])} ago,"
            )
        case "slot":
            reader = f", read by pid {row['pid']}," if row["pid"] else ""
            return f'replication slot "{row["name"]}"{reader}'
        case "standby":
            return f"the standby of pid {row['pid']} (role {row['role']}{application})"
    state = "in a transaction" if row["state"] == "active" else row["state"] or "active"
    since = f" for {format_age(row['since_s'])}" if row["since_s"] is not None else ""
    return f"pid {row['pid']} (role {row['role']}{application}), {state}{since}{_query(row)},"


def _query(row: Any) -> str:
    query = (row["query"] or "").strip()
    if not query:
        return ""
    cut = f"{query[:QUERY_CHARS_MAX]}…" if len(query) > QUERY_CHARS_MAX else query
    return f", with {cut}" if row["state"] == "active" else f", last with {cut}"


def _describe_kept_rows(row: Any) -> str:
    what = "dead rows of the catalogs" if row["catalog_only"] else "dead rows"
    return (
        f"keeps VACUUM from removing {what}; its snapshot is "
        f"{format_count(row['xids'], 'transaction')} old"
    )


def _end_command(row: Any) -> str:
    match row["kind"]:
        case "prepared":
            gid = quote_literal(row["name"]).strip()
            return f"end it: COMMIT PREPARED {gid}, or ROLLBACK PREPARED {gid}"
        case "slot":
            return f"let its reader catch up; if it is unused: {_drop_slot_command(row['name'])}"
        case "standby":
            return (
                "end the old query on that standby, or set hot_standby_feedback = off there; "
                f"to end it from here: SELECT pg_terminate_backend({row['pid']})"
            )
    return f"end it in its application, or SELECT pg_terminate_backend({row['pid']})"


def _drop_slot_command(slot: str) -> str:
    return f"SELECT pg_drop_replication_slot({quote_literal(slot).strip()})"
