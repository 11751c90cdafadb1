"""Delayed events of applications."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.store.schedules import future_events
from outbox.store.schedules.future_events import DELAYED_EVENTS_MAX
from tests.sim.database.engine import EXCLUSIVE, Wait
from tests.sim.database.inserts import insert_event

if TYPE_CHECKING:
    from tests.sim.database.connection import Connection
    from tests.sim.database.engine import Steps, Transaction
    from tests.sim.database.tables import Database


class FutureEventStore(future_events.FutureEventStore):
    """Stands in for the real `FutureEventStore`; nothing is held, or suppressed, here."""

    def __init__(self, connection: Any, replica_id: int) -> None:
        self._db: Connection = connection  # type: ignore[assignment]

    async def due_in_s(self) -> tuple[float | None, float | None]:
        return await self._db.call(read_events_due_in), None

    async def move_due(self) -> int:
        return await self._db.call(move_due_events)

    async def postponed(self) -> tuple[int, str | None]:
        return 0, None


def read_events_due_in(db: Database, tx: Transaction) -> float | None:
    times = [row["deliver_at"] for row in tx.rows(db.future_event)]
    return min(times).timestamp() - db.wall() if times else None


def lock_future(db: Database, tx: Transaction) -> bool:
    return tx.try_lock("lock", "future events", EXCLUSIVE)


def move_due_events(db: Database, tx: Transaction) -> Steps[int]:
    if not lock_future(db, tx):
        return 0
    now = db.clock_timestamp()
    due = [row for row in tx.rows(db.future_event) if row["deliver_at"] <= now]
    due.sort(key=lambda row: (row["deliver_at"], row["id"]))
    moved = 0
    for row in due[:DELAYED_EVENTS_MAX]:
        yield Wait(db.future_event, row["id"], EXCLUSIVE)
        if tx.get(db.future_event, row["id"]) is None:
            continue
        tx.put(db.future_event, row["id"], None)
        event = yield from insert_event(db, tx, row["type"], None, row["payload"])
        tx.notes.append(("moved", (row["id"], event.id)))
        moved += 1
    return moved
