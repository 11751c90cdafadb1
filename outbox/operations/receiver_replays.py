"""A receiver's wish to be sent again what a lane had delivered.

The numbers behind one that it names, up to what is acknowledged, come anew at the end of
their lanes, in order and in the pace that live events leave: each with a number and an
X-Delivery of its own, and with `replay_of`, so that a receiver that lost it takes it, and
one that has it does not.  What was given up is an operator's to send again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.core.sequencing.partition_window import WIDTH
from outbox.errors import Conflict
from outbox.operations import lane_history
from outbox.operations.lane_history import FIND_BATCH
from outbox.operations.replays import ADD_JOB, ADD_PARTS
from outbox.store.connection.connect import map_errors
from outbox.store.routing_change import change, write_journal

if TYPE_CHECKING:
    from asyncpg import Connection

    from outbox.operations.fetch_tokens import Fetcher
    from outbox.operations.lane_history import Lane

READ_STATE = "SELECT state FROM endpoint WHERE id = $1"

FIND_RUNNING = """
SELECT p.job_id FROM replay_part p JOIN replay_job j ON j.id = p.job_id
 WHERE p.endpoint_id = $1 AND p.ended_at IS NULL AND j.lane_id = $2
"""

# Behind a number, from a batch on that is kept: what is dropped may still be seen.
FIND_FIRST = f"""
SELECT seq, batch FROM delivery
 WHERE lane_id = $1 AND seq > $3
   AND batch >= greatest($2, (SELECT min(number) * {WIDTH} FROM period
                               WHERE kind = 'log' AND dropped_at IS NULL))
 ORDER BY batch, seq LIMIT 1
"""  # noqa: S608 (a constant only)

ADD_REPLAY = """
INSERT INTO replay (job_id, endpoint_id, next_seq, next_batch, to_seq)
VALUES ($1, $2, $3, $4, $5)
"""


_ACTOR = "receiver "


def is_receiver(actor: str) -> bool:
    """Whether it was asked for by the receiver of an endpoint, as it is told in the journal."""
    return actor.startswith(_ACTOR)


@dataclass(frozen=True, slots=True)
class Resending:
    """What will be sent again."""

    lane: str
    job: int | None
    """That tells how far it is; None: there is nothing behind the number."""
    from_sequence: int | None
    """The first one that the log still has."""
    to_sequence: int | None
    """What is higher is on its way anyway."""
    acknowledged: int
    """Up to here the lane's numbers were delivered or given up."""


async def ask(
    connection: Connection[Any],
    schema: str,
    fetcher: Fetcher,
    lane_name: str,
    after: int,
    to: int | None = None,
) -> Resending:
    """Have it sent again, once; the receiver of the lane's endpoint is who asks.

    Args:
        after, to: numbers of the lane, behind the one and up to the other.

    Raises:
        NotFound: the endpoint has no such lane.
        Conflict: that is being done already, or the endpoint is disabled.
    """
    with map_errors(schema):
        lane = await lane_history.lane(connection, schema, fetcher.endpoint_id, lane_name)
        await _require_idle(connection, fetcher, lane)
        last = lane.acknowledged if to is None else min(to, lane.acknowledged)
        batch = await connection.fetchval(FIND_BATCH, lane.id, after + 1)
        nothing = Resending(lane.name, None, None, None, lane.acknowledged)
        if await _first(connection, lane, batch, after, last) is None:
            return nothing
    actor = _ACTOR + fetcher.name
    # Nothing of all that needs to hold up whoever sequences; and it may have changed.
    async with change(connection, schema):
        await _require_idle(connection, fetcher, lane)
        first = await _first(connection, lane, batch, after, last)
        if first is None:
            return nothing
        told = (actor, None, lane.id)
        job: int = await connection.fetchval(ADD_JOB, "lane", fetcher.name, *(None,) * 6, *told)
        endpoint_id, seq = fetcher.endpoint_id, first["seq"]
        await connection.execute(ADD_PARTS, job, [endpoint_id], [seq], [last], [None], [None])
        await connection.execute(ADD_REPLAY, job, endpoint_id, seq, first["batch"], last)
        data = {"job": job, "lane": lane.name, "from": seq, "to": last}
        await write_journal(connection, "lane_asked", actor, endpoint_id, data)
    return Resending(lane.name, job, seq, last, lane.acknowledged)


async def _require_idle(connection: Connection[Any], fetcher: Fetcher, lane: Lane) -> None:
    state = await connection.fetchval(READ_STATE, fetcher.endpoint_id)
    if state not in ("active", "paused"):
        raise Conflict(f"the endpoint is {state}, and is sent nothing")
    running = await connection.fetchval(FIND_RUNNING, fetcher.endpoint_id, lane.id)
    if running is not None:
        raise Conflict(f"lane {lane.name} is being sent again already, by job {running}")


async def _first(connection: Connection[Any], lane: Lane, batch: int, after: int, last: int) -> Any:
    """The first number behind one and up to another, with its batch; None: there is none."""
    row = await connection.fetchrow(FIND_FIRST, lane.id, batch, after)
    return row if row is not None and row["seq"] <= last else None
