"""Checks of sessions: locks, open gaps, producer transactions, horizon and NOTIFY queue.

The horizon: VACUUM removes a dead row when no snapshot can see it any more.  An older
transaction, a prepared transaction, a replication slot, or a standby with hot_standby_feedback
can hold back the horizon, and with it the dead rows that each update of `cursor` or
`lane_progress` leaves.
"""

from __future__ import annotations

from typing import Any

from outbox.core.model.duration import rounded
from outbox.core.model.sql_names import quote_literal
from outbox.core.model.text import count
from outbox.operations.status import GAPS
from outbox.store.channels import trim_notification_queue
from outbox.store.sequencing.stalls import SESSION_COLUMNS, SESSION_JOINS, read_lock_blocker
from outbox_doctor.check import (
    ROWS_MAX,
    DoctorContext,
    Results,
    check,
    count_others,
    missing_privilege,
    ok,
    problem,
    warning,
)

# Rights to see other roles' sessions; pg_monitor includes pg_read_all_stats, and managed servers
# grant it.
MAY_READ_STATS = """
SELECT pg_has_role(current_user, 'pg_read_all_stats', 'USAGE') AS seen, current_user AS role
"""


@check("locks", passed="no statement waits for a lock on a table")
async def locks(context: DoctorContext) -> Results:
    """No session has locked a table of the outbox that others wait for."""
    blocker = await read_lock_blocker(context.db)
    if blocker is not None:
        yield problem(
            f"statements on a table wait for {blocker.describe()}",
            f"end it in its application, or {blocker.end_command}",
        )


# Open transactions that took an id from the outbox sequence.
PRODUCERS = f"""{SESSION_COLUMNS},
       CASE WHEN x.gid IS NULL THEN 'session' ELSE 'prepared' END AS kind, x.gid AS name
  FROM pg_locks l {SESSION_JOINS}
 WHERE l.locktype = 'relation' AND l.mode = 'RowExclusiveLock'
   AND l.relation = pg_get_serial_sequence('outbox', 'id')::regclass
   AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
 ORDER BY since_s DESC NULLS FIRST
"""  # noqa: S608 (constants only)


@check("gaps", passed="there is no open gap")
async def gaps(context: DoctorContext) -> Results:
    """No id has been an open gap for long."""
    row = await context.db.fetchrow(GAPS)
    if not row["gaps"]:
        return
    since_s = row["since_s"] or 0.0
    message = (
        f"{count(row['gaps'], 'gap')} open, the oldest at id {row['oldest']} "
        f"for about {rounded(since_s)}"
    )
    if since_s < context.limits.holder_s:
        yield ok(message)
    elif await context.db.fetch(PRODUCERS):
        yield warning(
            f"{message}: an open producer transaction holds them; other events are not delayed",
            "end the transactions under publishing",
        )
    else:
        yield warning(
            f"{message}, and no open transaction holds them",
            "a running relay closes them with its next batch; start one: outbox relay",
        )


@check("publishing")
async def publishing(context: DoctorContext) -> Results:
    """No transaction that published has been open for long."""
    rows = await context.db.fetch(PRODUCERS)
    hidden = [row for row in rows if row["since_s"] is None]
    old = [
        row
        for row in rows
        if row["since_s"] is not None and row["since_s"] >= context.limits.holder_s
    ]
    for row in old[:ROWS_MAX]:
        yield warning(
            f"{_describe(row)} has published but not ended: its events wait", _end_command(row)
        )
    if len(old) > ROWS_MAX:
        yield warning(f"and {len(old) - ROWS_MAX} more of this kind", "end them, too")
    if hidden:
        pids = ", ".join(str(row["pid"]) for row in hidden[:ROWS_MAX])
        role = (await context.db.fetchrow(MAY_READ_STATS))["role"]
        yield missing_privilege(f"how long these have been publishing: pid {pids}", role)
    if not old and not hidden:
        yield ok(f"{count(len(rows), 'transaction')} open, none for long")


QUERY_CHARS_MAX = 60

# What holds back the horizon: sessions of this database, prepared transactions, slots, and
# standbys (their WAL senders belong to no database).  VACUUM ignores its own snapshot.  A slot
# reports for its reader, and holds back the same without a reader.
PINS = f"""
WITH pins AS MATERIALIZED (
    SELECT CASE a.backend_type WHEN 'autovacuum worker' THEN 'autovacuum' ELSE 'session' END
               AS kind,
           a.pid, NULL::text AS name, a.usename::text AS role,
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
       s.xmin IS NOT NULL AS rows
  FROM pg_replication_slots s
 WHERE NOT s.active AND (s.restart_lsn IS NOT NULL OR s.xmin IS NOT NULL)
 ORDER BY s.restart_lsn
"""

SEE = "see pg_stat_activity, pg_prepared_xacts, pg_replication_slots, pg_stat_replication"


@check("horizon")
async def horizon(context: DoctorContext) -> Results:
    """No old transaction, slot or standby holds back the xmin horizon."""
    limits = context.limits
    pins = await context.db.fetch(PINS, ROWS_MAX, limits.transaction_s, limits.horizon_transactions)
    idle = await context.fetch_first(IDLE_SLOTS)
    idle_slots = {row["name"] for row in idle}
    old = [row for row in pins if row["old"]]
    for row in old:
        if not (row["kind"] == "slot" and row["name"] in idle_slots):
            what = "dead rows of the catalogs" if row["catalog_only"] else "dead rows"
            yield warning(
                f"{_describe(row)} keeps VACUUM from removing {what}; its snapshot is "
                f"{count(row['xids'], 'transaction')} old",
                _end_command(row),
            )
    for row in idle:
        kept = f"{(row['bytes'] or 0) / (1 << 20):.0f} MiB of write-ahead log"
        yield warning(
            f'replication slot "{row["name"]}" is not in use, and retains {kept}'
            + (" and dead rows" if row["rows"] else ""),
            f"start its reader, or drop it: {_drop_slot_command(row['name'])}",
        )
    for result in (*count_others(old, SEE), *count_others(idle, SEE)):
        yield result
    allowed = await context.db.fetchrow(MAY_READ_STATS)
    if not allowed["seen"]:
        yield missing_privilege("how old other sessions' transactions are", allowed["role"])
    elif not old and not idle:
        yield ok(
            f"no old transaction holds back VACUUM; the oldest is {_describe(pins[0])} "
            f"{count(pins[0]['xids'], 'transaction')} back"
            if pins
            else "nothing holds back VACUUM"
        )


# A session reads notifications only between transactions, and the queue is shared by all
# databases of the server.  PostgreSQL does not report which sessions listen.
OLDEST_SESSIONS = """
SELECT 'session' AS kind, a.pid, a.datname AS database, a.usename AS role,
       a.application_name AS application, a.state,
       extract(epoch FROM clock_timestamp() - a.xact_start)::float8 AS since_s
  FROM pg_stat_activity a
 WHERE a.backend_type = 'client backend' AND a.xact_start IS NOT NULL
   AND a.pid <> pg_backend_pid()
 ORDER BY a.xact_start LIMIT $1
"""
OLDEST_SESSIONS_MAX = 3


@check("notify queue", passed="the server's notification queue is nearly empty")
async def notification_queue(context: DoctorContext) -> Results:
    """The server's NOTIFY queue is not filling up; when it is full, commits fail."""
    share = await trim_notification_queue(context.db)
    if share < context.limits.queue_share:
        return
    make_result = problem if share > context.limits.queue_problem_share else warning
    message = (
        f"the server's notification queue is {share:.0%} full; when it is full, producers fail"
    )
    rows = await context.db.fetch(OLDEST_SESSIONS, OLDEST_SESSIONS_MAX)
    for row in rows:
        yield make_result(
            f"{message}; if it listens, {_describe(row)} in database "
            f'"{row["database"]}" holds it back',
            _end_command(row),
        )
    allowed = await context.db.fetchrow(MAY_READ_STATS)
    if not allowed["seen"]:
        yield make_result(message, "end the open transaction of a listening session")
        yield missing_privilege("which session holds back the queue", allowed["role"])
    elif not rows:
        yield make_result(
            message, "a listening session does not read: see pg_stat_activity for the oldest"
        )


def _describe(row: Any) -> str:
    """What holds something back: a session, a prepared transaction, a slot or a standby."""
    who = f"role {row['role']}"
    if row["application"]:
        who += f', application "{row["application"]}"'
    since = "" if row["since_s"] is None else rounded(row["since_s"])
    match row["kind"]:
        case "prepared":
            return (
                f'the prepared transaction "{row["name"]}" of {row["role"]}, prepared {since} ago,'
            )
        case "slot":
            reader = f", read by pid {row['pid']}," if row["pid"] else ""
            return f'replication slot "{row["name"]}"{reader}'
        case "standby":
            return f"the standby of pid {row['pid']} ({who})"
        case "autovacuum":
            at_work = f", at work for {since}" if since else ""
            return f"autovacuum's worker of pid {row['pid']}{at_work}{_quote(row, 'with')},"
    state = "in a transaction" if row["state"] == "active" else row["state"] or "active"
    statement = _quote(row, "with" if row["state"] == "active" else "last with")
    return f"pid {row['pid']} ({who}), {state}{since and f' for {since}'}{statement},"


def _quote(row: Any, verb: str) -> str:
    """The statement of a session, cut, after a comma; empty without one."""
    query = (row.get("query") or "").strip()
    if not query:
        return ""
    return f", {verb} {query[:QUERY_CHARS_MAX]}{'…' if len(query) > QUERY_CHARS_MAX else ''}"


def _end_command(row: Any) -> str:
    end_session = f"SELECT pg_terminate_backend({row['pid']})"
    match row["kind"]:
        case "prepared":
            gid = quote_literal(row["name"]).strip()
            return f"end it: COMMIT PREPARED {gid}, or ROLLBACK PREPARED {gid}"
        case "slot":
            return f"let its reader catch up; if it is unused: {_drop_slot_command(row['name'])}"
        case "standby":
            return (
                "end the old query on that standby, or set hot_standby_feedback = off there; "
                f"to end it from here: {end_session}"
            )
        case "autovacuum":
            return f"it ends by itself; to end it now: {end_session}"
    return f"end it in its application, or {end_session}"


def _drop_slot_command(slot: str) -> str:
    return f"SELECT pg_drop_replication_slot({quote_literal(slot).strip()})"
