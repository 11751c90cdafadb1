"""The server: what it is, what it promises, and its clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.operations.doctor.finding import age, many, ok, problem, warning
from outbox.store.connection.connect import SERVER_VERSION_MIN
from outbox.store.replicas import SESSION_NAME

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from outbox.operations.doctor.finding import Look, Said

SERVER_VERSION_TESTED = 18

VERSION = """
SELECT split_part(current_setting('server_version'), ' ', 1) AS version,
       current_setting('server_version_num')::integer / 10000 AS major,
       pg_is_in_recovery() AS standby
"""

DURABILITY = """
SELECT current_setting('fsync') AS fsync,
       current_setting('full_page_writes') AS full_page_writes,
       current_setting('synchronous_commit') AS synchronous_commit,
       current_user AS role
"""

# numbackends, and a session's role and name, can be seen by everybody, unlike most of
# pg_stat_activity.  The reserved ones are for superusers, and from version 16 on for a
# role of theirs.  A database and a role may have a limit of their own.
CONNECTIONS = f"""
SELECT *,
       (SELECT count(*) FROM pg_stat_activity
         WHERE datname = current_database()
           AND application_name LIKE '{SESSION_NAME.removesuffix(":")}%') AS of_relays
  FROM (SELECT 'this server' AS of, 'raise max_connections, or close some' AS do,
               (SELECT coalesce(sum(numbackends), 0) FROM pg_stat_database)::integer AS used,
               current_setting('max_connections')::integer
               - current_setting('superuser_reserved_connections')::integer
               - coalesce(current_setting('reserved_connections', true)::integer, 0) AS usable
         UNION ALL
        SELECT format('database "%s"', datname),
               format('ALTER DATABASE %I CONNECTION LIMIT -1, or close some', datname),
               pg_stat_get_db_numbackends(oid), datconnlimit
          FROM pg_database WHERE datname = current_database() AND datconnlimit >= 0
         UNION ALL
        SELECT format('role "%s"', rolname),
               format('ALTER ROLE %I CONNECTION LIMIT -1, or close some', rolname),
               (SELECT count(*) FROM pg_stat_activity a WHERE a.usesysid = r.oid)::integer,
               rolconnlimit
          FROM pg_roles r WHERE rolname = current_user AND rolconnlimit >= 0) budget
 ORDER BY usable - used LIMIT 1
"""  # noqa: S608 (constants only)

TIMELINE = """
SELECT server_timeline() AS server, timeline AS known, current_user AS role,
       extract(epoch FROM clock_timestamp() - timeline_at)::float8 AS since_s
  FROM cursor
"""

CLOCK = "SELECT extract(epoch FROM clock_timestamp())::float8"


async def version(look: Look) -> AsyncIterator[Said]:
    """A primary of a version that we know."""
    row = await look.db.fetchrow(VERSION)
    says = f"PostgreSQL {row['version']}"
    if row["standby"]:
        yield problem(
            f"{says}, a standby: it takes no writes, and does not see what the primary does",
            "connect to the primary, or name all hosts with target_session_attrs=primary",
        )
    elif row["major"] > SERVER_VERSION_TESTED:
        yield warning(
            f"{says}; this program is tested on {SERVER_VERSION_MIN} to {SERVER_VERSION_TESTED}",
            "look for a newer outbox-relay",
        )
    else:
        yield ok(f"{says}, a primary")


async def durability(look: Look) -> AsyncIterator[Said]:
    """What was committed is there after a crash."""
    row = await look.db.fetchrow(DURABILITY)
    off = [name for name in ("fsync", "full_page_writes") if row[name] != "on"]
    if off:
        yield warning(
            f"{' and '.join(off)} {'is' if len(off) == 1 else 'are'} off: a crash of the machine "
            "can lose events that were delivered already",
            f"set {' and '.join(f'{name} = on' for name in off)} in postgresql.conf",
        )
    # Where the relay can set it, it does.
    if look.pooled and row["synchronous_commit"] == "off":
        yield problem(
            "synchronous_commit is off, and behind a proxy the relay cannot set it: events may "
            "be sent whose commit a crash takes back",
            f'ALTER ROLE "{row["role"]}" SET synchronous_commit = on',
        )
    elif not off:
        yield ok("commits reach the disk before anything is sent")


async def timeline(look: Look) -> AsyncIterator[Said]:
    """A fail-over is noticed, and no lane goes on that may have lost numbers by it."""
    row = await look.db.fetchrow(TIMELINE)
    if row["server"] is None:
        yield warning(
            "the server does not say its timeline: after a fail-over that loses commits, numbers "
            "that receivers have seen may come again for other events",
            "GRANT EXECUTE ON FUNCTION pg_current_wal_insert_lsn(), pg_walfile_name(pg_lsn) TO "
            f'"{row["role"]}"; where that cannot be, change every endpoint\'s number of lanes '
            "after such a fail-over, before a relay runs again",
        )
    elif row["known"] not in (None, row["server"]):
        yield warning(
            f"the server is on timeline {row['server']}, and what was sequenced last was on "
            f"timeline {row['known']}: it was promoted, or recovered, since then",
            "a relay that lives begins new lanes by itself; if none does: outbox relay",
        )
    elif row["since_s"] is None:
        yield ok(f"timeline {row['server']}")
    else:
        yield ok(f"timeline {row['server']}; new lanes began with it {age(row['since_s'])} ago")


async def connections(look: Look) -> AsyncIterator[Said]:
    """There is room for another relay."""
    row = await look.db.fetchrow(CONNECTIONS)
    free = max(row["usable"] - row["used"], 0)
    says = (
        f"{many(free, 'connection')} of {row['usable']} free, of {row['of']}; "
        f"our relays have {row['of_relays']}, and one more opens up to "
        f"{look.limits.connections_free_min}"
    )
    if free < look.limits.connections_free_min:
        yield warning(says, row["do"])
    else:
        yield ok(says)


async def clock(look: Look) -> AsyncIterator[Said]:
    """This machine and the server agree on the time."""
    before = look.clock()
    there = await look.db.fetchval(CLOCK)
    after = look.clock()
    # It was read somewhere between the two.
    off_s = there - (before + after) / 2
    surely_s = abs(off_s) - (after - before) / 2
    where = "ahead of" if off_s < 0 else "behind"
    says = f"this machine is {age(abs(off_s))} {where} the server"
    do = "set both clocks by NTP; if relays run elsewhere, run this there, too"
    if surely_s > look.limits.clock_problem_s:
        yield problem(f"{says}: receivers refuse signatures whose time stamp is minutes off", do)
    elif surely_s > look.limits.clock_warning_s:
        yield warning(says, do)
    else:
        yield ok(f"this machine and the server agree within {max(abs(off_s), 0.1):.1f} s")
