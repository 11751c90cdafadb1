"""Mistakes with acknowledgements and progress."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from outbox.core.model.response import AttemptResult
from outbox.relay.delivery import dispatcher
from outbox.store.errors import Fenced
from tests.sim.database.engine import UPDATE, Wait
from tests.sim.mutants.catalogue import mutant, swap
from tests.sim.stores import records, replicas

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.core.delivery.commands import Progress
    from tests.sim.database.engine import Steps, Transaction
    from tests.sim.database.tables import Database, Tried
    from tests.sim.simulation import Simulation


@mutant
def acknowledgement_without_fence(sim: Simulation) -> None:
    """A group is written without a check of the owner of its lanes."""

    def write_acknowledgements(
        db: Database, tx: Transaction, me: int, rows: list[tuple[int, Tried]]
    ) -> int:
        records.log_attempts(db, tx, rows)
        return len(rows)

    swap(records, "write_acknowledgements", write_acknowledgements)


@mutant
def acknowledgement_before_response(sim: Simulation) -> None:
    """A success is written when the request is sent."""

    class Eager:
        def __init__(self, transport: Any) -> None:
            self._transport = transport

        async def send(self, request: Any, *_: object) -> AttemptResult:
            sending = asyncio.get_running_loop().create_task(self._transport.send(request))
            sending.add_done_callback(lambda task: task.cancelled() or task.exception())
            return AttemptResult.completed(200, 0.0)

        async def aclose(self) -> None:
            """Nothing to close."""

    init = dispatcher.Dispatcher.__init__

    def patched(
        self: Any, store: Any, recorder: Any, transport: Any, *args: Any, **rest: Any
    ) -> None:
        init(self, store, recorder, Eager(transport), *args, **rest)

    swap(dispatcher.Dispatcher, "__init__", patched)


@mutant
def acknowledgements_written_in_two_messages(sim: Simulation) -> None:
    """The fence is locked in a message of its own before a group is written."""
    write = records.RecordStore.write

    async def patched(self: Any, *args: Any) -> None:
        async with self._db.transaction():
            if not await self._db.call(replicas.fence, self._me):
                raise Fenced
            await write(self, *args)

    swap(records.RecordStore, "write", patched)


@mutant
def owner_checked_in_statement_snapshot(sim: Simulation) -> None:
    """The owner is read in the snapshot of the statement, which then waits."""

    def write_acknowledgements(
        db: Database, tx: Transaction, me: int, rows: list[tuple[int, Tried]]
    ) -> Steps[int]:
        lanes = [tx.get(db.lane, lane_id) for lane_id in dict.fromkeys(i for i, _ in rows)]
        owners = [tx.get(db.ownership, row["endpoint_id"]) for row in lanes if row is not None]
        if any(owner is None or owner["replica_id"] != me for owner in owners):
            return 0
        yield db.pause_s()
        records.log_attempts(db, tx, rows)
        return len(rows)

    def write_checkpoints(
        db: Database, tx: Transaction, me: int, rows: Sequence[tuple[int, int, Progress]]
    ) -> Steps[set[int]]:
        owners = {r["endpoint_id"]: r["replica_id"] for r in tx.rows(db.ownership)}
        written = set()
        for lane_id, _, new in rows:
            p = tx.get(db.lane_progress, lane_id)
            assert p is not None
            if owners[p["endpoint_id"]] != me:
                continue
            yield db.pause_s()
            yield Wait(db.lane_progress, lane_id, UPDATE)
            p = tx.get(db.lane_progress, lane_id)
            assert p is not None
            if p["acked_seq"] < new.acked_seq:
                names = ("acked_seq", "delivered_seq", "floor_batch", "success_at")
                values = {name: getattr(new, name) for name in names}
                tx.change(db.lane_progress, lane_id, **values)
                tx.notes.append(("checkpoint", (me, lane_id)))
                written.add(lane_id)
        return written

    swap(records, "write_acknowledgements", write_acknowledgements)
    swap(records, "write_checkpoints", write_checkpoints)


@mutant
def progress_moves_backwards(sim: Simulation) -> None:
    """A checkpoint is written without a comparison with the previous one."""
    write = records.write_checkpoints

    def write_checkpoints(
        db: Database, tx: Transaction, me: int, rows: Sequence[tuple[int, int, Progress]]
    ) -> Steps[set[int]]:
        for i, _, _ in rows:
            row = tx.get(db.lane_progress, i)
            assert row is not None
            tx.writes.setdefault(db.lane_progress, {})[i] = {**row, "acked_seq": -1}
        return write(db, tx, me, rows)

    swap(records, "write_checkpoints", write_checkpoints)
