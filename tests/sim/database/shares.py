"""Tenants' events that wait in `future_event`, and the shares that name the newest held ones."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple
from uuid import UUID

from outbox.store.channels import HELD
from tests.sim.database.engine import EXCLUSIVE, Wait, perform
from tests.sim.database.inserts import insert_event
from tests.sim.database.tables import SCHEMA

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.sim.database.engine import Row, Steps, Transaction
    from tests.sim.database.tables import Database


class Request(NamedTuple):
    """An event that a tenant's client publishes."""

    key: str | None
    payload: str
    number: int
    """Its number among the events of the client."""
    deliver_at: float = 0.0
    """0: it has none, and keeps the order of its key."""
    type: str = "t0.changed"
    cost: int = 1


def insert_future_event(
    db: Database,
    tx: Transaction,
    kind: str,
    key: str | None,
    payload: str,
    deliver_at: datetime,
    *,
    tenant: str | None = None,
    cost: int | None = None,
    is_held: bool = False,
) -> Row:
    """Insert one row into future_event; returns it."""
    new = db.serial(db.future_event)
    row = {
        "id": new,
        "event_id": UUID(int=(new << 96) | db.restores),
        "tenant": tenant,
        "type": kind,
        "key": key,
        "payload": payload,
        "deliver_at": deliver_at,
        "cost": cost,
        "is_held": is_held,
    }
    tx.put(db.future_event, new, row)
    tx.notes.append(("future", (new,)))
    return row


def held_rows(db: Database, tx: Transaction, tenant: str) -> Iterator[Row]:
    """The held events of a tenant."""
    return (r for r in tx.rows(db.future_event) if r["is_held"] and r["tenant"] == tenant)


def is_named(db: Database, tx: Transaction, tenant: str) -> bool:
    """Whether the event that a tenant's share names as the newest held one is still there."""
    share = tx.get(db.tenant_share, tenant)
    return share is not None and tx.get(db.future_event, share["last_id"]) is not None


def lock_share(db: Database, tx: Transaction, tenant: str) -> Steps[None]:
    yield Wait(db.tenant_share, tenant, EXCLUSIVE)
    if tx.get(db.tenant_share, tenant) is None:
        tx.put(db.tenant_share, tenant, {"tenant": tenant, "last_id": 0})


def lock_shares(db: Database, tx: Transaction, tenants: Sequence[str]) -> Steps[None]:
    """Lock the shares of tenants, in one order."""
    for tenant in sorted(set(tenants)):
        yield from perform(lock_share(db, tx, tenant))


def hold_event(
    db: Database, tx: Transaction, tenant: str, kind: str, key: str | None, payload: str, cost: int
) -> Row:
    """Hold an event of a tenant whose share is locked."""
    now = db.clock_timestamp()
    row = insert_future_event(
        db, tx, kind, key, payload, now, tenant=tenant, cost=cost, is_held=True
    )
    tx.put(db.tenant_share, tenant, {"tenant": tenant, "last_id": row["id"]})
    return row


def publish_shared(
    db: Database,
    tx: Transaction,
    tenant: str,
    once: str | None,
    requests: Sequence[Request],
    *,
    passes: bool,
) -> Steps[None]:
    """Publish what a tenant's token sends, once: directly, or it is held or delayed.

    Args:
        passes: whether the share of the tenant allows it.
    """
    held = (not passes or is_named(db, tx, tenant)) and not all(r.deliver_at for r in requests)
    if db.rng.random() < 0.3:
        yield db.pause_s()
    if held:
        yield from perform(lock_share(db, tx, tenant))
    if once is not None:
        yield Wait(db.idempotency_key, once, EXCLUSIVE)
        if tx.get(db.idempotency_key, once) is not None:
            return
        tx.put(db.idempotency_key, once, {"key": once})
    for each in requests:
        outbox_id = future = None
        content = each.type, each.key, each.payload
        if each.deliver_at:
            at = datetime.fromtimestamp(each.deliver_at, UTC)
            future = insert_future_event(db, tx, *content, at, tenant=tenant, cost=each.cost)
        elif held:
            future = hold_event(db, tx, tenant, *content, each.cost)
            if db.rng.random() < 0.2:
                yield 0.2 * db.rng.random()  # A request may have many more events.
        else:
            event = yield from insert_event(db, tx, *content)
            outbox_id = event.id
        tx.notes.append(("published", (each, outbox_id, future)))
    if held:
        tx.notify(SCHEMA, HELD)


def delete_future_events(db: Database, tx: Transaction, key: str) -> Steps[None]:
    """Delete the future events of a key, as an erasure does: the shares are locked first.

    Each statement has a snapshot of its own.
    """
    found = [r for r in tx.rows(db.future_event) if r["key"] == key]
    yield from lock_shares(db, tx, [r["tenant"] for r in found if r["is_held"]])
    rows = list(tx.rows(db.future_event))
    deleted: list[int] = []
    for row in rows:
        if row["key"] != key:
            continue
        yield Wait(db.future_event, row["id"], EXCLUSIVE)
        if tx.get(db.future_event, row["id"]) is not None:
            tx.put(db.future_event, row["id"], None)
            deleted.append(row["id"])
    left = [row for row in rows if row["id"] not in deleted]
    yield from perform(name_newest_left(db, tx, deleted, left))
    tx.notes.append(("erased", (deleted,)))


def name_newest_left(
    db: Database, tx: Transaction, deleted: Sequence[int], left: Sequence[Row]
) -> Steps[None]:
    """Let shares name the newest held event that is left, where theirs is deleted."""
    for share in tx.rows(db.tenant_share):
        if share["last_id"] in deleted:
            tenant = share["tenant"]
            yield Wait(db.tenant_share, tenant, EXCLUSIVE)
            ids = [r["id"] for r in left if r["is_held"] and r["tenant"] == tenant]
            tx.change(db.tenant_share, tenant, last_id=max(ids, default=0))
