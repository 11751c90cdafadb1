"""Replays of dead letters, requested by operators."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING

from outbox.errors import Conflict, NotFound
from outbox.operations.dead_letters.replay import ReplayCandidates, ReplayReport
from outbox.operations.replays.jobs import JobRange
from outbox.store.connection.connect import map_errors
from tests.sim.database.engine import EXCLUSIVE, Wait, abort_unless
from tests.sim.stores.change import make_change_and_read, new_job
from tests.sim.stores.timeline import first_generation

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from outbox.core.sequencing.gaps import Range
    from outbox.core.sequencing.replay_throttle import ReplayKind
    from outbox.operations.criteria import Criteria, DeadLetterSelection
    from tests.sim.database.connection import Connection
    from tests.sim.database.engine import Row, Steps, Transaction
    from tests.sim.database.tables import Database
    from tests.sim.stores.change import Change

UNAVAILABLE = {
    "removing": "removed",
    "removed": "removed",
    "disabling": "disabled",
    "disabled": "disabled",
}
"""Why dead letters of endpoints in these states cannot be replayed."""


async def start_replay(
    connection: Connection,
    schema: str,
    selection: DeadLetterSelection,
    *,
    actor: str,
    rate_per_s: float | None = None,
    counted: int | None = None,
    dry_run: bool = False,
) -> ReplayReport:
    assert not dry_run
    assert counted is None
    found: list[ReplayCandidates] = []
    if not selection.ids:
        if selection.criteria:
            raise NotImplementedError("a sweep of the simulation is of all dead letters")
        with map_errors(schema, "operator"):
            found = await find_candidates(connection, selection, to_replay=True)
        if all(each.reason is not None for each in found):
            return _report(found, None)

    async def plan(change: Change) -> list[ReplayCandidates]:
        ids = await choose_dead(change.db, selection.ids, to_replay=True)
        candidates = found or await find_candidates(change.db, selection, to_replay=True)
        some = [each for each in candidates if each.reason is None]
        # Those with ids have their replays already.
        ranges = [
            JobRange(e.endpoint_id, *((1, 0) if ids else (e.first_id, e.last_id)), e.numbers)
            for e in some
        ]
        add_job(change, "dead", selection.criteria, ranges, rate_per_s=rate_per_s)
        if ids:
            write_dead_letter_state(change, ids, "replaying")
            change.write(add_replays, ids)
        change.journal("dead_replayed", None, {"dead": ids}, with_job=True)
        return candidates

    async def read_back(
        db: Connection, request: UUID, replayed: list[ReplayCandidates]
    ) -> ReplayReport:
        return _report(replayed, await db.call(find_new_job, request))

    return await make_change_and_read(connection, schema, actor, plan, read_back)


async def read_new_job(db: Connection, request: UUID, _: object) -> int:
    return await db.call(find_new_job, request)


def add_job(
    change: Change,
    kind: ReplayKind,
    criteria: Criteria,
    ranges: Sequence[JobRange],
    *,
    rate_per_s: float | None,
    gaps: Sequence[Range] = (),
    outbox_ids: Sequence[int] | None = None,
) -> None:
    assert outbox_ids is None
    row: Row = {"kind": kind, "endpoint": criteria.endpoint, "since": criteria.since}
    row |= {"rate_per_s": rate_per_s, "requested_by": change.actor, "gaps": gaps}
    change.write_early(add_replay_job, row)
    change.write_early(add_replay_parts, ranges)


def write_dead_letter_state(change: Change, ids: Sequence[int], state: str) -> None:
    change.write(require_dead, ids)
    change.write(set_dead_letter_state, ids, state)
    change.write(unblock, ids)


async def find_candidates(
    connection: Connection, selection: DeadLetterSelection, *, to_replay: bool
) -> list[ReplayCandidates]:
    await choose_dead(connection, selection.ids, to_replay=to_replay)
    return await connection.call(count_selected, selection.ids)


async def choose_dead(connection: Connection, ids: Sequence[int], *, to_replay: bool) -> list[int]:
    if not ids:
        return []
    rows = await connection.call(read_dead, sorted(set(ids)))
    if missing := set(ids) - {row["id"] for row in rows}:
        raise NotFound(f"there is no dead letter {min(missing)}")
    for row in rows:
        if row["state"] == "replaying":
            await connection.call(read_last_replay)
        if row["state"] != "dead":
            raise Conflict(f"dead letter {row['id']} is {row['state']}")
    found = [row["id"] for row in rows if not (to_replay and row["endpoint_state"] in UNAVAILABLE)]
    if not found:
        raise Conflict("the endpoints of all of them are not available")
    return found


def _report(found: Sequence[ReplayCandidates], job: int | None) -> ReplayReport:
    skipped: Counter[str] = Counter()
    for each in found:
        if each.reason is not None:
            skipped[each.reason] += each.dead_letters
    dead_letters = {each.endpoint: each.dead_letters for each in found if each.reason is None}
    return ReplayReport(False, sum(dead_letters.values()), dead_letters, dict(skipped), job)


# --------------------------------------------------------------------- its jobs


def count_selected(db: Database, tx: Transaction, ids: Sequence[int]) -> list[ReplayCandidates]:
    found: dict[UUID, list[Row]] = {}
    for d in tx.rows(db.dead_letter):
        if d["state"] == "dead" and (not ids or d["id"] in ids):
            found.setdefault(d["endpoint_id"], []).append(d)
    rows = []
    for endpoint_id, dead_letters in found.items():
        e = tx.get(db.endpoint, endpoint_id)
        assert e is not None
        ids, count = [d["id"] for d in dead_letters], len(dead_letters)
        numbers = sum(d["to_seq"] - d["seq"] + 1 for d in dead_letters)
        reason = UNAVAILABLE.get(e["state"])
        skipped = 0 if reason is None else count
        counts = (count, numbers, skipped, reason, min(ids), max(ids))
        rows.append(ReplayCandidates(endpoint_id, e["name"], *counts))
    return sorted(rows, key=lambda row: row.endpoint)


def find_new_job(db: Database, tx: Transaction, request: UUID) -> int:
    row = tx.get(db.journalled, request)
    assert row is not None
    job: int = row["data"]["job"]
    return job


def next_job_id(db: Database, tx: Transaction) -> int:
    return first_generation(db, max((job["id"] for job in tx.rows(db.replay_job)), default=0))


def add_replay_job(db: Database, tx: Transaction, columns: Row) -> None:
    new = next_job_id(db, tx)
    tx.put(db.replay_job, new, {**columns, "id": new, "state": "running", "ended_at": None})


def add_replay_parts(db: Database, tx: Transaction, ranges: Sequence[JobRange]) -> None:
    job_id = new_job(db, tx)
    for each in ranges:
        row = {**asdict(each), "job_id": job_id, "next_id": each.first_id}
        row |= {"taken": 0, "erased": 0, "batch": None, "ended_at": None, "end_reason": None}
        tx.put(db.replay_job_endpoint, (job_id, each.endpoint_id), row)


def add_replays(db: Database, tx: Transaction, ids: Sequence[int]) -> None:
    for dead_id in sorted(ids):
        dead_letter = tx.get(db.dead_letter, dead_id)
        assert dead_letter is not None
        add_replay(db, tx, new_job(db, tx), dead_letter)


def add_replay(db: Database, tx: Transaction, job_id: int, dead_letter: Row) -> None:
    new = db.serial(db.replay)
    place = {
        "next_seq": dead_letter["seq"],
        "next_batch": dead_letter["batch"],
        "to_seq": dead_letter["to_seq"],
    }
    of = {"job_id": job_id, "endpoint_id": dead_letter["endpoint_id"], "dead_id": dead_letter["id"]}
    tx.put(db.replay, new, {"id": new, **of, **place})


# ------------------------------------------------------------- the dead letters


def read_dead(db: Database, tx: Transaction, ids: Sequence[int]) -> list[Row]:
    found = []
    for row in (tx.get(db.dead_letter, dead_id) for dead_id in ids):
        if row is not None:
            e = tx.get(db.endpoint, row["endpoint_id"])
            assert e is not None
            found.append({**row, "endpoint_state": e["state"], "endpoint": e["name"]})
    return found


def read_last_replay(db: Database, tx: Transaction) -> None:
    """Only the text of an error depends on it."""


def require_dead(db: Database, tx: Transaction, ids: Sequence[int]) -> Steps[None]:
    """Lock dead letters, and abort if one has another state than `dead`."""
    for dead_id in sorted(ids):
        yield Wait(db.dead_letter, dead_id, EXCLUSIVE)
        row = tx.get(db.dead_letter, dead_id)
        abort_unless(row is not None and row["state"] == "dead")


def set_dead_letter_state(db: Database, tx: Transaction, ids: Sequence[int], state: str) -> None:
    for dead_id in ids:
        tx.change(db.dead_letter, dead_id, state=state)


def is_blocking(db: Database, tx: Transaction, dead_letter: Row) -> bool:
    """Whether a dead letter blocks its lane."""
    block = tx.get(db.lane_block, dead_letter["lane_id"])
    return block is not None and block["seq"] == dead_letter["seq"]


def unblock(db: Database, tx: Transaction, ids: Sequence[int]) -> Steps[int]:
    """Unblock the lanes that these dead letters block; returns how many."""
    unblocked = 0
    for dead_id in ids:
        dead_letter = tx.get(db.dead_letter, dead_id)
        assert dead_letter is not None
        if is_blocking(db, tx, dead_letter):
            yield Wait(db.lane_block, dead_letter["lane_id"], EXCLUSIVE)
            tx.put(db.lane_block, dead_letter["lane_id"], None)
            unblocked += 1
    return unblocked
