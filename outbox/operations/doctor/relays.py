"""Doctor checks of relays: leases, LISTEN connections, sequencing lag and ownership."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.operations.doctor.finding import (
    ROWS_MAX,
    format_age,
    format_count,
    join_names,
    ok,
    problem,
    report_remaining,
    warning,
)
from outbox.store.sessions import LISTENER_SUFFIX
from outbox.store.skipped_events import BATCHES_PER_SEARCH, EVENTS_MAX, FIND_SKIPPED_EVENTS
from outbox.store.stalls import read_cursor_blocker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from outbox.operations.doctor.finding import CheckResult, DoctorContext

START = "start one: outbox relay"

REPLICAS = """
SELECT r.id, r.name, extract(epoch FROM r.expires_at - clock_timestamp())::float8 AS left_s,
       (SELECT count(*) FROM ownership o JOIN endpoint e ON e.id = o.endpoint_id
         WHERE o.replica_id = r.id AND e.state <> 'removed') AS endpoints
  FROM replica r ORDER BY r.id
"""

HAS_ENDPOINTS = "SELECT EXISTS (SELECT FROM endpoint WHERE state <> 'removed')"

# By application_name, which all roles may read.
NOT_LISTENING = f"""
SELECT r.id, r.name, count(*) OVER () AS total
  FROM replica r
 WHERE r.expires_at > clock_timestamp()
   AND r.started_at < clock_timestamp() - make_interval(secs => $1)
   AND NOT EXISTS (SELECT FROM pg_stat_activity a
                    WHERE a.datname = current_database()
                      AND a.application_name = r.label || '{LISTENER_SUFFIX}')
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

# Empty unless a relay is running: without one, the check of replicas reports the cause.
OWNERLESS = """
SELECT e.name, o.replica_id, count(*) OVER () AS total
  FROM endpoint e
  LEFT JOIN ownership o ON o.endpoint_id = e.id
  LEFT JOIN replica r ON r.id = o.replica_id AND r.expires_at > clock_timestamp()
 WHERE e.state <> 'removed' AND r.id IS NULL
   AND EXISTS (SELECT FROM replica WHERE expires_at > clock_timestamp())
 ORDER BY e.name COLLATE "C" LIMIT $1
"""


async def check_replicas(context: DoctorContext) -> AsyncIterator[CheckResult]:
    """At least one relay renews its lease."""
    rows = await context.db.fetch(REPLICAS)
    if not any(row["left_s"] > 0 for row in rows):
        if await context.db.fetchval(HAS_ENDPOINTS):
            yield problem("no relay is running: nothing is delivered", START)
        else:
            yield warning("no relay is running, and there is no endpoint yet", START)
    for row in rows:
        who = f"{row['name']} (replica {row['id']})"
        owns = f"owns {format_count(row['endpoints'], 'endpoint')}"
        if row["left_s"] > 0:
            yield ok(f"{who} {owns}; its lease expires in {format_age(row['left_s'])}")
        else:
            yield warning(
                f"{who} {owns}, but its lease expired {format_age(-row['left_s'])} ago",
                "another relay takes over automatically; if none runs, " + START,
            )


async def check_listeners(context: DoctorContext) -> AsyncIterator[CheckResult]:
    """Every relay has a LISTEN connection."""
    if not context.listening:
        yield ok("relays with these settings do not listen; they poll every OUTBOX_POLL_S")
        return
    rows = await context.db.fetch(NOT_LISTENING, context.limits.listener_s, ROWS_MAX)
    for row in rows:
        yield warning(
            f"{row['name']} (replica {row['id']}) has no LISTEN connection, and polls every "
            "OUTBOX_POLL_S",
            "see its log for the cause; expected with OUTBOX_POOLED or OUTBOX_NOTIFY=false",
        )
    for result in report_remaining(rows, "see their logs"):
        yield result
    if not rows:
        yield ok("every running relay listens")


async def check_lag(context: DoctorContext) -> AsyncIterator[CheckResult]:
    """Committed events are sequenced without delay."""
    row = await context.db.fetchrow(WAITING, COUNT_MAX + 1)
    if not row["events"]:
        yield ok(f"all events up to id {row['high']} are sequenced")
        return
    events = format_count(min(row["events"], COUNT_MAX), "event")
    if row["events"] > COUNT_MAX:
        events = f"over {events}"
    verb = "waits" if row["events"] == 1 else "wait"
    message = f"{events} {verb} to be sequenced, the oldest for {format_age(row['oldest_s'])}"
    if row["oldest_s"] < context.limits.lag_warning_s:
        yield ok(message)
        return
    blocker = await read_cursor_blocker(context.db)
    action = "see the relay's log" if row["relay"] else START
    if blocker is not None:
        message += f", blocked by {blocker.describe()}"
        action = f"end it in its application, or {blocker.end_command}"
    make_result = problem if row["oldest_s"] > context.limits.lag_problem_s else warning
    yield make_result(message, action)


async def check_skipped_events(context: DoctorContext) -> AsyncIterator[CheckResult]:
    """No committed event was skipped as rolled back; of older batches, outbox verify knows."""
    row = await context.db.fetchrow(FIND_SKIPPED_EVENTS, BATCHES_PER_SEARCH, None)
    if not row["events"]:
        yield ok("no committed event was skipped")
        return
    ids = ", ".join(map(str, row["first_ids"]))
    at_least = "at least " if row["events"] == EVENTS_MAX else ""
    yield problem(
        f"{at_least}{format_count(row['events'], 'committed event')} skipped, from id {ids}: the "
        "sequence of outbox.id was altered, or they were inserted with explicit ids",
        "outbox resequence, and the next batches sequence them",
    )


async def check_owners(context: DoctorContext) -> AsyncIterator[CheckResult]:
    """Every endpoint is owned by a running relay."""
    rows = await context.db.fetch(OWNERLESS, ROWS_MAX)
    if not rows:
        yield ok("every endpoint is owned by a running relay")
        return
    names = join_names([row["name"] for row in rows], rows[0]["total"])
    yield warning(
        f"no relay owns {names}",
        "a running relay acquires them within its lease; if this persists, see its log",
    )
