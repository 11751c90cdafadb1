"""Delayed and held events: the real store, with steps in place of its statements."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.store.schedules import future_events as real
from tests.sim.database.engine import EXCLUSIVE, UPDATE, Wait
from tests.sim.database.inserts import insert_event
from tests.sim.database.shares import held_rows, is_named

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.sim.database.connection import Connection
    from tests.sim.database.engine import Row, Steps, Transaction
    from tests.sim.database.tables import Database


class FutureEventStore(real.FutureEventStore):
    """The real `FutureEventStore`; no event is refused here."""

    def __init__(self, connection: Any, replica_id: int) -> None:
        super().__init__(Session(connection), replica_id)  # type: ignore[arg-type]

    due_in_s = real.FutureEventStore.due_in_s
    move_due = real.FutureEventStore.move_due
    move_shares = real.FutureEventStore.move_shares
    postponed = real.FutureEventStore.postponed


class Session:
    """A simulated connection with the methods of a real one that the real store calls."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    async def fetch(self, statement: str, *arguments: Any) -> Any:
        return await self.connection.call(STEPS[statement], *arguments)

    fetchrow = write = fetch

    async def write_unless_aborted(self, *calls: Any) -> int:
        (_lock,), (_move, ids) = calls
        return await self.connection.call(move_events, ids)


# ------------------------------------------------------------------------ steps


def read_events_due_in(db: Database, tx: Transaction) -> Row:
    rows = list(tx.rows(db.future_event))
    named = any(is_named(db, tx, share["tenant"]) for share in tx.rows(db.tenant_share))
    paced = [r for r in rows if r["cost"] is not None and not r["is_held"]]
    of_applications = _due_in_s(db, [r for r in rows if r["cost"] is None])
    return {
        "of_applications": of_applications,
        "of_tenants": 0.0 if named else _due_in_s(db, paced),
    }


def _due_in_s(db: Database, rows: Sequence[Row]) -> float | None:
    times = [row["deliver_at"].timestamp() for row in rows]
    return min(times) - db.wall() if times else None


def read_due_events(db: Database, tx: Transaction, limit: int) -> list[Row]:
    now = db.clock_timestamp()
    rows = tx.rows(db.future_event)
    due = [r for r in rows if r["cost"] is None and r["deliver_at"] <= now]
    return sorted(due, key=lambda r: (r["deliver_at"], r["id"]))[:limit]


def read_paced_tenants(
    db: Database, tx: Transaction, after: str, limit: int, search: bool
) -> list[Row]:
    paced = [r for r in tx.rows(db.future_event) if r["cost"] is not None]
    rows = [r for r in paced if r["tenant"] > after]
    now = db.clock_timestamp()
    if any(not r["is_held"] and r["deliver_at"] <= now for r in paced):
        delayed = sorted({r["tenant"] for r in rows if not r["is_held"]})[:limit]
    else:
        delayed = []
    held = sorted({r["tenant"] for r in rows if r["is_held"]})[: limit if search else 0]
    shares = sorted(s["tenant"] for s in tx.rows(db.tenant_share) if s["tenant"] > after)
    named = [tenant for tenant in shares if is_named(db, tx, tenant)][:limit]
    due = {r["tenant"] for r in rows if not r["is_held"] and r["deliver_at"] <= now}
    return [
        {
            "tenant": tenant,
            "is_due": tenant in held or tenant in named or tenant in due,
            "is_delayed": tenant in delayed,
        }
        for tenant in sorted({*delayed, *held, *named})
    ]


def read_paced_events(
    db: Database, tx: Transaction, tenants: Sequence[str], after: Sequence[int], limit: int
) -> list[Row]:
    now = db.clock_timestamp()
    found: list[Row] = []
    for tenant, after_id in zip(tenants, after, strict=True):
        held = [r for r in held_rows(db, tx, tenant) if r["id"] > after_id]
        held.sort(key=lambda r: int(r["id"]))
        delayed = [
            r
            for r in tx.rows(db.future_event)
            if r["tenant"] == tenant and not r["is_held"] and r["deliver_at"] <= now
        ]
        delayed.sort(key=lambda r: (r["deliver_at"], r["id"]))
        found += held[:limit] + delayed[:limit]
    return [{**row, "due_at": row["deliver_at"].timestamp()} for row in found]


def lock_future(db: Database, tx: Transaction) -> bool:
    return tx.try_lock("lock", "future events", EXCLUSIVE)


def move_events(db: Database, tx: Transaction, ids: Sequence[int]) -> Steps[int]:
    """The statements of one message; returns the number of events that it moves."""
    if not lock_future(db, tx):
        return 0
    due: dict[int, Row] = {}
    for i in sorted(ids):
        yield Wait(db.future_event, i, EXCLUSIVE)
        row = tx.get(db.future_event, i)
        if row is not None and (row["is_held"] or row["deliver_at"] <= db.clock_timestamp()):
            due[i] = row
    for row in [due[i] for i in ids if i in due]:
        event = yield from insert_event(db, tx, row["type"], row["key"], row["payload"])
        tx.put(db.future_event, row["id"], None)
        tx.notes.append(("moved", (row["id"], event.id)))
        for schedule in list(tx.rows(db.schedule)):
            if schedule["last_event_id"] == row["event_id"]:
                yield Wait(db.schedule, schedule["id"], UPDATE)
                if (tx.get(db.schedule, schedule["id"]) or {}).get("last_event_id") == row[
                    "event_id"
                ]:
                    tx.change(db.schedule, schedule["id"], last_outbox_id=event.id)
    return len(due)


def forget_shares(db: Database, tx: Transaction) -> None:
    """Delete the shares of tenants of which nothing is held; each is locked first."""
    for share in list(tx.rows(db.tenant_share)):
        tenant = share["tenant"]
        if (
            not is_named(db, tx, tenant)
            and tx.try_lock(db.tenant_share, tenant, EXCLUSIVE)
            and not any(held_rows(db, tx, tenant))
        ):
            tx.put(db.tenant_share, tenant, None)


def read_postponed(db: Database, tx: Transaction) -> Row:
    return {"events": 0, "reason": None}


STEPS: dict[Any, Any] = {
    real.READ_EVENTS_DUE_IN: read_events_due_in,
    real.READ_DUE_EVENTS: read_due_events,
    real.READ_PACED_TENANTS: read_paced_tenants,
    real.READ_PACED_EVENTS: read_paced_events,
    real.FORGET_SHARES: forget_shares,
    real.READ_POSTPONED: read_postponed,
}
