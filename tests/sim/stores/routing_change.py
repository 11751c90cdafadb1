"""Routing changes, which lock the cursor row, and the journal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.sim.database.engine import EXCLUSIVE, Wait, abort_unless, perform

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime
    from uuid import UUID

    from tests.sim.database.engine import Steps, Transaction
    from tests.sim.database.tables import Database


def lock_cursor(db: Database, tx: Transaction) -> Steps[None]:
    yield Wait(db.cursor, 1, EXCLUSIVE)


def read_last_batch(db: Database, tx: Transaction) -> int:
    return db.batches[-1].batch


def next_batch(db: Database) -> int:
    """The next batch, in a message that has locked the cursor row."""
    return db.batches[-1].batch + 1


def read_now(db: Database, tx: Transaction) -> datetime:
    return db.clock_timestamp()


def raise_version(db: Database, tx: Transaction) -> Steps[None]:
    yield Wait(db.cursor, 1, EXCLUSIVE)
    row = tx.get(db.cursor, 1)
    assert row is not None
    tx.change(db.cursor, 1, version=row["version"] + 1)


def begin_change(db: Database, tx: Transaction) -> Steps[None]:
    """Begin a change in the message of the leader."""
    yield from perform(raise_version(db, tx))


def begin_change_of(db: Database, tx: Transaction, version: int) -> Steps[None]:
    """Begin a change that was planned under a routing version, and abort if that has changed."""
    yield from perform(lock_cursor(db, tx))
    row = tx.get(db.cursor, 1)
    assert row is not None
    abort_unless(row["version"] == version)
    yield from perform(raise_version(db, tx))
    if row["identity"] is None:
        tx.change(db.cursor, 1, identity=db.identity)


def add_to_journal(
    db: Database,
    tx: Transaction,
    kind: str,
    actor: str,
    endpoint_id: UUID | None,
    data: Mapping[str, Any],
) -> None:
    at = db.wall()
    tx.append(lambda: db.journal.append((at, kind, actor, endpoint_id, data)))
