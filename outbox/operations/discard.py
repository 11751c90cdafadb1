"""Discard of dead letters: they are kept, but not replayed, with a journal entry."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from outbox.operations.dead_letter_filter import filter_parameters, find_endpoint_ids
from outbox.operations.replays import (
    ReplayOutcome,
    lock_dead_letters,
    set_dead_letter_state,
    to_journal_value,
)
from outbox.store.connection.connect import map_errors
from outbox.store.replay_feed import MATCHES_SELECTION
from outbox.store.routing_change import routing_transaction, write_journal

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from asyncpg import Connection

    from outbox.operations.dead_letter_filter import DeadLetterSelection

BATCH_SIZE = 1000
"""Dead letters per transaction, to hold locks and block lanes only briefly."""

# The next dead letters, and whether they block a lane.  They are locked afterwards, because
# unblocking a lane locks the cursor row first.
FIND_DEAD = f"""
SELECT d.id, EXISTS (SELECT FROM lane_block b
                      WHERE b.lane_id = d.lane_id AND b.seq = d.seq) AS blocks
  FROM dead_letter d, (SELECT {filter_parameters(4)}) s
 WHERE d.id > $1 AND d.state = 'dead' AND ($2::uuid[] IS NULL OR d.endpoint_id = ANY ($2))
   AND {MATCHES_SELECTION}
 ORDER BY d.id LIMIT $3
"""  # noqa: S608 (constants only)

# Locked in the order of ids, like all statements that lock several, to prevent deadlocks.
LOCK_STILL_DEAD = """
SELECT id FROM dead_letter WHERE id = ANY ($1) AND state = 'dead' ORDER BY id FOR UPDATE
"""

COUNT = f"""
SELECT count(*) FROM dead_letter d, (SELECT {filter_parameters(2)}) s
 WHERE d.state = 'dead' AND ($1::uuid[] IS NULL OR d.endpoint_id = ANY ($1)) AND {MATCHES_SELECTION}
"""  # noqa: S608


async def count_discardable(
    connection: Connection[Any], schema: str, selection: DeadLetterSelection
) -> int:
    """Count the dead letters that `discard` would discard now.

    Raises:
        NotFound, UsageError: as in `discard`.
    """
    with map_errors(schema):
        if selection.ids:
            async with connection.transaction():
                return len(await lock_dead_letters(connection, selection.ids))
        its = selection.filter
        ids = await find_endpoint_ids(connection, its.endpoint, its.owner)
        found: int = await connection.fetchval(COUNT, ids, *its.arguments)
    return found


async def discard(
    connection: Connection[Any],
    schema: str,
    selection: DeadLetterSelection,
    *,
    actor: str,
    comment: str | None = None,
) -> ReplayOutcome:
    """Discard dead letters; a filter is processed in batches, each in its own transaction.

    Raises:
        NotFound: an id or endpoint does not exist.
        Conflict: a dead letter selected by id has another state than `dead`.
    """
    comment_data = {} if comment is None else {"comment": comment}
    if selection.ids:
        async with routing_transaction(connection, schema):
            rows = await lock_dead_letters(connection, selection.ids)
            ids = [row["id"] for row in rows]
            await set_dead_letter_state(connection, ids, "discarded")
            endpoints = {row["endpoint_id"] for row in rows}
            only = endpoints.pop() if len(endpoints) == 1 else None
            await write_journal(
                connection, "dead_discarded", actor, only, {**comment_data, "dead": ids}
            )
        return ReplayOutcome(len(ids), {})
    its = selection.filter
    criteria = {
        "selection": {name: to_journal_value(value) for name, value in its.criteria.items()}
    }
    with map_errors(schema, "operator"):
        endpoints_of = await find_endpoint_ids(connection, its.endpoint, its.owner)
    only = endpoints_of[0] if endpoints_of is not None and len(endpoints_of) == 1 else None
    after = done = 0
    while True:
        with map_errors(schema, "operator"):
            found = await connection.fetch(
                FIND_DEAD, after, endpoints_of, BATCH_SIZE, *its.arguments
            )
        if not found:
            return ReplayOutcome(done, {})
        ids, after = [row["id"] for row in found], found[-1]["id"]
        async with _discard_transaction(
            connection, schema, unblocks=any(row["blocks"] for row in found)
        ):
            ids = [row["id"] for row in await connection.fetch(LOCK_STILL_DEAD, ids)]
            await set_dead_letter_state(connection, ids, "discarded")
            if ids:
                data = {
                    **comment_data,
                    **criteria,
                    "letters": len(ids),
                    "from": ids[0],
                    "to": ids[-1],
                }
                await write_journal(connection, "dead_discarded", actor, only, data)
        done += len(ids)


@asynccontextmanager
async def _discard_transaction(
    connection: Connection[Any], schema: str, *, unblocks: bool
) -> AsyncIterator[None]:
    """A transaction, which locks the cursor row only when it unblocks a lane."""
    if unblocks:
        async with routing_transaction(connection, schema):
            yield
    else:
        with map_errors(schema, "operator"):
            async with connection.transaction(isolation="read_committed"):
                yield
