"""Runs of schedules."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Any

from outbox.core.sequencing.feeds import Place
from outbox.core.sequencing.router import RoutableEvent, Route, Router
from outbox.store.schedules import schedule_runs
from outbox.store.schedules.schedule_runs import (
    SCHEDULES_MAX,
    ScheduleRunResult,
    decide_run,
)
from tests.sim.database.engine import EXCLUSIVE, UPDATE, Wait, perform
from tests.sim.database.inserts import insert_event
from tests.sim.database.shares import hold_event
from tests.sim.stores.routing_change import add_to_journal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import datetime

    from outbox.store.schedules.schedule_runs import ScheduleDecision
    from tests.sim.database.connection import Connection
    from tests.sim.database.engine import Row, Steps, Transaction
    from tests.sim.database.tables import Batch, Database


class ScheduleRunStore(schedule_runs.ScheduleRunStore):
    """Stands in for the real `ScheduleRunStore`, with the same decisions."""

    def __init__(self, connection: Any, replica_id: int) -> None:
        self._db: Connection = connection  # type: ignore[assignment]
        self._actor = f"replica {replica_id}"

    async def due_in_s(self) -> float | None:
        return await self._db.call(read_due_in)

    async def run_due_schedules(self) -> ScheduleRunResult:
        rows = await self._db.call(read_due)
        if not rows:
            return ScheduleRunResult(0)
        waited_for = [r["last_outbox_id"] for r in rows if r["overlap"] == "wait"]
        waited_for = [each for each in waited_for if each is not None]
        ended = await self._db.call(read_ended, waited_for) if waited_for else set()
        decided: list[ScheduleDecision] = [decide_run(row, ended) for row in rows]
        return ScheduleRunResult(await self._write(decided, []))

    async def _write_all(self, decided: Sequence[ScheduleDecision]) -> bool:
        return await self._db.call(write_runs, decided, self._actor)


# -------------------------------------------------------------------- schedules


def active_schedules(db: Database, tx: Transaction) -> Iterator[Row]:
    return (row for row in tx.rows(db.schedule) if row["state"] == "active")


def read_due_in(db: Database, tx: Transaction) -> float | None:
    times = [row["due_at"] for row in active_schedules(db, tx)]
    return min(times).timestamp() - db.wall() if times else None


def read_due(db: Database, tx: Transaction) -> list[Row]:
    """Due schedules, each with its `revision`: a row is replaced, and never changed in place."""
    now = db.clock_timestamp()
    found = [row for row in active_schedules(db, tx) if row["due_at"] <= now]
    found.sort(key=lambda row: (row["due_at"], row["id"]))
    if found:
        session = db.session_of(tx).name
        for call in db.on_tick:
            call(session)
    held = {row["event_id"] for row in tx.rows(db.future_event)}
    return [
        {**row, "is_held": row["last_event_id"] in held, "now": now, "revision": row}
        for row in found[:SCHEDULES_MAX]
    ]


def write_runs(
    db: Database, tx: Transaction, decided: Sequence[ScheduleDecision], actor: str
) -> Steps[bool]:
    """The statements of one message.

    It is aborted if a schedule has changed, or if another session has locked a tenant's share.
    """
    if not lock_unchanged(db, tx, [d.schedule["revision"] for d in decided]):
        return False
    tenants = sorted({d.schedule["tenant"] for d in decided if d.due.ticks} - {None})
    if not all(tx.try_lock(db.tenant_share, tenant, EXCLUSIVE) for tenant in tenants):
        return False
    ticks = sorted((at, d.schedule["id"]) for d in decided for at in d.due.ticks)
    if ticks:
        yield from publish_runs(db, tx, ticks)
    yield from perform(advance_schedules(db, tx, decided))
    for each in decided:
        if each.due.missed is not None:
            name, missed = each.schedule["name"], each.due.missed
            data = dict(zip(("from", "before"), missed, strict=True))
            data |= {"name": name, "misfire": each.schedule["misfire"]}
            add_to_journal(db, tx, "schedule_skipped", actor, None, data)
    return True


def lock_unchanged(db: Database, tx: Transaction, rows: Sequence[Row]) -> bool:
    """Lock schedules; returns False if one was changed, or is locked by another session."""
    return all(
        tx.try_lock(db.schedule, row["id"], EXCLUSIVE) and tx.get(db.schedule, row["id"]) is row
        for row in rows
    )


def read_ended(db: Database, tx: Transaction, outbox_ids: Sequence[int]) -> set[int]:
    """The events that are delivered or dead-lettered in every lane."""
    return {i for i in outbox_ids if _has_ended(db, tx, i)}


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
    given = {batch.batch}
    for f in tx.rows(db.feed):
        place, event_place = Place(f["batch"], f["outbox_id"]), Place(batch.batch, outbox_id)
        if place < event_place:
            if f["ended_at"] is None and _may_feed(db, f, outbox_id):
                return False
        elif (f["from_batch"], f["from_id"]) < event_place:
            steps = [s for s in tx.rows(db.feed_step) if s["feed_id"] == f["id"]]
            reached = [s for s in steps if (s["to_batch"], s["to_id"]) >= event_place]
            first = sorted(reached, key=lambda s: (s["to_batch"], s["to_id"]))[:1]
            given.update(s["batch"] for s in first)
    return all(_is_done(db, tx, b, outbox_id) for b in db.batches if b.batch in given)


def _may_feed(db: Database, feed: Row, outbox_id: int) -> bool:
    """Whether a feed is to give an event to its endpoint."""
    event = db.outbox.get(outbox_id)
    if event is None or any(lo <= outbox_id <= hi for lo, hi in feed["seen"]):
        return False
    if event.expires_at is not None and event.expires_at <= db.clock_timestamp():
        return False
    route = Route(feed["endpoint_id"], tuple(feed["types"]), None, True, (0,), feed["filter"])
    routable = RoutableEvent(event.id, None, event.type, event.key_hash)
    return bool(Router([route]).placements([routable]))


def _is_done(db: Database, tx: Transaction, batch: Batch, outbox_id: int) -> bool:
    """Whether an event is delivered or dead-lettered in the lanes of a batch."""
    for lane_id in batch.lanes:
        progress = tx.get(db.lane_progress, lane_id)
        if progress is None:
            continue  # The lane is removed.
        delivered = {a.seq for a in db.attempts.get(lane_id, ()) if a.outcome == "delivered"}
        for g in db.deliveries.get(lane_id, ()):
            if (g.batch, g.outbox_id, g.replay_id) != (batch.batch, outbox_id, None):
                continue
            if progress["acked_seq"] < g.seq and g.seq not in delivered:
                return False
    return True


def publish_runs(
    db: Database, tx: Transaction, ticks: Sequence[tuple[datetime, int]], *, by_hand: bool = False
) -> Steps[None]:
    """Insert the event of each run of a schedule, or hold it for its tenant."""
    for at, i in ticks:
        row = tx.get(db.schedule, i)
        assert row is not None
        tenant, content = row["tenant"], (row["type"], row["key"], row["payload_json"])
        if tenant is None:
            event = yield from insert_event(db, tx, *content)
            outbox_id, event_id = event.id, event.event_id
        else:
            outbox_id, event_id = None, hold_event(db, tx, tenant, *content, cost=1)["event_id"]
        tx.notes.append(("tick", (i, at, by_hand, row["last_outbox_id"], row["last_event_id"])))
        yield Wait(db.schedule, i, UPDATE)
        tx.change(
            db.schedule,
            i,
            last_at=at,
            last_run_at=db.clock_timestamp(),
            last_outbox_id=outbox_id,
            last_event_id=event_id,
        )


def advance_schedules(
    db: Database, tx: Transaction, decided: Sequence[ScheduleDecision]
) -> Steps[None]:
    for each in decided:
        i = each.schedule["id"]
        yield Wait(db.schedule, i, UPDATE)
        tx.change(db.schedule, i, next_at=each.due.next_at, due_at=each.due_at)
