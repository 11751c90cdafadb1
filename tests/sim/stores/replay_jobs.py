"""Replay jobs that an operator aborts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.errors import Conflict, NotFound
from outbox.operations.replays.jobs import ReplayJob
from outbox.store.connection.connect import map_errors
from tests.sim.database.engine import UPDATE, Wait, abort_unless
from tests.sim.stores.change import make_change_and_read

if TYPE_CHECKING:
    from uuid import UUID

    from tests.sim.database.connection import Connection
    from tests.sim.database.engine import Steps, Transaction
    from tests.sim.database.tables import Database
    from tests.sim.stores.change import Change


async def get_job(connection: Connection, schema: str, job_id: int) -> ReplayJob:
    with map_errors(schema):
        job = await connection.call(read_job, job_id)
    if job is None:
        raise NotFound(f"there is no replay job {job_id}")
    return job


async def abort_job(connection: Connection, schema: str, job_id: int, *, actor: str) -> ReplayJob:
    async def plan(change: Change) -> None:
        job = await get_job(change.db, schema, job_id)
        if job.state != "running":
            raise Conflict(f"replay job {job_id} is {job.state}")
        change.write(abort_job_row, job_id)
        change.write(cancel_replays, None, job_id)
        change.journal("replay_aborted", None, {"job": job_id, "taken": job.taken})

    async def read_back(db: Connection, _: UUID, __: None) -> ReplayJob:
        return await get_job(db, schema, job_id)

    return await make_change_and_read(connection, schema, actor, plan, read_back)


# ------------------------------------------------------------------------ steps


def cancel_replays(
    db: Database, tx: Transaction, endpoint_id: UUID | None, job_id: int | None
) -> Steps[None]:
    """Cancel the pending replays of an endpoint or of a job: their dead letters are dead again."""
    for r in list(tx.rows(db.replay)):
        if r["next_seq"] > r["to_seq"]:
            continue
        if endpoint_id not in (None, r["endpoint_id"]) or job_id not in (None, r["job_id"]):
            continue
        yield Wait(db.dead_letter, r["dead_id"], UPDATE)
        dead_letter = tx.get(db.dead_letter, r["dead_id"])
        assert dead_letter is not None
        if r["next_seq"] > dead_letter["seq"]:
            tx.change(db.replay, r["id"], to_seq=r["next_seq"] - 1)
        else:
            tx.put(db.replay, r["id"], None)
        tx.change(db.dead_letter, r["dead_id"], state="dead")


def abort_job_row(db: Database, tx: Transaction, job_id: int) -> Steps[None]:
    yield Wait(db.replay_job, job_id, UPDATE)
    row = tx.get(db.replay_job, job_id)
    abort_unless(row is not None and row["state"] == "running")
    tx.change(db.replay_job, job_id, state="aborted", ended_at=db.clock_timestamp())


def read_job(db: Database, tx: Transaction, job_id: int) -> ReplayJob | None:
    row = tx.get(db.replay_job, job_id)
    if row is None:
        return None
    parts = [p for p in tx.rows(db.replay_job_endpoint) if p["job_id"] == job_id]
    names = ("id", "kind", "state", "endpoint", "since", "rate_per_s")
    unknown = ("types", "tenant", "reason", "until", "events")
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
