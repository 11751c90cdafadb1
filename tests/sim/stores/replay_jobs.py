"""Replay jobs that an operator aborts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.errors import Conflict, NotFound
from outbox.operations.replay_jobs import ReplayJob
from tests.sim.database.engine import EXCLUSIVE, UPDATE, Wait
from tests.sim.stores.routing_change import routing_transaction, write_journal

if TYPE_CHECKING:
    from uuid import UUID

    from tests.sim.database.connection import Connection
    from tests.sim.database.engine import Steps, Transaction
    from tests.sim.database.tables import Database


async def abort(connection: Connection, schema: str, job_id: int, *, actor: str) -> ReplayJob:
    async with routing_transaction(connection, schema):
        state = await connection.call(lock_job, job_id)
        if state is None:
            raise NotFound(f"there is no replay job {job_id}")
        if state != "running":
            raise Conflict(f"replay job {job_id} is {state}")
        await connection.call(cancel_replays, None, job_id)
        await connection.call(abort_job, job_id)
        job = await connection.call(read_job, job_id)
        data = {"job": job_id, "taken": job.taken}
        await write_journal(connection, "replay_aborted", actor, None, data)
    return job


def lock_job(db: Database, tx: Transaction, job_id: int) -> Steps[str | None]:
    """Returns the state; None: there is no such job."""
    if tx.get(db.replay_job, job_id) is None:
        return None
    yield Wait(db.replay_job, job_id, EXCLUSIVE)
    row = tx.get(db.replay_job, job_id)
    assert row is not None
    return str(row["state"])


def cancel_replays(
    db: Database, tx: Transaction, endpoint_id: UUID | None, job_id: int | None
) -> Steps[None]:
    """Cancel the pending replays of an endpoint or of a job: their dead letters are dead again."""
    for r in list(tx.rows(db.replay)):
        if r["next_seq"] > r["to_seq"]:
            continue
        if endpoint_id not in (None, r["endpoint_id"]) or job_id not in (None, r["job_id"]):
            continue
        if r["dead_id"] is None:
            tx.change(db.replay, r["id"], to_seq=r["next_seq"] - 1)
            continue
        yield Wait(db.dead_letter, r["dead_id"], UPDATE)
        dead_letter = tx.get(db.dead_letter, r["dead_id"])
        assert dead_letter is not None
        if r["next_seq"] > dead_letter["seq"]:
            tx.change(db.replay, r["id"], to_seq=r["next_seq"] - 1)
        else:
            tx.put(db.replay, r["id"], None)
        tx.change(db.dead_letter, r["dead_id"], state="dead")


def abort_job(db: Database, tx: Transaction, job_id: int) -> None:
    tx.change(db.replay_job, job_id, state="aborted", ended_at=db.clock_timestamp())


def read_job(db: Database, tx: Transaction, job_id: int) -> ReplayJob:
    row = tx.get(db.replay_job, job_id)
    assert row is not None
    parts = [p for p in tx.rows(db.replay_job_endpoint) if p["job_id"] == job_id]
    names = ("id", "kind", "state", "endpoint", "since", "rate_per_s")
    unknown = ("lane", "from_sequence", "to_sequence", "types", "tenant", "reason", "until")
    columns: dict[str, Any] = {name: row[name] for name in names} | dict.fromkeys(unknown)
    return ReplayJob(
        **columns,
        requested_at=row["ended_at"],
        requested_by=row["requested_by"],
        ended_at=row["ended_at"],
        endpoints=len(parts),
        open=sum(p["ended_at"] is None for p in parts),
        taken=sum(p["taken"] for p in parts),
        erased=sum(p["erased"] for p in parts),
        done=0,
        all=0,
        stopped={},
    )
