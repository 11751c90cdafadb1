"""What the sequencer asks: the cursor row, the events, the gaps, the batch."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Any

import asyncpg
from asyncpg import Range

from outbox.store import cursor, event_reads, lanes, routing, timeline
from tests.sim.database.engine import EXCLUSIVE, UPDATE, Wait
from tests.sim.database.statements.registry import answers
from tests.sim.database.tables import AWAKE, SCHEMA, Batch, Given

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from tests.sim.database.engine import Row, Steps, Transaction
    from tests.sim.database.tables import Database, Event

OWNERS = f"{SCHEMA}:owners"


@answers(cursor.SEQUENCE)
def sequence(db: Database, tx: Transaction) -> list[Row]:
    return [{"oid": 1, "plain": True, "logged": True, "primary": True}]


@answers(cursor.LOCK_CURSOR)
def lock_cursor(db: Database, tx: Transaction) -> list[Row]:
    if not tx.try_lock(db.cursor, 1, EXCLUSIVE):
        return []
    row = tx.get(db.cursor, 1)
    assert row is not None
    silent = {"timeline": None, "server_timeline": None}
    held = {"writer": row["writer"], "version": row["version"]}
    return [{**held, **silent, "batch": db.batches[-1].batch}]


@answers(timeline.READ_TIMELINE)
def read_timeline(db: Database, tx: Transaction) -> list[Row]:
    return [{"server_timeline": None}]


@answers(cursor.READ_STATE)
def read_state(db: Database, tx: Transaction) -> list[Row]:
    newest = db.batches[-1]
    young = [Range(lo, hi + 1) for lo, hi in newest.young]
    return [{"batch": newest.batch, "high": newest.high, "young": young}]


@answers(cursor.READ_OLD_GAPS)
def read_old_gaps(db: Database, tx: Transaction) -> list[Row]:
    return [dict(row) for row in tx.rows(db.gap)]


@answers(cursor.READ_STANDING)
def read_standing(db: Database, tx: Transaction, me: int) -> list[Row]:
    row = tx.get(db.cursor, 1)
    assert row is not None
    leader = row["writer"]
    newest = db.batches[-1]
    alive = tx.get(db.replica, leader) if leader is not None else None
    free = leader is None or leader == me or alive is None or alive["expires_at"] <= db.wall()
    behind = bool(db.outbox_ids) and db.outbox_ids[-1] > newest.high
    behind = behind or any(_ids_between(db, lo, hi) for lo, hi in newest.young)
    return [{"leader": leader, "batch": newest.batch, "free": free, "behind": behind}]


def _ids_between(db: Database, lo: int, hi: int) -> list[int]:
    return db.outbox_ids[bisect_left(db.outbox_ids, lo) : bisect_right(db.outbox_ids, hi)]


@answers(event_reads.HOLDERS)
def holders(db: Database, tx: Transaction, oid: int) -> list[Row]:
    return [{"virtualtransaction": vxid} for vxid in db.holders]


@answers(event_reads.READ_RUNNING)
def read_running(db: Database, tx: Transaction) -> list[Row]:
    return [{"virtualtransaction": vxid} for vxid in db.running]


@answers(event_reads.READ)
def read(
    db: Database,
    tx: Transaction,
    high: int,
    los: Sequence[int],
    his: Sequence[int],
    limit: int,
    oid: int,
    more_gaps: bool,
) -> Steps:
    began_at = db.clock_timestamp()
    # The snapshot: events, and what stands on the cursor row.
    ids: list[int] = []
    for lo, hi in zip(los, his, strict=True):
        ids += _ids_between(db, lo, hi)[:limit]
    start = bisect_right(db.outbox_ids, high)
    ids += db.outbox_ids[start : start + limit]
    ids = sorted(ids)[:limit]
    events = [db.outbox[i] for i in ids]
    row = tx.get(db.cursor, 1)
    assert row is not None
    if db.rng.random() < 0.3:
        yield db.pause_s()
    # What no snapshot holds: sequences and locks.
    newer = [i for i in ids if i > high]
    missing = bool(los) or more_gaps or (bool(newer) and len(newer) < newer[-1] - high)
    said = {
        "id": None,
        "last_id": db.last_id,
        "wakeup": db.wakeup,
        "waiting": None,
        "holders": list(db.holders) if missing else None,
        "leader": row["writer"],
        "version": row["version"],
        "server_timeline": None,
        "began_at": began_at,
    }
    return [_sighting(event) for event in events] + [said]


def _sighting(event: Event) -> Row:
    return {"id": event.id, "tenant": None, "type": event.type, "spread": event.spread}


@answers(lanes.READ_COUNTERS)
def read_counters(db: Database, tx: Transaction, lane_ids: Sequence[int]) -> list[Row]:
    wanted = set(lane_ids)
    return [dict(row) for row in tx.rows(db.lane_counter) if row["lane_id"] in wanted]


@answers(routing.READ_ROUTES)
def read_routes(db: Database, tx: Transaction, stopped_for_s: float) -> list[Row]:
    found = []
    for s in tx.rows(db.subscription):
        e = tx.get(db.endpoint, s["endpoint_id"])
        assert e is not None
        if s["to_batch"] is not None or e["state"] not in ("active", "paused"):
            continue
        lane_rows = [
            lane
            for lane in tx.rows(db.lane)
            if lane["endpoint_id"] == e["id"] and lane["generation"] == e["generation"]
        ]
        lane_rows.sort(key=lambda lane: lane["slot"])
        found.append({**s, "lane_ids": [lane["id"] for lane in lane_rows]})
    return found


@answers(cursor.WRITE_BATCH)
def write_batch(db: Database, tx: Transaction, *arguments: Any) -> Steps:
    (
        batch,
        high,
        young,
        found,
        dead,
        _events,
        counted,
        last_seqs,
        lane_ids,
        seqs,
        outbox_ids,
        writer,
        replay_ids,
        replay_seqs,
        version,
        awake,
        wanted,
        tell,
        backfill_ids,
        copy_ids,
        was_backfill_ids,
        committed_after,
        _was,
        numbers,
    ) = arguments
    # The statement's snapshot; the row is looked at again once it is locked.
    row = tx.get(db.cursor, 1)
    assert row is not None
    if (row["writer"], row["version"]) != (writer, version):
        return []
    others = any(r["id"] != writer for r in tx.rows(db.replica))
    if not tx.try_lock(db.cursor, 1, EXCLUSIVE):
        return []
    row = tx.get(db.cursor, 1)
    assert row is not None
    if (row["writer"], row["version"]) != (writer, version):
        return []
    if batch > db.batches[-1].batch + 1:
        return []
    tx.wrote()
    if db.rng.random() < 0.2:
        yield db.pause_s()
    if batch <= db.batches[-1].batch:
        raise asyncpg.UniqueViolationError(f"batch {batch} exists")
    told = Batch(
        batch,
        high,
        _ranges(young),
        _ranges(found),
        _ranges(dead),
        tuple(counted),
        writer,
        db.clock_timestamp(),
        committed_after,
    )
    tx.append(lambda: db.batches.append(told))
    for lane_id, last_seq in zip(counted, last_seqs, strict=True):
        yield Wait(db.lane_counter, lane_id, UPDATE)
        tx.change(db.lane_counter, lane_id, last_seq=last_seq)
    given: list[tuple[int, Given]] = [
        (lane_id, Given(batch, *rest))
        for lane_id, *rest in zip(
            *(numbers_in(column) for column in (lane_ids, seqs, outbox_ids)),
            *(
                column or [None] * numbers
                for column in (replay_ids, replay_seqs, backfill_ids, copy_ids, was_backfill_ids)
            ),
            strict=True,
        )
    ]

    def deliver() -> None:
        for lane_id, each in given:
            db.deliveries.setdefault(lane_id, []).append(each)

    tx.append(deliver)
    tx.notes.append(("batch", (told, given)))
    if awake:
        db.wakeup = AWAKE
    if given and others and tell is not None:
        tx.notify(OWNERS, tell)
    back = sorted(each for each in given if each[0] in set(wanted))
    kept = [(lane_id, g) for lane_id, g in back if not _is_gone(db, g)]
    rows = [
        {**event_row(db, lane_id, g), "committed_after": seconds(committed_after)}
        for lane_id, g in kept
    ]
    return rows or [{"lane_id": None}]


def seconds(at: datetime | None) -> float | None:
    """Since the epoch."""
    return None if at is None else at.timestamp()


def numbers_in(array: str) -> list[int]:
    """Of an array as text."""
    return [int(word) for word in array[1:-1].split(",") if word]


def event_row(db: Database, lane_id: int, given: Given) -> Row:
    """A delivery with its event, as a lane reads it; in the order of the statement."""
    event = db.outbox[given.outbox_id]
    return {
        "lane_id": lane_id,
        "seq": given.seq,
        "batch": given.batch,
        "outbox_id": event.id,
        "event_id": event.event_id,
        "type": event.type,
        "tenant": None,
        "key": event.key,
        "published_at": seconds(event.created_at),
        "expires_at": None if given.again else seconds(event.expires_at),
        "payload": None if _is_gone(db, given) else event.payload,
        "headers": None,
        "backfill_id": given.backfill_id,
        "is_copy": is_copy(db, given),
        "was_backfill_id": given.was_backfill_id,
        "committed_after": None,
        "was_endpoint_id": None,
        "was_generation": None,
        "was_slot": None,
        "was_seq": None,
    }


def is_copy(db: Database, given: Given) -> bool:
    """Its receiver had asked for it."""
    job = None if given.backfill_id is None else db.replay_job.rows[given.backfill_id]
    return job is not None and job["kind"] == "lane"


def _is_gone(db: Database, given: Given) -> bool:
    """Its event was dropped, and no dead letter has a copy."""
    return given.outbox_id < db.first_id and given.copy_id is None


def _ranges(ranges: Sequence[Range]) -> tuple[tuple[int, int], ...]:
    return tuple((r.lower, r.upper - 1) for r in ranges)


@answers(cursor.CLOSE_OLD_GAPS)
def close_old_gaps(db: Database, tx: Transaction, los: Sequence[int]) -> str:
    for lo in los:
        tx.put(db.gap, lo, None)
    return f"DELETE {len(los)}"


@answers(cursor.OPEN_OLD_GAPS)
def open_old_gaps(db: Database, tx: Transaction, los: Sequence[int], his: Sequence[int]) -> str:
    for lo, hi in zip(los, his, strict=True):
        tx.put(db.gap, lo, {"lo": lo, "hi": hi})
    return f"INSERT 0 {len(los)}"


@answers(cursor.SIGN_CURSOR)
def sign_cursor(db: Database, tx: Transaction, writer: int | None) -> Steps:
    yield Wait(db.cursor, 1, EXCLUSIVE)
    tx.change(db.cursor, 1, writer=writer)
    return "UPDATE 1"


@answers(cursor.SET_WAKEUP)
def set_wakeup(db: Database, tx: Transaction, value: int) -> str:
    db.wakeup = value
    return "SELECT 1"


@answers(cursor.SLEEP_UNTIL)
def sleep_until(db: Database, tx: Transaction, for_s: int) -> list[Row]:
    return [{"until": int(db.wall()) + for_s}]
