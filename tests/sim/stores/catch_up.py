"""Catching up: what an endpoint has missed while it was disabled."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from outbox.errors import Conflict
from outbox.operations.criteria import Criteria
from outbox.operations.feeds.catch_up import CatchUp
from outbox.operations.replays.jobs import JobRange
from tests.sim.stores.change import new_job
from tests.sim.stores.replays import add_job, write_dead_letter_state
from tests.sim.stores.starts import begin_feed, count_after, resolve_missed

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from tests.sim.database.engine import Transaction
    from tests.sim.database.tables import Database
    from tests.sim.stores.change import Change


async def plan_catch_up(change: Change, endpoint_id: UUID, name: str) -> CatchUp | None:
    start = await resolve_missed(change.db, endpoint_id)
    if start is None:
        return None
    if await change.db.call(find_earlier_job, endpoint_id) is not None:
        raise Conflict("its last catch-up has not ended yet")
    rests = await change.db.call(read_disabled, endpoint_id)
    pending = sum(each.to_seq - each.next_seq + 1 for each in rests)
    if rests:
        criteria = Criteria(name, reason="disabled")
        part = JobRange(endpoint_id, 1, 0, pending)
        add_job(change, "dead", criteria, [part], rate_per_s=None)
        write_dead_letter_state(change, [each.dead_id for each in rests], "replaying")
        change.write(add_rests, endpoint_id, rests)
    begin_feed(change, endpoint_id, start, after_new_job=bool(rests))
    return CatchUp(pending, await count_after(change.db, start))


class Rest(NamedTuple):
    """What is left of a dead letter."""

    dead_id: int
    next_seq: int
    next_batch: int
    to_seq: int


# ------------------------------------------------------------------------ steps


def find_earlier_job(db: Database, tx: Transaction, endpoint_id: UUID) -> int | None:
    jobs = {f["after_job"] for f in tx.rows(db.feed) if f["endpoint_id"] == endpoint_id}
    running = {
        part["job_id"]
        for part in tx.rows(db.replay_job_endpoint)
        if part["endpoint_id"] == endpoint_id and part["ended_at"] is None
    }
    return min(jobs & running, default=None)


def read_disabled(db: Database, tx: Transaction, endpoint_id: UUID) -> list[Rest]:
    """What is left of the dead letters since an endpoint had got everything."""
    own = [(at, kind, data) for at, kind, _, of_id, data in db.journal if of_id == endpoint_id]
    whole = max(
        (
            at
            for at, kind, data in own
            if kind in ("endpoint_added", "endpoint_caught_up")
            or (kind == "endpoint_enabled" and "catches_up" not in data)
        ),
        default=-math.inf,
    )
    found = []
    for row in tx.rows(db.dead_letter):
        its = row["endpoint_id"], row["state"], row["reason"]
        if its != (endpoint_id, "dead", "disabled") or row["at"] < whole:
            continue
        enabled = sum(kind == "endpoint_enabled" and at <= row["at"] for at, kind, _ in own)
        former = [r for r in tx.rows(db.replay) if r["dead_id"] == row["id"]]
        place = row["seq"], row["batch"]
        if former:
            newest = max(former, key=lambda r: int(r["id"]))
            place = newest["to_seq"] + 1, newest["next_batch"]
        rest = Rest(row["id"], *place, row["to_seq"])
        if rest.next_seq <= rest.to_seq:
            found.append((-enabled, rest))
    return [rest for _, rest in sorted(found)]


def add_rests(db: Database, tx: Transaction, endpoint_id: UUID, rests: Sequence[Rest]) -> None:
    job_id = new_job(db, tx)
    for dead_id, next_seq, next_batch, to_seq in rests:
        new = db.serial(db.replay)
        place = {"next_seq": next_seq, "next_batch": next_batch, "to_seq": to_seq}
        of = {"job_id": job_id, "endpoint_id": endpoint_id, "dead_id": dead_id}
        tx.put(db.replay, new, {"id": new, **of, **place})
