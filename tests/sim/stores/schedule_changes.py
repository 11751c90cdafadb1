"""Schedules that operators add, change, pause, resume and run."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

import asyncpg
import orjson

from outbox.core.schedules.cron import Cron
from outbox.core.schedules.schedule import ticks_from
from outbox.errors import Conflict, NotFound
from outbox.operations.schedules.changes import ScheduleRun
from outbox.operations.schedules.queries import Schedule, next_runs
from tests.sim.database.engine import EXCLUSIVE, Wait, abort_unless
from tests.sim.database.shares import lock_shares
from tests.sim.stores.change import make_change_and_read
from tests.sim.stores.routing_change import read_now
from tests.sim.stores.schedule_runs import publish_runs

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID

    from outbox.core.schedules.schedule import ScheduleSettings
    from tests.sim.database.connection import Connection
    from tests.sim.database.engine import Row, Steps, Transaction
    from tests.sim.database.tables import Database
    from tests.sim.stores.change import Change


async def add_schedule(
    connection: Connection,
    schema: str,
    settings: ScheduleSettings,
    *,
    actor: str,
    replace: bool = False,
) -> Schedule:
    cron, name = Cron(settings.cron, settings.timezone), settings.name

    async def plan(change: Change) -> str:
        found = await change.db.call(find_schedule, name)
        if found is not None and not replace:
            raise Conflict(f"there is a schedule {name} already")
        next_at = cron.next(await _ticks_from(change, found))
        if found is None:
            change.write(add_schedule_row, settings, next_at, actor)
        else:
            _require_unchanged(change, [found])
            change.write(replace_schedule, settings, next_at)
        kind = "schedule_added" if found is None else "schedule_changed"
        change.journal(kind, None, {"name": name})
        return name

    return await make_change_and_read(connection, schema, actor, plan, _read_back, routing=False)


async def pause_schedules(
    connection: Connection,
    schema: str,
    names: Sequence[str],
    *,
    actor: str,
    comment: str | None = None,
) -> list[Schedule]:
    return await _set_states(connection, schema, names, "paused", "paused", actor, comment)


async def resume_schedules(
    connection: Connection,
    schema: str,
    names: Sequence[str],
    *,
    actor: str,
    comment: str | None = None,
) -> list[Schedule]:
    return await _set_states(connection, schema, names, "active", "resumed", actor, comment)


async def run_schedule_now(
    connection: Connection, schema: str, name: str, *, actor: str
) -> ScheduleRun:
    async def plan(change: Change) -> str:
        rows = await _find(change, [name])
        now = await change.db.call(read_now)
        if rows[0]["tenant"] is not None:
            change.write(lock_shares, [rows[0]["tenant"]])
        _require_unchanged(change, rows)
        change.write(publish_runs, [(now, rows[0]["id"])], by_hand=True)
        change.journal("schedule_run", None, {"name": name})
        return name

    async def read_back(db: Connection, _: UUID, name: str) -> ScheduleRun:
        # The real plan chooses the id; here it is that of the row, for the checkers.
        return ScheduleRun((await db.call(read_schedule, name))["last_event_id"])

    return await make_change_and_read(connection, schema, actor, plan, read_back, routing=False)


async def _set_states(
    connection: Connection,
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
            change.write(set_state, row["name"], state, actor, comment, next_at)
            change.journal(f"schedule_{verb}", None, {"name": row["name"]})
        return list(dict.fromkeys(names))

    async def read_back(db: Connection, _: UUID, each: Sequence[str]) -> list[Schedule]:
        return [await _read(db, name) for name in each]

    return await make_change_and_read(connection, schema, actor, plan, read_back, routing=False)


async def _read_back(db: Connection, _: UUID, name: str) -> Schedule:
    return await _read(db, name)


async def _ticks_from(change: Change, row: Row | None) -> datetime:
    """The time to compute the next run from."""
    return ticks_from(None if row is None else row["last_at"], await change.db.call(read_now))


async def _find(change: Change, names: Sequence[str]) -> list[Row]:
    rows = []
    for name in sorted(set(names)):
        row = await change.db.call(find_schedule, name)
        if row is None:
            await change.db.call(read_names)
            raise NotFound(f"there is no schedule {name}")
        rows.append(row)
    return rows


def _require_unchanged(change: Change, rows: Sequence[Row]) -> None:
    if rows:
        change.write(require_unchanged, rows)


async def _read(connection: Connection, name: str) -> Schedule:
    row = await connection.call(read_schedule, name)
    kept = {each.name: row[each.name] for each in fields(Schedule) if each.name in row}
    kept |= {"last_event": row["last_event_id"], "payload": orjson.loads(row["payload_json"])}
    kept["next_runs"] = next_runs(row["next_at"], row["cron"], row["timezone"])
    return Schedule(**kept)


# ------------------------------------------------------------------------ steps


def find_schedule(db: Database, tx: Transaction, name: str) -> Row | None:
    return next((row for row in tx.rows(db.schedule) if row["name"] == name), None)


def _columns(settings: ScheduleSettings, next_at: datetime) -> Row:
    names = ("name", "cron", "timezone", "tenant", "type", "key", "payload_json", "headers",
             "misfire", "grace_s", "overlap")  # fmt: skip
    return {name: getattr(settings, name) for name in names} | {
        "next_at": next_at,
        "due_at": next_at,
    }


def add_schedule_row(
    db: Database, tx: Transaction, settings: ScheduleSettings, next_at: datetime, actor: str
) -> Steps[None]:
    # The index on names is unique.
    yield Wait("schedule_name", settings.name, EXCLUSIVE)
    if find_schedule(db, tx, settings.name) is not None:
        raise asyncpg.UniqueViolationError("there is a schedule of this name already")
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
    row = find_schedule(db, tx, settings.name)
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
    row = find_schedule(db, tx, name)
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
    row = find_schedule(db, tx, name)
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


def require_unchanged(db: Database, tx: Transaction, rows: Sequence[Row]) -> Steps[None]:
    """Lock schedules, and abort if one was changed."""
    for row in rows:
        yield Wait(db.schedule, row["id"], EXCLUSIVE)
        abort_unless(tx.get(db.schedule, row["id"]) is row)
