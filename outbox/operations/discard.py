"""Setting dead letters aside for good: an operator's decision, kept in the journal."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from outbox.operations.dead_letter_filter import endpoint_ids, given
from outbox.operations.replays import Outcome, decide, named_dead, said
from outbox.store.connection.connect import map_errors
from outbox.store.replay_feed import SELECTED
from outbox.store.routing_change import change, write_journal

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from asyncpg import Connection

    from outbox.operations.dead_letter_filter import Selection

STEP = 1000
"""Dead letters in one transaction: others may need them, and lanes may wait for them."""

# The next ones that are dead, and whether a lane waits for them.  They are locked after
# this, because who frees a lane takes the cursor row first.
FIND_DEAD = f"""
SELECT d.id, EXISTS (SELECT FROM lane_block b
                      WHERE b.lane_id = d.lane_id AND b.seq = d.seq) AS blocks
  FROM dead_letter d, (SELECT {given(4)}) s
 WHERE d.id > $1 AND d.state = 'dead' AND ($2::uuid[] IS NULL OR d.endpoint_id = ANY ($2))
   AND {SELECTED}
 ORDER BY d.id LIMIT $3
"""  # noqa: S608 (constants only)

# Locked in the order of their ids, as everybody does who locks several.
LOCK_STILL_DEAD = """
SELECT id FROM dead_letter WHERE id = ANY ($1) AND state = 'dead' ORDER BY id FOR UPDATE
"""

COUNT = f"""
SELECT count(*) FROM dead_letter d, (SELECT {given(2)}) s
 WHERE d.state = 'dead' AND ($1::uuid[] IS NULL OR d.endpoint_id = ANY ($1)) AND {SELECTED}
"""  # noqa: S608


async def count(connection: Connection[Any], schema: str, selection: Selection) -> int:
    """How many `discard` would set aside now.

    Raises:
        NotFound, UsageError: as `discard`.
    """
    with map_errors(schema):
        if selection.ids:
            async with connection.transaction():
                return len(await named_dead(connection, selection.ids))
        its = selection.filter
        ids = await endpoint_ids(connection, its.endpoint, its.owner)
        found: int = await connection.fetchval(COUNT, ids, *its.arguments)
    return found


async def discard(
    connection: Connection[Any],
    schema: str,
    selection: Selection,
    *,
    actor: str,
    reason: str | None = None,
) -> Outcome:
    """Set dead letters aside; a sweep goes step by step, and each step is durable.

    Raises:
        NotFound: an id or endpoint that does not exist.
        Conflict: one named by id is not dead any more.
    """
    why = {} if reason is None else {"reason": reason}
    if selection.ids:
        async with change(connection, schema):
            rows = await named_dead(connection, selection.ids)
            ids = [row["id"] for row in rows]
            await decide(connection, ids, "discarded")
            endpoints = {row["endpoint_id"] for row in rows}
            only = endpoints.pop() if len(endpoints) == 1 else None
            await write_journal(connection, "dead_discarded", actor, only, {**why, "dead": ids})
        return Outcome(len(ids), {})
    its = selection.filter
    told = {"selection": {name: said(value) for name, value in its.told.items()}}
    with map_errors(schema, "operator"):
        endpoints_of = await endpoint_ids(connection, its.endpoint, its.owner)
    only = endpoints_of[0] if endpoints_of is not None and len(endpoints_of) == 1 else None
    after = done = 0
    while True:
        with map_errors(schema, "operator"):
            found = await connection.fetch(FIND_DEAD, after, endpoints_of, STEP, *its.arguments)
        if not found:
            return Outcome(done, {})
        ids, after = [row["id"] for row in found], found[-1]["id"]
        async with _step(connection, schema, frees=any(row["blocks"] for row in found)):
            ids = [row["id"] for row in await connection.fetch(LOCK_STILL_DEAD, ids)]
            await decide(connection, ids, "discarded")
            if ids:
                data = {**why, **told, "letters": len(ids), "from": ids[0], "to": ids[-1]}
                await write_journal(connection, "dead_discarded", actor, only, data)
        done += len(ids)


@asynccontextmanager
async def _step(connection: Connection[Any], schema: str, *, frees: bool) -> AsyncIterator[None]:
    """A transaction; under the cursor row only if a lane is to go on."""
    if frees:
        async with change(connection, schema):
            yield
    else:
        with map_errors(schema, "operator"):
            async with connection.transaction(isolation="read_committed"):
                yield
