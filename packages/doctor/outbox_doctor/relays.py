"""Checks of relays: leases, LISTEN connections, sequencing, schedules and ownership."""

from __future__ import annotations

import asyncio
from typing import Any

from outbox.core.model.duration import rounded
from outbox.core.model.text import count
from outbox.operations.events.future import OLDEST_HELD
from outbox.operations.status import REPLICAS
from outbox.store.cluster.sessions import LISTENER_SUFFIX
from outbox.store.schedules.future_events import READ_POSTPONED
from outbox.store.schedules.schedule_runs import RETRY_MAX
from outbox.store.sequencing.skipped_events import (
    BATCHES_PER_SEARCH,
    FIND_SKIPPED_EVENTS,
    SKIPPED_EVENTS_MAX,
)
from outbox.store.sequencing.stalls import read_cursor_blocker
from outbox.store.sql.expressions import lease_runs
from outbox_doctor.check import (
    CheckResult,
    DoctorContext,
    Results,
    check,
    join_names,
    ok,
    problem,
    report_rows,
    warning,
)

ACCOUNTED_BLOCKS_MAX = 3
"""Blocks of ids that are counted, each in less than a second."""

MOVED_POLL_S = 0.1

START = "start one: outbox relay"
START_FOR_SCHEDULES = (
    "start a relay: outbox relay; if one runs, its log has the error "
    '("scheduled runs failed" or "schedule is invalid")'
)

HAS_ENDPOINTS = "SELECT EXISTS (SELECT FROM endpoint WHERE state <> 'removed')"


@check("relays")
async def replicas(context: DoctorContext) -> Results:
    """At least one relay renews its lease."""
    rows = await context.db.fetch(REPLICAS)
    if not any(row["alive"] for row in rows):
        if await context.db.fetchval(HAS_ENDPOINTS):
            yield problem("no relay is running: nothing is delivered", START)
        else:
            yield warning("no relay is running, and there is no endpoint yet", START)
    for row in rows:
        who = f"{row['name']} (replica {row['id']})"
        owns = f"owns {count(row['endpoints'], 'endpoint')}"
        if row["alive"]:
            yield ok(f"{who} {owns}; its lease expires in {rounded(row['left_s'])}")
            if row["problem"]:
                yield problem(
                    f"{who} lacks resources for connections: {row['problem']}; it sends fewer "
                    "requests at a time",
                    "raise the limit of its process, such as LimitNOFILE of a systemd unit",
                )
            if row["api_problem"]:
                yield warning(
                    f"{who}: {row['api_problem']}",
                    "deliveries do not need it; the relay's log says more",
                )
        else:
            left_s = row["left_s"]
            expired = f"its lease expired {rounded(-left_s)} ago"
            if left_s > 0:
                expired = "its lease was last renewed by a clock that was ahead"
            yield warning(
                f"{who} {owns}, but {expired}",
                "another relay takes over automatically; if none runs, " + START,
            )


# By application_name, which all roles may read.
NOT_LISTENING = f"""
SELECT r.id, r.name
  FROM replica r
 WHERE {lease_runs("r")}
   AND r.started_at < clock_timestamp() - make_interval(secs => $1)
   AND NOT EXISTS (SELECT FROM pg_stat_activity a
                    WHERE a.datname = current_database()
                      AND a.application_name = r.label || '{LISTENER_SUFFIX}')
 ORDER BY r.id
"""  # noqa: S608 (constants only)


@check("listeners", passed="every running relay listens")
async def listeners(context: DoctorContext) -> Results:
    """Every relay has a LISTEN connection."""
    if not context.listening:
        yield ok("relays with these settings do not listen; they poll every OUTBOX_POLL_S")
        return
    for result in await report_rows(
        context, _missing_listener, "see their logs", NOT_LISTENING, context.limits.listener_s
    ):
        yield result


def _missing_listener(row: Any) -> CheckResult:
    return warning(
        f"{row['name']} (replica {row['id']}) has no LISTEN connection, and polls every "
        "OUTBOX_POLL_S",
        "see its log for the cause; expected with OUTBOX_POOLED or OUTBOX_NOTIFY=false",
    )


UNSEQUENCED_COUNT_MAX = 10_000

UNSEQUENCED = f"""
SELECT (SELECT count(*) FROM (SELECT FROM outbox o WHERE o.id > b.high LIMIT $1) w) AS events,
       (SELECT extract(epoch FROM clock_timestamp() - o.created_at)::float8
          FROM outbox o WHERE o.id > b.high ORDER BY o.id LIMIT 1) AS oldest_s,
       EXISTS (SELECT FROM replica WHERE {lease_runs("replica")}) AS relay,
       b.high
  FROM batch b ORDER BY b.batch DESC LIMIT 1
"""  # noqa: S608 (constants only)


@check("sequencing")
async def lag(context: DoctorContext) -> Results:
    """Committed events are sequenced without delay."""
    row = await context.db.fetchrow(UNSEQUENCED, UNSEQUENCED_COUNT_MAX + 1)
    if not row["events"]:
        yield ok(f"all events up to id {row['high']} are sequenced")
        return
    events = count(min(row["events"], UNSEQUENCED_COUNT_MAX), "event")
    if row["events"] > UNSEQUENCED_COUNT_MAX:
        events = f"over {events}"
    verb = "waits" if row["events"] == 1 else "wait"
    message = f"{events} {verb} to be sequenced, the oldest for {rounded(row['oldest_s'])}"
    if row["oldest_s"] < context.limits.lag_warning_s:
        yield ok(message)
        return
    blocker = await read_cursor_blocker(context.db)
    action = "see the relay's log" if row["relay"] else START
    if blocker is not None:
        message += f", blocked by {blocker.describe()}"
        action = f"end it in its application, or {blocker.end_command}"
    if not row["relay"]:
        yield problem(f"{message}, and no relay is alive", action)
        return
    make_result = problem if row["oldest_s"] > context.limits.lag_problem_s else warning
    yield make_result(message, action)


@check("skipped events", passed="no committed event was skipped")
async def skipped_events(context: DoctorContext) -> Results:
    """No committed event was skipped as rolled back; outbox verify checks older batches."""
    row = await context.db.fetchrow(FIND_SKIPPED_EVENTS, BATCHES_PER_SEARCH, None)
    if row["events"]:
        ids = ", ".join(map(str, row["first_ids"]))
        at_least = "at least " if row["events"] == SKIPPED_EVENTS_MAX else ""
        yield problem(
            f"{at_least}{count(row['events'], 'committed event')} skipped, from id {ids}: "
            "the sequence of outbox.id was altered, or they were inserted with explicit ids",
            "outbox resequence, and the next batches sequence them",
        )


# Blocks that differed when a relay counted them last, and still do.
UNACCOUNTED = """
SELECT lower(i.ids) AS first_id, upper(i.ids) - 1 AS last_id, a.present, a.expected,
       format('UPDATE %I.event_block SET dead = dead + (%s) WHERE period = %s AND block = %s',
              current_schema(), a.expected - a.present, e.period, e.block) AS accept
  FROM (SELECT period, block FROM event_block WHERE present <> expected
         ORDER BY examined_at LIMIT $1) e
 CROSS JOIN LATERAL account(e.period, e.block) a
 CROSS JOIN LATERAL block_ids(e.period, e.block) AS i(ids)
 WHERE a.present <> a.expected
"""
UNASSIGNED = "SELECT id, event_id FROM outbox WHERE id < 1 ORDER BY id"


@check("accounting", passed="every id is the id of an event, or proven dead")
async def unaccounted_events(context: DoctorContext) -> Results:
    """The number of events is the number of ids without the dead ones; outbox verify counts all."""
    for row in await context.db.fetch(UNACCOUNTED, ACCOUNTED_BLOCKS_MAX):
        events = f"ids {row['first_id']} to {row['last_id']}: {count(row['present'], 'event')}"
        if row["present"] < row["expected"]:
            yield problem(
                f"{events} instead of {row['expected']}: some are gone without a record, or hidden",
                "outbox verify, which names the cause (a detached partition, an index); restore "
                f"them from a backup, or accept that they are gone: {row['accept']}",
            )
        else:
            yield problem(
                f"{events} instead of {row['expected']}: some were skipped, or have ids that the "
                "sequence did not assign",
                "outbox resequence, and the next batches sequence them; if it finds none, publish "
                f"them again, and accept the rows: {row['accept']}",
            )
    for row in await context.fetch_first(UNASSIGNED):
        yield problem(
            f"event {row['event_id']} has the id {row['id']}, which the sequence does not assign: "
            "it is never sequenced",
            "publish it again, and delete this row",
        )


# A schedule that waits for its last run is polled later than it is due.
OVERDUE = """
SELECT name, cron, extract(epoch FROM clock_timestamp() - due_at)::float8 AS since_s
  FROM schedule
 WHERE state = 'active' AND due_at < clock_timestamp() - make_interval(secs => $1)
 ORDER BY due_at, id
"""

# Schedules that wait for their last run, which is pending for some endpoint.
WAITING = """
SELECT name, cron, extract(epoch FROM clock_timestamp() - next_at)::float8 AS since_s,
       last_event_id
  FROM schedule
 WHERE state = 'active' AND overlap = 'wait' AND last_outbox_id IS NOT NULL
   AND due_at > greatest(next_at, clock_timestamp())
   AND next_at < clock_timestamp() - make_interval(secs => $1)
 ORDER BY next_at, id
"""

# Schedules that the relay postponed because the database refused them, which the journal explains.
REFUSED = """
SELECT name, cron, extract(epoch FROM clock_timestamp() - next_at)::float8 AS since_s,
       (SELECT j.data ->> 'reason' FROM journal j
         WHERE j.kind = 'row_refused' AND j.data ->> 'schedule' = s.name
         ORDER BY j.id DESC LIMIT 1) AS reason
  FROM schedule s
 WHERE state = 'active' AND (overlap <> 'wait' OR last_outbox_id IS NULL)
   AND due_at > greatest(next_at, clock_timestamp())
   AND next_at < clock_timestamp() - make_interval(secs => $1)
 ORDER BY next_at, id
"""

# Applications' delayed events; what waits for the share of a tenant is late on purpose.
FUTURE = """
SELECT extract(epoch FROM clock_timestamp() - deliver_at)::float8 AS since_s
  FROM future_event WHERE cost IS NULL AND problem IS NULL
 ORDER BY coalesce(retry_at, deliver_at), id LIMIT 1
"""

# The first events that wait for the shares of their tenants, held or due, for more than $1 seconds.
SHARED = f"""
SELECT id, since_s FROM (
    SELECT oldest.id, extract(epoch FROM clock_timestamp() - oldest.created_at)::float8 AS since_s
      FROM tenant_share s CROSS JOIN LATERAL ({OLDEST_HELD}) oldest
     UNION ALL
    (SELECT id, extract(epoch FROM clock_timestamp() - deliver_at)::float8 FROM future_event
      WHERE cost IS NOT NULL AND held_before IS NULL AND problem IS NULL
      ORDER BY coalesce(retry_at, deliver_at) LIMIT 1)) first
 WHERE since_s > $1 ORDER BY since_s DESC
"""  # noqa: S608 (constants only)


@check("schedules", passed="no schedule and no future event is overdue")
async def schedules(context: DoctorContext) -> Results:
    """Schedules and future events are published on time."""
    late_s = context.limits.overdue_s
    for query, describe in (
        (OVERDUE, _overdue_schedule),
        (WAITING, _waiting_schedule),
        (REFUSED, _refused_schedule),
    ):
        for result in await report_rows(context, describe, "outbox schedule list", query, late_s):
            yield result
    since_s = await context.db.fetchval(FUTURE)
    if since_s is not None and since_s > late_s:
        yield problem(
            f"a future event has been overdue for {rounded(since_s)}", START_FOR_SCHEDULES
        )
    rows = await context.db.fetch(SHARED, late_s)
    if rows and not await _some_are_moved(context, {row["id"] for row in rows}):
        yield problem(
            f"held events are not published, the oldest for {rounded(rows[0]['since_s'])}",
            START_FOR_SCHEDULES,
        )
    row = await context.db.fetchrow(READ_POSTPONED)
    if row["events"]:
        yield problem(
            f"{count(row['events'], 'future event')} could not be published: {row['reason']}",
            "correct the trigger, constraint or rule that refuses them; the relay tries again at "
            f"least every {rounded(RETRY_MAX.total_seconds())}",
        )


async def _some_are_moved(context: DoctorContext, first: set[int]) -> bool:
    """Whether a relay publishes any of the first held events within `moved_s`."""
    loop = asyncio.get_running_loop()
    until = loop.time() + context.limits.moved_s
    while loop.time() < until:
        await asyncio.sleep(MOVED_POLL_S)
        rows = await context.db.fetch(SHARED, 0.0)
        if not first.issubset(row["id"] for row in rows):
            return True
    return False


def _overdue_schedule(row: Any) -> CheckResult:
    return problem(
        f'schedule "{row["name"]}" ({row["cron"]}) has been overdue for {rounded(row["since_s"])}',
        START_FOR_SCHEDULES,
    )


def _waiting_schedule(row: Any) -> CheckResult:
    return warning(
        f'schedule "{row["name"]}" ({row["cron"]}) has been due for '
        f"{rounded(row['since_s'])}, and waits until its last run is delivered",
        f"see what blocks that run: outbox trace {row['last_event_id']}",
    )


def _refused_schedule(row: Any) -> CheckResult:
    return problem(
        f'schedule "{row["name"]}" ({row["cron"]}) has been due for {rounded(row["since_s"])}, and '
        f"cannot run: {row['reason'] or 'see the log of the relay'}",
        "correct the trigger, constraint or rule that refuses its event; the relay "
        f"tries again at least every {rounded(RETRY_MAX.total_seconds())}",
    )


# Empty unless a relay is running: without one, the check of replicas reports the cause.
OWNERLESS = f"""
SELECT e.name, o.replica_id
  FROM endpoint e
  LEFT JOIN ownership o ON o.endpoint_id = e.id
  LEFT JOIN replica r ON r.id = o.replica_id AND {lease_runs("r")}
 WHERE e.state <> 'removed' AND r.id IS NULL
   AND EXISTS (SELECT FROM replica WHERE {lease_runs("replica")})
 ORDER BY e.name COLLATE "C"
"""  # noqa: S608 (constants only)


@check("owners", passed="every endpoint is owned by a running relay")
async def owners(context: DoctorContext) -> Results:
    """Every endpoint is owned by a running relay."""
    rows = await context.fetch_first(OWNERLESS)
    if rows:
        yield warning(
            f"no relay owns {join_names([row['name'] for row in rows], rows[0]['total'])}",
            "a running relay acquires them within its lease; if this persists, see its log",
        )
