"""Doctor checks of lanes: blocked, failing and old lanes, and dead letters."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import orjson

from outbox.core.model.ids import lane_name
from outbox.operations.doctor.finding import (
    ROWS_MAX,
    format_age,
    format_count,
    ok,
    problem,
    report_remaining,
    warning,
)
from outbox.operations.lanes import LANE_STATE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from outbox.operations.doctor.finding import CheckResult, DoctorContext

# The dead letter may be a range that includes the sequence number.
BLOCKED = """
SELECT e.id AS endpoint_id, e.name, l.generation, l.slot, b.seq, d.id AS dead_id, d.reason,
       extract(epoch FROM clock_timestamp() - b.at)::float8 AS since_s,
       count(*) OVER () AS total
  FROM lane_block b
  JOIN lane l ON l.id = b.lane_id
  JOIN endpoint e ON e.id = l.endpoint_id AND e.state <> 'removed'
  LEFT JOIN LATERAL (
       SELECT id, reason FROM dead_letter d
        WHERE d.lane_id = b.lane_id AND d.seq <= b.seq AND d.to_seq >= b.seq
        ORDER BY d.seq DESC LIMIT 1) d ON true
 ORDER BY b.at LIMIT $1
"""

# Retry state older than an acknowledgement above the checkpoint is stale: its delivery has been
# delivered since.
FAILING = """
SELECT e.id AS endpoint_id, e.name, l.generation, l.slot, p.retry_seq, p.attempts,
       extract(epoch FROM clock_timestamp() - p.first_attempt_at)::float8 AS since_s,
       p.last_response::text AS last_response, count(*) OVER () AS total
  FROM lane_progress p
  JOIN lane l ON l.id = p.lane_id
  JOIN endpoint e ON e.id = p.endpoint_id AND e.state = 'active'
 WHERE p.attempts > 0 AND p.retry_seq = p.acked_seq + 1
   AND p.first_attempt_at < clock_timestamp() - make_interval(secs => $2)
   AND NOT EXISTS (SELECT FROM attempt a
                    WHERE a.lane_id = p.lane_id AND a.batch >= p.floor_batch
                      AND a.seq >= p.retry_seq AND a.outcome = 'delivered')
 ORDER BY p.first_attempt_at LIMIT $1
"""

# Lanes of an older generation with pending deliveries; the lanes of the new one wait for them.
GENERATIONS = f"""
SELECT e.name, e.state, count(*) AS lanes, sum(s.last_seq - s.acked_seq)::bigint AS pending,
       count(b.lane_id) AS blocked, coalesce(h.state, 'healthy') AS health,
       count(*) OVER () AS total
  FROM ({LANE_STATE}) s
  JOIN endpoint e ON e.id = s.endpoint_id AND e.state <> 'removed'
  LEFT JOIN endpoint_health h ON h.endpoint_id = e.id
  LEFT JOIN lane_block b ON b.lane_id = s.lane_id
 WHERE s.generation < e.generation AND s.last_seq > s.acked_seq
 GROUP BY e.id, e.name, e.state, h.state
 ORDER BY e.name COLLATE "C" LIMIT $1
"""  # noqa: S608 (constants only)

# Without removed endpoints, whose dead letters cannot be replayed.
DEAD_LETTERS = """
SELECT e.name, count(*) AS dead_letters, extract(epoch FROM clock_timestamp() - min(d.at))::float8
       AS oldest_s, sum(count(*)) OVER ()::bigint AS all_dead_letters, count(*) OVER () AS total
  FROM dead_letter d JOIN endpoint e ON e.id = d.endpoint_id AND e.state <> 'removed'
 WHERE d.state = 'dead'
 GROUP BY e.id, e.name
 ORDER BY count(*) DESC, e.name COLLATE "C" LIMIT $1
"""


def _lane(row: Any) -> str:
    lane = lane_name(row["endpoint_id"], row["generation"], row["slot"])
    return f'lane {lane} of "{row["name"]}"'


async def check_blocked(context: DoctorContext) -> AsyncIterator[CheckResult]:
    """No lane is blocked by a dead letter."""
    rows = await context.db.fetch(BLOCKED, ROWS_MAX)
    for row in rows:
        name = shlex.quote(row["name"])
        dead_id = row["dead_id"]
        which = f" as dead letter {dead_id} ({row['reason']})" if dead_id else ""
        unblock = (
            f"outbox dead replay {dead_id}, or outbox dead discard {dead_id}; or "
            if dead_id
            else ""
        )
        yield problem(
            f"{_lane(row)} has been blocked for {format_age(row['since_s'])}: sequence "
            f"{row['seq']} was dead-lettered{which}",
            f"{unblock}unblock all lanes: outbox endpoint resume {name}",
        )
    for result in report_remaining(rows, "outbox status"):
        yield result
    if not rows:
        yield ok("no lane is blocked")


async def check_failing(context: DoctorContext) -> AsyncIterator[CheckResult]:
    """No lane has been failing for long."""
    rows = await context.db.fetch(FAILING, ROWS_MAX, context.limits.failing_s)
    for row in rows:
        response = orjson.loads(row["last_response"]) if row["last_response"] else {}
        last = response.get("status") or response.get("failure") or "no response"
        yield warning(
            f"{_lane(row)} has been failing at sequence {row['retry_seq']} for "
            f"{format_age(row['since_s'])}: {format_count(row['attempts'], 'attempt')}, {last}",
            "fix its receiver; when the retries are exhausted, the delivery is dead-lettered",
        )
    for result in report_remaining(rows, "outbox status"):
        yield result
    if not rows:
        yield ok("no lane has been failing for long")


async def check_generations(context: DoctorContext) -> AsyncIterator[CheckResult]:
    """Lanes of older generations have no pending deliveries."""
    rows = await context.db.fetch(GENERATIONS, ROWS_MAX)
    for row in rows:
        yield _generation(row)
    for result in report_remaining(rows, "outbox status"):
        yield result
    if not rows:
        yield ok("no lane of an older generation has pending deliveries")


def _generation(row: Any) -> CheckResult:
    message = (
        f'"{row["name"]}": {format_count(row["lanes"], "lane")} of an older generation with '
        f"{row['pending']} pending, which are delivered before the new lanes"
    )
    if row["blocked"]:
        return problem(f"{message}; {row['blocked']} of them blocked", "see blocked lanes above")
    if row["state"] == "paused":
        return warning(
            f"{message}; it is paused",
            f"resume it: outbox endpoint resume {shlex.quote(row['name'])}",
        )
    if row["health"] != "healthy":
        return warning(f"{message}; it is {row['health']}", "fix its receiver")
    return ok(message)


async def check_dead_letters(context: DoctorContext) -> AsyncIterator[CheckResult]:
    """No dead letter waits for a decision."""
    rows = await context.db.fetch(DEAD_LETTERS, ROWS_MAX)
    if not rows:
        yield ok("no dead letter waits for a decision")
        return
    by_endpoint = ", ".join(f'{row["dead_letters"]} of "{row["name"]}"' for row in rows)
    more = rows[0]["total"] - len(rows)
    yield warning(
        f"{format_count(rows[0]['all_dead_letters'], 'dead letter')}, the oldest for "
        f"{format_age(rows[0]['oldest_s'])}: {by_endpoint}"
        + (f" and {format_count(more, 'endpoint')} more" if more else ""),
        "see outbox dead list; then outbox dead replay or outbox dead discard",
    )
