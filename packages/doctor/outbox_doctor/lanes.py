"""Checks of lanes: blocked, failing and old lanes, and dead letters."""

from __future__ import annotations

import shlex
from typing import Any

from outbox.core.brokers.results import BROKER_FAILURES
from outbox.core.model.duration import rounded
from outbox.core.model.ids import lane_name
from outbox.core.model.response import HOLD_FAILURES
from outbox.core.model.stored_response import describe_attempts
from outbox.core.model.text import count
from outbox.operations import lanes
from outbox.operations.dead_letters.skip import Standing, stuck_advice
from outbox.operations.rows import parse_json
from outbox.store.sql.expressions import is_held
from outbox_doctor.check import (
    CheckResult,
    DoctorContext,
    Results,
    check,
    check_rows,
    ok,
    problem,
    warning,
)


def _lane(row: Any) -> str:
    lane = lane_name(row["endpoint_id"], row["generation"], row["slot"])
    return f'lane {lane} of "{row["name"]}"'


BLOCKED = f"""
SELECT e.id AS endpoint_id, e.name, l.generation, l.slot, b.seq, d.id AS dead_id, d.reason,
       extract(epoch FROM clock_timestamp() - b.at)::float8 AS since_s
  FROM lane_block b
  JOIN lane l ON l.id = b.lane_id
  JOIN endpoint e ON e.id = l.endpoint_id AND e.state <> 'removed'
  LEFT JOIN dead_letter d ON d.id = {lanes.BLOCKED_BY}
 ORDER BY b.at
"""  # noqa: S608 (constants only)


@check_rows("blocked lanes", BLOCKED, "no lane is blocked")
def blocked(row: Any) -> CheckResult:
    """A lane is blocked by a dead letter."""
    which = unblock = ""
    if dead_id := row["dead_id"]:
        which = f" as dead letter {dead_id} ({row['reason']})"
        unblock = f"outbox dead replay {dead_id}, or outbox dead discard {dead_id}; or "
    return problem(
        f"{_lane(row)} has been blocked for {rounded(row['since_s'])}: sequence "
        f"{row['seq']} was dead-lettered{which}",
        f"{unblock}unblock all lanes: outbox endpoint resume {shlex.quote(row['name'])}",
    )


# Lanes that have been failing for some time, or that are held: their stream does not match, or the
# event of their next delivery is gone.
FAILING = f"""
SELECT l.endpoint_id, e.name, l.generation, l.slot, l.retry_seq, l.attempts, l.spent,
       extract(epoch FROM clock_timestamp() - l.first_attempt_at)::float8 AS since_s,
       l.last_response, coalesce(h.state, 'healthy') AS health,
       count(*) OVER (PARTITION BY l.endpoint_id) AS failing_lanes
  FROM ({lanes.LANE_STATE}) l
  JOIN endpoint e ON e.id = l.endpoint_id AND e.state = 'active'
  LEFT JOIN endpoint_health h ON h.endpoint_id = e.id
 WHERE {lanes.FAILING}
   AND (l.first_attempt_at < clock_timestamp() - make_interval(secs => $1)
        OR {is_held("l.last_response")})
 ORDER BY l.first_attempt_at
"""  # noqa: S608 (constants only)


@check_rows(
    "failing lanes",
    FAILING,
    "no lane has been failing for long",
    limit=lambda limits: limits.failing_s,
)
def failing(row: Any) -> CheckResult:
    """The next delivery of a lane has been failing for long, or the lane is held."""
    response = parse_json(row["last_response"]) or {}
    last = response.get("status") or response.get("failure") or "no response"
    lane = lane_name(row["endpoint_id"], row["generation"], row["slot"])
    tried = describe_attempts(row["attempts"], row["attempts"] - row["spent"])
    what = (
        f"{_lane(row)} has been failing at sequence {row['retry_seq']} for "
        f"{rounded(row['since_s'])}: {tried}, {last}"
    )
    standing = Standing("active", row["health"], row["failing_lanes"])
    advice = stuck_advice(row["name"], lane, row["retry_seq"], response, standing)
    if response.get("failure") in HOLD_FAILURES:
        return problem(f"{what}: {response.get('detail')}", advice or "see outbox status")
    if response.get("failure") in BROKER_FAILURES:
        return warning(what, advice or f"{response.get('detail') or last}; see the check brokers")
    return warning(
        what,
        "fix its receiver; when the retries are exhausted, the delivery is dead-lettered; or, "
        f"{advice}",
    )


# Lanes of an older generation with pending deliveries, or without their end entry in a stream; the
# lanes of the new one wait for them.
GENERATIONS = f"""
SELECT e.name, e.state, count(*) AS lanes, sum(s.last_seq - s.acked_seq)::bigint AS pending,
       count(b.lane_id) AS blocked, coalesce(h.state, 'healthy') AS health
  FROM ({lanes.LANE_STATE}) s
  JOIN endpoint e ON e.id = s.endpoint_id AND e.state <> 'removed'
  LEFT JOIN endpoint_health h ON h.endpoint_id = e.id
  LEFT JOIN lane_block b ON b.lane_id = s.lane_id
 WHERE {lanes.is_waited_for("s")}
 GROUP BY e.id, e.name, e.state, h.state
 ORDER BY e.name COLLATE "C"
"""  # noqa: S608 (constants only)


@check_rows("old lanes", GENERATIONS, "no lane of an older generation has pending deliveries")
def older_generations(row: Any) -> CheckResult:
    """An endpoint's new lanes wait for the pending deliveries of its old ones."""
    message = (
        f'"{row["name"]}": {count(row["lanes"], "lane")} of an older generation with '
        f"{count(row['pending'], 'pending delivery')}, to be delivered before the new lanes"
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


# Without removed endpoints, whose dead letters cannot be replayed.
DEAD_LETTERS = """
SELECT e.name, count(*) AS dead_letters, extract(epoch FROM clock_timestamp() - min(d.at))::float8
       AS oldest_s, sum(count(*)) OVER ()::bigint AS all_dead_letters
  FROM dead_letter d JOIN endpoint e ON e.id = d.endpoint_id AND e.state <> 'removed'
 WHERE d.state = 'dead'
 GROUP BY e.id, e.name
 ORDER BY count(*) DESC, e.name COLLATE "C"
"""


@check("dead letters", passed="no dead letter waits for a decision")
async def dead_letters(context: DoctorContext) -> Results:
    """No dead letter waits for a decision."""
    rows = await context.fetch_first(DEAD_LETTERS)
    if rows:
        by_endpoint = ", ".join(f'{row["dead_letters"]} of "{row["name"]}"' for row in rows)
        more = rows[0]["total"] - len(rows)
        yield warning(
            f"{count(rows[0]['all_dead_letters'], 'dead letter')}, the oldest for "
            f"{rounded(rows[0]['oldest_s'])}: {by_endpoint}"
            + (f" and {count(more, 'endpoint')} more" if more else ""),
            "see outbox dead list; then outbox dead replay or outbox dead discard",
        )
