"""What the ticker asks, and whoever adds, pauses and removes schedules."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Any

from outbox.operations import schedule_changes, schedules
from outbox.store import schedule_runs
from tests.sim.database.engine import EXCLUSIVE, UPDATE, Wait
from tests.sim.database.inserts import insert_event
from tests.sim.database.statements.registry import answers

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from tests.sim.database.engine import Row, Steps, Transaction
    from tests.sim.database.tables import Database


def _active(rows: Any) -> list[Row]:
    return [row for row in rows if row["state"] == "active"]


@answers(schedule_runs.READ_DUE_IN)
def read_due_in(db: Database, tx: Transaction) -> list[Row]:
    times = [row["look_at"] for row in _active(tx.rows(db.schedule))]
    times += [row["deliver_at"] for row in tx.rows(db.future_event)]
    return [{"float8": min(times).timestamp() - db.wall() if times else None}]


@answers(schedule_runs.LOCK_DUE)
def lock_due(db: Database, tx: Transaction, limit: int) -> Steps:
    now = db.clock_timestamp()
    # The snapshot; each row is looked at again once it is locked.
    found = [row for row in _active(tx.rows(db.schedule)) if row["look_at"] <= now]
    found.sort(key=lambda row: (row["look_at"], row["id"]))
    if found:
        session = db.session_of(tx).name
        for call in db.on_tick:
            call(session)
        if db.rng.random() < 0.3:
            yield db.pause_s()
    locked: list[Row] = []
    for row in found:
        if len(locked) == limit:
            break
        if tx.try_lock(db.schedule, row["id"], EXCLUSIVE):
            new = tx.get(db.schedule, row["id"])
            if new is not None and new["state"] == "active" and new["look_at"] <= now:
                locked.append({**new, "now": now})
    return locked


@answers(schedule_runs.READ_ENDED)
def read_ended(db: Database, tx: Transaction, outbox_ids: Sequence[int]) -> list[Row]:
    return [{"outbox_id": i} for i in outbox_ids if _has_ended(db, tx, i)]


def _has_ended(db: Database, tx: Transaction, outbox_id: int) -> bool:
    def holds(ranges: tuple[tuple[int, int], ...]) -> bool:
        return any(lo <= outbox_id <= hi for lo, hi in ranges)

    n = bisect_left(db.batches, outbox_id, key=lambda batch: batch.high)
    if n == len(db.batches):
        return False
    batch = db.batches[n]
    if holds(batch.young):
        late = [b for b in db.batches[n + 1 :] if holds(b.found)]
        if not late:
            return False
        batch = late[0]
    for lane_id in batch.lanes:
        progress = tx.get(db.lane_progress, lane_id)
        assert progress is not None
        delivered = {a.seq for a in db.attempts.get(lane_id, ()) if a.outcome == "delivered"}
        for g in db.deliveries.get(lane_id, ()):
            if (g.batch, g.outbox_id, g.replay_id) != (batch.batch, outbox_id, None):
                continue
            if progress["acked_seq"] < g.seq and g.seq not in delivered:
                return False
    return True


@answers(schedule_runs.PUBLISH)
def publish(
    db: Database, tx: Transaction, ids: Sequence[int], ats: Sequence[datetime], by_hand: bool
) -> Steps:
    event_id = None
    for i, at in zip(ids, ats, strict=True):
        row = tx.get(db.schedule, i)
        assert row is not None
        event = yield from insert_event(db, tx, row["type"], row["key"], row["payload_json"])
        event_id = event.event_id
        tx.notes.append(("tick", (i, at, by_hand, event.id, row["last_outbox_id"])))
        yield Wait(db.schedule, i, UPDATE)
        tx.change(
            db.schedule,
            i,
            last_at=at,
            last_run_at=db.clock_timestamp(),
            last_outbox_id=event.id,
            last_event_id=event_id,
        )
    return [{"last_event_id": event_id}]


@answers(schedule_runs.ADVANCE)
def advance(
    db: Database,
    tx: Transaction,
    ids: Sequence[int],
    next_ats: Sequence[datetime],
    look_ats: Sequence[datetime],
) -> Steps:
    for i, next_at, look_at in zip(ids, next_ats, look_ats, strict=True):
        yield Wait(db.schedule, i, UPDATE)
        tx.change(db.schedule, i, next_at=next_at, look_at=look_at)
    return f"UPDATE {len(ids)}"


@answers(schedule_runs.LOCK_FUTURE)
def lock_future(db: Database, tx: Transaction) -> list[Row]:
    return [{"locked": tx.try_lock("advisory lock", "future events", EXCLUSIVE)}]


@answers(schedule_runs.MOVE_FUTURE)
def move_future(db: Database, tx: Transaction, limit: int) -> Steps:
    now = db.clock_timestamp()
    due = [row for row in tx.rows(db.future_event) if row["deliver_at"] <= now]
    due.sort(key=lambda row: (row["deliver_at"], row["id"]))
    moved = 0
    for row in due[:limit]:
        yield Wait(db.future_event, row["id"], EXCLUSIVE)
        if tx.get(db.future_event, row["id"]) is None:
            continue
        tx.put(db.future_event, row["id"], None)
        event = yield from insert_event(db, tx, row["type"], None, row["payload"])
        tx.notes.append(("moved", (row["id"], event.id)))
        moved += 1
    return [{"count": moved}]


# ------------------------------------------------------------------ operators


def _by_name(db: Database, tx: Transaction, name: str) -> Row | None:
    return next((row for row in tx.rows(db.schedule) if row["name"] == name), None)


@answers(schedule_changes.LOCK_SCHEDULE)
def lock_schedule(db: Database, tx: Transaction, name: str) -> Steps:
    row = _by_name(db, tx, name)
    if row is None:
        return []
    yield Wait(db.schedule, row["id"], EXCLUSIVE)
    new = tx.get(db.schedule, row["id"])
    return [] if new is None else [dict(new)]


_SETTINGS = ("name", "cron", "timezone", "tenant", "type", "key", "payload_json", "headers_json",
             "misfire", "grace_s", "overlap", "next_at")  # fmt: skip


@answers(schedule_changes.ADD)
def add(db: Database, tx: Transaction, *values: Any) -> list[Row]:
    settings = dict(zip(_SETTINGS, values, strict=False))
    # Nobody else adds any: the unique index is not simulated.
    new = db.serial(db.schedule)
    now = db.clock_timestamp()
    state = {"state": "active", "state_at": now, "state_by": values[-1], "state_why": None}
    last = dict.fromkeys(("last_at", "last_run_at", "last_outbox_id", "last_event_id"))
    row = {"id": new, **settings, "look_at": settings["next_at"], **state, **last}
    tx.put(db.schedule, new, {**row, "created_at": now})
    tx.notes.append(("schedule", (new, settings["next_at"])))
    return [{"id": new}]


@answers(schedule_changes.REPLACE)
def replace(db: Database, tx: Transaction, *values: Any) -> str:
    settings = dict(zip(_SETTINGS, values, strict=True))
    row = _by_name(db, tx, settings["name"])
    assert row is not None
    tx.put(db.schedule, row["id"], {**row, **settings, "look_at": settings["next_at"]})
    tx.notes.append(("schedule", (row["id"], settings["next_at"])))
    return "UPDATE 1"


@answers(schedule_changes.SET_STATE)
def set_state(
    db: Database,
    tx: Transaction,
    name: str,
    state: str,
    by: str,
    why: str | None,
    next_at: datetime,
) -> str:
    row = _by_name(db, tx, name)
    assert row is not None
    told = {"state": state, "state_at": db.clock_timestamp(), "state_by": by, "state_why": why}
    tx.change(db.schedule, row["id"], **told, next_at=next_at, look_at=next_at)
    tx.notes.append(("schedule", (row["id"], next_at)))
    return "UPDATE 1"


@answers(schedule_changes.REMOVE)
def remove(db: Database, tx: Transaction, name: str) -> str:
    row = _by_name(db, tx, name)
    assert row is not None
    tx.put(db.schedule, row["id"], None)
    return "DELETE 1"


@answers(schedules.GET)
def get(db: Database, tx: Transaction, name: str) -> list[Row]:
    row = _by_name(db, tx, name)
    if row is None:
        return []
    now = db.clock_timestamp()
    waits = (
        row["state"] == "active"
        and row["overlap"] == "wait"
        and row["last_outbox_id"] is not None
        and row["next_at"] <= now
        and row["look_at"] > row["next_at"]
    )
    return [{**row, "now": now, "waits": waits}]


@answers(schedules.READ_NAMES)
def read_names(db: Database, tx: Transaction) -> list[Row]:
    return [{"name": row["name"]} for row in tx.rows(db.schedule)]
