"""Checks of the server: version, durability, timeline, connections, clock and standbys."""

from __future__ import annotations

import asyncpg

from outbox.core.model.duration import rounded
from outbox.core.model.text import count
from outbox.drivers.errors import server_error
from outbox.store.cluster.sessions import SESSION_NAME
from outbox.store.cluster.timeline import INCOMPLETE, IS_RESTORED, RESTORE_PROBLEM
from outbox.store.connection.connect import SERVER_VERSION_MIN
from outbox.store.schema.server_product import READ_VERSION, explain_foreign_product
from outbox_doctor.check import (
    CheckResult,
    DoctorContext,
    Results,
    check,
    missing_privilege,
    ok,
    problem,
    settings_off,
    warning,
)

SERVER_VERSION_TESTED = 18

VERSION = """
SELECT split_part(current_setting('server_version'), ' ', 1) AS version,
       current_setting('server_version_num')::integer / 10000 AS major,
       pg_is_in_recovery() AS standby
"""


@check("server")
async def version(context: DoctorContext) -> Results:
    """The server is a primary of a tested version."""
    if (reason := explain_foreign_product(await context.db.fetchval(READ_VERSION))) is not None:
        yield problem(reason, "move the schema to a PostgreSQL server")
        return
    row = await context.db.fetchrow(VERSION)
    message = f"PostgreSQL {row['version']}"
    if row["standby"]:
        yield problem(
            f"{message}, a standby: it accepts no writes",
            "connect to the primary, or list all hosts with target_session_attrs=primary",
        )
    elif row["major"] > SERVER_VERSION_TESTED:
        yield warning(
            f"{message}; this program is tested on {SERVER_VERSION_MIN} to {SERVER_VERSION_TESTED}",
            "upgrade outbox-relay",
        )
    else:
        yield ok(f"{message}, a primary")


DURABILITY = """
SELECT current_setting('fsync')::boolean AS fsync,
       current_setting('full_page_writes')::boolean AS full_page_writes
"""

COMMITS = "SELECT current_setting('synchronous_commit') AS synchronous_commit, current_user AS role"


@check("durability", passed="commits reach the disk before anything is sent")
async def durability(context: DoctorContext) -> Results:
    """Committed data survives a crash."""
    lost = ": a machine crash can lose events that were already delivered"
    for result in settings_off(await context.db.fetchrow(DURABILITY), lost):
        yield result
    commits = await context.db.fetchrow(COMMITS)
    # Without a proxy, the relay sets it for its session.
    if context.pooled and commits["synchronous_commit"] == "off":
        yield problem(
            "synchronous_commit is off, and behind a pooling proxy the relay cannot set it: events "
            "may be sent whose commit is lost in a crash",
            f'ALTER ROLE "{commits["role"]}" SET synchronous_commit = on',
        )


TIMELINE = f"""
SELECT server_timeline() AS server, timeline AS known, current_user AS role,
       {IS_RESTORED} AS copied,
       ({RESTORE_PROBLEM}) AS problem,
       extract(epoch FROM clock_timestamp() - timeline_at)::float8 AS since_s,
       CASE WHEN timeline_at IS NOT NULL THEN (
           SELECT data ? 'restored' FROM journal
            WHERE endpoint_id IS NULL AND kind = 'timeline_changed'
            ORDER BY id DESC LIMIT 1) END AS restored
  FROM cursor
"""  # noqa: S608 (constants only)


@check("timeline")
async def timeline(context: DoctorContext) -> Results:
    """A failover is detected, and starts new lanes, because commits may have been lost."""
    row = await context.db.fetchrow(TIMELINE)
    new_lanes = "a running relay starts new lanes automatically; if none runs: outbox relay"
    if row["copied"] and row["problem"] is not None:
        yield problem(
            f"nothing is sequenced: {INCOMPLETE.format(row['problem'])}",
            "the relay begins new lanes as soon as the state is complete",
        )
    elif row["server"] is None:
        yield await _explain_unknown_timeline(context, row["role"])
    elif row["known"] not in (None, row["server"]):
        yield warning(
            f"the server is on timeline {row['server']}, but the last batch was sequenced on "
            f"timeline {row['known']}: the server was promoted or recovered since",
            new_lanes,
        )
    elif row["copied"]:
        yield warning(
            "this database was restored from a dump or copied since the last batch: receivers may "
            "have seen sequence numbers that it does not know",
            new_lanes,
        )
    elif row["since_s"] is None:
        yield ok(f"timeline {row['server']}")
    else:
        cause = "the restored database" if row["restored"] else "it"
        since = rounded(row["since_s"])
        yield ok(f"timeline {row['server']}; new lanes started with {cause} {since} ago")


# What `server_timeline` reads.
READ_WAL_FILE = "SELECT pg_walfile_name(pg_current_wal_insert_lsn())"


async def _explain_unknown_timeline(context: DoctorContext, role: str) -> CheckResult:
    """The result for a server on which `server_timeline` fails, with the error that it hides."""
    error: asyncpg.PostgresError | None = None
    try:
        async with context.db.transaction():
            await context.db.fetchval(READ_WAL_FILE)
    except asyncpg.PostgresError as raised:
        error = raised
    message = (
        "the server does not report its timeline: after a failover that loses commits, "
        "sequence numbers that receivers have seen may be used again for other events"
    )
    if error is None or isinstance(error, asyncpg.InsufficientPrivilegeError):
        return warning(
            message,
            "GRANT EXECUTE ON FUNCTION pg_current_wal_insert_lsn(), pg_walfile_name(pg_lsn) TO "
            f'"{role}"; if that is not possible, change every endpoint\'s number of lanes '
            "after such a failover, before a relay starts",
        )
    # Amazon Aurora has functions of the WAL with wal_level = logical only.
    new_lanes = f"UPDATE {context.qualify('cursor')} SET identity = 'restored'"  # noqa: S608
    return warning(
        f"{message} ({server_error(error).message})",
        "a failover within a cluster of Amazon Aurora loses no commit; after the promotion of "
        f"another cluster or a restore, before a relay starts: {new_lanes}",
    )


# All roles may read the database, the role and the name of a session, unlike most of
# pg_stat_activity.  Workers of autovacuum have no role, replication has no database, and no limit
# counts them.  Reserved connections are for superusers, and from version 16 on for
# pg_use_reserved_connections.  A database and a role may have their own limit.
CONNECTIONS = f"""
SELECT *,
       (SELECT count(*) FROM pg_stat_activity
         WHERE datname = current_database()
           AND application_name LIKE '{SESSION_NAME.removesuffix(":")}%') AS of_relays
  FROM (SELECT 'this server' AS of, 'raise max_connections, or close some' AS do,
               (SELECT count(*) FROM pg_stat_activity
                 WHERE datid IS NOT NULL AND usesysid IS NOT NULL)::integer AS used,
               current_setting('max_connections')::integer
               - current_setting('superuser_reserved_connections')::integer
               - coalesce(current_setting('reserved_connections', true)::integer, 0) AS usable
         UNION ALL
        SELECT format('database "%s"', datname),
               format('ALTER DATABASE %I CONNECTION LIMIT -1, or close some', datname),
               (SELECT count(*) FROM pg_stat_activity a
                 WHERE a.datid = d.oid AND a.usesysid IS NOT NULL)::integer,
               datconnlimit
          FROM pg_database d WHERE datname = current_database() AND datconnlimit >= 0
         UNION ALL
        SELECT format('role "%s"', rolname),
               format('ALTER ROLE %I CONNECTION LIMIT -1, or close some', rolname),
               (SELECT count(*) FROM pg_stat_activity a WHERE a.usesysid = r.oid)::integer,
               rolconnlimit
          FROM pg_roles r WHERE rolname = current_user AND rolconnlimit >= 0) budget
 ORDER BY usable - used LIMIT 1
"""  # noqa: S608 (constants only)


@check("connections")
async def connections(context: DoctorContext) -> Results:
    """Connections for one more relay are available."""
    row = await context.db.fetchrow(CONNECTIONS)
    free, needed = max(row["usable"] - row["used"], 0), context.limits.connections_free_min
    message = (
        f"{count(free, 'connection')} of {row['usable']} free, of {row['of']}; "
        f"relays use {row['of_relays']}, and one more opens up to {needed}"
    )
    yield warning(message, row["do"]) if free < needed else ok(message)


CLOCK = "SELECT extract(epoch FROM clock_timestamp())::float8"


@check("clock")
async def clock(context: DoctorContext) -> Results:
    """The clocks of this machine and the server agree."""
    before = context.clock()
    server_time = await context.db.fetchval(CLOCK)
    after = context.clock()
    # The server read its clock between `before` and `after`.
    off_s = server_time - (before + after) / 2
    surely_s = abs(off_s) - (after - before) / 2
    where = "ahead of" if off_s < 0 else "behind"
    message = f"this machine is {rounded(abs(off_s))} {where} the server"
    do = "synchronize both clocks by NTP; if relays run elsewhere, run outbox doctor there, too"
    if surely_s > context.limits.clock_problem_s:
        yield problem(
            f"{message}: receivers refuse what the wrong one of these clocks signs; then relays "
            "sign with the other one",
            do,
        )
    elif surely_s > context.limits.clock_warning_s:
        yield warning(message, do)
    else:
        yield ok(f"this machine and the server agree within {max(abs(off_s), 0.1):.1f} s")


# Sessions whose commit waits for a synchronous standby.  Without pg_monitor a role sees only those
# of its own roles.
UNCONFIRMED_COMMITS = """
SELECT count(*) AS sessions, current_setting('synchronous_standby_names') AS standbys,
       max(extract(epoch FROM clock_timestamp() - state_change))::float8 AS since_s,
       pg_has_role(current_user, 'pg_read_all_stats', 'USAGE') AS may_see, current_user AS role
  FROM pg_stat_activity WHERE wait_event = 'SyncRep'
"""


@check("standbys")
async def synchronous_standbys(context: DoctorContext) -> Results:
    """No commit waits long for a synchronous standby."""
    row = await context.db.fetchrow(UNCONFIRMED_COMMITS)
    if row["sessions"] and row["since_s"] > context.limits.standby_s:
        yield problem(
            f"the commits of {count(row['sessions'], 'session')} wait for a synchronous "
            f"standby, for up to {rounded(row['since_s'])}: nothing is published or delivered",
            f"bring back a standby of synchronous_standby_names ({row['standbys']}), or remove it "
            "there",
        )
    elif not row["standbys"]:
        yield ok("commits wait for no standby")
    elif not row["sessions"] and not row["may_see"]:
        yield missing_privilege("whether commits wait for a synchronous standby", row["role"])
    else:
        yield ok("synchronous standbys confirm commits")
