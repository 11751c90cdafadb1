"""What the dispatcher's side asks: endpoints, lanes, and what they owe."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Any

from outbox.store import endpoints, lanes
from tests.sim.database.statements.registry import answers
from tests.sim.database.statements.sequencing import event_row, seconds

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from tests.sim.database.engine import Row, Transaction
    from tests.sim.database.tables import Database, Given


@answers(lanes.READ_LAST_BATCH)
def read_last_batch(db: Database, tx: Transaction) -> list[Row]:
    return [{"max": db.batches[-1].batch}]


@answers(lanes.READ_NEWS)
def read_news(db: Database, tx: Transaction, after: int, limit: int) -> list[Row]:
    first = bisect_right(db.batches, after, key=lambda b: b.batch)
    newer = db.batches[first : first + limit]
    last_seqs = {}
    for lane_id in sorted({lane_id for b in newer for lane_id in b.lanes}):
        row = tx.get(db.lane_counter, lane_id)
        assert row is not None
        last_seqs[lane_id] = row["last_seq"]
    return [
        {
            "batch": newer[-1].batch if newer else None,
            "batches": len(newer),
            "lanes": list(last_seqs) or None,
            "last_seqs": list(last_seqs.values()) or None,
        }
    ]


@answers(lanes.READ_BLOCKED)
def read_blocked(db: Database, tx: Transaction, lane_ids: Sequence[int]) -> list[Row]:
    return [{"lane_id": i} for i in lane_ids if tx.get(db.lane_block, i) is not None]


@answers(endpoints.READ_ENDPOINTS)
def read_endpoints(db: Database, tx: Transaction, endpoint_ids: Sequence[UUID]) -> list[Row]:
    found = []
    for each in endpoint_ids:
        e, h = tx.get(db.endpoint, each), tx.get(db.endpoint_health, each)
        if e is None or h is None:
            continue
        health = {
            "health": h["state"],
            "obeyed": h["resumes"],
            "since": h["since"],
            "held_until": h["held_until"],
            "last_answer": h["last_answer"],
            "told_held_since": h["told_held_since"],
            "told_stalled_at": h["told_stalled_at"],
            "secrets": [(e["secret"], None)],
        }
        found.append({**e, **health})
    return found


@answers(lanes.READ_LANES)
def read_lanes(db: Database, tx: Transaction, endpoint_ids: Sequence[UUID]) -> list[Row]:
    wanted = set(endpoint_ids)
    found = []
    for lane in tx.rows(db.lane):
        if lane["endpoint_id"] not in wanted:
            continue
        e = tx.get(db.endpoint, lane["endpoint_id"])
        p = tx.get(db.lane_progress, lane["id"])
        c = tx.get(db.lane_counter, lane["id"])
        assert e is not None
        assert p is not None
        assert c is not None
        blocked = tx.get(db.lane_block, lane["id"]) is not None
        owes = c["last_seq"] > p["acked_seq"]
        ended = lane["generation"] < e["generation"]
        if ended and not owes and not blocked:
            continue
        owed_since = None
        if owes:
            head = _after(db, lane["id"], p["floor_batch"], p["acked_seq"])
            owed_since = db.batch(head[0].batch).at if head else None
        found.append(
            {
                **lane,
                **p,
                "id": lane["id"],
                "ended": ended,
                "last_seq": c["last_seq"],
                "blocked": blocked,
                "owed_since": owed_since,
            }
        )
    return found


def _after(db: Database, lane_id: int, floor_batch: int, seq: int) -> list[Given]:
    return [g for g in db.deliveries.get(lane_id, ()) if g.seq > seq and g.batch >= floor_batch]


@answers(lanes.READ_TAIL)
def read_tail(
    db: Database,
    tx: Transaction,
    lane_ids: Sequence[int],
    floors: Sequence[int],
    acked: Sequence[int],
) -> list[Row]:
    return [
        {"id": lane_id, "seq": a.seq, "batch": a.batch, "started_at": a.started_at}
        for lane_id, floor, seq in zip(lane_ids, floors, acked, strict=True)
        for a in db.attempts.get(lane_id, ())
        if a.outcome == "delivered" and a.batch >= floor and a.seq > seq
    ]


@answers(lanes.READ_DELIVERIES)
def read_deliveries(
    db: Database,
    tx: Transaction,
    lane_ids: Sequence[int],
    floors: Sequence[int],
    after: Sequence[int],
    rows_max: Sequence[int],
    bytes_max: int,
) -> list[Row]:
    return [
        {
            **event_row(db, lane_id, g),
            "committed_after": seconds(db.batch(g.batch).committed_after),
            **_replayed(db, tx, g),
        }
        for lane_id, floor, seq, most in sorted(zip(lane_ids, floors, after, rows_max, strict=True))
        for g in _after(db, lane_id, floor, seq)[:most]
    ]


def _replayed(db: Database, tx: Transaction, given: Given) -> dict[str, Any]:
    if given.replay_id is None:
        return {}
    request = tx.get(db.replay, given.replay_id)
    assert request is not None
    if request["dead_id"] is None:
        whose = tx.get(db.replay_job, request["job_id"])
    else:
        whose = tx.get(db.dead_letter, request["dead_id"])
    assert whose is not None
    was = tx.get(db.lane, whose["lane_id"])
    assert was is not None
    return {
        "was_endpoint_id": was["endpoint_id"],
        "was_generation": was["generation"],
        "was_slot": was["slot"],
        "was_seq": given.replay_seq,
    }
