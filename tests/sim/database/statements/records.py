"""What the recorder writes: attempts, progress, dead letters."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from outbox.store import records
from tests.sim.database.engine import EXCLUSIVE, UPDATE, Wait
from tests.sim.database.statements.operational import holds_ordinary, tell_letter
from tests.sim.database.statements.ownership import fence, journal
from tests.sim.database.statements.registry import answers
from tests.sim.database.tables import Tried

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from tests.sim.database.engine import Row, Steps, Transaction
    from tests.sim.database.tables import Database

_ATTEMPT_COLUMNS, _PROGRESS_COLUMNS = 10, 12
_PROGRESS = (
    "acked_seq",
    "delivered_seq",
    "floor_batch",
    "head_seq",
    "attempts",
    "spent",
    "first_attempt_at",
    "next_attempt_at",
    "last_answer",
    "success_at",
)
_DEAD = (
    "lane_id",
    "batch",
    "seq",
    "to_seq",
    "reason",
    "attempts",
    "last_answer",
    "blocks",
    "outbox_id",
    "event_id",
    "tenant",
    "type",
    "key",
    "payload",
    "headers",
    "published_at",
    "expires_at",
    "backfill_id",
)


def tried_of(columns: Sequence[Sequence[Any]], me: int) -> list[tuple[int, Tried]]:
    """Rows of the attempt log from a statement's columns."""
    words = [column[1:-1].split(",") if column != "{}" else [] for column in map(str, columns)]
    lane_ids, batches, seqs, attempts, outcomes, _, _, started_us, elapsed_us, _ = words
    return [
        (
            int(lane_id),
            Tried(
                int(batch),
                int(seq),
                int(attempt),
                outcome,
                me,
                datetime.fromtimestamp(int(started) / 1e6, UTC),
                int(elapsed) / 1000,
            ),
        )
        for lane_id, batch, seq, attempt, outcome, started, elapsed in zip(
            lane_ids, batches, seqs, attempts, outcomes, started_us, elapsed_us, strict=True
        )
    ]


def log(db: Database, tx: Transaction, tried: list[tuple[int, Tried]]) -> None:
    """Append to the attempt log."""

    def append() -> None:
        for lane_id, each in tried:
            db.attempts.setdefault(lane_id, []).append(each)

    tx.append(append)
    tx.notes.append(("attempts", tried))


@answers(records.WRITE_GROUP)
def write_group(db: Database, tx: Transaction, me: int, *columns: Any) -> Steps:
    if not (yield from fence(db, tx, me)):
        return "INSERT 0 0"
    tried = tried_of(columns, me)
    log(db, tx, tried)
    return f"INSERT 0 {len(tried)}"


@answers(records.WRITE_RECORDS)
def write_records(db: Database, tx: Transaction, me: int, *columns: Any) -> Steps:
    if not (yield from fence(db, tx, me)):
        return []
    tried = tried_of(columns[:_ATTEMPT_COLUMNS], me)
    progress = columns[_ATTEMPT_COLUMNS : _ATTEMPT_COLUMNS + _PROGRESS_COLUMNS]
    moved: dict[int, UUID] = {}
    for lane_id, epoch, *values in zip(*progress, strict=True):
        new = dict(zip(_PROGRESS, values, strict=True))
        yield Wait(db.lane_progress, lane_id, UPDATE)
        p = tx.get(db.lane_progress, lane_id)
        assert p is not None
        if p["epoch"] == epoch and p["acked_seq"] <= new["acked_seq"]:
            tx.change(db.lane_progress, lane_id, **new)
            tx.notes.append(("checkpoint", (me, lane_id)))
            moved[lane_id] = p["endpoint_id"]
    urgent = set(progress[0])
    log(db, tx, [each for each in tried if each[0] not in urgent or each[0] in moved])
    for given_up in zip(*columns[_ATTEMPT_COLUMNS + _PROGRESS_COLUMNS :], strict=True):
        dead = dict(zip(_DEAD, given_up, strict=True))
        if dead["lane_id"] in moved:
            yield from bury(db, tx, dead, moved[dead["lane_id"]])
    return [{"lane_id": lane_id} for lane_id in moved]


def bury(db: Database, tx: Transaction, dead: Row, endpoint_id: UUID) -> Steps:
    """A dead letter, or a longer one."""
    lane_id, blocks = dead["lane_id"], dead.pop("blocks")
    if dead["outbox_id"] is None:
        told = {"lane": lane_id, "from": dead["seq"], "to": dead["to_seq"]}
        journal(db, tx, "backlog_given_up", "", endpoint_id, told)
        earlier = [
            x for x in tx.rows(db.dead_letter) if x["lane_id"] == lane_id and x["seq"] < dead["seq"]
        ]
        last = max(earlier, key=lambda x: x["seq"], default=None)
        if (
            last is not None
            and last["to_seq"] == dead["seq"] - 1
            and last["outbox_id"] is None
            and (last["reason"], last["state"]) == (dead["reason"], "dead")
            and last["began_at"] > db.wall() - records.RANGE_GROWS_S
            and tx.try_lock(db.dead_letter, last["id"], UPDATE)
        ):
            longer = tx.change(db.dead_letter, last["id"], to_seq=dead["to_seq"], at=db.wall())
            if not holds_ordinary(db, lane_id, last["seq"], last["to_seq"]):
                yield from tell_letter(db, tx, longer)
            return
    new = db.serial(db.dead_letter)
    times = {"began_at": db.wall(), "at": db.wall()}
    row = {**dead, "id": new, "endpoint_id": endpoint_id, "state": "dead", **times}
    tx.put(db.dead_letter, new, row)
    if blocks:
        tx.put(db.lane_block, lane_id, {"lane_id": lane_id, "seq": dead["seq"]})
    yield from tell_letter(db, tx, row, blocks=blocks)


@answers(records.WRITE_CHECKPOINTS)
def write_checkpoints(db: Database, tx: Transaction, me: int, *columns: Any) -> Steps:
    if not (yield from fence(db, tx, me)):
        return []
    written = []
    for lane_id, epoch, acked, delivered, floor, success_at in zip(*columns, strict=True):
        yield Wait(db.lane_progress, lane_id, UPDATE)
        p = tx.get(db.lane_progress, lane_id)
        assert p is not None
        if p["epoch"] != epoch or p["acked_seq"] >= acked:
            continue
        tx.change(
            db.lane_progress,
            lane_id,
            acked_seq=acked,
            delivered_seq=delivered,
            floor_batch=floor,
            head_seq=None,
            attempts=0,
            spent=0,
            first_attempt_at=None,
            next_attempt_at=None,
            last_answer=None,
            success_at=success_at,
        )
        tx.notes.append(("checkpoint", (me, lane_id)))
        written.append({"lane_id": lane_id})
    return written


@answers(records.FINISH)
def finish(
    db: Database,
    tx: Transaction,
    me: int,
    endpoint_id: UUID,
    lane_ids: Sequence[int],
    acked: Sequence[int],
) -> Steps:
    if not (yield from fence(db, tx, me)):
        return [{"count": 0}]
    yield Wait(db.endpoint, endpoint_id, UPDATE)
    e = tx.get(db.endpoint, endpoint_id)
    assert e is not None
    if e["state"] not in ("removing", "disabling"):
        return [{"count": 1}]
    state = "removed" if e["state"] == "removing" else "disabled"
    tx.change(db.endpoint, endpoint_id, state=state)
    buried: list[Row] = []
    for lane_id, seq in zip(lane_ids, acked, strict=True):
        yield Wait(db.lane_progress, lane_id, UPDATE)
        counter = tx.get(db.lane_counter, lane_id)
        p = tx.get(db.lane_progress, lane_id)
        assert counter is not None
        assert p is not None
        if counter["last_seq"] > seq:
            owed = {
                "lane_id": lane_id,
                "batch": p["floor_batch"],
                "seq": seq + 1,
                "to_seq": counter["last_seq"],
                "reason": state,
                "attempts": 0,
                "outbox_id": None,
                "backfill_id": None,
            }
            new = db.serial(db.dead_letter)
            row = {**owed, "id": new, "endpoint_id": endpoint_id, "state": "dead"}
            row |= {"began_at": db.wall(), "at": db.wall()}
            tx.put(db.dead_letter, new, row)
            buried.append(row)
            tx.change(
                db.lane_progress,
                lane_id,
                acked_seq=counter["last_seq"],
                head_seq=None,
                attempts=0,
                spent=0,
                first_attempt_at=None,
                next_attempt_at=None,
                last_answer=None,
            )
    for block in list(tx.rows(db.lane_block)):
        lane = tx.get(db.lane, block["lane_id"])
        assert lane is not None
        if lane["endpoint_id"] == endpoint_id:
            yield Wait(db.lane_block, block["lane_id"], EXCLUSIVE)
            tx.put(db.lane_block, block["lane_id"], None)
    journal(db, tx, f"endpoint_{state}", f"replica {me}", endpoint_id, {})
    for row in buried:
        yield from tell_letter(db, tx, row)
    return [{"count": 1}]
