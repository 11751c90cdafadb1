"""Attempts, progress and dead letters, as the recorder writes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.core.delivery.commands import DeadRange, Progress
from outbox.core.model.delivery import Delivery
from outbox.store.absence_proof import AbsenceProof
from outbox.store.delivery import records as real
from outbox.store.delivery.dead_letters import RANGE_GROWTH_MAX_S
from outbox.store.errors import Fenced
from tests.sim.database.engine import EXCLUSIVE, UPDATE, Wait
from tests.sim.database.tables import Tried
from tests.sim.stores.operational_events import contains_ordinary_event, publish_dead_letter_created
from tests.sim.stores.replicas import fence
from tests.sim.stores.routing_change import add_to_journal

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from outbox.core.delivery.commands import Record, Successes
    from outbox.core.delivery.delivery_history import CountedDeliveries
    from outbox.store.refused_rows import RefusedRow
    from tests.sim.database.connection import Connection
    from tests.sim.database.engine import Row, Steps, Transaction
    from tests.sim.database.tables import Database


class RecordStore(real.RecordStore):
    """Stands in for `outbox.store.delivery.records.RecordStore`."""

    def __init__(self, connection: Any, replica_id: int, server_fence: int | None = None) -> None:
        assert server_fence is None
        self._db: Connection = connection  # type: ignore[assignment]
        self._me = replica_id
        self.proof = AbsenceProof(connection)

    async def write(
        self,
        records: Sequence[Record],
        epochs: Sequence[int],
        runs: Sequence[tuple[int, Successes]] = (),
        refused: RefusedRow | None = None,
    ) -> None:
        assert refused is None
        rows = attempt_rows(runs, records, self._me)
        urgent = sum(record.urgent for record in records)
        if not urgent:
            if await self._db.call(write_acknowledgements, self._me, rows) != len(rows):
                raise Fenced
        elif await self._db.call(write_records, self._me, rows, records, epochs) != urgent:
            raise Fenced

    async def checkpoint(
        self,
        rows: Sequence[tuple[int, int, Progress]],
        history: Sequence[CountedDeliveries] = (),
    ) -> set[int]:
        return await self._db.call(write_checkpoints, self._me, rows)

    async def finish_endpoint(self, endpoint_id: UUID, lanes: Sequence[tuple[int, int]]) -> None:
        if not await self._db.call(end_endpoint, self._me, endpoint_id, lanes):
            raise Fenced


# ------------------------------------------------------------- attempts, groups


def attempt_rows(
    runs: Sequence[tuple[int, Successes]], records: Sequence[Record], me: int
) -> list[tuple[int, Tried]]:
    """The rows of the attempt log, each with its lane."""
    rows = [(lane_id, row) for lane_id, run in runs for row in run.rows]
    rows += [(record.lane_id, record.attempt) for record in records if record.attempt is not None]
    return [
        (
            lane_id,
            Tried(
                row.batch,
                row.seq,
                row.attempt,
                row.outcome,
                me,
                round(row.started_at * 1e6) / 1e6,
                round(row.elapsed_s * 1e6) / 1000,
            ),
        )
        for lane_id, row in rows
    ]


def log_attempts(db: Database, tx: Transaction, rows: list[tuple[int, Tried]]) -> None:
    """Append to the attempt log."""

    def append() -> None:
        for lane_id, each in rows:
            db.attempts.setdefault(lane_id, []).append(each)

    tx.append(append)
    tx.notes.append(("attempts", rows))


def write_acknowledgements(
    db: Database, tx: Transaction, me: int, rows: list[tuple[int, Tried]]
) -> Steps[int]:
    """Write acknowledgements; returns how many were written."""
    if not (yield from fence(db, tx, me)):
        return 0
    log_attempts(db, tx, rows)
    return len(rows)


def write_records(
    db: Database,
    tx: Transaction,
    me: int,
    rows: list[tuple[int, Tried]],
    records: Sequence[Record],
    epochs: Sequence[int],
) -> Steps[int]:
    """Write a group with progress in it; returns how many lanes moved."""
    if not (yield from fence(db, tx, me)):
        return 0
    moved: dict[int, UUID] = {}
    for record, epoch in zip(records, epochs, strict=True):
        if record.progress is None:
            continue
        lane_id = record.lane_id
        yield Wait(db.lane_progress, lane_id, UPDATE)
        p = tx.get(db.lane_progress, lane_id)
        assert p is not None
        if p["epoch"] == epoch and p["acked_seq"] <= record.progress.acked_seq:
            tx.change(db.lane_progress, lane_id, **record.progress._asdict())
            tx.notes.append(("checkpoint", (me, lane_id)))
            moved[lane_id] = p["endpoint_id"]
    urgent = {record.lane_id for record in records if record.urgent}
    log_attempts(db, tx, [each for each in rows if each[0] not in urgent or each[0] in moved])
    for record in records:
        if record.urgent and record.dead is not None and record.lane_id in moved:
            yield from _add_dead_letter(db, tx, record, moved[record.lane_id])
    return len(moved)


# ----------------------------------------------------------------- dead letters


def dead_letter_columns(record: Record) -> Row:
    """The columns of a dead letter that its record has."""
    dead = record.dead
    assert dead is not None
    row: Row = {
        "lane_id": record.lane_id,
        "reason": dead.reason,
        "attempts": dead.attempts,
        "last_response": dead.last_response,
        "outbox_id": None,
        "event_id": None,
        "type": None,
        "backfill_id": None,
    }
    if isinstance(dead, DeadRange):
        return {**row, "batch": dead.batch, "seq": dead.seq, "to_seq": dead.to_seq}
    d = dead.delivery
    row |= {"batch": d.batch, "seq": d.seq, "to_seq": d.seq}
    row |= {"outbox_id": d.outbox_id, "backfill_id": d.backfill_id}
    if isinstance(d, Delivery):
        row |= {"event_id": d.event_id, "type": d.type}
    return row


def _add_dead_letter(
    db: Database, tx: Transaction, record: Record, endpoint_id: UUID
) -> Steps[None]:
    """Insert a dead letter, or extend the range before it."""
    dead_letter, lane_id = dead_letter_columns(record), record.lane_id
    if dead_letter["outbox_id"] is None:
        data = {"lane": lane_id, "from": dead_letter["seq"], "to": dead_letter["to_seq"]}
        add_to_journal(db, tx, "backlog_dead_lettered", "", endpoint_id, data)
        last = _range_before(db, tx, dead_letter)
        if last is not None:
            longer = tx.change(
                db.dead_letter, last["id"], to_seq=dead_letter["to_seq"], at=db.wall()
            )
            if not contains_ordinary_event(db, lane_id, last["seq"], last["to_seq"]):
                yield from publish_dead_letter_created(db, tx, longer)
            return
    row = _insert_dead_letter(db, tx, dead_letter, endpoint_id)
    if record.blocks:
        tx.put(db.lane_block, lane_id, {"lane_id": lane_id, "seq": dead_letter["seq"]})
    yield from publish_dead_letter_created(db, tx, row, blocks=record.blocks)


def _range_before(db: Database, tx: Transaction, dead_letter: Row) -> Row | None:
    """The range that ends before this one and can be extended by it, locked."""
    earlier = [
        x
        for x in tx.rows(db.dead_letter)
        if x["lane_id"] == dead_letter["lane_id"] and x["seq"] < dead_letter["seq"]
    ]
    last = max(earlier, key=lambda x: int(x["seq"]), default=None)
    if (
        last is not None
        and last["to_seq"] == dead_letter["seq"] - 1
        and last["outbox_id"] is None
        and (last["reason"], last["state"]) == (dead_letter["reason"], "dead")
        and last["began_at"] > db.wall() - RANGE_GROWTH_MAX_S
        and tx.try_lock(db.dead_letter, last["id"], UPDATE)
    ):
        return last
    return None


def _insert_dead_letter(db: Database, tx: Transaction, dead_letter: Row, endpoint_id: UUID) -> Row:
    new = db.serial(db.dead_letter)
    times = {"began_at": db.wall(), "at": db.wall()}
    row = {**dead_letter, "id": new, "endpoint_id": endpoint_id, "state": "dead", **times}
    tx.put(db.dead_letter, new, row)
    return row


# ------------------------------------------------------ checkpoints, end of one


def write_checkpoints(
    db: Database, tx: Transaction, me: int, rows: Sequence[tuple[int, int, Progress]]
) -> Steps[set[int]]:
    written: set[int] = set()
    fenced = not (yield from fence(db, tx, me))
    for lane_id, epoch, new in rows:
        if not fenced:
            yield Wait(db.lane_progress, lane_id, UPDATE)
        p = tx.get(db.lane_progress, lane_id)
        assert p is not None
        if p["epoch"] == epoch and p["acked_seq"] == new.acked_seq:
            written.add(lane_id)  # It is there already.
        if fenced or p["epoch"] != epoch or p["acked_seq"] >= new.acked_seq:
            continue
        progress = Progress(
            new.acked_seq, new.delivered_seq, new.floor_batch, success_at=new.success_at
        )
        tx.change(db.lane_progress, lane_id, **progress._asdict())
        tx.notes.append(("checkpoint", (me, lane_id)))
        written.add(lane_id)
    return written


def end_endpoint(
    db: Database, tx: Transaction, me: int, endpoint_id: UUID, lanes: Sequence[tuple[int, int]]
) -> Steps[bool]:
    """End an endpoint that is removed or disabled; returns whether the lease runs."""
    if not (yield from fence(db, tx, me)):
        return False
    yield Wait(db.endpoint, endpoint_id, UPDATE)
    e = tx.get(db.endpoint, endpoint_id)
    assert e is not None
    if e["state"] not in ("removing", "disabling"):
        return True
    state = "removed" if e["state"] == "removing" else "disabled"
    tx.change(db.endpoint, endpoint_id, state=state)
    dead_letters: list[Row] = []
    for lane_id, seq in lanes:
        yield Wait(db.lane_progress, lane_id, UPDATE)
        counter = tx.get(db.lane_counter, lane_id)
        p = tx.get(db.lane_progress, lane_id)
        assert counter is not None
        assert p is not None
        if counter["last_seq"] > seq:
            dead_letter = dict.fromkeys(
                ("last_response", "outbox_id", "event_id", "type", "backfill_id")
            )
            dead_letter |= {"lane_id": lane_id, "batch": p["floor_batch"], "reason": state}
            dead_letter |= {"seq": seq + 1, "to_seq": counter["last_seq"], "attempts": 0}
            dead_letters.append(_insert_dead_letter(db, tx, dead_letter, endpoint_id))
            kept = {name: p[name] for name in ("delivered_seq", "floor_batch", "success_at")}
            progress = Progress(counter["last_seq"], **kept)
            tx.change(db.lane_progress, lane_id, **progress._asdict())
    for block in list(tx.rows(db.lane_block)):
        lane = tx.get(db.lane, block["lane_id"])
        assert lane is not None
        if lane["endpoint_id"] == endpoint_id:
            yield Wait(db.lane_block, block["lane_id"], EXCLUSIVE)
            tx.put(db.lane_block, block["lane_id"], None)
    add_to_journal(db, tx, f"endpoint_{state}", f"replica {me}", endpoint_id, {})
    for row in dead_letters:
        yield from publish_dead_letter_created(db, tx, row)
    return True
