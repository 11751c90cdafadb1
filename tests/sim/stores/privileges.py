"""Privileges: the role of a simulated relay lacks none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.store.connection.connect import map_errors

if TYPE_CHECKING:
    from tests.sim.database.connection import Connection
    from tests.sim.database.engine import Transaction
    from tests.sim.database.tables import Database


async def require_privileges(connection: Connection, schema: str, purpose: str) -> None:
    with map_errors(schema, purpose):
        await connection.call(read_missing_privileges)


def read_missing_privileges(db: Database, tx: Transaction) -> list[str]:
    return []
