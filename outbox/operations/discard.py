"""Discard of dead letters: they are kept, but not replayed, with a journal entry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.operations.dead_letter_filter import filter_parameters, find_endpoint_ids
from outbox.operations.replays import (
    read_dead_letters,
    to_journal_value,
    write_dead_letter_state,
)
from outbox.store.change import make_change
from outbox.store.connection.connect import map_errors
from outbox.store.replay_feed import MATCHES_SELECTION

if TYPE_CHECKING:
    from asyncpg import Connection

    from outbox.operations.dead_letter_filter import DeadLetterSelection
    from outbox.store.change import Change

BATCH_SIZE = 1000
"""Dead letters per message, to hold locks and block lanes only briefly."""

# The next dead letters, and whether they block a lane.
FIND_DEAD = f"""
SELECT d.id, EXISTS (SELECT FROM lane_block b
                      WHERE b.lane_id = d.lane_id AND b.seq = d.seq) AS blocks
  FROM dead_letter d, (SELECT {filter_parameters(4)}) s
 WHERE d.id > $1 AND d.state = 'dead' AND ($2::uuid[] IS NULL OR d.endpoint_id = ANY ($2))
   AND {MATCHES_SELECTION}
 ORDER BY d.id LIMIT $3
"""  # noqa: S608 (constants only)

COUNT = f"""
SELECT count(*) FROM dead_letter d, (SELECT {filter_parameters(2)}) s
 WHERE d.state = 'dead' AND ($1::uuid[] IS NULL OR d.endpoint_id = ANY ($1)) AND {MATCHES_SELECTION}
"""  # noqa: S608


@dataclass(frozen=True, slots=True)
class DiscardReport:
    """Result of discarding, or of its dry run."""

    dry_run: bool
    discarded: int
    """Number of dead letters."""


async def discard_dead_letters(
    connection: Connection[Any],
    schema: str,
    selection: DeadLetterSelection,
    *,
    actor: str,
    comment: str | None = None,
    dry_run: bool = False,
) -> DiscardReport:
    """Discard dead letters; a filter is processed in batches.

    Args:
        comment: recorded in the journal.
        dry_run: count only.

    Raises:
        NotFound: an id or endpoint does not exist.
        Conflict: a dead letter selected by id has another state than `dead`.
    """
    if dry_run:
        return DiscardReport(dry_run, await _count(connection, schema, selection))
    comment_data = {} if comment is None else {"comment": comment}

    async def plan_named(change: Change) -> int:
        rows = await read_dead_letters(change.db, selection.ids)
        ids = [row["id"] for row in rows]
        write_dead_letter_state(change, ids, "discarded")
        endpoints = {row["endpoint_id"] for row in rows}
        only = endpoints.pop() if len(endpoints) == 1 else None
        change.journal("dead_discarded", only, {**comment_data, "dead": ids})
        return len(ids)

    if selection.ids:
        return DiscardReport(dry_run, await make_change(connection, schema, actor, plan_named))
    dead_letter_filter = selection.filter
    criteria = {
        "selection": {
            name: to_journal_value(value) for name, value in dead_letter_filter.criteria.items()
        }
    }
    with map_errors(schema, "operator"):
        endpoints_of = await find_endpoint_ids(
            connection, dead_letter_filter.endpoint, dead_letter_filter.owner
        )
    only = endpoints_of[0] if endpoints_of is not None and len(endpoints_of) == 1 else None
    after = done = 0

    async def plan_batch(change: Change) -> list[int]:
        rows = await change.db.fetch(
            FIND_DEAD, after, endpoints_of, BATCH_SIZE, *dead_letter_filter.arguments
        )
        ids = [row["id"] for row in rows]
        # Relays must continue the lanes that are unblocked.
        change.routing = any(row["blocks"] for row in rows)
        if ids:
            write_dead_letter_state(change, ids, "discarded")
            data = {
                **comment_data,
                **criteria,
                "dead_letters": len(ids),
                "from": ids[0],
                "to": ids[-1],
            }
            change.journal("dead_discarded", only, data)
        return ids

    while ids := await make_change(connection, schema, actor, plan_batch):
        after, done = ids[-1], done + len(ids)
    return DiscardReport(dry_run, done)


async def _count(connection: Connection[Any], schema: str, selection: DeadLetterSelection) -> int:
    """Count the dead letters that would be discarded now."""
    with map_errors(schema):
        if selection.ids:
            return len(await read_dead_letters(connection, selection.ids))
        only = selection.filter
        ids = await find_endpoint_ids(connection, only.endpoint, only.owner)
        number: int = await connection.fetchval(COUNT, ids, *only.arguments)
    return number
