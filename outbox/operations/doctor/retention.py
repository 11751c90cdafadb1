"""What is kept, and what keeps it longer than it was to be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.core.sequencing.partition_window import Period
from outbox.operations.doctor.finding import ROWS_MAX, age, listed, many, ok, warning
from outbox.store.retention import PERIODS, PINNED_BY_RANGES, PINNED_BY_REPLAYS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from outbox.core.sequencing.partition_window import Kind
    from outbox.operations.doctor.finding import Look, Said

GRACE_S = 3600.0
"""A relay drops what is due within minutes, if nothing is in the way."""

# Endpoints whose lanes may owe something of batches up to $1; their total, too.
OWING = f"""
SELECT e.name, count(*) OVER () AS total
  FROM lane_progress p
  JOIN lane_counter c ON c.lane_id = p.lane_id
  JOIN endpoint e ON e.id = p.endpoint_id
 WHERE c.last_seq > p.acked_seq AND p.floor_batch <= $1
 GROUP BY e.id, e.name ORDER BY min(p.floor_batch), e.name LIMIT {ROWS_MAX}
"""  # noqa: S608 (a constant only)

RANGES = """
SELECT count(*) FROM dead_letter
 WHERE outbox_id IS NULL AND state = 'dead' AND batch <= $1
   AND endpoint_id NOT IN (SELECT id FROM endpoint WHERE state = 'removed')
"""

_OF: dict[Kind, str] = {"events": "events", "log": "deliveries and attempts"}


async def retention(look: Look) -> AsyncIterator[Said]:
    """Old periods are dropped when their time has come."""
    periods = [Period(**dict(row)) for row in await look.db.fetch(PERIODS)]
    kinds: tuple[Kind, ...] = ("events", "log")
    for kind in kinds:
        ours = sorted((p for p in periods if p.kind == kind), key=lambda p: p.number)
        keep_s, what, oldest = look.keep.of(kind), _OF[kind], ours[0]
        kept = f"{what} are kept since {age(oldest.age_s)} ago, in {many(len(ours), 'period')}"
        if keep_s is None:
            yield ok(f"{kept}, for ever")
            continue
        overdue_s = (oldest.ended_s or 0.0) - keep_s
        if overdue_s < GRACE_S:
            yield ok(kept)
            continue
        why, do = await _why(look, oldest)
        yield warning(
            f"{what} of {age(oldest.age_s)} ago should have been dropped {age(overdue_s)} ago: "
            f"{why}",
            do,
        )


async def _why(look: Look, period: Period) -> tuple[str, str]:
    """What is in the way of dropping a period, and what to do about it."""
    if period.kind == "events" and period.last_batch is None:
        return "one of them may still be committed", "end the transactions under publishing"
    last = period.last_batch if period.kind == "events" else period.end - 1
    owing: list[Any] = await look.db.fetch(OWING, last)
    if owing:
        names = listed([row["name"] for row in owing], owing[0]["total"])
        return (
            f"they are owed to {names}",
            "see outbox status; what is not to be sent any more: outbox endpoint disable NAME",
        )
    if await look.db.fetchval(PINNED_BY_RANGES, look.keep.dead_letters_s, last):
        ranges = await look.db.fetchval(RANGES, last)
        return (
            f"{many(ranges, 'dead letter')} that stand for many could still be sent again",
            "see outbox dead list; then outbox dead replay or outbox dead discard",
        )
    if period.kind == "events" and await look.db.fetchval(
        PINNED_BY_REPLAYS, look.keep.dead_letters_s, period.first, period.end
    ):
        return (
            "they are being sent again, or were given up again and still could be",
            "see outbox replay list and outbox dead list",
        )
    return "no relay has dropped them", "run outbox relay; its log tells what it was refused"
