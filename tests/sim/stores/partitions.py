"""Partitions of periods; each exists from the beginning, and is dropped with its period."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import asyncpg

from outbox.store import partitions
from outbox.store.partitions import PARENTS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.sim.database.connection import Connection
    from tests.sim.database.engine import Transaction
    from tests.sim.database.tables import Database


class PartitionStore(partitions.PartitionStore):
    """Stands in for `outbox.store.partitions.PartitionStore`, as far as a relay calls it."""

    def __init__(self, connection: Any, *, pooled: bool = False) -> None:
        self._db: Connection = connection  # type: ignore[assignment]
        self._pooled = pooled

    @asynccontextmanager
    async def maintenance_lock(self) -> AsyncIterator[bool]:
        if self._pooled:
            yield True
            return
        if not await self._db.call(lock_maintenance):
            yield False
            return
        try:
            yield True
        except asyncpg.PostgresError:
            await self._db.call(unlock_maintenance)
            raise
        await self._db.call(unlock_maintenance)

    async def extend(self) -> int:
        for parents in PARENTS.values():
            for _ in parents:
                await self._db.call(read_nothing)
        return 0

    async def drop(self) -> tuple[int, int]:
        for _ in PARENTS:
            await self._db.call(read_nothing)
        return 0, 0

    async def summarize(self) -> None:
        await self._db.call(read_nothing)

    async def analyze(self) -> None:
        for parents in PARENTS.values():
            for _ in parents:
                await self._db.call(read_nothing)


def lock_maintenance(db: Database, tx: Transaction) -> bool:
    """Does not exclude other maintainers; neither does the real lock behind a pooler."""
    return db.maintained


def unlock_maintenance(db: Database, tx: Transaction) -> None:
    """Nothing is locked."""


def read_nothing(db: Database, tx: Transaction) -> None:
    """Partitions need no maintenance here."""
