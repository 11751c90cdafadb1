"""Partitions of periods; each exists from the beginning, and is dropped with its period."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import asyncpg

from outbox.store.retention import partitions
from outbox.store.retention.partitions import PARENTS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.sim.database.connection import Connection
    from tests.sim.database.engine import Transaction
    from tests.sim.database.tables import Database


class PartitionStore(partitions.PartitionStore):
    """Stands in for the real `PartitionStore`, as far as a relay calls it."""

    def __init__(self, connection: Any) -> None:
        self._db: Connection = connection  # type: ignore[assignment]

    @asynccontextmanager
    async def maintenance_lease(self) -> AsyncIterator[bool]:
        if not await self.renew_lease():
            yield False
            return
        try:
            yield True
        except asyncpg.PostgresError:
            await self._db.call(release_lease)
            raise
        await self._db.call(release_lease)

    async def renew_lease(self) -> bool:
        return await self._db.call(take_lease)

    async def extend(self) -> int:
        for parents in PARENTS.values():
            for _ in parents:
                await self._db.call(read_nothing)
        return 0

    async def last_id_beyond(self) -> int | None:
        await self._db.call(read_nothing)
        return None

    async def drop(self) -> tuple[int, int, list[str]]:
        for _ in PARENTS:
            await self._db.call(read_nothing)
        return 0, 0, []

    async def guard(self) -> bool:
        await self._db.call(read_nothing)
        return False

    async def summarize(self) -> None:
        await self._db.call(read_nothing)

    async def analyze(self) -> None:
        for parents in PARENTS.values():
            for _ in parents:
                await self._db.call(read_nothing)


def take_lease(db: Database, tx: Transaction) -> bool:
    """Does not exclude other maintainers; neither does the real lease, if a step outlasts it."""
    return db.maintained


def release_lease(db: Database, tx: Transaction) -> None:
    """Nothing is leased."""


def read_nothing(db: Database, tx: Transaction) -> None:
    """Partitions need no maintenance here."""
