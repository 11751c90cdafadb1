"""Discard of dead letters: they are kept, but not replayed, with a journal entry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.operations.criteria import criteria_parameters, find_endpoint_ids
from outbox.operations.dead_letters.replay import (
    find_candidates,
    require_counted,
    single,
)
from outbox.operations.replays.claims import write_dead_letter_state
from outbox.store.change import make_change
from outbox.store.connection.connect import map_errors
from outbox.store.replays.replay_feed import MATCHES_SELECTION

if TYPE_CHECKING:
    from datetime import datetime

    from asyncpg import Connection

    from outbox.operations.criteria import DeadLetterSelection
    from outbox.store.change import Change

BATCH_SIZE = 1000
"""Dead letters per message, to hold locks and block lanes only briefly."""

# The next dead letters, and whether they block a lane.
FIND_DEAD = f"""
SELECT d.id, EXISTS (SELECT FROM lane_block b
                      WHERE b.lane_id = d.lane_id AND b.seq = d.seq) AS blocks
  FROM dead_letter d, (SELECT {criteria_parameters(4)}) s
 WHERE d.id > $1 AND d.state = 'dead' AND ($2::uuid[] IS NULL OR d.endpoint_id = ANY ($2))
   AND {MATCHES_SELECTION}
 ORDER BY d.id LIMIT $3
"""  # noqa: S608 (constants only)


@dataclass(frozen=True, slots=True)
class DiscardReport:
    """Result of discarding, or of its dry run."""

    dry_run: bool
    discarded: int
    """Number of dead letters."""
    until: datetime | None = None
    """The time at which a dry run counted them, by the database's clock: with this `until`, nothing
    that is dead-lettered later is selected.  None: they were selected by id, or this is no dry
    run."""


async def discard_dead_letters(
    connection: Connection[Any],
    schema: str,
    selection: DeadLetterSelection,
    *,
    actor: str,
    comment: str | None = None,
    counted: int | None = None,
    dry_run: bool = False,
) -> DiscardReport:
    """Discard dead letters; a selection by criteria is processed in batches.

    Args:
        comment: recorded in the journal.
        counted: the number of a dry run; more dead letters are not discarded.
        dry_run: count only.

    Raises:
        NotFound: an id or endpoint does not exist.
        Conflict: a dead letter selected by id has another state than `dead`, or there are more
            than were counted.
    """
    with map_errors(schema, None if dry_run else "operator"):
        if dry_run:
            selection = await selection.resolve_until_now(connection)
        else:
            selection = await selection.resolve(connection)
        only = selection.criteria
        if dry_run or counted is not None:
            found = await find_candidates(connection, selection, to_replay=False)
            discarded = sum(each.dead_letters for each in found)
            if dry_run:
                return DiscardReport(dry_run, discarded, selection.until)
            require_counted(discarded, counted)
        endpoint_ids = await find_endpoint_ids(connection, only.endpoint, only.owner)
    comment_data = {} if comment is None else {"comment": comment}
    after = done = 0

    async def plan_named(change: Change) -> list[int]:
        found = await find_candidates(change.db, selection, to_replay=False)
        ids = sorted(set(selection.ids))
        write_dead_letter_state(change, ids, "discarded")
        named = single([each.endpoint_id for each in found])
        change.journal("dead_discarded", named, comment_data | {"dead": ids})
        return ids

    async def plan_batch(change: Change) -> list[int]:
        rows = await change.db.fetch(FIND_DEAD, after, endpoint_ids, BATCH_SIZE, *only.arguments)
        ids = [row["id"] for row in rows]
        # Relays must continue the lanes that are unblocked.
        change.routing = any(row["blocks"] for row in rows)
        if ids:
            write_dead_letter_state(change, ids, "discarded")
            data = {"selection": only.journal_data, "dead_letters": len(ids)}
            data |= comment_data | {"from": ids[0], "to": ids[-1]}
            change.journal("dead_discarded", single(endpoint_ids or ()), data)
        return ids

    if selection.ids:
        return DiscardReport(dry_run, len(await make_change(connection, schema, actor, plan_named)))
    while ids := await make_change(connection, schema, actor, plan_batch):
        after, done = ids[-1], done + len(ids)
    return DiscardReport(dry_run, done)
