"""What keeps events from being sequenced, and the reports of it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from outbox.core.delivery.operational_events import LAGGING_EVERY_S, LAGGING_S, RELAY_LAGGING
from outbox.store.sequencing import stalls as real
from tests.sim.database.engine import EXCLUSIVE
from tests.sim.stores.operational_events import RESERVED, publish_operational_event

if TYPE_CHECKING:
    from outbox.store.sequencing.stalls import Blocker
    from tests.sim.database.connection import Connection
    from tests.sim.database.engine import Steps, Transaction
    from tests.sim.database.tables import Database


class StallStore(real.StallStore):
    """Stands in for `outbox.store.sequencing.stalls.StallStore`."""

    def __init__(self, connection: Any, server_fence: int | None = None) -> None:
        assert server_fence is None
        self._db: Connection = connection  # type: ignore[assignment]

    async def read_blocker(self) -> Blocker | None:
        return await self._db.call(read_blocker)

    async def publish_lagging(self, replica_id: int, blocker: Blocker | None = None) -> bool:
        return await self._db.call(report_lagging, replica_id, blocker)

    async def end_lagging(self, leader: int) -> bool:
        return await self._db.call(clear_lagging, leader)


def read_blocker(db: Database, tx: Transaction) -> Blocker | None:
    """The session that holds the cursor row; only its process is known."""
    holder = db.holder_of((db.cursor.name, 1), tx)
    if holder is None or db.world.now - holder.began_at < real.BLOCKER_AGE_MIN_S:
        return None
    pid = int(holder.vxid.partition("/")[0])
    return real.Blocker(pid, None, None, None, None, None)


def report_lagging(
    db: Database, tx: Transaction, replica_id: int, blocker: Blocker | None
) -> Steps[bool]:
    """Report that events wait too long; returns whether it was reported."""
    row, cursor = tx.get(db.lag_report, 1), tx.get(db.cursor, 1)
    assert row is not None
    assert cursor is not None
    if row["lagging"] or (cursor["writer"] != replica_id and blocker is None):
        return False
    if row["lagging_at"] is not None and row["lagging_at"] >= db.wall() - LAGGING_EVERY_S:
        return False
    if not tx.try_lock(db.lag_report, 1, EXCLUSIVE):
        return False
    if tx.get(db.lag_report, 1) is not row:
        return False
    high = db.batches[-1].high
    oldest = next((i for i in db.outbox_ids if i > high), None)
    if oldest is None or db.outbox[oldest].type.startswith(RESERVED):
        return False
    waiting_s = (db.clock_timestamp() - db.outbox[oldest].created_at).total_seconds()
    if waiting_s <= LAGGING_S:
        return False
    details = {"waiting_s": round(waiting_s, 1), "blocked_by": blocker and asdict(blocker)}
    if not (yield from publish_operational_event(db, tx, RELAY_LAGGING, None, details)):
        return False
    tx.change(db.lag_report, 1, lagging=True, lagging_at=db.wall())
    return True


def clear_lagging(db: Database, tx: Transaction, leader: int) -> bool:
    """Returns False if another replica leads, or another session writes the report."""
    cursor = tx.get(db.cursor, 1)
    assert cursor is not None
    if cursor["writer"] != leader or not tx.try_lock(db.lag_report, 1, EXCLUSIVE):
        return False
    row = tx.get(db.lag_report, 1)
    assert row is not None
    if row["lagging"]:
        tx.change(db.lag_report, 1, lagging=False)
    return True
