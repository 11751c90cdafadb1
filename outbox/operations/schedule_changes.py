"""Schedule changes: add, replace, pause, resume, remove, and run by hand.

    (added) ──▶ active ──▶ paused ──▶ active       pause, resume
    any ──▶ (gone)                                  remove

Each change locks the schedule's row, which waits for a relay that is publishing a run, and
writes a journal entry.  Runs that are due while a schedule is paused are skipped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import asyncpg

from outbox.core.schedules.cron import Cron
from outbox.errors import Conflict, UsageError
from outbox.operations.schedules import not_found, read
from outbox.store.connection.connect import map_errors
from outbox.store.routing_change import READ_NOW, write_journal
from outbox.store.schedule_runs import PUBLISH_RUNS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID

    from asyncpg import Connection, Record

    from outbox.core.schedules.schedule import ScheduleSettings
    from outbox.operations.schedules import Schedule

# Waits for a relay that is publishing a run of the schedule.
LOCK_SCHEDULE = """
SELECT id, state, cron, timezone, type, last_at FROM schedule WHERE name = $1 FOR UPDATE
"""

# Returns no row when another session added the name concurrently.
ADD = """
INSERT INTO schedule (name, cron, timezone, tenant, type, key, payload, headers, misfire, grace_s,
                      overlap, next_at, due_at, state_by)
VALUES ($1, $2, $3, $4, $5, $6, $7::text::jsonb, $8::text::jsonb, $9, $10, $11, $12, $12, $13)
ON CONFLICT (name) DO NOTHING
RETURNING id
"""

# Keeps the state and the last run.
REPLACE = """
UPDATE schedule
   SET cron = $2, timezone = $3, tenant = $4, type = $5, key = $6, payload = $7::text::jsonb,
       headers = $8::text::jsonb, misfire = $9, grace_s = $10, overlap = $11, next_at = $12,
       due_at = $12
 WHERE name = $1
"""

# Pause or resume: due runs that are not published yet are skipped.
SET_STATE = """
UPDATE schedule
   SET state = $2, state_at = clock_timestamp(), state_by = $3, state_comment = $4,
       next_at = $5, due_at = $5
 WHERE name = $1
"""

REMOVE = "DELETE FROM schedule WHERE name = $1"


async def add(
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
    with map_errors(schema, "operator"):
        async with connection.transaction(isolation="read_committed"):
            found = await connection.fetchrow(LOCK_SCHEDULE, settings.name)
            if found is not None and not replace:
                raise _exists(settings.name)
            next_at = cron.next(await _ticks_from(connection, found))
            values = (
                settings.name,
                settings.cron,
                settings.timezone,
                settings.tenant,
                settings.type,
                settings.key,
                settings.payload_json,
                settings.headers_json,
                settings.misfire,
                settings.grace_s,
                settings.overlap,
                next_at,
            )
            try:
                if found is not None:
                    await connection.execute(REPLACE, *values)
                elif await connection.fetchval(ADD, *values, actor) is None:
                    # Another session added it concurrently.
                    raise _exists(settings.name)
            except asyncpg.CheckViolationError as error:
                # The limit on payloads is a check constraint.
                raise UsageError((error.constraint_name or "").replace("_", " ")) from error
            verb = "added" if found is None else "changed"
            details = {"cron": settings.cron, "timezone": settings.timezone, "type": settings.type}
            await _journal(connection, verb, settings.name, actor, details)
            return await read(connection, settings.name)


async def pause(
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


async def resume(
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


async def remove(
    connection: Connection[Any], schema: str, names: Sequence[str], *, actor: str
) -> None:
    """Remove schedules; published events are kept.

    Raises:
        NotFound: no schedule has this name; nothing was changed.
    """
    with map_errors(schema, "operator"):
        async with connection.transaction(isolation="read_committed"):
            for name in sorted(set(names)):
                row = await _lock(connection, name)
                await connection.execute(REMOVE, name)
                details = {"cron": row["cron"], "timezone": row["timezone"], "type": row["type"]}
                await _journal(connection, "removed", name, actor, details)


async def run_now(connection: Connection[Any], schema: str, name: str, *, actor: str) -> UUID:
    """Publish a schedule's event at once, in any state; returns the event's id.

    Scheduled runs do not change; with overlap `wait` the next one waits for this run.

    Raises:
        NotFound: no schedule has this name.
    """
    with map_errors(schema, "operator"):
        async with connection.transaction(isolation="read_committed"):
            row = await _lock(connection, name)
            # A separate statement after the lock: a run may have been published while waiting.
            now = await connection.fetchval(READ_NOW)
            event_id: UUID = await connection.fetchval(PUBLISH_RUNS, [row["id"]], [now], True)
            await _journal(connection, "run", name, actor, {"event": str(event_id)})
    return event_id


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
    with map_errors(schema, "operator"):
        async with connection.transaction(isolation="read_committed"):
            # In the order of names, to prevent deadlocks between two commands.
            for name in sorted(set(names)):
                row = await _lock(connection, name)
                if row["state"] == state:
                    continue
                since = await _ticks_from(connection, row)
                next_at = Cron(row["cron"], row["timezone"]).next(since)
                await connection.execute(SET_STATE, name, state, actor, comment, next_at)
                await _journal(connection, verb, name, actor, {"comment": comment})
            return [await read(connection, name) for name in dict.fromkeys(names)]


async def _ticks_from(connection: Connection[Any], row: Record | None) -> datetime:
    """The time to compute the next run from: now, but not before the last published run.

    The clock may have been set back.
    """
    now: datetime = await connection.fetchval(READ_NOW)
    last_at: datetime | None = row and row["last_at"]
    return now if last_at is None else max(now, last_at)


async def _lock(connection: Connection[Any], name: str) -> Record:
    row = await connection.fetchrow(LOCK_SCHEDULE, name)
    if row is None:
        raise await not_found(connection, name)
    return row


def _exists(name: str) -> Conflict:
    return Conflict(f'schedule "{name}" exists already; use replace to change it')


async def _journal(
    connection: Connection[Any], verb: str, name: str, actor: str, details: dict[str, Any]
) -> None:
    data = {"name": name, **{k: v for k, v in details.items() if v is not None}}
    await write_journal(connection, f"schedule_{verb}", actor, None, data)
