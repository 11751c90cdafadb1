"""What the clock should have published already."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.operations.doctor.finding import ROWS_MAX, age, ok, problem, rest, warning

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from outbox.operations.doctor.finding import Look, Said

# One that waits for its last run is looked at later than it is due.
OVERDUE = """
SELECT name, cron, extract(epoch FROM clock_timestamp() - look_at)::float8 AS since_s,
       count(*) OVER () AS total
  FROM schedule
 WHERE state = 'active' AND look_at < clock_timestamp() - make_interval(secs => $2)
 ORDER BY look_at, id LIMIT $1
"""

# Those that wait for their last run, which some endpoint still owes.
WAITING = """
SELECT name, cron, extract(epoch FROM clock_timestamp() - next_at)::float8 AS since_s,
       last_event_id, count(*) OVER () AS total
  FROM schedule
 WHERE state = 'active' AND overlap = 'wait' AND last_outbox_id IS NOT NULL
   AND look_at > greatest(next_at, clock_timestamp())
   AND next_at < clock_timestamp() - make_interval(secs => $2)
 ORDER BY next_at, id LIMIT $1
"""

FUTURE = """
SELECT extract(epoch FROM clock_timestamp() - deliver_at)::float8 AS since_s
  FROM future_event ORDER BY deliver_at, id LIMIT 1
"""

DO = 'a running relay publishes them; its log says "ticks were refused" if the database does'


async def overdue(look: Look) -> AsyncIterator[Said]:
    """Schedules run when they should, and future events are published at their time."""
    late_s = look.limits.overdue_s
    rows = await look.db.fetch(OVERDUE, ROWS_MAX, late_s)
    for row in rows:
        yield problem(
            f'schedule "{row["name"]}" ({row["cron"]}) is overdue for {age(row["since_s"])}', DO
        )
    for said in rest(rows, "outbox schedule list"):
        yield said
    waiting = await look.db.fetch(WAITING, ROWS_MAX, late_s)
    for row in waiting:
        yield warning(
            f'schedule "{row["name"]}" ({row["cron"]}) is due for {age(row["since_s"])}, and waits '
            "until its last run has ended",
            f"find out who owes it: outbox trace {row['last_event_id']}",
        )
    for said in rest(waiting, "outbox schedule list"):
        yield said
    since_s = await look.db.fetchval(FUTURE)
    if since_s is not None and since_s > late_s:
        yield problem(f"an event waits for {age(since_s)} longer than it should", DO)
    elif not rows and not waiting:
        yield ok("no schedule and no future event is overdue")
