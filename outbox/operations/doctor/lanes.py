"""Lanes: which stand still, and who has to act."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import orjson

from outbox.core.model.ids import lane_name
from outbox.operations.doctor.finding import ROWS_MAX, age, many, ok, problem, rest, warning
from outbox.operations.endpoints import LANE_STATE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from outbox.operations.doctor.finding import Look, Said

# The letter may be a range that the number lies in.
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

# Retry state that is older than an acknowledgement behind the checkpoint is of
# a number that was delivered meanwhile.
FAILING = """
SELECT e.id AS endpoint_id, e.name, l.generation, l.slot, p.head_seq, p.attempts,
       extract(epoch FROM clock_timestamp() - p.first_attempt_at)::float8 AS since_s,
       p.last_answer::text AS last_answer, count(*) OVER () AS total
  FROM lane_progress p
  JOIN lane l ON l.id = p.lane_id
  JOIN endpoint e ON e.id = p.endpoint_id AND e.state = 'active'
 WHERE p.attempts > 0 AND p.head_seq = p.acked_seq + 1
   AND p.first_attempt_at < clock_timestamp() - make_interval(secs => $2)
   AND NOT EXISTS (SELECT FROM attempt a
                    WHERE a.lane_id = p.lane_id AND a.batch >= p.floor_batch
                      AND a.seq >= p.head_seq AND a.outcome = 'delivered')
 ORDER BY p.first_attempt_at LIMIT $1
"""

# Lanes of an older generation that still owe something hold up the new ones.
GENERATIONS = f"""
SELECT e.name, e.state, count(*) AS lanes, sum(s.last_seq - s.acked_seq)::bigint AS owed,
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

# Those of removed endpoints can only be looked at.
DEAD_LETTERS = """
SELECT e.name, count(*) AS letters, extract(epoch FROM clock_timestamp() - min(d.at))::float8
       AS oldest_s, sum(count(*)) OVER ()::bigint AS all_letters, count(*) OVER () AS total
  FROM dead_letter d JOIN endpoint e ON e.id = d.endpoint_id AND e.state <> 'removed'
 WHERE d.state = 'dead'
 GROUP BY e.id, e.name
 ORDER BY count(*) DESC, e.name COLLATE "C" LIMIT $1
"""


def _lane(row: Any) -> str:
    lane = lane_name(row["endpoint_id"], row["generation"], row["slot"])
    return f'lane {lane} of "{row["name"]}"'


async def blocked(look: Look) -> AsyncIterator[Said]:
    """Lanes that wait for an operator."""
    rows = await look.db.fetch(BLOCKED, ROWS_MAX)
    for row in rows:
        name = shlex.quote(row["name"])
        letter = row["dead_id"]
        which = f" as dead letter {letter} ({row['reason']})" if letter else ""
        each = (
            f"outbox dead replay {letter}, or outbox dead discard {letter}; or " if letter else ""
        )
        yield problem(
            f"{_lane(row)} waits for an operator since {age(row['since_s'])}: number "
            f"{row['seq']} was given up{which}",
            f"{each}outbox endpoint resume {name}, which lets all its lanes go on",
        )
    for said in rest(rows, "outbox status"):
        yield said
    if not rows:
        yield ok("no lane waits for an operator")


async def failing(look: Look) -> AsyncIterator[Said]:
    """Deliveries that their lane is held up by."""
    rows = await look.db.fetch(FAILING, ROWS_MAX, look.limits.failing_s)
    for row in rows:
        answer = orjson.loads(row["last_answer"]) if row["last_answer"] else {}
        told = answer.get("status") or answer.get("failure") or "no answer"
        yield warning(
            f"{_lane(row)} is held up by number {row['head_seq']} since {age(row['since_s'])}: "
            f"{many(row['attempts'], 'attempt')}, {told}",
            "mend its receiver; when its retries end, it becomes a dead letter by itself",
        )
    for said in rest(rows, "outbox status"):
        yield said
    if not rows:
        yield ok("no delivery holds up its lane for long")


async def generations(look: Look) -> AsyncIterator[Said]:
    """Lanes from before their number was changed."""
    rows = await look.db.fetch(GENERATIONS, ROWS_MAX)
    for row in rows:
        yield _generation(row)
    for said in rest(rows, "outbox status"):
        yield said
    if not rows:
        yield ok("no lane of an older generation owes anything")


def _generation(row: Any) -> Said:
    says = (
        f'"{row["name"]}": {many(row["lanes"], "lane")} of an older generation owe '
        f"{row['owed']} more, and the new ones wait"
    )
    if row["blocked"]:
        return problem(
            f"{says}; {row['blocked']} of them for an operator", "see blocked lanes above"
        )
    if row["state"] == "paused":
        return warning(
            f"{says}; it is paused", f"outbox endpoint resume {shlex.quote(row['name'])}"
        )
    if row["health"] != "healthy":
        return warning(f"{says}; it is {row['health']}", "mend its receiver")
    return ok(says)


async def dead_letters(look: Look) -> AsyncIterator[Said]:
    """What was given up and waits for a decision."""
    rows = await look.db.fetch(DEAD_LETTERS, ROWS_MAX)
    if not rows:
        yield ok("none waits")
        return
    of = ", ".join(f'{row["letters"]} of "{row["name"]}"' for row in rows)
    more = rows[0]["total"] - len(rows)
    yield warning(
        f"{many(rows[0]['all_letters'], 'dead letter')} since {age(rows[0]['oldest_s'])}: {of}"
        + (f" and {many(more, 'endpoint')} more" if more else ""),
        "outbox dead list shows them; then outbox dead replay or outbox dead discard",
    )
