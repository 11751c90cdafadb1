"""What maintenance asks: periods that begin, settle and are dropped.

Every period has its partition here, and goes at the moment that it is decided.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from outbox.core.sequencing import partition_window as numbering
from outbox.operations import backfill
from outbox.store import erasure, partitions, retention
from tests.sim.database.engine import UPDATE, Wait
from tests.sim.database.statements.registry import answers
from tests.sim.database.tables import Batch

if TYPE_CHECKING:
    from outbox.core.sequencing.partition_window import Kind
    from tests.sim.database.engine import Row, Steps, Transaction
    from tests.sim.database.tables import Database


@answers(partitions.LOCK)
def lock_maintenance(db: Database, tx: Transaction) -> list[Row]:
    # Nobody is kept out: behind a pooler they are not, either.
    return [{"locked": db.maintained}]


@answers(partitions.UNLOCK)
def unlock_maintenance(db: Database, tx: Transaction) -> str:
    return "SELECT 1"


@answers(partitions.READ_MISSING, partitions.READ_DOOMED, partitions.READ_SUMMARIES)
def no_partitions(db: Database, tx: Transaction, *_: object) -> list[Row]:
    return []


@answers(partitions.ANALYZE)
def analyze(db: Database, tx: Transaction, parent: str) -> str:
    return "SELECT 1"


@answers(erasure.READ_ERASED)
def read_erased(db: Database, tx: Transaction, *_: object) -> list[Row]:
    return []


@answers(retention.DELETE_DEAD, retention.DELETE_RESENT, retention.DELETE_ONCE)
def delete_old(db: Database, tx: Transaction, keep_s: float) -> list[Row]:
    return [{"count": 0}]


@answers(retention.PERIODS)
def periods(db: Database, tx: Transaction) -> list[Row]:
    now = db.wall()
    return [
        {
            "kind": row["kind"],
            "number": row["number"],
            "age_s": now - row["began_at"],
            "ended_s": None if row["ended_at"] is None else now - row["ended_at"],
            "last_batch": row["last_batch"],
        }
        for row in tx.rows(db.period)
        if not row["dropped"]
    ]


@answers(retention.EVENTS_WRITTEN)
def events_written(db: Database, tx: Transaction, first: int) -> list[Row]:
    return [{"exists": bool(db.outbox_ids) and db.outbox_ids[-1] >= first}]


@answers(retention.LOG_WRITTEN)
def log_written(db: Database, tx: Transaction, first: int) -> list[Row]:
    return [{"exists": db.batches[-1].batch > first}]


@answers(retention.HAS_PARTITION)
def has_partition(db: Database, tx: Transaction, number: int) -> list[Row]:
    return [{"has": True}]


@answers(retention.WRITERS)
def writers(db: Database, tx: Transaction) -> list[Row]:
    return []


@answers(retention.END_PERIOD)
def end_period(db: Database, tx: Transaction, kind: Kind, number: int) -> list[Row]:
    row = tx.get(db.period, (kind, number))
    if row is None or row["ended_at"] is not None:
        return [{"end_period": False}]
    tx.change(db.period, (kind, number), ended_at=db.wall())
    tx.put(db.period, (kind, number + 1), db.new_period(kind, number + 1))
    begins_at = (number + 1) * numbering.WIDTH
    if kind == "log":
        newest = db.batches[-1]
        batch = Batch(begins_at, newest.high, newest.young, (), (), (), None, db.clock_timestamp())
        tx.append(lambda: db.batches.append(batch))
    # A sequence: not undone by a rollback, and its lock is held to the end.
    elif db.last_id < begins_at - 1:
        db.last_id = begins_at - 1
        db.holders[tx.vxid] = None
    return [{"end_period": True}]


@answers(retention.SETTLE_PERIOD)
def settle_period(db: Database, tx: Transaction, number: int) -> list[Row]:
    first, end = number * numbering.WIDTH, (number + 1) * numbering.WIDTH
    newest = db.batches[-1]
    gaps = [*newest.young, *((row["lo"], row["hi"]) for row in tx.rows(db.gap))]
    if db.last_id < end - 1 or any(lo < end and hi >= first for lo, hi in gaps):
        return [{"settle_period": False}]
    above = bisect_left(db.outbox_ids, newest.high + 1) < bisect_left(db.outbox_ids, end)
    if newest.high < end - 1 and (db.holders or above):
        return [{"settle_period": False}]
    return settled(db, tx, number)


def settled(db: Database, tx: Transaction, number: int) -> list[Row]:
    """Write that the newest batch is the last one that can hold any of it."""
    tx.change(db.period, ("events", number), last_batch=db.batches[-1].batch)
    return [{"settle_period": True}]


@answers(retention.OWING)
def owing(db: Database, tx: Transaction, last_batch: int) -> list[Row]:
    for p in tx.rows(db.lane_progress):
        c = tx.get(db.lane_counter, p["lane_id"])
        assert c is not None
        if c["last_seq"] > p["acked_seq"] and p["floor_batch"] <= last_batch:
            return [{"exists": True}]
    return [{"exists": False}]


def _open_ranges(db: Database, tx: Transaction, keep_s: float | None) -> list[Row]:
    """Those that may be sent again: by a person, for a while, or by a job that comes to it."""
    parts = [
        part
        for part in tx.rows(db.replay_part)
        if part["ended_at"] is None and db.replay_job.rows[part["job_id"]]["kind"] == "dead"
    ]

    def asked_for(row: Row) -> bool:
        return any(
            part["endpoint_id"] == row["endpoint_id"]
            and part["next_id"] <= row["id"] <= part["last_id"]
            for part in parts
        )

    return [
        row
        for row in tx.rows(db.dead_letter)
        if row["outbox_id"] is None
        and row["state"] == "dead"
        and (keep_s is None or row["began_at"] > db.wall() - keep_s or asked_for(row))
    ]


@answers(retention.PINNED_BY_RANGES)
def pinned_by_ranges(
    db: Database, tx: Transaction, keep_s: float | None, last_batch: int
) -> list[Row]:
    dead = any(row["batch"] <= last_batch for row in _open_ranges(db, tx, keep_s))
    ranges = {row["id"] for row in tx.rows(db.dead_letter) if row["outbox_id"] is None}
    coming = any(
        r["next_seq"] <= r["to_seq"]
        and (r["dead_id"] is None or r["dead_id"] in ranges)
        and r["next_batch"] <= last_batch
        for r in tx.rows(db.replay)
    )
    return [{"exists": dead or coming}]


@answers(retention.PINNED_BY_REPLAYS)
def pinned_by_replays(
    db: Database, tx: Transaction, keep_s: float | None, first: int, end: int
) -> list[Row]:
    ranges = _open_ranges(db, tx, keep_s)
    coming = []
    for r in tx.rows(db.replay):
        if r["dead_id"] is None:
            whose = db.replay_job.rows[r["job_id"]]
        elif (whose := db.dead_letter.rows[r["dead_id"]])["outbox_id"] is not None:
            continue
        numbers = {"seq": r["next_seq"], "to_seq": r["to_seq"]}
        coming.append({"lane_id": whose["lane_id"], **numbers})
    for lane_id, given in db.deliveries.items():
        p = tx.get(db.lane_progress, lane_id)
        assert p is not None
        for g in given:
            if not g.again or g.copy_id is not None or not first <= g.outbox_id < end:
                continue
            if g.seq > p["acked_seq"] or any(
                row["lane_id"] == lane_id and row["seq"] <= g.seq <= row["to_seq"]
                for row in (*ranges, *coming)
            ):
                return [{"exists": True}]
    return [{"exists": False}]


@answers(retention.REPLAYS_STAND)
def replays_stand(db: Database, tx: Transaction) -> list[Row]:
    parts = [part for part in tx.rows(db.replay_part) if part["ended_at"] is None]
    jobs = max((row["id"] for row in tx.rows(db.replay_job)), default=None)
    batches = [part["batch"] for part in parts if part["batch"] is not None]
    stand = (jobs, len(parts), sum(batches) if batches else None)
    return [{"concat_ws": " ".join(str(each) for each in stand if each is not None)}]


@answers(retention.PINNED_BY_JOBS)
def pinned_by_jobs(db: Database, tx: Transaction, end: int) -> list[Row]:
    for part in tx.rows(db.replay_part):
        if part["ended_at"] is None and part["from_id"] is not None and part["from_id"] < end:
            return [{"exists": True}]
    return [{"exists": False}]


@answers(retention.DISCARD_RANGES)
def discard_ranges(db: Database, tx: Transaction, keep_s: float | None) -> Steps:
    kept = {row["id"] for row in _open_ranges(db, tx, keep_s)}
    found = [
        row["id"]
        for row in tx.rows(db.dead_letter)
        if row["outbox_id"] is None and row["state"] == "dead" and row["id"] not in kept
    ]
    for dead_id in found:
        yield Wait(db.dead_letter, dead_id, UPDATE)
        row = tx.get(db.dead_letter, dead_id)
        if row is not None and row["state"] == "dead":
            tx.change(db.dead_letter, dead_id, state="discarded")
    return [{"count": len(found)}]


@answers(retention.DROP_PERIOD)
def drop_period(db: Database, tx: Transaction, kind: Kind, number: int) -> list[Row]:
    row = tx.get(db.period, (kind, number))
    if row is None or row["dropped"] or row["ended_at"] is None:
        return []
    if any(
        older["kind"] == kind and older["number"] < number and not older["dropped"]
        for older in tx.rows(db.period)
    ):
        return []
    last_batch = row["last_batch"] if kind == "events" else (number + 1) * numbering.WIDTH - 1
    if last_batch is None or owing(db, tx, last_batch)[0]["exists"]:
        return []
    return dropped(db, tx, kind, number)


def dropped(db: Database, tx: Transaction, kind: Kind, number: int) -> list[Row]:
    """Write that it is, for good."""
    tx.change(db.period, (kind, number), dropped=True)
    tx.append(lambda: db.drop_below(kind, number + 1))
    at = db.clock_timestamp()
    return [{"began_at": at, "ended_at": at}]


@answers(backfill.READ_FIRST_KEPT)
def read_first_kept(db: Database, tx: Transaction) -> list[Row]:
    return [{"first": db.first_id}]
