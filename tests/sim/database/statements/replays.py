"""What the leader and operators ask about replay jobs and dead letters."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Any

from asyncpg import Range

from outbox.operations import (
    backfill,
    dead_letter_filter,
    dead_letters,
    discard,
    lane_history,
    receiver_replays,
    replay_jobs,
    replays,
)
from outbox.store import replay_feed, routing, routing_change
from tests.sim.database.engine import EXCLUSIVE, UPDATE, Wait
from tests.sim.database.statements.registry import answers
from tests.sim.database.statements.sequencing import is_copy

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from uuid import UUID

    from tests.sim.database.engine import Row, Steps, Transaction
    from tests.sim.database.tables import Database, Given

_ENDS = {
    "removing": "removed",
    "removed": "removed",
    "disabling": "disabled",
    "disabled": "disabled",
}


def _endpoint(db: Database, tx: Transaction, endpoint_id: UUID) -> Row:
    row = tx.get(db.endpoint, endpoint_id)
    assert row is not None
    return row


def _subscribed(db: Database, tx: Transaction, endpoint_id: UUID) -> bool:
    return any(
        s["endpoint_id"] == endpoint_id and s["to_batch"] is None for s in tx.rows(db.subscription)
    )


def _in_batch(db: Database, lane_id: int, batch: int) -> list[Given]:
    given = db.deliveries.get(lane_id, [])
    return given[bisect_left(given, (batch,)) : bisect_left(given, (batch + 1,))]


def _open_parts(db: Database, tx: Transaction) -> Iterator[Row]:
    for _, part in sorted(
        ((p["job_id"], str(p["endpoint_id"])), p)
        for p in tx.rows(db.replay_part)
        if p["ended_at"] is None
    ):
        yield part


# ------------------------------------------------------------------ the leader


@answers(replay_feed.READ_PARTS)
def read_parts(db: Database, tx: Transaction) -> list[Row]:
    rows = []
    for part in _open_parts(db, tx):
        job = tx.get(db.replay_job, part["job_id"])
        e = _endpoint(db, tx, part["endpoint_id"])
        assert job is not None
        why = "aborted" if job["state"] == "aborted" else _ENDS.get(e["state"])
        if why is None and job["kind"] == "history" and not _subscribed(db, tx, e["id"]):
            why = "unsubscribed"
        named = {name: part[name] for name in ("job_id", "endpoint_id")}
        said = {"kind": job["kind"], "rate_per_s": job["rate_per_s"], "lanes": e["lanes"]}
        rows.append({**named, **said, "why": why})
    return rows


@answers(replay_feed.LOOK)
def look(db: Database, tx: Transaction, endpoint_ids: Sequence[UUID]) -> list[Row]:
    rows = []
    for endpoint_id in endpoint_ids:
        lanes = [lane["id"] for lane in tx.rows(db.lane) if lane["endpoint_id"] == endpoint_id]
        done, took_ms = True, []
        for part in _open_parts(db, tx):
            if part["endpoint_id"] != endpoint_id or part["batch"] is None:
                continue
            for lane_id in lanes:
                given = _in_batch(db, lane_id, part["batch"])
                if not given:
                    continue
                tried = [t for t in db.attempts.get(lane_id, ()) if t.batch == part["batch"]]
                took_ms += [t.elapsed_ms for t in tried]
                progress = tx.get(db.lane_progress, lane_id)
                assert progress is not None
                last = given[-1].seq
                acked = any(t.seq == last and t.outcome == "delivered" for t in tried)
                done = done and (acked or progress["acked_seq"] >= last)
        counters = [tx.get(db.lane_counter, lane_id) for lane_id in lanes]
        rows.append(
            {
                "endpoint_id": endpoint_id,
                "done": done,
                "mean_ms": sum(took_ms) / len(took_ms) if took_ms else None,
                "numbers": sum(c["last_seq"] for c in counters if c is not None),
            }
        )
    return rows


def _pending(db: Database, tx: Transaction, job_id: int, endpoint_id: UUID) -> list[Row]:
    return sorted(
        (
            r
            for r in tx.rows(db.replay)
            if (r["job_id"], r["endpoint_id"]) == (job_id, endpoint_id)
            and r["next_seq"] <= r["to_seq"]
        ),
        key=lambda r: int(r["id"]),
    )


@answers(replay_feed.READ_LETTERS)
def read_letters(
    db: Database,
    tx: Transaction,
    job_ids: Sequence[int],
    endpoint_ids: Sequence[UUID],
    numbers: Sequence[int],
) -> list[Row]:
    rows: list[Row] = []
    for job_id, endpoint_id, limit in sorted(zip(job_ids, endpoint_ids, numbers, strict=True)):
        part_of = (job_id, endpoint_id)
        part, job = tx.get(db.replay_part, part_of), tx.get(db.replay_job, part_of[0])
        assert part is not None
        assert job is not None
        if job["kind"] == "history" or job["state"] != "running" or _pending(db, tx, *part_of):
            continue
        ids = sorted(
            d["id"]
            for d in tx.rows(db.dead_letter)
            if job["kind"] == "dead"
            and d["endpoint_id"] == part_of[1]
            and d["state"] == "dead"
            and part["next_id"] <= d["id"] <= part["last_id"]
        )
        named = {"job_id": part_of[0], "endpoint_id": part_of[1], "last_id": part["last_id"]}
        if not ids:
            rows.append({**named, "id": None, "is_erased": None, "wanted": None})
        rows += [{**named, "id": i, "is_erased": False, "wanted": True} for i in ids[:limit]]
    return rows


@answers(replay_feed.TAKE_LETTERS)
def take_letters(
    db: Database, tx: Transaction, job_ids: Sequence[int], ids: Sequence[int]
) -> Steps:
    unblocked = 0
    for dead_id, job_id in sorted(zip(ids, job_ids, strict=True)):
        yield Wait(db.dead_letter, dead_id, EXCLUSIVE)
        letter = tx.get(db.dead_letter, dead_id)
        assert letter is not None
        if letter["state"] != "dead":
            continue
        tx.change(db.dead_letter, dead_id, state="replaying")
        _ask(db, tx, job_id, letter)
        unblocked += yield from _unblock(db, tx, letter)
    return [{"unblocked": unblocked}]


def _ask(db: Database, tx: Transaction, job_id: int, letter: Row) -> None:
    new = db.serial(db.replay)
    place = {"next_seq": letter["seq"], "next_batch": letter["batch"], "to_seq": letter["to_seq"]}
    whose = {"job_id": job_id, "endpoint_id": letter["endpoint_id"], "dead_id": letter["id"]}
    tx.put(db.replay, new, {"id": new, **whose, **place})


def _unblock(db: Database, tx: Transaction, letter: Row) -> Steps:
    block = tx.get(db.lane_block, letter["lane_id"])
    if block is None or block["seq"] != letter["seq"]:
        return 0
    yield Wait(db.lane_block, letter["lane_id"], EXCLUSIVE)
    tx.put(db.lane_block, letter["lane_id"], None)
    return 1


@answers(routing.READ_REPLAYS)
def read_replays(
    db: Database,
    tx: Transaction,
    job_ids: Sequence[int],
    endpoint_ids: Sequence[UUID],
    limits: Sequence[int],
) -> list[Row]:
    rows: list[Row] = []
    for job_id, endpoint_id, limit in sorted(zip(job_ids, endpoint_ids, limits, strict=True)):
        e = _endpoint(db, tx, endpoint_id)
        if e["state"] not in ("active", "paused"):
            continue
        before = 0
        for r in _pending(db, tx, job_id, endpoint_id):
            if before >= limit:
                break
            rest = limit + routing.RESENT_SPARE if r["dead_id"] is None else limit - before
            numbers = min(r["to_seq"] - r["next_seq"] + 1, rest)
            before += r["to_seq"] - r["next_seq"] + 1
            rows += _numbers(db, tx, r, e, numbers)
    return rows


def _numbers(db: Database, tx: Transaction, r: Row, e: Row, numbers: int) -> list[Row]:
    """The next numbers of one replay, each in the lane that its key has today."""
    kept = ("job_id", "endpoint_id", "id", "next_seq", "next_batch")
    base = {name: r[name] for name in kept} | {"numbers": numbers}
    letter = None if r["dead_id"] is None else tx.get(db.dead_letter, r["dead_id"])
    found: list[tuple[Any, ...]]
    if letter is None:
        job = tx.get(db.replay_job, r["job_id"])
        part = tx.get(db.replay_part, (r["job_id"], r["endpoint_id"]))
        assert job is not None
        assert part is not None
        found = []
        for g in _numbered(db, job["lane_id"], r["next_seq"], numbers):
            wanted = is_resent(db, job["lane_id"], part["first_id"], g)
            was = g.was_backfill_id if is_copy(db, g) else g.backfill_id
            found.append((g.seq, g.batch, g.outbox_id, job["id"], g.copy_id, was, wanted))
    elif letter["outbox_id"] is None:
        found = [
            (g.seq, g.batch, g.outbox_id, g.backfill_id, g.copy_id, g.was_backfill_id, True)
            for g in _numbered(db, letter["lane_id"], r["next_seq"], numbers)
        ]
    else:
        was = db.given(letter["lane_id"], letter["seq"]).was_backfill_id
        event = (letter["outbox_id"], letter["backfill_id"], letter["id"], was)
        found = [(r["next_seq"], r["next_batch"], *event, True)]
    names = ("seq", "batch", "outbox_id", "backfill_id", "copy_id", "was_backfill_id", "wanted")
    if not found:
        return [{**base, **dict.fromkeys(("lane_id", *names))}]
    rows = []
    for values in found:
        told = dict(zip(names, values, strict=True))
        slot = db.outbox[told["outbox_id"]].spread % e["lanes"]
        lane = next(
            lane
            for lane in tx.rows(db.lane)
            if (lane["endpoint_id"], lane["generation"], lane["slot"])
            == (e["id"], e["generation"], slot)
        )
        rows.append({**base, "lane_id": lane["id"], **told})
    return rows


def _numbered(db: Database, lane_id: int, seq: int, numbers: int) -> list[Given]:
    return [g for g in db.deliveries.get(lane_id, []) if seq <= g.seq < seq + numbers]


def is_resent(db: Database, lane_id: int, first: int, given: Given) -> bool:
    """Whether it is sent again when its receiver asks for what the lane delivered."""
    if given.copy_id is None and given.outbox_id < db.first_id:
        return False
    if is_copy(db, given):
        assert given.backfill_id is not None
        of_lane = db.replay_job.rows[given.backfill_id]["lane_id"]
        if of_lane == lane_id and (given.replay_seq or 0) >= first:
            return False
    return not any(
        d["lane_id"] == lane_id and d["seq"] <= given.seq <= d["to_seq"]
        for d in db.dead_letter.rows.values()
    )


@answers(routing.WRITE_HELPINGS)
def write_helpings(
    db: Database, tx: Transaction, ids: Sequence[int], seqs: Sequence[int], batches: Sequence[int]
) -> str:
    for i, seq, batch in zip(ids, seqs, batches, strict=True):
        tx.change(db.replay, i, next_seq=seq, next_batch=batch)
    return f"UPDATE {len(ids)}"


@answers(replay_feed.READ_HISTORY)
def read_history(
    db: Database, tx: Transaction, job_id: int, endpoint_id: UUID, limit: int
) -> list[Row]:
    part, job = tx.get(db.replay_part, (job_id, endpoint_id)), tx.get(db.replay_job, job_id)
    assert part is not None
    assert job is not None
    if job["state"] != "running":
        return []
    last_id = {"last_id": part["last_id"]}
    lo = bisect_left(db.outbox_ids, part["next_id"])
    ids = db.outbox_ids[lo : bisect_right(db.outbox_ids, part["last_id"])][:limit]
    rows = []
    for event in (db.outbox[i] for i in ids):
        wanted = event.created_at >= job["since"] and not any(
            gap.lower <= event.id < gap.upper for gap in job["gaps"]
        )
        told = {"id": event.id, "tenant": None, "type": event.type, "spread": event.spread}
        rows.append({**last_id, **told, "wanted": wanted})
    return rows or [{**last_id, "id": None}]


@answers(replay_feed.MOVE_PARTS)
def move_parts(db: Database, tx: Transaction, batch: int, *columns: Any) -> Steps:
    for job_id, endpoint_id, next_id, taken, erased, from_id in zip(*columns, strict=True):
        yield Wait(db.replay_part, (job_id, endpoint_id), UPDATE)
        part = tx.get(db.replay_part, (job_id, endpoint_id))
        assert part is not None
        tx.change(
            db.replay_part,
            (job_id, endpoint_id),
            next_id=part["next_id"] if next_id is None else next_id,
            taken=part["taken"] + taken,
            erased=part["erased"] + erased,
            batch=batch if taken else part["batch"],
            from_id=from_id,
        )
    return "UPDATE 1"


@answers(replay_feed.END_PARTS)
def end_parts(db: Database, tx: Transaction, *columns: Any) -> Steps:
    for job_id, endpoint_id, why in zip(*columns, strict=True):
        yield Wait(db.replay_part, (job_id, endpoint_id), UPDATE)
        ended = {"ended_at": db.clock_timestamp(), "why": why, "from_id": None}
        tx.change(db.replay_part, (job_id, endpoint_id), **ended)
    return "UPDATE 1"


@answers(replay_feed.END_JOBS)
def end_jobs(db: Database, tx: Transaction, ids: Sequence[int]) -> Steps:
    ended = []
    for job_id in ids:
        if any(part["job_id"] == job_id for part in _open_parts(db, tx)):
            continue
        yield Wait(db.replay_job, job_id, UPDATE)
        job = tx.get(db.replay_job, job_id)
        assert job is not None
        state = "done" if job["state"] == "running" else job["state"]
        tx.change(db.replay_job, job_id, state=state, ended_at=db.clock_timestamp())
        ended.append({"id": job_id, "state": state, "kind": job["kind"]})
    return ended


@answers(replay_feed.READ_TAKEN)
def read_taken(db: Database, tx: Transaction, job_id: int) -> list[Row]:
    parts = [p for p in tx.rows(db.replay_part) if p["job_id"] == job_id]
    return [{"taken": sum(p["taken"] for p in parts)}]


# ------------------------------------------------------------------- operators


@answers(replays.COUNT_DEAD)
def count_dead(
    db: Database, tx: Transaction, endpoint_ids: Sequence[UUID] | None, *_: Any
) -> list[Row]:
    found: dict[UUID, list[Row]] = {}
    for d in tx.rows(db.dead_letter):
        if d["state"] == "dead" and (endpoint_ids is None or d["endpoint_id"] in endpoint_ids):
            found.setdefault(d["endpoint_id"], []).append(d)
    rows = []
    for endpoint_id, letters in found.items():
        e = _endpoint(db, tx, endpoint_id)
        ids = [d["id"] for d in letters]
        told = {"endpoint_id": endpoint_id, "endpoint": e["name"], "state": e["state"]}
        numbers = sum(d["to_seq"] - d["seq"] + 1 for d in letters)
        counts = {"letters": len(letters), "numbers": numbers, "erased": 0}
        rows.append({**told, **counts, "first_id": min(ids), "last_id": max(ids)})
    return sorted(rows, key=lambda row: str(row["endpoint"]))


_JOB = (
    "kind",
    "endpoint",
    "types",
    "tenant",
    "reason",
    "since",
    "until",
    "rate_per_s",
    "asked_by",
    "gaps",
    "lane_id",
)


@answers(replays.ADD_JOB)
def add_job(db: Database, tx: Transaction, *columns: Any) -> list[Row]:
    new = db.serial(db.replay_job)
    told = dict(zip(_JOB, columns, strict=True))
    tx.put(db.replay_job, new, {"id": new, **told, "state": "running", "ended_at": None})
    return [{"id": new}]


@answers(replays.ADD_PARTS)
def add_parts(db: Database, tx: Transaction, job_id: int, *columns: Any) -> str:
    for endpoint_id, first_id, last_id, expected, from_id in zip(*columns, strict=True):
        row = {
            "job_id": job_id,
            "endpoint_id": endpoint_id,
            "first_id": first_id,
            "next_id": first_id,
            "last_id": last_id,
            "expected": expected,
            "taken": 0,
            "erased": 0,
            "batch": None,
            "from_id": from_id,
            "ended_at": None,
            "why": None,
        }
        tx.put(db.replay_part, (job_id, endpoint_id), row)
    return "INSERT 0 1"


@answers(replays.LOCK_DEAD)
def lock_dead(db: Database, tx: Transaction, ids: Sequence[int]) -> Steps:
    found = []
    for row in sorted(tx.rows(db.dead_letter), key=lambda d: int(d["id"])):
        if row["id"] not in ids:
            continue
        yield Wait(db.dead_letter, row["id"], EXCLUSIVE)
        new = tx.get(db.dead_letter, row["id"])
        assert new is not None
        e = _endpoint(db, tx, row["endpoint_id"])
        state = {"endpoint_state": e["state"], "endpoint": e["name"], "is_erased": False}
        found.append({**new, **state})
    return found


@answers(dead_letters.GET_REPLAYS)
def get_replays(_db: Database, _tx: Transaction, _dead_id: int) -> list[dict[str, Any]]:
    # Here only the words of a refusal depend on it.
    place = dict.fromkeys(("endpoint_id", "generation", "slot", "seq", "again"))
    return [{**place, "asked_at": None, "taken": 0, "is_range": False, "state": "replaying"}]


@answers(replays.ASK_REPLAY)
def ask_replay(db: Database, tx: Transaction, job_id: int, ids: Sequence[int]) -> str:
    for dead_id in sorted(ids):
        letter = tx.get(db.dead_letter, dead_id)
        assert letter is not None
        _ask(db, tx, job_id, letter)
    return f"INSERT 0 {len(ids)}"


@answers(replays.SET_STATE)
def set_dead_state(db: Database, tx: Transaction, ids: Sequence[int], state: str) -> str:
    for dead_id in ids:
        tx.change(db.dead_letter, dead_id, state=state)
    return f"UPDATE {len(ids)}"


@answers(replays.UNBLOCK)
def unblock(db: Database, tx: Transaction, ids: Sequence[int]) -> Steps:
    for dead_id in ids:
        letter = tx.get(db.dead_letter, dead_id)
        assert letter is not None
        yield from _unblock(db, tx, letter)
    return "DELETE 1"


@answers(discard.FIND_DEAD)
def find_dead(
    db: Database,
    tx: Transaction,
    after: int,
    endpoint_ids: Sequence[UUID] | None,
    limit: int,
    *_: Any,
) -> list[Row]:
    found = []
    for d in sorted(tx.rows(db.dead_letter), key=lambda d: int(d["id"])):
        if d["id"] > after and d["state"] == "dead":
            block = tx.get(db.lane_block, d["lane_id"])
            blocks = block is not None and block["seq"] == d["seq"]
            found.append({"id": d["id"], "blocks": blocks})
    return found[:limit]


@answers(discard.LOCK_STILL_DEAD)
def lock_still_dead(db: Database, tx: Transaction, ids: Sequence[int]) -> Steps:
    found = []
    for dead_id in sorted(ids):
        yield Wait(db.dead_letter, dead_id, EXCLUSIVE)
        row = tx.get(db.dead_letter, dead_id)
        if row is not None and row["state"] == "dead":
            found.append({"id": dead_id})
    return found


@answers(replay_feed.CANCEL_REPLAYS)
def call_off(db: Database, tx: Transaction, endpoint_id: UUID | None, job_id: int | None) -> Steps:
    for r in list(tx.rows(db.replay)):
        if r["next_seq"] > r["to_seq"]:
            continue
        if endpoint_id not in (None, r["endpoint_id"]) or job_id not in (None, r["job_id"]):
            continue
        if r["dead_id"] is None:
            tx.change(db.replay, r["id"], to_seq=r["next_seq"] - 1)
            continue
        yield Wait(db.dead_letter, r["dead_id"], UPDATE)
        letter = tx.get(db.dead_letter, r["dead_id"])
        assert letter is not None
        if r["next_seq"] > letter["seq"]:
            tx.change(db.replay, r["id"], to_seq=r["next_seq"] - 1)
        else:
            tx.put(db.replay, r["id"], None)
        tx.change(db.dead_letter, r["dead_id"], state="dead")
    return "UPDATE 1"


@answers(replay_jobs.LOCK_JOB)
def lock_job(db: Database, tx: Transaction, job_id: int) -> Steps:
    if tx.get(db.replay_job, job_id) is None:
        return []
    yield Wait(db.replay_job, job_id, EXCLUSIVE)
    row = tx.get(db.replay_job, job_id)
    assert row is not None
    return [{"state": row["state"]}]


@answers(replay_jobs.ABORT_JOB)
def abort_job(db: Database, tx: Transaction, job_id: int) -> str:
    tx.change(db.replay_job, job_id, state="aborted", ended_at=db.clock_timestamp())
    return "UPDATE 1"


@answers(replay_jobs.READ_JOB)
def read_job(db: Database, tx: Transaction, job_id: int) -> list[Row]:
    row = tx.get(db.replay_job, job_id)
    assert row is not None
    parts = [p for p in tx.rows(db.replay_part) if p["job_id"] == job_id]
    numbers = {name: sum(p[name] for p in parts) for name in ("taken", "erased")}
    rest = dict.fromkeys(("open", "done", "all", "disabled", "removed", "unsubscribed"), 0)
    lane = dict.fromkeys(("lane_endpoint", "from_sequence", "to_sequence"))
    return [{**row, **numbers, **rest, **lane, "endpoints": len(parts), "asked_at": None}]


@answers(backfill.FIND_ENDPOINT)
def find_endpoint(db: Database, tx: Transaction, name: str) -> list[Row]:
    return [
        {"id": e["id"], "state": e["state"], "subscribed": _subscribed(db, tx, e["id"])}
        for e in tx.rows(db.endpoint)
        if e["name"] == name and e["state"] != "removed"
    ]


@answers(backfill.READ_CURSOR)
def read_cursor(db: Database, tx: Transaction) -> list[Row]:
    newest = db.batches[-1]
    gaps = [*newest.young, *((gap["lo"], gap["hi"]) for gap in tx.rows(db.gap))]
    return [{"high": newest.high, "gaps": [Range(lo, hi + 1) for lo, hi in sorted(gaps)]}]


@answers(backfill.FIND_FIRST)
def find_first(db: Database, tx: Transaction, since: Any, high: int) -> list[Row]:
    before = [b.high for b in db.batches if b.at < since]
    start = before[-1] if before else 0
    ids = (i for i in db.outbox_ids if start < i <= high and db.outbox[i].created_at >= since)
    return [{"id": i} for i in ids][:1]


@answers(backfill.FIND_LAST)
def find_last(db: Database, tx: Transaction, first: int, high: int, until: Any) -> list[Row]:
    return [{"id": i} for i in reversed(db.outbox_ids) if first <= i <= high][:1]


@answers(receiver_replays.READ_STATE)
def read_endpoint_state(db: Database, tx: Transaction, endpoint_id: UUID) -> list[Row]:
    return [{"state": _endpoint(db, tx, endpoint_id)["state"]}]


@answers(receiver_replays.FIND_RUNNING)
def find_running(db: Database, tx: Transaction, endpoint_id: UUID, lane_id: int) -> list[Row]:
    return [
        {"job_id": part["job_id"]}
        for part in _open_parts(db, tx)
        if part["endpoint_id"] == endpoint_id
        and db.replay_job.rows[part["job_id"]]["lane_id"] == lane_id
    ]


@answers(receiver_replays.FIND_FIRST)
def find_first_kept(db: Database, tx: Transaction, lane_id: int, _: int, after: int) -> list[Row]:
    kept = (g for g in db.deliveries.get(lane_id, []) if g.seq > after)
    return [{"seq": g.seq, "batch": g.batch} for g in kept][:1]


@answers(receiver_replays.ADD_REPLAY)
def add_replay(db: Database, tx: Transaction, job_id: int, *columns: Any) -> str:
    new = db.serial(db.replay)
    names = ("endpoint_id", "next_seq", "next_batch", "to_seq")
    told = dict(zip(names, columns, strict=True))
    tx.put(db.replay, new, {"id": new, "job_id": job_id, "dead_id": None, **told})
    return "INSERT 0 1"


@answers(lane_history.FIND_BATCH)
def find_batch(_db: Database, _tx: Transaction, _lane_id: int, _seq: int) -> list[Row]:
    # Where to begin to look: from the beginning is right, too.
    return [{"min": 0}]


@answers(lane_history.READ_LANES)
def read_own_lanes(
    db: Database, tx: Transaction, endpoint_id: UUID, generation: int, slot: int, *_: Any
) -> list[Row]:
    e = _endpoint(db, tx, endpoint_id)
    rows = []
    for lane in tx.rows(db.lane):
        place = (lane["endpoint_id"], lane["generation"], lane["slot"])
        if e["state"] == "removed" or place != (endpoint_id, generation, slot):
            continue
        progress, counter = (
            tx.get(db.lane_progress, lane["id"]),
            tx.get(db.lane_counter, lane["id"]),
        )
        assert progress is not None
        assert counter is not None
        told = {"acked_seq": progress["acked_seq"], "last_seq": counter["last_seq"]}
        tail = [
            t.seq
            for t in db.attempts.get(lane["id"], ())
            if t.outcome == "delivered" and t.seq > progress["acked_seq"]
        ]
        ended = lane["generation"] < e["generation"]
        rows.append({**lane, **told, "ended": ended, "tail": tail})
    return rows


@answers(dead_letter_filter.FIND_ENDPOINTS)
def find_endpoints(db: Database, tx: Transaction, name: str) -> list[Row]:
    return [{"id": e["id"]} for e in tx.rows(db.endpoint) if e["name"] == name]


@answers(routing_change.READ_NOW)
def read_now(db: Database, tx: Transaction) -> list[Row]:
    return [{"now": db.clock_timestamp()}]
