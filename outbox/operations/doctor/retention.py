"""Doctor check of retention: old periods, and what keeps them from being dropped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.core.sequencing.partition_window import PartitionWindow
from outbox.operations.doctor.finding import (
    ROWS_MAX,
    format_age,
    format_count,
    join_names,
    ok,
    warning,
)
from outbox.store.retention import PINNED_BY_RANGES, PINNED_BY_REPLAYS, READ_PERIODS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from outbox.core.sequencing.partition_window import WindowKind
    from outbox.operations.doctor.finding import CheckResult, DoctorContext

GRACE_S = 3600.0
"""A relay drops a period within minutes of its due time, unless it is pinned."""

# Endpoints with pending deliveries in batches up to $1, and their total.
PENDING_ENDPOINTS = f"""
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

_CONTENTS: dict[WindowKind, str] = {"events": "events", "log": "deliveries and attempts"}


async def check_retention(context: DoctorContext) -> AsyncIterator[CheckResult]:
    """Periods older than the retention are dropped."""
    periods = [PartitionWindow(**dict(row)) for row in await context.db.fetch(READ_PERIODS)]
    kinds: tuple[WindowKind, ...] = ("events", "log")
    for kind in kinds:
        ours = sorted((p for p in periods if p.kind == kind), key=lambda p: p.number)
        keep_s, what, oldest = context.keep.retention_s(kind), _CONTENTS[kind], ours[0]
        periods_kept = format_count(len(ours), "period")
        kept = f"{what} are kept for {format_age(oldest.age_s)}, in {periods_kept}"
        if keep_s is None:
            yield ok(f"{kept}, without a limit")
            continue
        overdue_s = (oldest.ended_s or 0.0) - keep_s
        if overdue_s < GRACE_S:
            yield ok(kept)
            continue
        reason, action = await _find_blocker(context, oldest)
        yield warning(
            f"{what} from {format_age(oldest.age_s)} ago were due to be dropped "
            f"{format_age(overdue_s)} ago: "
            f"{reason}",
            action,
        )


async def _find_blocker(context: DoctorContext, period: PartitionWindow) -> tuple[str, str]:
    """The cause that a period is not dropped, and the action."""
    if period.kind == "events" and period.last_batch is None:
        return "an open transaction may add to them", "end the transactions under publishing"
    last = period.last_batch if period.kind == "events" else period.end - 1
    endpoints: list[Any] = await context.db.fetch(PENDING_ENDPOINTS, last)
    if endpoints:
        names = join_names([row["name"] for row in endpoints], endpoints[0]["total"])
        return (
            f"they have pending deliveries to {names}",
            "see outbox status; to stop deliveries: outbox endpoint disable NAME",
        )
    if await context.db.fetchval(PINNED_BY_RANGES, context.keep.dead_letters_s, last):
        ranges = await context.db.fetchval(RANGES, last)
        return (
            f"{format_count(ranges, 'dead letter')} with ranges of them can still be replayed",
            "see outbox dead list; then outbox dead replay or outbox dead discard",
        )
    if period.kind == "events" and await context.db.fetchval(
        PINNED_BY_REPLAYS, context.keep.dead_letters_s, period.first, period.end
    ):
        return (
            "they are being replayed, or were dead-lettered again and can be replayed",
            "see outbox replay list and outbox dead list",
        )
    return "no relay has dropped them", "run outbox relay; its log has the error"
