"""Accounting of events.  Simulated events are never hidden or removed: there is no difference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.store.sequencing import accounting as real

if TYPE_CHECKING:
    from outbox.store.sequencing.accounting import UnaccountedEvents
    from tests.sim.database.connection import Connection
    from tests.sim.database.engine import Transaction
    from tests.sim.database.tables import Database


class AccountingStore(real.AccountingStore):
    """Stands in for `outbox.store.sequencing.accounting.AccountingStore`."""

    def __init__(self, connection: Any, actor: str) -> None:
        self._db: Connection = connection  # type: ignore[assignment]

    async def count_dead_ids(self) -> None:
        await self._db.call(find_none)

    async def examine(self, *, next_blocks: bool) -> list[UnaccountedEvents]:
        return await self._db.call(find_none)


def find_none(db: Database, tx: Transaction) -> list[UnaccountedEvents]:
    return []
