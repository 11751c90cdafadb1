"""Checks of retention: old periods, what keeps them, and partitions that are left of them."""

from __future__ import annotations

from outbox.core.model.duration import rounded
from outbox.core.model.schema_name import migrate_command
from outbox.core.model.text import count
from outbox.core.sequencing.partition_window import PartitionWindow, WindowKind
from outbox.store.retention.partitions import PARENTS
from outbox.store.retention.periods import (
    IS_OBSERVED,
    PINNED_BY_FEEDS,
    PINNED_BY_RANGES,
    PINNED_BY_REPLAYS,
    READ_PERIODS,
)
from outbox_doctor.check import (
    DoctorContext,
    Results,
    are,
    check,
    join_names,
    ok,
    warning,
)

DROP_GRACE_S = 3600.0
"""A relay drops a period within minutes of its due time, unless it is pinned."""

CONTENTS: dict[WindowKind, str] = {"events": "events", "log": "deliveries and attempts"}

# Endpoints with pending deliveries in batches up to $1, and their total.
PENDING_ENDPOINTS = """
SELECT e.name
  FROM lane_progress p
  JOIN lane_counter c ON c.lane_id = p.lane_id
  JOIN endpoint e ON e.id = p.endpoint_id
 WHERE c.last_seq > p.acked_seq AND p.floor_batch <= $1
 GROUP BY e.id, e.name ORDER BY min(p.floor_batch), e.name
"""

# Endpoints whose feeds have not passed batch $1.
FED_ENDPOINTS = """
SELECT e.name FROM feed f JOIN endpoint e ON e.id = f.endpoint_id
 WHERE f.ended_at IS NULL AND f.batch <= $1
 ORDER BY f.batch, e.name
"""

RANGES = """
SELECT count(*) FROM dead_letter
 WHERE outbox_id IS NULL AND state = 'dead' AND batch <= $1
   AND endpoint_id NOT IN (SELECT id FROM endpoint WHERE state = 'removed')
"""


@check("retention")
async def periods(context: DoctorContext) -> Results:
    """Periods older than the retention are dropped."""
    all_periods = [PartitionWindow(**dict(row)) for row in await context.db.fetch(READ_PERIODS)]
    for kind, what in CONTENTS.items():
        of_kind = [period for period in all_periods if period.kind == kind]
        if not of_kind:
            continue  # The check "complete" reports it.
        oldest = min(of_kind, key=lambda period: period.number)
        keep_s = context.keep.retention_s(kind)
        age = rounded(oldest.age_s)
        kept = f"the oldest {what} are from {age} ago, in {count(len(of_kind), 'period')}"
        if keep_s is None:
            yield ok(f"{kept}, without a limit")
        elif (overdue_s := (oldest.ended_s or 0.0) - keep_s) < DROP_GRACE_S:
            yield ok(kept)
        else:
            overdue = [p for p in of_kind if (p.ended_s or 0.0) - keep_s >= DROP_GRACE_S]
            reason, action = await _find_blocker(context, oldest)
            due = (
                f"{what} from {age} ago were due to be dropped {rounded(overdue_s)} ago, in "
                f"{count(len(overdue), 'period')}"
            )
            yield warning(f"{due}: {reason}", action)


async def _find_blocker(context: DoctorContext, period: PartitionWindow) -> tuple[str, str]:
    """The cause that a period is not dropped, and the action."""
    if period.kind == "events" and period.last_batch is None:
        return "an open transaction may add to them", "end the transactions under publishing"
    last = period.last_batch if period.kind == "events" else period.end - 1
    endpoints = await context.fetch_first(PENDING_ENDPOINTS, last)
    if endpoints:
        names = join_names([row["name"] for row in endpoints], endpoints[0]["total"])
        return (
            f"they have pending deliveries to {names}",
            "see outbox status; then outbox endpoint resume NAME, or to dead-letter them: outbox "
            "endpoint remove NAME --dead-letter",
        )
    fed = await context.fetch_first(FED_ENDPOINTS, last)
    if fed:
        names = join_names([row["name"] for row in fed], fed[0]["total"])
        return (
            f"they are still to be fed to {names}",
            "see the check feeds; or, if such an endpoint needs only new events, remove it and add "
            "it again: outbox endpoint remove NAME",
        )
    if await context.db.fetchval(PINNED_BY_FEEDS, last, context.keep.dead_letters_s):
        return (
            "they were fed lately, to endpoints where they are pending or can be replayed",
            "see outbox status and outbox dead list",
        )
    if await context.db.fetchval(PINNED_BY_RANGES, context.keep.dead_letters_s, last):
        ranges = await context.db.fetchval(RANGES, last)
        return (
            f"{count(ranges, 'dead letter')} with ranges of them can still be replayed",
            "see outbox dead list; then outbox dead replay or outbox dead discard",
        )
    if period.kind == "events" and await context.db.fetchval(
        PINNED_BY_REPLAYS, context.keep.dead_letters_s, period.first, period.end
    ):
        return (
            "they are being replayed, or were dead-lettered again and can be replayed",
            "see outbox replay list and outbox dead list",
        )
    keep_s = context.keep.retention_s(period.kind)
    if not await context.db.fetchval(IS_OBSERVED, period.kind, period.number, keep_s):
        return (
            "no relay has run for a day since they ended, or since the last restore",
            "keep a relay running",
        )
    return "no relay has dropped them", "run outbox relay; its log has the error"


# Partitions still attached a day after their period was dropped, or whose time of that is wrong.
EMPTY_PARTITIONS = """
SELECT count(*)
  FROM period p
  JOIN pg_class c ON c.relnamespace = quote_ident(current_schema())::regnamespace
   AND c.relname = ANY (CASE p.kind WHEN 'events' THEN ARRAY['outbox_' || p.number]
                        ELSE ARRAY['attempt_run_' || p.number, 'batch_' || p.number,
                                   'delivery_run_' || p.number] END)
 WHERE p.dropped_at NOT BETWEEN clock_timestamp() - interval '1 day' AND clock_timestamp()
"""


@check("old periods", passed="no partition of a dropped period is left")
async def empty_partitions(context: DoctorContext) -> Results:
    """Partitions that relays emptied, but do not own, are dropped by the owner."""
    empty = await context.db.fetchval(EMPTY_PARTITIONS)
    message = (
        f"{count(empty, 'partition')} of dropped periods {are(empty)} empty and still "
        "attached, because the relays do not own them"
    )
    if empty > context.limits.empty_partitions_max:
        yield warning(
            f"{message}: this slows down planning",
            f"as their owner: {migrate_command(context.schema)}",
        )
    elif empty:
        yield ok(message)


# Tables of dropped periods that are not attached, and that maintenance has not detached.
DETACHED_TABLES = """
SELECT c.relname AS name
  FROM period p CROSS JOIN unnest($2::text[]) AS parent
  JOIN pg_class c ON c.relnamespace = quote_ident(current_schema())::regnamespace
                 AND c.relname = parent || '_' || p.number
 WHERE p.kind = $1 AND p.dropped_at IS NOT NULL AND c.oid <> ALL (p.detaching)
   AND NOT EXISTS (SELECT FROM pg_inherits WHERE inhrelid = c.oid)
 ORDER BY c.relname
"""


@check("detached tables", passed="no table of a dropped period was detached by hand")
async def detached_tables(context: DoctorContext) -> Results:
    """A table that was detached by hand may have events that were never sequenced."""
    for kind, parents in PARENTS.items():
        for row in await context.db.fetch(DETACHED_TABLES, kind, list(parents)):
            yield warning(
                f"the table {row['name']} of a dropped period was detached by hand, so it is kept",
                f"look whether you need its rows; then DROP TABLE {row['name']}",
            )
