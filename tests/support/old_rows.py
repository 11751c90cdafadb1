"""Rows that an older version accepted and this one does not."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from asyncpg import Connection

_RULES = """
SELECT conname AS name, regexp_replace(pg_get_constraintdef(oid), ' NOT VALID$', '') AS definition
  FROM pg_constraint WHERE conrelid = $1::regclass AND contype = 'c'
"""


@asynccontextmanager
async def without_rules(db: Connection[Any], table: str = "relay.outbox") -> AsyncIterator[None]:
    """Drop the constraints of a table; at the end, add them NOT VALID, as the migrations do."""
    rules = await db.fetch(_RULES, table)
    for rule in rules:
        await db.execute(f'ALTER TABLE {table} DROP CONSTRAINT "{rule["name"]}"')
    yield
    for rule in rules:
        added = f'ADD CONSTRAINT "{rule["name"]}" {rule["definition"]} NOT VALID'
        await db.execute(f"ALTER TABLE {table} {added}")
