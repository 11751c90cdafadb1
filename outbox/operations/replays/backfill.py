"""Backfill: delivers past events to an endpoint, for the first time or again.

A backfill covers the events that are sequenced at the time of the request; later events are
delivered live.  It uses the current subscription of the endpoint.  It covers the events since some
time, or chosen ones.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from outbox.core.sequencing.partition_window import WIDTH
from outbox.errors import Conflict
from outbox.operations.criteria import criteria_parameters
from outbox.operations.lanes import FED, SUBSCRIBED
from outbox.operations.replays.jobs import JobRange, add_job, read_new_job
from outbox.store.change import make_change_and_read
from outbox.store.connection.connect import map_errors
from outbox.store.delivery.endpoints import endpoint_not_found
from outbox.store.sql.message import WriteStatement
from outbox.store.sql.type_match import FILTER_MET, MATCHES, matches_criteria

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from asyncpg import Connection

    from outbox.operations.criteria import Criteria
    from outbox.store.change import Change

FIND_ENDPOINT = f"""
SELECT e.id, e.state, {SUBSCRIBED} AS subscribed, {FED} AS fed
  FROM endpoint e WHERE e.name = $1 AND e.state <> 'removed'
"""  # noqa: S608 (constants only)

# One statement, for a consistent view of one batch: each id up to `high` is sequenced, an open
# gap, or rolled back.
READ_CURSOR = """
SELECT b.high,
       b.young + coalesce((SELECT range_agg(int8range(lo, hi, '[]')) FROM gap), '{}') AS gaps
  FROM (SELECT high, young FROM batch ORDER BY batch DESC LIMIT 1) b
"""

# Ids increase with time: ids that a batch passed before `since` are older.  The scan starts
# there for `since`, and at the upper end for `until`.
FIND_FIRST = """
SELECT id FROM outbox
 WHERE id > coalesce((SELECT high FROM batch WHERE at < $1 ORDER BY at DESC LIMIT 1), 0)
   AND id <= $2 AND created_at >= $1
 ORDER BY id LIMIT 1
"""
FIND_LAST = """
SELECT id FROM outbox WHERE id BETWEEN $1 AND $2 AND ($3::timestamptz IS NULL OR created_at < $3)
 ORDER BY id DESC LIMIT 1
"""

# The oldest period of events that is not dropped; rows of dropped ones may still be visible.
READ_OLDEST = "SELECT min(number) FROM period WHERE kind = 'events' AND dropped_at IS NULL"

# The first and the last of chosen events that are sequenced, kept and not erased: see READ_CURSOR.
FIND_CHOSEN = f"""
SELECT min(id) AS first, max(id) AS last FROM outbox
 WHERE id = ANY ($1) AND id <= $2 AND NOT $3::int8multirange @> id AND erased_at IS NULL
   AND id >= ({READ_OLDEST}) * {WIDTH}
"""  # noqa: S608 (constants only)

# Aborts if it is another one; from now on, retention respects the job.
REQUIRE_OLDEST = WriteStatement(
    "require_oldest_period", f"SELECT abort_unless(({READ_OLDEST}) = $1)"
)

# Those that the endpoint's subscription selects.
_SELECTED = f"""
SELECT o.id, o.erased_at
  FROM outbox o
  JOIN subscription s ON s.endpoint_id = $1 AND s.to_batch IS NULL,
       (SELECT {criteria_parameters(5)}) j
 WHERE o.id BETWEEN $2 AND $3 AND NOT $4::int8multirange @> o.id
   AND {matches_criteria("o", "created_at", "j")} AND {MATCHES} AND {FILTER_MET} IS NOT FALSE
"""  # noqa: S608 (constants only)
COUNT_HISTORY = f"SELECT count(*) FROM ({_SELECTED}) o"  # noqa: S608
COUNT_CHOSEN = f"{COUNT_HISTORY} WHERE o.id = ANY ($10) AND o.erased_at IS NULL"


@dataclass(frozen=True, slots=True)
class BackfillPlan:
    """Dry run of a backfill."""

    dry_run: bool
    endpoint: str
    since: datetime | None
    until: datetime | None
    types: tuple[str, ...]
    deliveries: int
    """Number of deliveries that it would create now."""
    events: int | None = None
    """Number of chosen events; null: all since some time."""


async def plan_backfill(
    connection: Connection[Any],
    schema: str,
    criteria: Criteria,
    *,
    outbox_ids: Sequence[int] | None = None,
) -> BackfillPlan:
    """Count the deliveries that the backfill would create now, without a change.

    Args:
        outbox_ids: see `request_backfill`.

    Raises:
        NotFound, UsageError: as in `request_backfill`.
    """
    with map_errors(schema):
        only: Any = await criteria.resolve(connection)  # With an endpoint and absolute times.
        part, gaps = await _find_range(connection, only, outbox_ids)
        deliveries = await _count(connection, part, gaps, only, outbox_ids)
    chosen = None if outbox_ids is None else len(outbox_ids)
    return BackfillPlan(True, only.endpoint, only.since, only.until, only.types, deliveries, chosen)


async def request_backfill(
    connection: Connection[Any],
    schema: str,
    criteria: Criteria,
    *,
    actor: str,
    rate_per_s: float | None = None,
    outbox_ids: Sequence[int] | None = None,
) -> int:
    """Start a backfill, in order and behind live events.

    Args:
        criteria: the criteria, with the endpoint, and with `since` unless events are chosen; its
            types restrict the subscription further.
        outbox_ids: chosen events, from `outbox.operations.replays.chosen`; None: all.
        rate_per_s: maximum rate in deliveries per second; None: no limit.

    Returns:
        The id of the replay job.

    Raises:
        NotFound: there is no such endpoint.
        Conflict: the endpoint is disabled, being removed, or without a subscription; or its
            subscription selects none of the chosen events.
    """

    async def plan(change: Change) -> None:
        only = await criteria.resolve(change.db)
        part, gaps = await _find_range(change.db, only, outbox_ids)
        if outbox_ids is not None and not await _count(change.db, part, gaps, only, outbox_ids):
            raise Conflict(
                f'endpoint "{only.endpoint}" does not receive the chosen events: its types, filter '
                "or tenant exclude them, or they are not sequenced yet, erased, or removed by "
                "retention; see: outbox trace"
            )
        # This period must not be dropped before the job is added.
        oldest = await change.db.fetchval(READ_OLDEST)
        change.write(REQUIRE_OLDEST, oldest)
        first_id = max(part.first_id, oldest * WIDTH)
        part = replace(part, first_id=first_id, from_id=first_id)
        add_job(
            change,
            "history",
            only,
            [part],
            rate_per_s=rate_per_s,
            gaps=gaps,
            outbox_ids=outbox_ids,
        )
        data = only.journal_data | {"from_id": first_id, "to_id": part.last_id}
        del data["endpoint"]
        if outbox_ids is not None:
            data["events"] = len(outbox_ids)
        change.journal("backfill_requested", part.endpoint_id, data, with_job=True)

    return await make_change_and_read(connection, schema, actor, plan, read_new_job)


async def _count(
    connection: Connection[Any],
    part: JobRange,
    gaps: list[Any],
    only: Criteria,
    outbox_ids: Sequence[int] | None,
) -> int:
    """The deliveries that a backfill of a range would create now."""
    arguments: list[Any] = [part.endpoint_id, part.first_id, part.last_id, gaps, *only.arguments]
    statement = COUNT_HISTORY
    if outbox_ids is not None:
        statement = COUNT_CHOSEN
        arguments.append(outbox_ids)
    deliveries: int = await connection.fetchval(statement, *arguments)
    return deliveries


async def _find_range(
    connection: Connection[Any], only: Criteria, outbox_ids: Sequence[int] | None
) -> tuple[JobRange, list[Any]]:
    """The ids that a backfill covers, and the open gaps among them, which are delivered live."""
    name = only.endpoint
    assert name is not None
    endpoint = await connection.fetchrow(FIND_ENDPOINT, name)
    if endpoint is None:
        raise await endpoint_not_found(connection, name)
    if endpoint["state"] in ("disabling", "disabled"):
        raise Conflict(
            f'endpoint "{name}" is disabled; enable it first: '
            f"outbox endpoint enable {shlex.quote(name)}"
        )
    if endpoint["state"] == "removing" or not endpoint["subscribed"]:
        raise Conflict(f'endpoint "{name}" is being removed, and receives no new events')
    if endpoint["fed"]:
        raise Conflict(
            f'endpoint "{name}" is catching up; replay to it when it has got what was earlier: '
            f"outbox endpoint show {shlex.quote(name)}"
        )
    at = await connection.fetchrow(READ_CURSOR)
    if outbox_ids is not None:
        first, last = await connection.fetchrow(FIND_CHOSEN, outbox_ids, at["high"], at["gaps"])
    else:
        first = await connection.fetchval(FIND_FIRST, only.since, at["high"])
        last = first and await connection.fetchval(FIND_LAST, first, at["high"], only.until)
    if not last:
        # An empty range: its job ends at once.
        return JobRange(endpoint["id"], 1, 0), []
    # Only overlapping gaps: there can be many, and each event is compared with them.
    gaps = [gap for gap in at["gaps"] if gap.upper > first and gap.lower <= last]
    return JobRange(endpoint["id"], first, last), gaps
