"""Operators whose changes take several messages, or stay open."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from outbox.store.channels import WAKE_ALL
from outbox.store.routing_change import LOCK_CURSOR, NEXT_BATCH, RAISE_VERSION

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from asyncpg import Connection

LOCK_EPOCH = "SELECT epoch FROM ownership WHERE endpoint_id = $1 FOR NO KEY UPDATE"
"""Locks an endpoint's ownership, as a claim and a change of lanes do."""


@asynccontextmanager
async def routing_transaction(connection: Connection[Any]) -> AsyncIterator[int]:
    """Hold the cursor row, and change the routing version; yields the next batch."""
    async with connection.transaction():
        await connection.execute(LOCK_CURSOR)
        yield await connection.fetchval(f"SELECT {NEXT_BATCH}")
        await connection.execute(RAISE_VERSION)
        await connection.execute(WAKE_ALL)
