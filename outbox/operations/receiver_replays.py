"""Receiver replay: a receiver requests deliveries of a lane again.

The delivered sequences after a given one, up to the last acknowledged, are added again at the
end of their lanes, in order and behind live events.  Each copy has a new sequence number and
X-Delivery, and `replay_of`, so a receiver that has the original can discard it.  Dead letters
are not included: an operator replays them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from outbox.core.sequencing.partition_window import WIDTH
from outbox.errors import Conflict
from outbox.operations import lane_history
from outbox.operations.lane_history import FIND_BATCH
from outbox.operations.new_replay_job import READ_NEW_JOB, JobPart, add_job, require_oldest
from outbox.store.change import NEW_JOB, make_change_and_read
from outbox.store.connection.connect import map_errors
from outbox.store.connection.message import WriteStatement

if TYPE_CHECKING:
    from uuid import UUID

    from asyncpg import Connection

    from outbox.operations.fetch_tokens import Fetcher
    from outbox.operations.lane_history import LaneHistory
    from outbox.store.change import Change

READ_STATE = "SELECT state FROM endpoint WHERE id = $1"

FIND_RUNNING = """
SELECT p.job_id FROM replay_job_endpoint p JOIN replay_job j ON j.id = p.job_id
 WHERE p.endpoint_id = $1 AND p.ended_at IS NULL AND j.lane_id = $2
"""

# The first sequence after $3 in a retained batch; rows of a dropped period may still be visible.
FIND_FIRST = f"""
SELECT seq, batch FROM delivery
 WHERE lane_id = $1 AND seq > $3
   AND batch >= greatest($2, (SELECT min(number) * {WIDTH} FROM period
                               WHERE kind = 'log' AND dropped_at IS NULL))
 ORDER BY batch, seq LIMIT 1
"""  # noqa: S608 (a constant only)

ADD_REPLAY = WriteStatement(
    "add_lane_replay",
    f"""
INSERT INTO replay (job_id, endpoint_id, next_seq, next_batch, to_seq)
VALUES ({NEW_JOB}, $1, $2, $3, $4)
""",  # noqa: S608 (a constant only)
)


_ACTOR = "receiver "


def is_receiver(actor: str) -> bool:
    """Whether a journal actor is the receiver of an endpoint."""
    return actor.startswith(_ACTOR)


@dataclass(frozen=True, slots=True)
class ReceiverReplay:
    """The accepted range of a receiver replay."""

    lane: str
    job: int | None
    """The replay job; None: there is nothing to replay."""
    from_sequence: int | None
    """First replayed sequence that the log retains."""
    to_sequence: int | None
    """Last replayed sequence; higher ones are pending and are delivered anyway."""
    acknowledged: int
    """All sequences up to this one were delivered or dead-lettered."""


async def request_replay(
    connection: Connection[Any],
    schema: str,
    fetcher: Fetcher,
    lane_name: str,
    after: int,
    to: int | None = None,
) -> ReceiverReplay:
    """Replay a range of a lane, at the request of the endpoint's receiver.

    Args:
        after: replay sequences greater than this one.
        to: replay sequences up to this one; None: up to the last acknowledged.

    Raises:
        NotFound: the endpoint has no such lane.
        Conflict: a replay of the lane is running, or the endpoint is disabled.
    """
    with map_errors(schema):
        lane = await lane_history.get_lane(connection, schema, fetcher.endpoint_id, lane_name)
        await _require_idle(connection, fetcher, lane)
        last = lane.acknowledged if to is None else min(to, lane.acknowledged)
        batch = await connection.fetchval(FIND_BATCH, lane.id, after + 1)
        nothing = ReceiverReplay(lane.name, None, None, None, lane.acknowledged)
        if await _find_first(connection, lane, batch, after, last) is None:
            return nothing

    async def plan(change: Change) -> ReceiverReplay:
        await _require_idle(change.db, fetcher, lane)
        await require_oldest(change, "log")
        first = await _find_first(change.db, lane, batch, after, last)
        if first is None:
            return nothing
        endpoint_id, seq = fetcher.endpoint_id, first["seq"]
        row = {"kind": "lane", "endpoint": fetcher.name, "lane_id": lane.id}
        add_job(change, row, [JobPart(endpoint_id, seq, last)])
        change.write(ADD_REPLAY, endpoint_id, seq, first["batch"], last)
        data = {"lane": lane.name, "from": seq, "to": last}
        change.journal("lane_replay_requested", endpoint_id, data, with_job=True)
        return replace(nothing, from_sequence=seq, to_sequence=last)

    async def read_back(db: Any, request: UUID, replay: ReceiverReplay) -> ReceiverReplay:
        return replace(replay, job=await db.fetchval(READ_NEW_JOB, request))

    actor = _ACTOR + fetcher.name
    return await make_change_and_read(connection, schema, actor, plan, read_back)


async def _require_idle(connection: Connection[Any], fetcher: Fetcher, lane: LaneHistory) -> None:
    state = await connection.fetchval(READ_STATE, fetcher.endpoint_id)
    if state not in ("active", "paused"):
        raise Conflict(f"the endpoint is {state}, and receives nothing")
    running = await connection.fetchval(FIND_RUNNING, fetcher.endpoint_id, lane.id)
    if running is not None:
        raise Conflict(f"lane {lane.name} is being replayed already, by job {running}")


async def _find_first(
    connection: Connection[Any], lane: LaneHistory, batch: int, after: int, last: int
) -> Any:
    """The first sequence after `after` and up to `last`, with its batch; None: there is none."""
    row = await connection.fetchrow(FIND_FIRST, lane.id, batch, after)
    return row if row is not None and row["seq"] <= last else None
