"""Relays: who lives, who listens, and whether the log moves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.operations.doctor.finding import ROWS_MAX, age, listed, many, ok, problem, rest, warning
from outbox.store.replicas import LISTENER_SUFFIX, SESSION_NAME

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from outbox.operations.doctor.finding import Look, Said

START = "start one: outbox relay"

REPLICAS = """
SELECT r.id, r.name, extract(epoch FROM r.expires_at - clock_timestamp())::float8 AS left_s,
       (SELECT count(*) FROM ownership o JOIN endpoint e ON e.id = o.endpoint_id
         WHERE o.replica_id = r.id AND e.state <> 'removed') AS endpoints
  FROM replica r ORDER BY r.id
"""

HAS_ENDPOINTS = "SELECT EXISTS (SELECT FROM endpoint WHERE state <> 'removed')"

# By its name, which everybody may see.
DEAF = f"""
SELECT r.id, r.name, count(*) OVER () AS total
  FROM replica r
 WHERE r.expires_at > clock_timestamp()
   AND r.started_at < clock_timestamp() - make_interval(secs => $1)
   AND NOT EXISTS (SELECT FROM pg_stat_activity a
                    WHERE a.datname = current_database()
                      AND a.application_name = '{SESSION_NAME}' || r.id || '{LISTENER_SUFFIX}')
 ORDER BY r.id LIMIT $2
"""  # noqa: S608 (constants only)

COUNT_MAX = 10_000

WAITING = """
SELECT (SELECT count(*) FROM (SELECT FROM outbox o WHERE o.id > b.high LIMIT $1) w) AS events,
       (SELECT extract(epoch FROM clock_timestamp() - o.created_at)::float8
          FROM outbox o WHERE o.id > b.high ORDER BY o.id LIMIT 1) AS oldest_s,
       EXISTS (SELECT FROM replica WHERE expires_at > clock_timestamp()) AS relay,
       b.high
  FROM batch b ORDER BY b.batch DESC LIMIT 1
"""

# Only where a relay lives: otherwise that is what is wrong.
OWNERLESS = """
SELECT e.name, o.replica_id, count(*) OVER () AS total
  FROM endpoint e
  LEFT JOIN ownership o ON o.endpoint_id = e.id
  LEFT JOIN replica r ON r.id = o.replica_id AND r.expires_at > clock_timestamp()
 WHERE e.state <> 'removed' AND r.id IS NULL
   AND EXISTS (SELECT FROM replica WHERE expires_at > clock_timestamp())
 ORDER BY e.name COLLATE "C" LIMIT $1
"""


async def replicas(look: Look) -> AsyncIterator[Said]:
    """At least one relay renews its lease."""
    rows = await look.db.fetch(REPLICAS)
    if not any(row["left_s"] > 0 for row in rows):
        if await look.db.fetchval(HAS_ENDPOINTS):
            yield problem("no relay is alive: nothing is delivered", START)
        else:
            yield warning("no relay is alive, and there is no endpoint yet", START)
    for row in rows:
        who = f"{row['name']} (replica {row['id']})"
        owns = f"owns {many(row['endpoints'], 'endpoint')}"
        if row["left_s"] > 0:
            yield ok(f"{who} {owns}; its lease runs for {age(row['left_s'])} more")
        else:
            yield warning(
                f"{who} {owns}, and has not renewed its lease for {age(-row['left_s'])}",
                "a living relay takes over by itself; if none does, " + START,
            )


async def listeners(look: Look) -> AsyncIterator[Said]:
    """Every relay hears when something is published."""
    if not look.listening:
        yield ok("relays with these settings do not listen; they look each OUTBOX_POLL_S")
        return
    rows = await look.db.fetch(DEAF, look.limits.listener_s, ROWS_MAX)
    for row in rows:
        yield warning(
            f"{row['name']} (replica {row['id']}) has no connection for LISTEN: it delivers, "
            "but looks only each OUTBOX_POLL_S",
            "see its log for why; as it should be with OUTBOX_POOLED or OUTBOX_NOTIFY=false",
        )
    for said in rest(rows, "see their logs"):
        yield said
    if not rows:
        yield ok("no living relay is deaf")


async def lag(look: Look) -> AsyncIterator[Said]:
    """What is committed becomes deliveries at once."""
    row = await look.db.fetchrow(WAITING, COUNT_MAX + 1)
    if not row["events"]:
        yield ok(f"up to id {row['high']}, and nothing waits")
        return
    events = many(min(row["events"], COUNT_MAX), "event")
    if row["events"] > COUNT_MAX:
        events = f"over {events}"
    verb = "waits" if row["events"] == 1 else "wait"
    says = f"{events} {verb} to be sequenced, the oldest for {age(row['oldest_s'])}"
    if row["oldest_s"] < look.limits.lag_warning_s:
        yield ok(says)
        return
    do = START
    if row["relay"]:
        do = "see the relay's log, and end what holds the cursor row (an outbox command left open?)"
    say = problem if row["oldest_s"] > look.limits.lag_problem_s else warning
    yield say(says, do)


async def owners(look: Look) -> AsyncIterator[Said]:
    """Every endpoint belongs to a living relay."""
    rows = await look.db.fetch(OWNERLESS, ROWS_MAX)
    if not rows:
        yield ok("no endpoint is left out by the living relays")
        return
    names = listed([row["name"] for row in rows], rows[0]["total"])
    yield warning(
        f"nobody delivers to {names}",
        "a living relay takes them within its lease; if this stays, see its log",
    )
