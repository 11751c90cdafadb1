"""INSERT INTO outbox."""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import UUID

from tests.sim.database.engine import SHARE, Wait
from tests.sim.database.tables import SCHEMA, Event

if TYPE_CHECKING:
    from datetime import datetime

    from tests.sim.database.engine import Steps, Transaction
    from tests.sim.database.tables import Database

OUTBOX_LOCK = ("outbox", "table")
"""The lock of the table: held by a transaction that has inserted a row, until its end."""


def insert_event(
    db: Database,
    tx: Transaction,
    kind: str,
    key: str | None,
    payload: str,
    expires_at: datetime | None = None,
) -> Steps[Event]:
    """Insert one row; returns it."""
    yield Wait(*OUTBOX_LOCK, SHARE)
    db.holders[tx.vxid] = None  # Locked before the sequence assigns a value.
    if db.rng.random() < 0.3:
        yield db.pause_s()
    db.last_id += 1
    new = db.last_id
    if db.rng.random() < 0.3:
        yield db.pause_s()
    # A restored database assigns the same ids again, to events with other event ids.
    event = Event(
        new,
        UUID(int=(new << 64) | 0x8000_0000_0000_0000 | db.restores),
        kind,
        key,
        payload,
        db.clock_timestamp(),
        expires_at,
        new if key is None else db.hash_key(key),
    )
    tx.append(lambda: db.add_event(event))
    tx.notes.append(("event", (new, tx.quiet)))
    if db.flag_seen_by(tx) > db.wall() and not tx.quiet:
        tx.notify(SCHEMA, "")
    return event
