"""The progress of replay jobs, in the message that writes a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.sim.database.engine import UPDATE, Wait
from tests.sim.stores import replay_jobs, routing_change
from tests.sim.stores.replay_feed import open_parts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.core.sequencing.replay_throttle import JobPart
    from outbox.core.sequencing.router import ReplayChunk
    from outbox.store.replays.replay_progress import PartProgress, ReplayBatch
    from tests.sim.database.engine import Row, Steps, Transaction
    from tests.sim.database.tables import Database


def write_progress(
    db: Database, tx: Transaction, batch: int, replays: ReplayBatch, actor: str
) -> Steps[None]:
    """Store what a batch has taken of replay jobs, and end them."""
    advance_replays(db, tx, replays.chunks)
    yield from advance_parts(db, tx, batch, replays.moves)
    parts = [share.part for share in replays.ends]
    stopped = {p.endpoint_id for p in parts if p.end_reason in ("disabled", "removed")}
    for endpoint_id in sorted(stopped):
        yield from replay_jobs.cancel_replays(db, tx, endpoint_id, None)
    yield from end_parts(db, tx, parts)
    yield from end_jobs(db, tx, sorted({p.job_id for p in parts}), actor)


def advance_replays(db: Database, tx: Transaction, chunks: Sequence[ReplayChunk]) -> None:
    for each in chunks:
        tx.change(db.replay, each.id, next_seq=each.next_seq, next_batch=each.next_batch)


def advance_parts(
    db: Database, tx: Transaction, batch: int, moves: Sequence[PartProgress]
) -> Steps[None]:
    for m in moves:
        key = m.share.part.key
        yield Wait(db.replay_job_endpoint, key, UPDATE)
        part = tx.get(db.replay_job_endpoint, key)
        assert part is not None
        tx.change(db.replay_job_endpoint, key, **position_columns(part, batch, m))


def position_columns(part: Row, batch: int, progress: PartProgress) -> Row:
    """The columns of a part that a batch changes."""
    return {
        "next_id": part["next_id"] if progress.next_id is None else progress.next_id,
        "taken": part["taken"] + progress.taken,
        "batch": batch if progress.taken else part["batch"],
        "from_id": progress.from_id,
    }


def end_parts(db: Database, tx: Transaction, parts: Sequence[JobPart]) -> Steps[None]:
    for part in parts:
        yield Wait(db.replay_job_endpoint, part.key, UPDATE)
        ended = {"ended_at": db.clock_timestamp(), "end_reason": part.end_reason, "from_id": None}
        tx.change(db.replay_job_endpoint, part.key, **ended)


def end_jobs(db: Database, tx: Transaction, ids: Sequence[int], actor: str) -> Steps[None]:
    """End those of the jobs that have no open part."""
    for job_id in ids:
        if any(part["job_id"] == job_id for part in open_parts(db, tx)):
            continue
        yield Wait(db.replay_job, job_id, UPDATE)
        job = tx.get(db.replay_job, job_id)
        assert job is not None
        state = "done" if job["state"] == "running" else job["state"]
        tx.change(db.replay_job, job_id, state=state, ended_at=db.clock_timestamp())
        taken = sum(p["taken"] for p in tx.rows(db.replay_job_endpoint) if p["job_id"] == job_id)
        data = {"job": job_id, "state": state, "taken": taken}
        routing_change.add_to_journal(db, tx, "replay_ended", actor, None, data)
