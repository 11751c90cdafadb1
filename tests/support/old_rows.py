"""Rows that an older version accepted and this one does not."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from tests.support.relay import REFUSED, Network

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from asyncpg import Connection

    from outbox.core.model.response import AttemptResult
    from outbox.destinations.interface import Request

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


DEEP = 3_000
NUMBER = "1e131000"
OLD_ROWS = {
    "expires in 20000": ("expires_at", "'20000-01-01'"),
    "expires never": ("expires_at", "'infinity'"),
    "created in 20000": ("created_at", "'20000-01-01'"),
    "created before Christ": ("created_at", "'0044-03-15 BC'"),
    "created at no time": ("created_at", "'-infinity'"),
    "an endless number": ("payload", f"'{{\"n\": {NUMBER}}}'"),
    "a number of 400 digits": ("payload", "'1e400'"),
    "nesting": ("payload", f"(repeat('[', {DEEP}) || repeat(']', {DEEP}))::jsonb"),
    "a control mark": ("headers", """'{"outbox-control": "end"}'"""),
    "numbers that are rounded": ("payload", "'[9007199254740993, 18446744073709551616, 0.10]'"),
}
"""One column of each event that an older version accepted."""


async def insert_old_rows(db: Connection[Any]) -> None:
    """Insert each of `OLD_ROWS`, with its name as the key."""
    async with without_rules(db):
        for name, (column, value) in OLD_ROWS.items():
            row = {"type": "'a'", "payload": "'1'", "tenant": "NULL", "key": f"'{name}'"}
            row[column] = value
            await db.execute(
                f"INSERT INTO relay.outbox ({', '.join(row)}) VALUES ({', '.join(row.values())})"
            )


class Refusing(Network):
    """Refuses each delivery, without parsing it."""

    async def _send(self, request: Request) -> AttemptResult:
        return REFUSED
