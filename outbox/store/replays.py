"""Sending dead letters again, and setting them aside: an operator's decisions.

Both take the cursor row: what is sent again is for the next batch to number, and
a lane that waits for a decision goes on when it is made.
"""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.errors import UsageError
from outbox.store.changes import change, write_journal
from outbox.store.dead import endpoint_ids, no_such, replays_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from asyncpg import Connection

# Locked in the order of their ids, as everybody does who locks several.
LOCK_DEAD = """
SELECT d.id, d.state, d.outbox_id IS NOT NULL AND d.payload IS NULL AS is_erased,
       e.state AS endpoint_state, e.name AS endpoint, d.endpoint_id
  FROM dead_letter d JOIN endpoint e ON e.id = d.endpoint_id
 WHERE ($1::bigint[] IS NULL OR d.id = ANY ($1))
   AND ($2::uuid[] IS NULL OR d.endpoint_id = ANY ($2))
   AND ($1::bigint[] IS NOT NULL OR d.state = 'dead')
 ORDER BY d.id FOR UPDATE OF d
"""

# The next batches make deliveries of them.
ASK_REPLAY = """
INSERT INTO replay (dead_id, next_seq, next_batch, to_seq)
SELECT id, seq, batch, to_seq FROM dead_letter WHERE id = ANY ($1) ORDER BY id
"""

SET_STATE = "UPDATE dead_letter SET state = $2 WHERE id = ANY ($1)"

# The decision that a lane waits for was made.
UNBLOCK = """
DELETE FROM lane_block b USING dead_letter d
 WHERE d.id = ANY ($1) AND b.lane_id = d.lane_id AND b.seq = d.seq
"""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which dead letters a command is about; sweeping needs a word for it.

    Raises:
        UsageError: nothing was selected, or two things at once.
    """

    ids: tuple[int, ...] = ()
    endpoint: str | None = None
    everything: bool = False

    def __post_init__(self) -> None:
        said = bool(self.ids) + (self.endpoint is not None) + self.everything
        if said == 0:
            raise UsageError("say which dead letters: ID…, --endpoint NAME, or --all")
        if said > 1:
            raise UsageError("say one of ID…, --endpoint NAME and --all, not several")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a sweep did, and what it left alone, by reason."""

    done: int
    skipped: dict[str, int]


async def replay(
    connection: Connection[Any], schema: str, selection: Selection, *, actor: str
) -> Outcome:
    """Send dead letters again, at the end of their lanes, from the next batch on.

    Of a range each number becomes a delivery, in order; that takes as many
    batches as it needs, and other events go on between them.  What was named by
    id must be possible; a sweep passes over what is not.

    Raises:
        NotFound: an id or endpoint that does not exist.
        UsageError: one named by id is erased, not dead any more, or of an
            endpoint that is disabled or removed.
    """
    async with change(connection, schema):
        chosen, skipped = await _choose(connection, selection, _why_not_again)
        await connection.execute(ASK_REPLAY, [row["id"] for row in chosen])
        await _decide(connection, chosen, "replaying")
        await _tell(connection, "dead_replayed", actor, chosen, {})
    return Outcome(len(chosen), skipped)


async def discard(
    connection: Connection[Any],
    schema: str,
    selection: Selection,
    *,
    actor: str,
    reason: str | None = None,
) -> Outcome:
    """Set dead letters aside for good: a person's decision, kept in the journal.

    Raises:
        NotFound: an id or endpoint that does not exist.
        UsageError: one named by id is not dead any more.
    """
    async with change(connection, schema):
        chosen, skipped = await _choose(connection, selection, _why_not_dead)
        await _decide(connection, chosen, "discarded")
        data = {} if reason is None else {"reason": reason}
        await _tell(connection, "dead_discarded", actor, chosen, data)
    return Outcome(len(chosen), skipped)


async def _decide(connection: Connection[Any], rows: Sequence[Any], state: str) -> None:
    """Give dead letters their new state; lanes that wait for them need not any more."""
    ids = [row["id"] for row in rows]
    await connection.execute(SET_STATE, ids, state)
    await connection.execute(UNBLOCK, ids)


async def _choose(
    connection: Connection[Any], selection: Selection, why_not: Any
) -> tuple[list[Any], dict[str, int]]:
    """Rows to act on, locked, and how many were passed over for each reason."""
    ids = sorted(set(selection.ids)) or None
    rows = await connection.fetch(
        LOCK_DEAD, ids, await endpoint_ids(connection, selection.endpoint)
    )
    missing = set(ids or ()) - {row["id"] for row in rows}
    if missing:
        raise no_such(min(missing))
    chosen, skipped = [], Counter[str]()
    for row in rows:
        reason, explanation = why_not(row)
        if reason is None:
            chosen.append(row)
        elif ids is None:
            skipped[reason] += 1
        elif row["state"] == "replaying":
            raise await _sent_again(connection, row["id"])
        else:
            raise UsageError(f"dead letter {row['id']} {explanation}")
    return chosen, dict(skipped)


async def _sent_again(connection: Connection[Any], dead_id: int) -> UsageError:
    """Why not once more: what became of the last replay."""
    last = (await replays_of(connection, dead_id))[-1]
    as_number = "" if last.sequence is None else f" as number {last.sequence}"
    text = {
        "replaying": "is being sent again already",
        "replayed": f"was sent again{as_number}",
        "dead_again": f"was sent again, and is dead again as {last.again}",
    }[last.state]
    shown = last.again or dead_id
    return UsageError(f"dead letter {dead_id} {text}; see: outbox dead show {shown}")


def _why_not_dead(row: Any) -> tuple[str | None, str]:
    match row["state"]:
        case "replaying":
            return "replaying", "is being sent again already"
        case "discarded":
            return "discarded", "was discarded"
    return None, ""


def _why_not_again(row: Any) -> tuple[str | None, str]:
    if row["state"] != "dead":
        return _why_not_dead(row)
    name = row["endpoint"]
    if row["endpoint_state"] in ("removing", "removed"):
        return "removed", f'belongs to the endpoint "{name}", which was removed'
    if row["endpoint_state"] in ("disabling", "disabled"):
        return "disabled", (
            f'belongs to the endpoint "{name}", which is disabled; '
            f"enable it first: outbox endpoint enable {shlex.quote(name)}"
        )
    if row["is_erased"]:
        return "erased", "has no event any more: it was erased"
    return None, ""


async def _tell(
    connection: Connection[Any], kind: str, actor: str, rows: Sequence[Any], data: dict[str, Any]
) -> None:
    by_endpoint: dict[UUID, list[int]] = {}
    for row in rows:
        by_endpoint.setdefault(row["endpoint_id"], []).append(row["id"])
    for endpoint_id, ids in by_endpoint.items():
        await write_journal(connection, kind, actor, endpoint_id, {**data, "dead": ids})
