"""What an operator's commands ask."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.operations import endpoint_changes, endpoint_states
from outbox.store import routing_change
from tests.sim.database.engine import EXCLUSIVE, UPDATE, Wait
from tests.sim.database.statements.registry import answers

if TYPE_CHECKING:
    from uuid import UUID

    from tests.sim.database.engine import Row, Steps, Transaction
    from tests.sim.database.tables import Database


@answers(endpoint_changes.LOCK_ENDPOINT)
def lock_endpoint(db: Database, tx: Transaction, name: str) -> Steps:
    for row in list(tx.rows(db.endpoint)):
        if row["name"] == name and row["state"] != "removed":
            yield Wait(db.endpoint, row["id"], UPDATE)
            new = tx.get(db.endpoint, row["id"])
            assert new is not None
            subscribed = any(
                s["endpoint_id"] == row["id"] and s["to_batch"] is None
                for s in tx.rows(db.subscription)
            )
            return [{**new, "subscribed": subscribed}]
    return []


@answers(endpoint_changes.LOCK_EPOCH)
def lock_epoch(db: Database, tx: Transaction, endpoint_id: UUID) -> Steps:
    yield Wait(db.ownership, endpoint_id, UPDATE)
    row = tx.get(db.ownership, endpoint_id)
    assert row is not None
    return [{"epoch": row["epoch"]}]


@answers(endpoint_changes.NEXT_GENERATION)
def next_generation(db: Database, tx: Transaction, generation: int) -> list[Row]:
    return [{"next_generation": generation + 1}]


@answers(endpoint_changes.ADD_LANES)
def add_lanes(
    db: Database,
    tx: Transaction,
    endpoint_id: UUID,
    generation: int,
    lanes: int,
    from_batch: int,
    epoch: int,
) -> str:
    for slot in range(lanes):
        new = db.serial(db.lane)
        place = {"endpoint_id": endpoint_id, "generation": generation, "slot": slot}
        tx.put(db.lane, new, {"id": new, **place})
        tx.put(db.lane_counter, new, {"lane_id": new, "last_seq": 0})
        tx.put(db.lane_progress, new, new_progress(new, endpoint_id, from_batch, epoch))
    return f"INSERT 0 {lanes}"


def new_progress(lane_id: int, endpoint_id: UUID, floor_batch: int, epoch: int) -> Row:
    """A lane's progress before anything was delivered."""
    return {
        "lane_id": lane_id,
        "endpoint_id": endpoint_id,
        "epoch": epoch,
        "acked_seq": 0,
        "delivered_seq": 0,
        "floor_batch": floor_batch,
        "head_seq": None,
        "attempts": 0,
        "spent": 0,
        "first_attempt_at": None,
        "next_attempt_at": None,
        "last_answer": None,
        "success_at": None,
    }


@answers(endpoint_changes.UPDATE_ENDPOINT)
def update_endpoint(
    db: Database, tx: Transaction, endpoint_id: UUID, generation: int, *columns: Any
) -> Steps:
    *_, lanes = columns
    yield Wait(db.endpoint, endpoint_id, UPDATE)
    tx.change(db.endpoint, endpoint_id, lanes=lanes, generation=generation)
    return "UPDATE 1"


@answers(endpoint_changes.DROP_UNUSED_SUBSCRIPTION)
def drop_unused(db: Database, tx: Transaction, endpoint_id: UUID, from_batch: int) -> str:
    tx.put(db.subscription, (endpoint_id, from_batch), None)
    return "DELETE 1"


@answers(routing_change.END_SUBSCRIPTION)
def end_subscription(db: Database, tx: Transaction, endpoint_id: UUID, batch: int) -> str:
    for row in list(tx.rows(db.subscription)):
        if row["endpoint_id"] == endpoint_id and row["to_batch"] is None:
            tx.change(db.subscription, (endpoint_id, row["from_batch"]), to_batch=batch)
    return "UPDATE 1"


@answers(endpoint_changes.ADD_SUBSCRIPTION)
def add_subscription(
    db: Database, tx: Transaction, endpoint_id: UUID, from_batch: int, *columns: Any
) -> str:
    row = dict(zip(("types", "tenant", "all_tenants", "filter"), columns, strict=True))
    row |= {"endpoint_id": endpoint_id, "from_batch": from_batch, "to_batch": None}
    tx.put(db.subscription, (endpoint_id, from_batch), row)
    return "INSERT 0 1"


@answers(endpoint_states.SET_STATE)
def set_state(
    db: Database, tx: Transaction, endpoint_id: UUID, state: str, by: str, why: str | None
) -> Steps:
    yield Wait(db.endpoint, endpoint_id, UPDATE)
    tx.change(db.endpoint, endpoint_id, state=state, state_by=by, state_why=why)
    return "UPDATE 1"


@answers(endpoint_states.UNBLOCK_LANES)
def unblock_lanes(db: Database, tx: Transaction, endpoint_id: UUID) -> Steps:
    taken = 0
    for block in list(tx.rows(db.lane_block)):
        lane = tx.get(db.lane, block["lane_id"])
        assert lane is not None
        if lane["endpoint_id"] == endpoint_id:
            yield Wait(db.lane_block, block["lane_id"], EXCLUSIVE)
            tx.put(db.lane_block, block["lane_id"], None)
            taken += 1
    return [{"count": taken}]


@answers(endpoint_states.TRY_NOW)
def try_now(db: Database, tx: Transaction, endpoint_id: UUID) -> Steps:
    yield Wait(db.endpoint, endpoint_id, UPDATE)
    e = tx.get(db.endpoint, endpoint_id)
    assert e is not None
    tx.change(db.endpoint, endpoint_id, resumes=e["resumes"] + 1)
    return "UPDATE 1"
