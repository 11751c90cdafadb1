"""Schedules that operators add, change, pause, resume and run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson

from outbox.core.schedules.cron import Cron
from outbox.errors import Conflict, NotFound
from outbox.operations.schedules import Schedule
from outbox.store.connection.connect import map_errors
from tests.sim.database.engine import EXCLUSIVE, Wait
from tests.sim.stores.routing_change import read_now, write_journal
from tests.sim.stores.schedule_runs import publish_runs

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID

    from outbox.core.schedules.schedule import ScheduleSettings
    from tests.sim.database.connection import Connection
    from tests.sim.database.engine import Row, Steps, Transaction
    from tests.sim.database.tables import Database


async def add(
    connection: Connection,
    schema: str,
    settings: ScheduleSettings,
    *,
    actor: str,
    replace: bool = False,
) -> Schedule:
    cron, name = Cron(settings.cron, settings.timezone), settings.name
    with map_errors(schema, "operator"):
        async with connection.transaction():
            found = await connection.call(lock_schedule, name)
            if found is not None and not replace:
                raise Conflict(f"there is a schedule {name} already")
            next_at = cron.next(await _start(connection, found))
            if found is None:
                await connection.call(add_schedule, settings, next_at, actor)
            else:
                await connection.call(replace_schedule, settings, next_at)
            kind = "schedule_added" if found is None else "schedule_changed"
            await write_journal(connection, kind, actor, None, {"name": name})
            return await _read(connection, name)


async def pause(
    connection: Connection,
    schema: str,
    names: Sequence[str],
    *,
    actor: str,
    comment: str | None = None,
) -> list[Schedule]:
    return await _set_states(connection, schema, names, "paused", "paused", actor, comment)


async def resume(
    connection: Connection,
    schema: str,
    names: Sequence[str],
    *,
    actor: str,
    comment: str | None = None,
) -> list[Schedule]:
    return await _set_states(connection, schema, names, "active", "resumed", actor, comment)


async def run_now(connection: Connection, schema: str, name: str, *, actor: str) -> UUID:
    with map_errors(schema, "operator"):
        async with connection.transaction():
            row = await _lock(connection, name)
            now = await connection.call(read_now)
            event_id = await connection.call(publish_runs, [(now, row["id"])], by_hand=True)
            await write_journal(connection, "schedule_run", actor, None, {"name": name})
    assert event_id is not None
    return event_id


async def _set_states(
    connection: Connection,
    schema: str,
    names: Sequence[str],
    state: str,
    verb: str,
    actor: str,
    comment: str | None,
) -> list[Schedule]:
    with map_errors(schema, "operator"):
        async with connection.transaction():
            for name in sorted(set(names)):
                row = await _lock(connection, name)
                if row["state"] == state:
                    continue
                since = await _start(connection, row)
                next_at = Cron(row["cron"], row["timezone"]).next(since)
                await connection.call(set_state, name, state, actor, comment, next_at)
                await write_journal(connection, f"schedule_{verb}", actor, None, {"name": name})
            return [await _read(connection, name) for name in dict.fromkeys(names)]


async def _start(connection: Connection, row: Row | None) -> datetime:
    """The time from which ticks count: now, or the last published tick if that is later."""
    now = await connection.call(read_now)
    return now if row is None or row["last_at"] is None else max(now, row["last_at"])


async def _lock(connection: Connection, name: str) -> Row:
    row = await connection.call(lock_schedule, name)
    if row is None:
        await connection.call(read_names)
        raise NotFound(f"there is no schedule {name}")
    return row


async def _read(connection: Connection, name: str) -> Schedule:
    row = await connection.call(read_schedule, name)
    kept = {each: row[each] for each in Schedule.__slots__ if each in row}
    kept |= {"last_event": row["last_event_id"], "payload": orjson.loads(row["payload_json"])}
    return Schedule(**kept)


# ------------------------------------------------------------------------ steps


def _by_name(db: Database, tx: Transaction, name: str) -> Row | None:
    return next((row for row in tx.rows(db.schedule) if row["name"] == name), None)


def lock_schedule(db: Database, tx: Transaction, name: str) -> Steps[Row | None]:
    row = _by_name(db, tx, name)
    if row is None:
        return None
    yield Wait(db.schedule, row["id"], EXCLUSIVE)
    return tx.get(db.schedule, row["id"])


def _columns(settings: ScheduleSettings, next_at: datetime) -> Row:
    names = ("name", "cron", "timezone", "tenant", "type", "key", "payload_json", "headers",
             "misfire", "grace_s", "overlap")  # fmt: skip
    return {name: getattr(settings, name) for name in names} | {
        "next_at": next_at,
        "due_at": next_at,
    }


def add_schedule(
    db: Database, tx: Transaction, settings: ScheduleSettings, next_at: datetime, actor: str
) -> None:
    # No other session adds schedules: the unique index is not simulated.
    new = db.serial(db.schedule)
    now = db.clock_timestamp()
    row = {"id": new, **_columns(settings, next_at), "created_at": now}
    row |= {"state": "active", "state_at": now, "state_by": actor, "state_comment": None}
    row |= dict.fromkeys(("last_at", "last_run_at", "last_outbox_id", "last_event_id"))
    tx.put(db.schedule, new, row)
    tx.notes.append(("schedule", (new, next_at)))


def replace_schedule(
    db: Database, tx: Transaction, settings: ScheduleSettings, next_at: datetime
) -> None:
    row = _by_name(db, tx, settings.name)
    assert row is not None
    tx.put(db.schedule, row["id"], {**row, **_columns(settings, next_at)})
    tx.notes.append(("schedule", (row["id"], next_at)))


def set_state(
    db: Database,
    tx: Transaction,
    name: str,
    state: str,
    by: str,
    comment: str | None,
    next_at: datetime,
) -> None:
    row = _by_name(db, tx, name)
    assert row is not None
    new = {
        "state": state,
        "state_at": db.clock_timestamp(),
        "state_by": by,
        "state_comment": comment,
    }
    tx.change(db.schedule, row["id"], **new, next_at=next_at, due_at=next_at)
    tx.notes.append(("schedule", (row["id"], next_at)))


def read_names(db: Database, tx: Transaction) -> None:
    """Only the text of an error depends on them."""


def read_schedule(db: Database, tx: Transaction, name: str) -> Row:
    row = _by_name(db, tx, name)
    assert row is not None
    now, active = db.clock_timestamp(), row["state"] == "active"
    waits = (
        active
        and row["overlap"] == "wait"
        and row["last_outbox_id"] is not None
        and row["next_at"] <= now
        and row["due_at"] > row["next_at"]
    )
    return {**row, "next_at": row["next_at"] if active else None, "now": now, "waits": waits}
