"""Schedules: adding, changing, pausing, removing and running them by hand.

    (added) ──▶ active ──▶ paused ──▶ active       pause, resume
    any ──▶ (gone)                                  remove

Each change locks the schedule's row, for which a relay that is deciding on a tick is
waited for, and is journalled.  Ticks that come while it is paused are left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import asyncpg

from outbox.core.schedules.cron import Cron
from outbox.errors import Conflict, UsageError
from outbox.operations.schedules import not_found, read
from outbox.store.connection.connect import map_errors
from outbox.store.routing_change import READ_NOW, write_journal
from outbox.store.schedule_runs import PUBLISH

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID

    from asyncpg import Connection, Record

    from outbox.core.schedules.schedule import ScheduleSettings
    from outbox.operations.schedules import Schedule

# A relay that decides on one of its ticks is waited for.
LOCK_SCHEDULE = """
SELECT id, state, cron, timezone, type, last_at FROM schedule WHERE name = $1 FOR UPDATE
"""

# Nothing, when somebody has just added one of that name.
ADD = """
INSERT INTO schedule (name, cron, timezone, tenant, type, key, payload, headers, misfire, grace_s,
                      overlap, next_at, look_at, state_by)
VALUES ($1, $2, $3, $4, $5, $6, $7::text::jsonb, $8::text::jsonb, $9, $10, $11, $12, $12, $13)
ON CONFLICT (name) DO NOTHING
RETURNING id
"""

# Its state, and what is known of its last run, stay.
REPLACE = """
UPDATE schedule
   SET cron = $2, timezone = $3, tenant = $4, type = $5, key = $6, payload = $7::text::jsonb,
       headers = $8::text::jsonb, misfire = $9, grace_s = $10, overlap = $11, next_at = $12,
       look_at = $12
 WHERE name = $1
"""

# Paused or resumed: ticks that are not decided yet are left out.
SET_STATE = """
UPDATE schedule
   SET state = $2, state_at = clock_timestamp(), state_by = $3, state_why = $4,
       next_at = $5, look_at = $5
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
    """Add a schedule; its first tick is the next one from now.

    Args:
        replace: change the one of that name, if there is one.

    Raises:
        Conflict: there is one of that name.
        UsageError: the database refuses the event.
    """
    cron = Cron(settings.cron, settings.timezone)
    with map_errors(schema, "operator"):
        async with connection.transaction(isolation="read_committed"):
            found = await connection.fetchrow(LOCK_SCHEDULE, settings.name)
            if found is not None and not replace:
                raise _exists(settings.name)
            next_at = cron.next(await _from(connection, found))
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
                    # Somebody has just added it.
                    raise _exists(settings.name)
            except asyncpg.CheckViolationError as error:
                # The limit on payloads is the database's own.
                raise UsageError((error.constraint_name or "").replace("_", " ")) from error
            verb = "added" if found is None else "changed"
            told = {"cron": settings.cron, "timezone": settings.timezone, "type": settings.type}
            await _journal(connection, verb, settings.name, actor, told)
            return await read(connection, settings.name)


async def pause(
    connection: Connection[Any],
    schema: str,
    names: Sequence[str],
    *,
    actor: str,
    why: str | None = None,
) -> list[Schedule]:
    """Publish nothing for these schedules until they are resumed.

    Raises:
        NotFound: there is none of that name; nothing was changed.
    """
    return await _set_states(connection, schema, names, "paused", "paused", actor, why)


async def resume(
    connection: Connection[Any],
    schema: str,
    names: Sequence[str],
    *,
    actor: str,
    why: str | None = None,
) -> list[Schedule]:
    """Let paused schedules go on with their next tick from now.

    Raises:
        NotFound: there is none of that name; nothing was changed.
    """
    return await _set_states(connection, schema, names, "active", "resumed", actor, why)


async def remove(
    connection: Connection[Any], schema: str, names: Sequence[str], *, actor: str
) -> None:
    """Remove schedules; what they published stays.

    Raises:
        NotFound: there is none of that name; nothing was changed.
    """
    with map_errors(schema, "operator"):
        async with connection.transaction(isolation="read_committed"):
            for name in sorted(set(names)):
                row = await _lock(connection, name)
                await connection.execute(REMOVE, name)
                told = {"cron": row["cron"], "timezone": row["timezone"], "type": row["type"]}
                await _journal(connection, "removed", name, actor, told)


async def run_now(connection: Connection[Any], schema: str, name: str, *, actor: str) -> UUID:
    """Publish a schedule's event at once, whatever its state; returns the event's id.

    Its ticks stay what they are; with overlap `wait` the next one waits for this run.

    Raises:
        NotFound: there is none of that name.
    """
    with map_errors(schema, "operator"):
        async with connection.transaction(isolation="read_committed"):
            row = await _lock(connection, name)
            # A statement of its own: the lock may have been waited for, while a tick was
            # published.
            now = await connection.fetchval(READ_NOW)
            event_id: UUID = await connection.fetchval(PUBLISH, [row["id"]], [now], True)
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
    why: str | None,
) -> list[Schedule]:
    with map_errors(schema, "operator"):
        async with connection.transaction(isolation="read_committed"):
            # In this order, so that two commands do not wait for each other.
            for name in sorted(set(names)):
                row = await _lock(connection, name)
                if row["state"] == state:
                    continue
                since = await _from(connection, row)
                next_at = Cron(row["cron"], row["timezone"]).next(since)
                await connection.execute(SET_STATE, name, state, actor, why, next_at)
                await _journal(connection, verb, name, actor, {"why": why})
            return [await read(connection, name) for name in dict.fromkeys(names)]


async def _from(connection: Connection[Any], row: Record | None) -> datetime:
    """Ticks count from now on, and never from before one that was published.

    The clock may have been set back since then.
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
    return Conflict(f'there is a schedule "{name}" already; say replace to change it')


async def _journal(
    connection: Connection[Any], verb: str, name: str, actor: str, told: dict[str, Any]
) -> None:
    data = {"name": name, **{k: v for k, v in told.items() if v is not None}}
    await write_journal(connection, f"schedule_{verb}", actor, None, data)
