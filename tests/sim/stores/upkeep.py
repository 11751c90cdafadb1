"""Removal of lanes of older generations and removed endpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.core.sequencing import partition_window
from outbox.store.retention import upkeep as real
from outbox.store.retention.upkeep import LANES_PER_STEP
from tests.sim.database.engine import UPDATE
from tests.sim.stores import timeline

if TYPE_CHECKING:
    from tests.sim.database.connection import Connection
    from tests.sim.database.engine import Row, Transaction
    from tests.sim.database.tables import Database


class UpkeepStore(real.UpkeepStore):
    """Stands in for `outbox.store.retention.upkeep.UpkeepStore`."""

    def __init__(self, connection: Any) -> None:
        self._db: Connection = connection  # type: ignore[assignment]

    async def remove_lanes(self) -> int:
        removed = 0
        while step := await self._db.call(remove_lanes, LANES_PER_STEP):
            removed += step
            if step < LANES_PER_STEP:
                break
        return removed

    async def count_keys(self) -> None:
        await self._db.call(count_none)


def count_none(db: Database, tx: Transaction) -> None:
    """The simulation has no idempotency keys."""


def remove_lanes(db: Database, tx: Transaction, lanes_max: int) -> int:
    """Remove lanes without references, whose endpoints no relay is acquiring."""
    if timeline.history_changed(db, tx):
        return 0
    kept = (p["number"] for p in tx.rows(db.period) if p["kind"] == "log" and not p["dropped"])
    kept_from = min(kept) * partition_window.WIDTH
    found = [lane for lane in tx.rows(db.lane) if is_unused(db, tx, lane, kept_from)][:lanes_max]
    owned = {
        endpoint_id
        for endpoint_id in sorted({lane["endpoint_id"] for lane in found})
        if tx.try_lock(db.ownership, endpoint_id, UPDATE)
    }
    removed = [lane["id"] for lane in found if lane["endpoint_id"] in owned]
    for lane_id in removed:
        for table in (db.lane_progress, db.lane_counter, db.lane):
            tx.put(table, lane_id, None)
    return len(removed)


def is_unused(db: Database, tx: Transaction, lane: Row, kept_from: int) -> bool:
    lane_id, e = lane["id"], tx.get(db.endpoint, lane["endpoint_id"])
    c, p = tx.get(db.lane_counter, lane_id), tx.get(db.lane_progress, lane_id)
    assert e is not None
    assert c is not None
    assert p is not None
    return (
        (lane["generation"] < e["generation"] or e["state"] == "removed")
        and c["last_seq"] == p["acked_seq"]
        and (c["last_seq"] == 0 or p["floor_batch"] < kept_from)
        and tx.get(db.lane_block, lane_id) is None
        and not any(row["lane_id"] == lane_id for row in tx.rows(db.dead_letter))
        and not db.deliveries.get(lane_id)
        and not db.attempts.get(lane_id)
    )
