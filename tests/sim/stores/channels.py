"""The two channels of notifications."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.store.channels import OWNERS_SUFFIX, RECONFIGURED
from tests.sim.database.tables import SCHEMA

if TYPE_CHECKING:
    from tests.sim.database.connection import Connection
    from tests.sim.database.engine import Transaction
    from tests.sim.database.tables import Database

OWNERS = SCHEMA + OWNERS_SUFFIX


async def trim_notification_queue(connection: Connection) -> float:
    return await connection.call(read_queue_share)


def read_queue_share(db: Database, tx: Transaction) -> float:
    return 0.0


def notify_all(db: Database, tx: Transaction) -> None:
    tx.notify(SCHEMA, RECONFIGURED)
    tx.notify(OWNERS, RECONFIGURED)


def notify_owners(db: Database, tx: Transaction, payload: str) -> None:
    tx.notify(OWNERS, payload)
