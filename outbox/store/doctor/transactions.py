"""Other people's transactions: which events wait for them, and what else they hold up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.core.names import quote_literal
from outbox.store.doctor.finding import ROWS_MAX, age, many, ok, problem, rest, warning

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from outbox.store.doctor.finding import Look, Said

# A gap is about as old as the event behind it.
GAPS = """
WITH open AS MATERIALIZED (
    SELECT lower(r) AS lo, upper(r) - 1 AS hi
      FROM (SELECT young FROM batch ORDER BY batch DESC LIMIT 1) b, unnest(b.young) AS r
    UNION ALL
    SELECT lo, hi FROM gap)
SELECT count(*) AS gaps, coalesce(sum(hi - lo + 1), 0)::bigint AS ids, min(lo) AS oldest,
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

# What keeps dead rows of this database from being cleaned away.
OLD_TRANSACTIONS = """
SELECT a.pid, a.usename AS role, a.application_name AS application, a.state, NULL AS gid,
       NULL AS owner, extract(epoch FROM clock_timestamp() - a.xact_start)::float8 AS since_s,
       count(*) OVER () AS total
  FROM pg_stat_activity a
 WHERE a.datname = current_database() AND a.backend_type = 'client backend'
   AND a.pid <> ALL ($3::integer[]) AND a.pid <> pg_backend_pid()
   AND a.xact_start < clock_timestamp() - make_interval(secs => $2)
 ORDER BY a.xact_start LIMIT $1
"""

OLD_PREPARED = """
SELECT NULL::integer AS pid, x.gid, x.owner, count(*) OVER () AS total,
       extract(epoch FROM clock_timestamp() - x.prepared)::float8 AS since_s
  FROM pg_prepared_xacts x
 WHERE x.database = current_database() AND x.gid::text <> ALL ($3::text[])
   AND x.prepared < clock_timestamp() - make_interval(secs => $2)
 ORDER BY x.prepared LIMIT $1
"""

SLOTS = """
SELECT s.slot_name AS name, pg_wal_lsn_diff(pg_current_wal_lsn(), s.restart_lsn)::bigint AS bytes,
       s.xmin IS NOT NULL AS rows, count(*) OVER () AS total
  FROM pg_replication_slots s
 WHERE NOT s.active AND (s.restart_lsn IS NOT NULL OR s.xmin IS NOT NULL)
 ORDER BY s.restart_lsn LIMIT $1
"""

# How old an unseen session's transaction is, only these roles are told.
MAY_SEE = """
SELECT pg_has_role(current_user, 'pg_read_all_stats', 'USAGE') AS seen, current_user AS role
"""

QUEUE = "SELECT pg_notification_queue_usage()"


async def gaps(look: Look) -> AsyncIterator[Said]:
    """Ids that were given out and may still appear."""
    row = await look.db.fetchrow(GAPS)
    if not row["gaps"]:
        yield ok("no id is missing")
        return
    since_s = row["since_s"] or 0.0
    says = (
        f"{many(row['gaps'], 'gap')} of {many(row['ids'], 'id')} open, the oldest at id "
        f"{row['oldest']} for about {age(since_s)}"
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
    unseen = [row for row in rows if row["since_s"] is None]
    old = [row for row in seen if row["since_s"] >= look.limits.holder_s]
    for row in old[:ROWS_MAX]:
        yield warning(f"{_who(row)} has published and not ended: its events wait", _end(row))
    if len(old) > ROWS_MAX:
        yield warning(f"and {len(old) - ROWS_MAX} more of that kind", "end them, too")
    if unseen:
        pids = ", ".join(str(row["pid"]) for row in unseen[:ROWS_MAX])
        role = (await look.db.fetchrow(MAY_SEE))["role"]
        yield warning(
            f"this role may not see for how long these have been publishing: pid {pids}",
            f'GRANT pg_read_all_stats TO "{role}"',
        )
    if not old and not unseen:
        yield ok(f"{many(len(rows), 'transaction')} just now, none for long")


async def horizon(look: Look) -> AsyncIterator[Said]:
    """What makes the tables grow."""
    known = await look.db.fetch(HOLDERS)
    limit_s = look.limits.transaction_s
    pids = [row["pid"] for row in known if row["pid"]]
    gids = [row["gid"] for row in known if row["gid"]]
    running = await look.db.fetch(OLD_TRANSACTIONS, ROWS_MAX, limit_s, pids)
    prepared = await look.db.fetch(OLD_PREPARED, ROWS_MAX, limit_s, gids)
    slots = await look.db.fetch(SLOTS, ROWS_MAX)
    for row in (*running, *prepared):
        yield warning(f"{_who(row)} keeps dead rows from being cleaned away", _end(row))
    for row in slots:
        kept = f"{(row['bytes'] or 0) / (1 << 20):.0f} MiB of write-ahead log"
        name = quote_literal(row["name"])
        yield warning(
            f'replication slot "{row["name"]}" is not in use, and keeps {kept}'
            + (" and dead rows" if row["rows"] else ""),
            f"start its reader, or SELECT pg_drop_replication_slot({name})",
        )
    for rows in (running, prepared, slots):
        for said in rest(rows, "see pg_stat_activity, pg_prepared_xacts, pg_replication_slots"):
            yield said
    allowed = await look.db.fetchrow(MAY_SEE)
    if not allowed["seen"]:
        yield warning(
            "this role may not see how old other sessions' transactions are",
            f'GRANT pg_read_all_stats TO "{allowed["role"]}"',
        )
    elif not (running or prepared or slots):
        yield ok("nothing keeps dead rows from being cleaned away for long")


async def queue(look: Look) -> AsyncIterator[Said]:
    """Commits that notify fail when the server's queue is full."""
    share = await look.db.fetchval(QUEUE)
    if share < look.limits.queue_share:
        yield ok("the server's queue of notifications is empty enough")
        return
    say = problem if share > 0.75 else warning
    yield say(
        f"the server's queue of notifications is {share:.0%} full; when it is full, producers fail",
        "a session that listens sits in a transaction: end the oldest one in pg_stat_activity",
    )


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
