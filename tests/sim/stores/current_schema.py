"""The version of the schema, which is always the program's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.core.model.schema_name import schema_missing
from outbox.store.connection.connect import map_errors
from tests.sim.database.tables import SCHEMA

if TYPE_CHECKING:
    from tests.sim.database.connection import Connection
    from tests.sim.database.engine import Transaction
    from tests.sim.database.tables import Database


async def require_current(connection: Connection, schema: str, purpose: str | None = None) -> None:
    with map_errors(schema, purpose):
        if not await connection.call(find_history, schema):
            raise schema_missing(schema)
        await connection.call(read_history)


def find_history(db: Database, tx: Transaction, schema: str) -> bool:
    return schema == SCHEMA


def read_history(db: Database, tx: Transaction) -> None:
    """Every migration is applied."""
