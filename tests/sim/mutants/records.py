"""Mistakes with acknowledgements and progress."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from outbox.core.model.response import Answer
from outbox.relay.delivery import dispatcher
from outbox.store import records, replicas
from tests.sim.database.engine import SHARE, UPDATE, Wait
from tests.sim.database.statements import records as record_answers
from tests.sim.database.statements import registry
from tests.sim.mutants.catalogue import mutant, swap

if TYPE_CHECKING:
    from tests.sim.database.engine import Row, Steps, Transaction
    from tests.sim.database.tables import Database
    from tests.sim.simulation import Simulation


@mutant
def no_epoch_in_the_acknowledgement(sim: Simulation) -> None:
    """A group is written whoever owns its lanes by now."""

    def write_group(db: Database, tx: Transaction, me: int, *columns: Any) -> str:
        tried = record_answers.tried_of(columns, me)
        record_answers.log(db, tx, tried)
        return f"INSERT 0 {len(tried)}"

    sim.database.changed[records.WRITE_GROUP] = write_group


@mutant
def acknowledge_before_the_answer(sim: Simulation) -> None:
    """A success is written when the request is sent."""

    class Eager:
        def __init__(self, transport: Any) -> None:
            self._transport = transport

        async def send(self, request: Any) -> Answer:
            sending = asyncio.get_running_loop().create_task(self._transport.send(request))
            sending.add_done_callback(lambda task: task.cancelled() or task.exception())
            return Answer.of(200, 0.0)

        async def aclose(self) -> None:
            """Nothing to close."""

    init = dispatcher.Dispatcher.__init__

    def patched(
        self: Any, store: Any, recorder: Any, transport: Any, *args: Any, **rest: Any
    ) -> None:
        init(self, store, recorder, Eager(transport), *args, **rest)

    swap(dispatcher.Dispatcher, "__init__", patched)


@mutant
def an_acknowledgement_group_that_can_be_frozen_while_it_holds_the_lock(sim: Simulation) -> None:
    """A group is written in several steps, and nobody ends the sessions of a frozen owner."""
    lock = "lock the fence"

    def lock_fence(db: Database, tx: Transaction, me: int) -> Steps:
        yield Wait(db.replica, me, SHARE)
        return [{"one": 1}] if tx.get(db.replica, me) is not None else []

    async def write(self: Any, group: Any, epochs: Any) -> None:
        connection = self._db
        connection.backend.idle_timeout_s = 0.0
        async with connection.transaction():
            if not await connection.fetch(lock, self._me):
                raise records.Fenced
            await original(self, group, epochs)

    original = records.RecordStore.write
    swap(records.RecordStore, "write", write)
    sim.database.changed[lock] = lock_fence
    sim.database.changed[replicas.BACKENDS] = lambda db, tx, *_: [{"count": 0}]


@mutant
def the_epoch_is_checked_by_joining_another_table(sim: Simulation) -> None:
    """Who owns the endpoint is looked up in the statement's snapshot, and then it waits."""

    def write_group(db: Database, tx: Transaction, me: int, *columns: Any) -> Steps:
        tried = record_answers.tried_of(columns, me)
        lanes = [tx.get(db.lane, lane_id) for lane_id in dict.fromkeys(i for i, _ in tried)]
        owners = [tx.get(db.ownership, row["endpoint_id"]) for row in lanes if row is not None]
        if any(owner is None or owner["replica_id"] != me for owner in owners):
            return "INSERT 0 0"
        yield db.pause_s()
        record_answers.log(db, tx, tried)
        return f"INSERT 0 {len(tried)}"

    def write_checkpoints(db: Database, tx: Transaction, me: int, *columns: Any) -> Steps:
        owners = {r["endpoint_id"]: r["replica_id"] for r in tx.rows(db.ownership)}
        written: list[Row] = []
        for lane_id, _, acked, delivered, floor, success_at in zip(*columns, strict=True):
            p = tx.get(db.lane_progress, lane_id)
            assert p is not None
            if owners[p["endpoint_id"]] != me:
                continue
            yield db.pause_s()
            yield Wait(db.lane_progress, lane_id, UPDATE)
            p = tx.get(db.lane_progress, lane_id)
            assert p is not None
            if p["acked_seq"] < acked:
                new = {"acked_seq": acked, "delivered_seq": delivered, "floor_batch": floor}
                tx.change(db.lane_progress, lane_id, **new, success_at=success_at)
                tx.notes.append(("checkpoint", (me, lane_id)))
                written.append({"lane_id": lane_id})
        return written

    sim.database.changed[records.WRITE_GROUP] = write_group
    sim.database.changed[records.WRITE_CHECKPOINTS] = write_checkpoints


@mutant
def progress_may_go_back(sim: Simulation) -> None:
    """A checkpoint is written, whatever stands there."""
    answer = registry.ANSWERS[records.WRITE_CHECKPOINTS]

    def write_checkpoints(db: Database, tx: Transaction, me: int, *columns: Any) -> Steps:
        lane_ids, epochs, acked, delivered, floors, at = columns
        before = {i: tx.get(db.lane_progress, i) for i in lane_ids}
        for i, row in before.items():
            assert row is not None
            tx.writes.setdefault(db.lane_progress, {})[i] = {**row, "acked_seq": -1}
        return (yield from answer(db, tx, me, lane_ids, epochs, acked, delivered, floors, at))

    sim.database.changed[records.WRITE_CHECKPOINTS] = write_checkpoints
