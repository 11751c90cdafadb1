"""Schedule changes: add, replace, pause, resume, remove, and run by hand.

    (added) ──▶ active ──▶ paused ──▶ active       pause, resume
    any ──▶ (gone)                                  remove

Each change is planned by reading and written in one message (see `outbox.store.change`), which
aborts if a relay publishes a run of the schedule meanwhile.  Runs that are due while a schedule is
paused are skipped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import asyncpg
import orjson

from outbox.core.schedules.cron import Cron
from outbox.core.schedules.schedule import ticks_from
from outbox.core.sequencing.tenant_pace import HELD_DELIVERIES_MAX, PER_S
from outbox.drivers.errors import NOT_STORED
from outbox.errors import Conflict, EventSuppressed, QuotaExceeded, UsageError
from outbox.operations.events.future import OLDEST_HELD
from outbox.operations.schedules.queries import read_schedule, schedule_not_found
from outbox.store.change import make_change, make_change_and_read
from outbox.store.routing_change import READ_NOW
from outbox.store.schedules.schedule_runs import LOCK_SCHEDULES, Run, publish_calls
from outbox.store.sql.message import Private, WriteStatement

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID

    from asyncpg import Connection, Record

    from outbox.core.schedules.schedule import ScheduleSettings
    from outbox.operations.schedules.queries import Schedule
    from outbox.store.change import Change

# revision: it changes with every change of the row, also by a relay that publishes a run.
FIND_SCHEDULE = """
SELECT id, name, tenant, state, cron, timezone, type, last_at, xmin::text AS revision FROM schedule
 WHERE name = $1
"""

# Waits for a relay that publishes a run; a relay does not wait for another one, but gives up its
# write.
REQUIRE_UNCHANGED = WriteStatement(
    "require_unchanged_schedules", LOCK_SCHEDULES.sql.replace(" SKIP LOCKED", "")
)

# $1: the columns as a JSON object; $2, $3: payload and headers as JSON.
ADD = WriteStatement(
    "add_schedule",
    """
INSERT INTO schedule (name, cron, timezone, tenant, type, key, payload, headers, misfire, grace_s,
                      overlap, next_at, due_at, state_by)
SELECT name, cron, timezone, tenant, type, key, $2::text::jsonb, $3::text::jsonb, misfire, grace_s,
       overlap, $4, $4, $5
  FROM jsonb_populate_record(NULL::schedule, $1::text::jsonb)
""",
)

# Keeps the state and the last run.
REPLACE = WriteStatement(
    "replace_schedule",
    """
UPDATE schedule s
   SET cron = n.cron, timezone = n.timezone, tenant = n.tenant, type = n.type, key = n.key,
       payload = $2::text::jsonb, headers = $3::text::jsonb, misfire = n.misfire,
       grace_s = n.grace_s, overlap = n.overlap, next_at = $4, due_at = $4
  FROM jsonb_populate_record(NULL::schedule, $1::text::jsonb) n WHERE s.name = n.name
""",
)

# Pause or resume: due runs that are not published yet are skipped.
SET_STATE = WriteStatement(
    "set_schedule_state",
    """
UPDATE schedule
   SET state = $2, state_at = clock_timestamp(), state_by = $3, state_comment = $4,
       next_at = $5, due_at = $5
 WHERE name = $1
""",
)

# The deliveries of a tenant that are held: from its oldest held event on.
READ_HELD_DELIVERIES = f"""
SELECT s.total - oldest.held_before
  FROM tenant_share s CROSS JOIN LATERAL ({OLDEST_HELD}) oldest WHERE s.tenant = $1
"""  # noqa: S608 (a constant only)

REMOVE = WriteStatement("remove_schedules", "DELETE FROM schedule WHERE name = ANY ($1)")

_COLUMNS = ("name", "cron", "timezone", "tenant", "type", "key", "misfire", "grace_s", "overlap")


@dataclass(frozen=True, slots=True)
class RemovedSchedule:
    """A removed schedule."""

    removed: str
    """Its name."""


@dataclass(frozen=True, slots=True)
class ScheduleRun:
    """The event that a run has published."""

    id: UUID


async def add_schedule(
    connection: Connection[Any],
    schema: str,
    settings: ScheduleSettings,
    *,
    actor: str,
    replace: bool = False,
) -> Schedule:
    """Add a schedule; its first run is the next one from now.

    Args:
        replace: replace the settings of an existing schedule.

    Raises:
        Conflict: the name exists already, and `replace` is false.
        UsageError: the database rejects the event.
    """
    cron = Cron(settings.cron, settings.timezone)
    columns = orjson.dumps({name: getattr(settings, name) for name in _COLUMNS}).decode()
    headers = settings.headers_json
    contents = Private(settings.payload_json), None if headers is None else Private(headers)

    async def plan(change: Change) -> str:
        existing = await change.db.fetchrow(FIND_SCHEDULE, settings.name)
        if existing is not None and not replace:
            raise Conflict(f'schedule "{settings.name}" exists already; use replace to change it')
        next_at = cron.next(await _ticks_from(change, existing))
        if settings.tenant is not None and (
            existing is None or existing["tenant"] != settings.tenant
        ):
            change.additions.schedules.append(settings.tenant)
        if existing is None:
            change.write(ADD, columns, *contents, next_at, actor)
        else:
            _require_unchanged(change, [existing])
            change.write(REPLACE, columns, *contents, next_at)
        details = {"cron": settings.cron, "timezone": settings.timezone, "type": settings.type}
        _journal(change, "added" if existing is None else "changed", settings.name, details)
        return settings.name

    try:
        return await make_change_and_read(
            connection, schema, actor, plan, _read_back, routing=False
        )
    except asyncpg.CheckViolationError as error:
        # The limit on payloads is a check constraint.
        raise UsageError((error.constraint_name or "").replace("_", " ")) from error


async def pause_schedules(
    connection: Connection[Any],
    schema: str,
    names: Sequence[str],
    *,
    actor: str,
    comment: str | None = None,
) -> list[Schedule]:
    """Pause schedules: nothing is published until they are resumed.

    Raises:
        NotFound: no schedule has this name; nothing was changed.
    """
    return await _set_states(connection, schema, names, "paused", "paused", actor, comment)


async def resume_schedules(
    connection: Connection[Any],
    schema: str,
    names: Sequence[str],
    *,
    actor: str,
    comment: str | None = None,
) -> list[Schedule]:
    """Resume schedules with their next run from now.

    Raises:
        NotFound: no schedule has this name; nothing was changed.
    """
    return await _set_states(connection, schema, names, "active", "resumed", actor, comment)


async def remove_schedules(
    connection: Connection[Any], schema: str, names: Sequence[str], *, actor: str
) -> list[RemovedSchedule]:
    """Remove schedules; published events are kept.

    Raises:
        NotFound: no schedule has this name; nothing was changed.
    """

    async def plan(change: Change) -> list[RemovedSchedule]:
        rows = await _find(change, names)
        _require_unchanged(change, rows)
        change.write(REMOVE, [row["name"] for row in rows])
        for row in rows:
            details = {"cron": row["cron"], "timezone": row["timezone"], "type": row["type"]}
            _journal(change, "removed", row["name"], details)
        return [RemovedSchedule(name) for name in dict.fromkeys(names)]

    return await make_change(connection, schema, actor, plan, routing=False)


async def run_schedule_now(
    connection: Connection[Any], schema: str, name: str, *, actor: str
) -> ScheduleRun:
    """Publish a schedule's event at once, in any state; that of a tenant's schedule is held.

    Scheduled runs do not change; with overlap `wait` the next one waits for this run.

    Raises:
        NotFound: no schedule has this name.
        QuotaExceeded: too many deliveries of the schedule's tenant are held already.
        EventSuppressed: a trigger or rule of the table suppressed the event.
    """

    async def plan(change: Change) -> ScheduleRun:
        (row,), event_id = await _find(change, [name]), uuid4()
        held = await change.db.fetchval(READ_HELD_DELIVERIES, row["tenant"]) or 0
        if held >= HELD_DELIVERIES_MAX:
            raise QuotaExceeded(
                f'{held:,} deliveries of the tenant "{row["tenant"]}" are held for its share of '
                f"{PER_S:,.0f} a second; try again later"
            )
        run = Run(await change.db.fetchval(READ_NOW), row["id"], row["tenant"])
        *locks, publish = publish_calls([run], event_id, wait=True)
        # Before the schedule is locked, for which a relay would wait that moves its last run.
        for lock in locks:
            change.write(*lock)
        _require_unchanged(change, [row])
        change.write(*publish)
        _journal(change, "run", name, {"event": str(event_id)})
        return ScheduleRun(event_id)

    try:
        return await make_change(connection, schema, actor, plan, routing=False)
    except asyncpg.PostgresError as error:
        if error.sqlstate == NOT_STORED:
            raise EventSuppressed(str(error)) from error
        raise


# ------------------------------------------------------------------ details


async def _set_states(
    connection: Connection[Any],
    schema: str,
    names: Sequence[str],
    state: str,
    verb: str,
    actor: str,
    comment: str | None,
) -> list[Schedule]:
    async def plan(change: Change) -> Sequence[str]:
        changed = [row for row in await _find(change, names) if row["state"] != state]
        _require_unchanged(change, changed)
        for row in changed:
            since = await _ticks_from(change, row)
            next_at = Cron(row["cron"], row["timezone"]).next(since)
            change.write(SET_STATE, row["name"], state, actor, comment, next_at)
            _journal(change, verb, row["name"], {"comment": comment})
        return list(dict.fromkeys(names))

    async def read_back(db: Any, _: UUID, each: Sequence[str]) -> list[Schedule]:
        return [await read_schedule(db, name) for name in each]

    return await make_change_and_read(connection, schema, actor, plan, read_back, routing=False)


async def _read_back(db: Any, _: UUID, name: str) -> Schedule:
    return await read_schedule(db, name)


async def _ticks_from(change: Change, row: Record | None) -> datetime:
    """The time to compute the next run from."""
    now: datetime = await change.db.fetchval(READ_NOW)
    return ticks_from(row and row["last_at"], now)


async def _find(change: Change, names: Sequence[str]) -> list[Record]:
    """The rows of schedules, each once, in the order of names.

    Raises:
        NotFound: no schedule has one of these names.
    """
    rows = []
    for name in sorted(set(names)):
        row = await change.db.fetchrow(FIND_SCHEDULE, name)
        if row is None:
            raise await schedule_not_found(change.db, name)
        rows.append(row)
    return rows


def _require_unchanged(change: Change, rows: Sequence[Record]) -> None:
    """Require that schedules are as they were read: a relay may publish a run meanwhile."""
    if rows:
        change.write(REQUIRE_UNCHANGED, [r["id"] for r in rows], [r["revision"] for r in rows])


def _journal(change: Change, verb: str, name: str, details: dict[str, Any]) -> None:
    data = {"name": name, **{k: v for k, v in details.items() if v is not None}}
    change.journal(f"schedule_{verb}", None, data)
