"""Requests of receivers to send deliveries of a lane again."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from outbox.core.model.ids import lane_name as name_of
from outbox.errors import Conflict, NotFound
from outbox.operations.lane_history import LaneHistory
from outbox.operations.new_replay_job import JobPart
from outbox.operations.receiver_replays import ReceiverReplay
from outbox.store.connection.connect import map_errors
from tests.sim.stores.change import make_change_and_read, new_job
from tests.sim.stores.replay_feed import open_parts
from tests.sim.stores.replays import add_job, find_new_job, require_oldest

if TYPE_CHECKING:
    from uuid import UUID

    from outbox.operations.fetch_tokens import Fetcher
    from tests.sim.database.connection import Connection
    from tests.sim.database.engine import Transaction
    from tests.sim.database.tables import Database, Given
    from tests.sim.stores.change import Change


async def request_replay(
    connection: Connection,
    schema: str,
    fetcher: Fetcher,
    lane_name: str,
    after: int,
    to: int | None = None,
) -> ReceiverReplay:
    endpoint_id = fetcher.endpoint_id
    with map_errors(schema):
        lane = await connection.call(find_lane, endpoint_id, lane_name)
        if lane is None:
            raise NotFound(f"there is no lane {lane_name}")
        await _require_idle(connection, endpoint_id, lane)
        last = lane.acknowledged if to is None else min(to, lane.acknowledged)
        await connection.call(find_batch)
        nothing = ReceiverReplay(lane.name, None, None, None, lane.acknowledged)
        if await connection.call(find_first, lane.id, after, last) is None:
            return nothing

    async def plan(change: Change) -> ReceiverReplay:
        await _require_idle(change.db, endpoint_id, lane)
        await require_oldest(change, "log")
        first = await change.db.call(find_first, lane.id, after, last)
        if first is None:
            return nothing
        columns = {"kind": "lane", "endpoint": fetcher.name, "lane_id": lane.id}
        add_job(change, columns, [JobPart(endpoint_id, first.seq, last)])
        change.write(add_lane_replay, endpoint_id, first, last)
        data = {"lane": lane.name, "from": first.seq, "to": last}
        change.journal("lane_replay_requested", endpoint_id, data, with_job=True)
        return replace(nothing, from_sequence=first.seq, to_sequence=last)

    async def read_back(db: Connection, request: UUID, replay: ReceiverReplay) -> ReceiverReplay:
        return replace(replay, job=await db.call(find_new_job, request))

    actor = f"receiver {fetcher.name}"
    return await make_change_and_read(connection, schema, actor, plan, read_back)


async def _require_idle(connection: Connection, endpoint_id: UUID, lane: LaneHistory) -> None:
    state = await connection.call(read_state, endpoint_id)
    if state not in ("active", "paused"):
        raise Conflict(f"the endpoint is {state}")
    if await connection.call(is_running, endpoint_id, lane.id):
        raise Conflict(f"lane {lane.name} is being sent again already")


def find_lane(
    db: Database, tx: Transaction, endpoint_id: UUID, lane_name: str
) -> LaneHistory | None:
    e = tx.get(db.endpoint, endpoint_id)
    assert e is not None
    for lane in tx.rows(db.lane):
        place = (lane["endpoint_id"], lane["generation"], lane["slot"])
        if endpoint_id != place[0] or name_of(*place) != lane_name or e["state"] == "removed":
            continue
        progress, counter = (
            tx.get(db.lane_progress, lane["id"]),
            tx.get(db.lane_counter, lane["id"]),
        )
        assert progress is not None
        assert counter is not None
        acknowledged = progress["acked_seq"]
        delivered = {t.seq for t in db.attempts.get(lane["id"], ()) if t.outcome == "delivered"}
        while acknowledged + 1 in delivered:
            acknowledged += 1
        ended = lane["generation"] < e["generation"]
        return LaneHistory(lane["id"], *place, acknowledged, counter["last_seq"], ended)
    return None


def read_state(db: Database, tx: Transaction, endpoint_id: UUID) -> str:
    e = tx.get(db.endpoint, endpoint_id)
    assert e is not None
    return str(e["state"])


def is_running(db: Database, tx: Transaction, endpoint_id: UUID, lane_id: int) -> bool:
    return any(
        part["endpoint_id"] == endpoint_id
        and db.replay_job.rows[part["job_id"]]["lane_id"] == lane_id
        for part in open_parts(db, tx)
    )


def find_batch(db: Database, tx: Transaction) -> None:
    """The search begins at the first delivery, whatever the batch."""


def find_first(db: Database, tx: Transaction, lane_id: int, after: int, last: int) -> Given | None:
    """The first delivery behind a sequence number and up to another one."""
    kept = (g for g in db.deliveries.get(lane_id, []) if after < g.seq <= last)
    return next(kept, None)


def add_lane_replay(
    db: Database, tx: Transaction, endpoint_id: UUID, first: Given, last: int
) -> None:
    new = db.serial(db.replay)
    row = {"id": new, "job_id": new_job(db, tx), "endpoint_id": endpoint_id, "dead_id": None}
    row |= {"next_seq": first.seq, "next_batch": first.batch, "to_seq": last}
    tx.put(db.replay, new, row)
