"""The search for skipped events.  The simulated sequence is never altered, so there are none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.store.sequencing import skipped_events as real

if TYPE_CHECKING:
    from outbox.store.sequencing.skipped_events import SkippedEvents
    from tests.sim.database.connection import Connection
    from tests.sim.database.engine import Transaction
    from tests.sim.database.tables import Database


class SkippedEventStore(real.SkippedEventStore):
    """Stands in for `outbox.store.sequencing.skipped_events.SkippedEventStore`."""

    def __init__(self, connection: Any, actor: str) -> None:
        self._db: Connection = connection  # type: ignore[assignment]

    async def find(self) -> SkippedEvents | None:
        return await self._db.call(find_skipped_events)


def find_skipped_events(db: Database, tx: Transaction) -> SkippedEvents | None:
    return None
