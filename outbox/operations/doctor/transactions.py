"""Other people's transactions: which events wait for them, and notifications."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.core.model.sql_names import quote_literal
from outbox.operations.doctor.finding import (
    MAY_SEE,
    ROWS_MAX,
    age,
    many,
    ok,
    problem,
    unseen,
    warning,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from outbox.operations.doctor.finding import Look, Said

# A gap is about as old as the event behind it.
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

# Who took an id of the outbox and has not ended.  A prepared transaction has no
# process; the lock on its own number leads to its name.
HOLDERS = """
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

QUEUE = "SELECT pg_notification_queue_usage()"

# A session reads its notifications between two transactions, whichever database of the
# server it is in; which sessions listen, PostgreSQL does not tell.
TAIL = """
SELECT a.pid, a.datname AS database, a.usename AS role, a.application_name AS application,
       a.state, NULL AS gid, count(*) OVER () AS total,
       extract(epoch FROM clock_timestamp() - a.xact_start)::float8 AS since_s
  FROM pg_stat_activity a
 WHERE a.backend_type = 'client backend' AND a.xact_start IS NOT NULL
   AND a.pid <> pg_backend_pid()
 ORDER BY a.xact_start LIMIT $1
"""
TAIL_MAX = 3


async def gaps(look: Look) -> AsyncIterator[Said]:
    """Ids that were given out and may still appear."""
    row = await look.db.fetchrow(GAPS)
    if not row["gaps"]:
        yield ok("no id is missing")
        return
    since_s = row["since_s"] or 0.0
    says = (
        f"{many(row['gaps'], 'gap')} open, the oldest at id {row['oldest']} "
        f"for about {age(since_s)}"
    )
    if since_s < look.limits.holder_s:
        yield ok(says)
    elif await look.db.fetch(HOLDERS):
        yield warning(
            f"{says}: events of a transaction that has not ended; nothing else waits for them",
            "end the transactions under publishing",
        )
    else:
        yield warning(
            f"{says}, and no transaction holds them any more",
            "a running relay settles them with its next batch: outbox relay",
        )


async def holders(look: Look) -> AsyncIterator[Said]:
    """Transactions that published and have not ended."""
    rows = await look.db.fetch(HOLDERS)
    seen = [row for row in rows if row["since_s"] is not None]
    hidden = [row for row in rows if row["since_s"] is None]
    old = [row for row in seen if row["since_s"] >= look.limits.holder_s]
    for row in old[:ROWS_MAX]:
        yield warning(f"{_who(row)} has published and not ended: its events wait", _end(row))
    if len(old) > ROWS_MAX:
        yield warning(f"and {len(old) - ROWS_MAX} more of that kind", "end them, too")
    if hidden:
        pids = ", ".join(str(row["pid"]) for row in hidden[:ROWS_MAX])
        role = (await look.db.fetchrow(MAY_SEE))["role"]
        yield unseen(f"for how long these have been publishing: pid {pids}", role)
    if not old and not hidden:
        yield ok(f"{many(len(rows), 'transaction')} just now, none for long")


async def queue(look: Look) -> AsyncIterator[Said]:
    """Commits that notify fail when the server's queue is full."""
    share = await look.db.fetchval(QUEUE)
    if share < look.limits.queue_share:
        yield ok("the server's queue of notifications is empty enough")
        return
    say = problem if share > look.limits.queue_problem_share else warning
    says = (
        f"the server's queue of notifications is {share:.0%} full; when it is full, producers fail"
    )
    rows = await look.db.fetch(TAIL, TAIL_MAX)
    for row in rows:
        yield say(
            f'{says}; if it listens, {_who(row)} in database "{row["database"]}" keeps it',
            _end(row),
        )
    allowed = await look.db.fetchrow(MAY_SEE)
    if not allowed["seen"]:
        yield say(says, "a session that listens sits in a transaction: end it")
        yield unseen("which session keeps the queue from being read", allowed["role"])
    elif not rows:
        yield say(says, "a session that listens does not read: see pg_stat_activity for the oldest")


def _who(row: Any) -> str:
    if row["gid"] is not None:
        return (
            f'the prepared transaction "{row["gid"]}" of {row["owner"]}, prepared '
            f"{age(row['since_s'])} ago,"
        )
    if row["pid"] is None:
        return "a prepared transaction"
    application = f', application "{row["application"]}"' if row["application"] else ""
    state = "in a transaction" if row["state"] == "active" else row["state"]
    return f"pid {row['pid']} (role {row['role']}{application}), {state} for {age(row['since_s'])},"


def _end(row: Any) -> str:
    if row["gid"] is not None:
        gid = quote_literal(row["gid"]).strip()
        return f"decide: COMMIT PREPARED {gid}, or ROLLBACK PREPARED {gid}"
    if row["pid"] is None:
        return "find it in pg_prepared_xacts"
    return f"end it in its application, or SELECT pg_terminate_backend({row['pid']})"
