"""Positions of lanes, for the checkpoints of receivers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.core.delivery.receiver_checkpoint import DEAD_RANGES_MAX, LANES_MAX, LaneMark
from outbox.core.model.ids import lane_name
from outbox.store.delivery import receiver_checkpoints

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from tests.sim.database.connection import Connection
    from tests.sim.database.engine import Row, Transaction
    from tests.sim.database.tables import Database


class CheckpointStore(receiver_checkpoints.CheckpointStore):
    """Stands in for `outbox.store.delivery.receiver_checkpoints.CheckpointStore`."""

    def __init__(self, connection: Any) -> None:
        self._db: Connection = connection

    async def marks(self, endpoint_ids: Sequence[UUID]) -> dict[UUID, list[LaneMark]]:
        return await self._db.call(read_marks, endpoint_ids)


def read_marks(
    db: Database, tx: Transaction, endpoint_ids: Sequence[UUID]
) -> dict[UUID, list[LaneMark]]:
    found: dict[UUID, list[LaneMark]] = {}
    for endpoint_id in endpoint_ids:
        lanes = [lane for lane in tx.rows(db.lane) if lane["endpoint_id"] == endpoint_id]
        lanes.sort(key=lambda lane: (-lane["generation"], lane["slot"]))
        marks = (_mark(db, tx, lane) for lane in lanes[:LANES_MAX])
        found[endpoint_id] = [mark for mark in marks if mark.sequence]
    return found


def _mark(db: Database, tx: Transaction, lane: Row) -> LaneMark:
    lane_id = lane["id"]
    p = tx.get(db.lane_progress, lane_id)
    assert p is not None
    tail = [
        (a.batch, a.seq)
        for a in db.attempts.get(lane_id, ())
        if a.outcome == "delivered" and a.batch >= p["floor_batch"] and a.seq > p["acked_seq"]
    ]
    last = max(p["delivered_seq"], max(tail)[1] if tail else 0)
    dead_letters = [
        (d["seq"], d["to_seq"]) for d in tx.rows(db.dead_letter) if d["lane_id"] == lane_id
    ]
    newest = sorted(dead_letters)[-DEAD_RANGES_MAX:]
    name = lane_name(lane["endpoint_id"], lane["generation"], lane["slot"])
    dead_lettered = tuple(each for each in newest if each[1] < last)
    return LaneMark(name, lane["generation"], last, dead_lettered)
