"""Catching up: what an endpoint has missed while it was disabled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.operations.criteria import Criteria
from outbox.operations.feeds.catch_up import CatchUp
from outbox.operations.replays.jobs import JobRange
from tests.sim.stores.replays import add_job, add_replays, write_dead_letter_state
from tests.sim.stores.starts import begin_feed, count_after, resolve_missed

if TYPE_CHECKING:
    from uuid import UUID

    from tests.sim.database.engine import Row, Transaction
    from tests.sim.database.tables import Database
    from tests.sim.stores.change import Change


async def plan_catch_up(change: Change, endpoint_id: UUID, name: str) -> CatchUp | None:
    start = await resolve_missed(change.db, endpoint_id)
    if start is None:
        return None
    ranges = await change.db.call(read_disabled_ranges, endpoint_id)
    pending = sum(each["to_seq"] - each["seq"] + 1 for each in ranges)
    if ranges:
        ids, criteria = [each["id"] for each in ranges], Criteria(name, reason="disabled")
        part = JobRange(endpoint_id, 1, 0, pending)
        add_job(change, "dead", criteria, [part], rate_per_s=None)
        write_dead_letter_state(change, ids, "replaying")
        change.write(add_replays, ids)
    begin_feed(change, endpoint_id, start, after_new_job=bool(ranges))
    return CatchUp(pending, await count_after(change.db, start))


# ------------------------------------------------------------------------ steps


def read_disabled_ranges(db: Database, tx: Transaction, endpoint_id: UUID) -> list[Row]:
    """The dead letters of the last time that an endpoint was disabled."""
    began = [
        at
        for at, kind, _, of_id, _ in db.journal
        if of_id == endpoint_id and kind == "endpoint_disabling"
    ]
    found = [
        row
        for row in tx.rows(db.dead_letter)
        if (row["endpoint_id"], row["state"], row["reason"]) == (endpoint_id, "dead", "disabled")
        and began
        and row["at"] >= max(began)
    ]
    return sorted(found, key=lambda row: int(row["id"]))
