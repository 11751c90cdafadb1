"""Doctor checks of transactions: open gaps, open producer transactions, NOTIFY queue."""

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
    problem,
    warning,
)
from outbox.store.channels import trim_notification_queue
from outbox.store.stalls import read_lock_blocker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from outbox.operations.doctor.finding import CheckResult, DoctorContext

# The age of a gap is about the age of the next event.
GAPS = """
WITH open AS MATERIALIZED (
    SELECT lower(r) AS lo, upper(r) - 1 AS hi
      FROM (SELECT young FROM batch ORDER BY batch DESC LIMIT 1) b, unnest(b.young) AS r
    UNION ALL
    SELECT lo, hi FROM gap)
SELECT count(*) AS gaps, min(lo) AS oldest,
       (SELECT extract(epoch FROM clock_timestamp() - o.created_at)::float8
          FROM outbox o WHERE o.id > (SELECT min(hi) FROM open) ORDER BY o.id LIMIT 1) AS since_s
  FROM open
"""

# Open transactions that took an id from the outbox sequence.  A prepared transaction has no
# process; the lock on its transaction id leads to its name.
IN_FLIGHT_TRANSACTIONS = """
SELECT l.pid, a.usename AS role, a.application_name AS application, a.state, x.gid, x.owner,
       extract(epoch FROM clock_timestamp() - coalesce(a.xact_start, x.prepared))::float8
           AS since_s
  FROM pg_locks l
  LEFT JOIN pg_stat_activity a ON a.pid = l.pid
  LEFT JOIN LATERAL (
       SELECT p.* FROM pg_locks t JOIN pg_prepared_xacts p ON p.transaction = t.transactionid
        WHERE l.pid IS NULL AND t.pid IS NULL AND t.locktype = 'transactionid'
          AND t.virtualtransaction = l.virtualtransaction) x ON true
 WHERE l.locktype = 'relation' AND l.mode = 'RowExclusiveLock'
   AND l.relation = pg_get_serial_sequence('outbox', 'id')::regclass
   AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
 ORDER BY since_s DESC NULLS FIRST
"""

# A session reads notifications only between transactions, and the queue is shared by all
# databases of the server.  PostgreSQL does not report which sessions listen.
OLDEST_SESSIONS = """
SELECT a.pid, a.datname AS database, a.usename AS role, a.application_name AS application,
       a.state, NULL AS gid, count(*) OVER () AS total,
       extract(epoch FROM clock_timestamp() - a.xact_start)::float8 AS since_s
  FROM pg_stat_activity a
 WHERE a.backend_type = 'client backend' AND a.xact_start IS NOT NULL
   AND a.pid <> pg_backend_pid()
 ORDER BY a.xact_start LIMIT $1
"""
OLDEST_SESSIONS_MAX = 3


async def check_locks(context: DoctorContext) -> AsyncIterator[CheckResult]:
    """No session has locked a table of the outbox that others wait for."""
    blocker = await read_lock_blocker(context.db)
    if blocker is None:
        yield ok("no statement waits for a lock on a table")
    else:
        yield problem(
            f"statements on a table wait for {blocker.describe()}",
            f"end it in its application, or {blocker.end_command}",
        )


async def check_gaps(context: DoctorContext) -> AsyncIterator[CheckResult]:
    """No id has been an open gap for long."""
    row = await context.db.fetchrow(GAPS)
    if not row["gaps"]:
        yield ok("there is no open gap")
        return
    since_s = row["since_s"] or 0.0
    message = (
        f"{format_count(row['gaps'], 'gap')} open, the oldest at id {row['oldest']} "
        f"for about {format_age(since_s)}"
    )
    if since_s < context.limits.holder_s:
        yield ok(message)
    elif await context.db.fetch(IN_FLIGHT_TRANSACTIONS):
        yield warning(
            f"{message}: an open producer transaction holds them; other events are not delayed",
            "end the transactions under publishing",
        )
    else:
        yield warning(
            f"{message}, and no open transaction holds them",
            "a running relay closes them with its next batch; start one: outbox relay",
        )


async def check_in_flight(context: DoctorContext) -> AsyncIterator[CheckResult]:
    """No transaction that published has been open for long."""
    rows = await context.db.fetch(IN_FLIGHT_TRANSACTIONS)
    active = [row for row in rows if row["since_s"] is not None]
    unreadable = [row for row in rows if row["since_s"] is None]
    old = [row for row in active if row["since_s"] >= context.limits.holder_s]
    for row in old[:ROWS_MAX]:
        yield warning(
            f"{_describe_session(row)} has published but not ended: its events wait",
            _end_command(row),
        )
    if len(old) > ROWS_MAX:
        yield warning(f"and {len(old) - ROWS_MAX} more of this kind", "end them, too")
    if unreadable:
        pids = ", ".join(str(row["pid"]) for row in unreadable[:ROWS_MAX])
        role = (await context.db.fetchrow(MAY_READ_STATS))["role"]
        yield missing_privilege(f"how long these have been publishing: pid {pids}", role)
    if not old and not unreadable:
        yield ok(f"{format_count(len(rows), 'transaction')} open, none for long")


async def check_queue(context: DoctorContext) -> AsyncIterator[CheckResult]:
    """The server's NOTIFY queue is not filling up; when it is full, commits fail."""
    share = await trim_notification_queue(context.db)
    if share < context.limits.queue_share:
        yield ok("the server's notification queue is nearly empty")
        return
    make_result = problem if share > context.limits.queue_problem_share else warning
    message = (
        f"the server's notification queue is {share:.0%} full; when it is full, producers fail"
    )
    rows = await context.db.fetch(OLDEST_SESSIONS, OLDEST_SESSIONS_MAX)
    for row in rows:
        yield make_result(
            f"{message}; if it listens, {_describe_session(row)} in database "
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


def _describe_session(row: Any) -> str:
    if row["gid"] is not None:
        return (
            f'the prepared transaction "{row["gid"]}" of {row["owner"]}, prepared '
            f"{format_age(row['since_s'])} ago,"
        )
    if row["pid"] is None:
        return "a prepared transaction"
    application = f', application "{row["application"]}"' if row["application"] else ""
    state = "in a transaction" if row["state"] == "active" else row["state"]
    age = format_age(row["since_s"])
    return f"pid {row['pid']} (role {row['role']}{application}), {state} for {age},"


def _end_command(row: Any) -> str:
    if row["gid"] is not None:
        gid = quote_literal(row["gid"]).strip()
        return f"end it: COMMIT PREPARED {gid}, or ROLLBACK PREPARED {gid}"
    if row["pid"] is None:
        return "find it in pg_prepared_xacts"
    return f"end it in its application, or SELECT pg_terminate_backend({row['pid']})"
