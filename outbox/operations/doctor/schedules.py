"""Doctor check of schedules and future events that are overdue."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.operations.doctor.finding import (
    ROWS_MAX,
    format_age,
    ok,
    problem,
    report_remaining,
    warning,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from outbox.operations.doctor.finding import CheckResult, DoctorContext

# A schedule that waits for its last run is polled later than it is due.
OVERDUE = """
SELECT name, cron, extract(epoch FROM clock_timestamp() - due_at)::float8 AS since_s,
       count(*) OVER () AS total
  FROM schedule
 WHERE state = 'active' AND due_at < clock_timestamp() - make_interval(secs => $2)
 ORDER BY due_at, id LIMIT $1
"""

# Schedules that wait for their last run, which is pending for some endpoint.
WAITING = """
SELECT name, cron, extract(epoch FROM clock_timestamp() - next_at)::float8 AS since_s,
       last_event_id, count(*) OVER () AS total
  FROM schedule
 WHERE state = 'active' AND overlap = 'wait' AND last_outbox_id IS NOT NULL
   AND due_at > greatest(next_at, clock_timestamp())
   AND next_at < clock_timestamp() - make_interval(secs => $2)
 ORDER BY next_at, id LIMIT $1
"""

FUTURE = """
SELECT extract(epoch FROM clock_timestamp() - deliver_at)::float8 AS since_s
  FROM future_event ORDER BY deliver_at, id LIMIT 1
"""

ACTION = 'start a relay: outbox relay; if one runs, its log has the error ("scheduled runs failed")'


async def check_overdue(context: DoctorContext) -> AsyncIterator[CheckResult]:
    """Schedules and future events are published on time."""
    late_s = context.limits.overdue_s
    rows = await context.db.fetch(OVERDUE, ROWS_MAX, late_s)
    for row in rows:
        yield problem(
            f'schedule "{row["name"]}" ({row["cron"]}) has been overdue for '
            f"{format_age(row['since_s'])}",
            ACTION,
        )
    for result in report_remaining(rows, "outbox schedule list"):
        yield result
    waiting = await context.db.fetch(WAITING, ROWS_MAX, late_s)
    for row in waiting:
        yield warning(
            f'schedule "{row["name"]}" ({row["cron"]}) has been due for '
            f"{format_age(row['since_s'])}, and "
            "waits until its last run is delivered",
            f"see what blocks that run: outbox trace {row['last_event_id']}",
        )
    for result in report_remaining(waiting, "outbox schedule list"):
        yield result
    since_s = await context.db.fetchval(FUTURE)
    if since_s is not None and since_s > late_s:
        yield problem(f"a future event has been overdue for {format_age(since_s)}", ACTION)
    elif not rows and not waiting:
        yield ok("no schedule and no future event is overdue")
