"""Deliveries that an operator skips."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.core.model.ids import lane_name
from outbox.errors import Conflict, NotFound
from outbox.operations.dead_letters.skip import OWNER_WAIT_S, LaneMoved, SkippedDelivery
from tests.sim.database.engine import UPDATE, Wait
from tests.sim.stores.change import make_change
from tests.sim.stores.endpoint_changes import find_endpoint

if TYPE_CHECKING:
    from uuid import UUID

    from tests.sim.database.connection import Connection
    from tests.sim.database.engine import Steps, Transaction
    from tests.sim.database.tables import Database
    from tests.sim.stores.change import Change


async def skip_delivery(
    connection: Connection,
    schema: str,
    endpoint: str,
    lane: str,
    sequence: int,
    *,
    actor: str,
    comment: str | None = None,
    owner: str | None = None,
    wait_s: float = OWNER_WAIT_S,
) -> SkippedDelivery:
    async def plan(change: Change) -> SkippedDelivery:
        found = await find_endpoint(change, endpoint, owner)
        lane_id, acked_seq, last_seq = await change.db.call(read_lane, found.id, lane)
        pending = last_seq - max(acked_seq, sequence)
        skipped = SkippedDelivery(endpoint, lane, sequence, None, 0, None, None, pending)
        if await change.db.call(was_skipped, lane_id, sequence):
            return skipped
        if sequence != acked_seq + 1 or sequence > last_seq:
            raise LaneMoved(f"lane {lane} waits for {acked_seq + 1} of {last_seq}")
        if await change.db.call(read_blocked, lane_id):
            raise Conflict(f"lane {lane} is blocked")
        change.write(request_skip, lane_id, sequence)
        change.journal("skip_requested", found.id, {"lane": lane, "sequence": sequence})
        return skipped

    return await make_change(connection, schema, actor, plan)


# ------------------------------------------------------------------------ steps


def read_lane(db: Database, tx: Transaction, endpoint_id: UUID, name: str) -> tuple[int, int, int]:
    """The id of a lane, its last acknowledged and its last sequence number."""
    for row in tx.rows(db.lane):
        # A name has only the first digits of its endpoint's id.
        own = row["endpoint_id"] == endpoint_id
        if own and lane_name(endpoint_id, row["generation"], row["slot"]) == name:
            lane_id = row["id"]
            p, c = tx.get(db.lane_progress, lane_id), tx.get(db.lane_counter, lane_id)
            assert p is not None
            assert c is not None
            later = [a.seq for a in db.attempts.get(lane_id, ()) if a.outcome == "delivered"]
            return lane_id, max(p["acked_seq"], *later, 0), c["last_seq"]
    raise NotFound(f"there is no lane {name}")


def was_skipped(db: Database, tx: Transaction, lane_id: int, sequence: int) -> bool:
    return any(
        row["lane_id"] == lane_id and row["seq"] == sequence and row["reason"] == "skipped"
        for row in tx.rows(db.dead_letter)
    )


def read_blocked(db: Database, tx: Transaction, lane_id: int) -> bool:
    return tx.get(db.lane_block, lane_id) is not None


def request_skip(db: Database, tx: Transaction, lane_id: int, sequence: int) -> Steps[None]:
    """Request that the owner skips the delivery."""
    yield Wait(db.lane, lane_id, UPDATE)
    tx.change(db.lane, lane_id, skip_seq=sequence)


def read_skipped(db: Database, tx: Transaction, endpoint_ids: set[UUID]) -> dict[int, int]:
    """By lane, the sequence number that was skipped last."""
    return {
        row["id"]: row["skip_seq"]
        for row in tx.rows(db.lane)
        if row["endpoint_id"] in endpoint_ids and row["skip_seq"]
    }
