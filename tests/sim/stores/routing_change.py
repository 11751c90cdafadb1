"""Routing changes, which lock the cursor row, and the journal."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from outbox.store.connection.connect import map_errors
from tests.sim.database.engine import EXCLUSIVE, Wait
from tests.sim.stores import channels

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from datetime import datetime
    from uuid import UUID

    from tests.sim.database.connection import Connection
    from tests.sim.database.engine import Steps, Transaction
    from tests.sim.database.tables import Database


@asynccontextmanager
async def routing_transaction(connection: Connection, schema: str) -> AsyncIterator[int]:
    with map_errors(schema, "operator"):
        async with connection.transaction():
            await connection.call(lock_cursor)
            batch = await connection.call(read_last_batch)
            yield batch + 1
            await _notify_relays(connection)


@asynccontextmanager
async def request_transaction(connection: Connection, schema: str) -> AsyncIterator[None]:
    with map_errors(schema, "operator"):
        async with connection.transaction():
            yield
            await connection.call(lock_cursor)
            await _notify_relays(connection)


async def _notify_relays(connection: Connection) -> None:
    await connection.call(raise_version)
    await connection.call(channels.notify_all)


async def write_journal(
    connection: Connection,
    kind: str,
    actor: str,
    endpoint_id: UUID | None,
    data: Mapping[str, Any],
) -> None:
    await connection.call(add_to_journal, kind, actor, endpoint_id, data)


# ------------------------------------------------------------------------ steps


def lock_cursor(db: Database, tx: Transaction) -> Steps[None]:
    yield Wait(db.cursor, 1, EXCLUSIVE)


def read_last_batch(db: Database, tx: Transaction) -> int:
    return db.batches[-1].batch


def read_now(db: Database, tx: Transaction) -> datetime:
    return db.clock_timestamp()


def raise_version(db: Database, tx: Transaction) -> Steps[None]:
    yield Wait(db.cursor, 1, EXCLUSIVE)
    row = tx.get(db.cursor, 1)
    assert row is not None
    tx.change(db.cursor, 1, version=row["version"] + 1)


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
