"""Asking for dead letters to be sent again: an operator's decision.

Those that are named by number are taken at once, so that each can be answered for.
For a sweep a job is written, which takes as long for one as for a hundred thousand;
the leader takes from it in the pace that live events leave.
"""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.core.delivery.message import rfc3339
from outbox.errors import Conflict
from outbox.operations.dead_letter_filter import endpoint_ids, given
from outbox.operations.dead_letters import no_such, replays_of
from outbox.store.connection.connect import map_errors
from outbox.store.replay_feed import SELECTED
from outbox.store.routing_change import change, wish, write_journal

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from asyncpg import Connection

    from outbox.operations.dead_letter_filter import Selection

# Locked in the order of their ids, as everybody does who locks several.
LOCK_DEAD = """
SELECT d.id, d.state, d.outbox_id IS NOT NULL AND d.payload IS NULL AS is_erased,
       e.state AS endpoint_state, e.name AS endpoint, d.endpoint_id, d.seq, d.to_seq
  FROM dead_letter d JOIN endpoint e ON e.id = d.endpoint_id
 WHERE d.id = ANY ($1)
 ORDER BY d.id FOR UPDATE OF d
"""

# What a sweep would find, by endpoint.
COUNT_DEAD = f"""
SELECT d.endpoint_id, e.name AS endpoint, e.state,
       count(*) AS letters, sum(d.to_seq - d.seq + 1)::bigint AS numbers,
       count(*) FILTER (WHERE d.outbox_id IS NOT NULL AND d.payload IS NULL) AS erased,
       min(d.id) AS first_id, max(d.id) AS last_id
  FROM dead_letter d
  JOIN endpoint e ON e.id = d.endpoint_id,
       (SELECT {given(2)}) s
 WHERE d.state = 'dead' AND ($1::uuid[] IS NULL OR d.endpoint_id = ANY ($1)) AND {SELECTED}
 GROUP BY d.endpoint_id, e.name, e.state
 ORDER BY e.name
"""  # noqa: S608 (constants only)

ADD_JOB = """
INSERT INTO replay_job (kind, endpoint, types, tenant, reason, since, until, rate_per_s, asked_by,
                        gaps, lane_id)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, coalesce($10::int8multirange, '{}'), $11)
RETURNING id
"""

ADD_PARTS = """
INSERT INTO replay_part (job_id, endpoint_id, first_id, next_id, last_id, expected, from_id)
SELECT $1, p.endpoint_id, p.first_id, p.first_id, p.last_id, p.expected, p.from_id
  FROM unnest($2::uuid[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[])
       AS p(endpoint_id, first_id, last_id, expected, from_id)
"""

# The next batches make deliveries of them.
ASK_REPLAY = """
INSERT INTO replay (job_id, endpoint_id, dead_id, next_seq, next_batch, to_seq)
SELECT $1, endpoint_id, id, seq, batch, to_seq FROM dead_letter WHERE id = ANY ($2) ORDER BY id
"""

SET_STATE = "UPDATE dead_letter SET state = $2 WHERE id = ANY ($1)"

# The decision that a lane waits for was made.
UNBLOCK = """
DELETE FROM lane_block b USING dead_letter d
 WHERE d.id = ANY ($1) AND b.lane_id = d.lane_id AND b.seq = d.seq
"""


@dataclass(frozen=True, slots=True)
class Found:
    """What a sweep finds at one endpoint."""

    endpoint_id: UUID
    endpoint: str
    letters: int
    numbers: int
    """A range has many."""
    skipped: int
    """Of the letters, because of `why`."""
    why: str | None
    first_id: int
    last_id: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is done with dead letters, and which are left alone, by reason."""

    done: int
    skipped: dict[str, int]
    job: int | None = None
    """Whose progress tells how far it is."""
    by_endpoint: dict[str, int] | None = None


async def plan(
    connection: Connection[Any], schema: str, selection: Selection
) -> tuple[list[Found], Outcome]:
    """What `replay` would do now, by endpoint and in all; nothing is changed.

    Raises:
        NotFound, UsageError: as `replay`.
    """
    with map_errors(schema):
        if selection.ids:
            async with connection.transaction():
                found = _by_endpoint(await _named(connection, selection.ids, why_not_again))
        else:
            found = await _sweep(connection, selection)
    return found, _outcome(found, None)


async def replay(
    connection: Connection[Any],
    schema: str,
    selection: Selection,
    *,
    actor: str,
    rate_per_s: float | None = None,
) -> Outcome:
    """Send dead letters again, at the end of their lanes, in the pace that live events leave.

    Of a range each number becomes a delivery, in order; other events go on between
    them.  What was named by id must be possible; a sweep passes over what is not.

    Args:
        rate_per_s: at most so many deliveries.

    Raises:
        NotFound: an id or endpoint that does not exist.
        Conflict: one named by id is erased, not dead any more, or of an
            endpoint that is disabled or removed.
    """
    if selection.ids:
        async with change(connection, schema):
            rows = await _named(connection, selection.ids, why_not_again)
            found = _by_endpoint(rows)
            ids = [row["id"] for row in rows]
            job = await _add(connection, selection, found, rate_per_s, actor)
            await connection.execute(ASK_REPLAY, job, ids)
            await decide(connection, ids, "replaying")
            told = {"job": job, "dead": ids}
            await write_journal(connection, "dead_replayed", actor, _only(found), told)
        return _outcome(found, job)
    with map_errors(schema, "operator"):
        found = await _sweep(connection, selection)
    some = [each for each in found if each.letters > each.skipped]
    if not some:
        return _outcome(found, None)
    async with wish(connection, schema):
        job = await _add(connection, selection, some, rate_per_s, actor)
        its = {name: said(value) for name, value in selection.filter.told.items()}
        told = {"job": job, "selection": its, "letters": _outcome(found, job).done}
        await write_journal(connection, "dead_replayed", actor, _only(some), told)
    return _outcome(found, job)


async def decide(connection: Connection[Any], ids: Sequence[int], state: str) -> None:
    """Give dead letters their new state; lanes that wait for them need not any more."""
    await connection.execute(SET_STATE, ids, state)
    await connection.execute(UNBLOCK, ids)


async def _add(
    connection: Connection[Any],
    selection: Selection,
    found: Sequence[Found],
    rate_per_s: float | None,
    actor: str,
) -> int:
    """A job, and its part at each endpoint."""
    its = selection.filter
    job: int = await connection.fetchval(
        ADD_JOB, "dead", its.endpoint, *its.arguments, rate_per_s, actor, None, None
    )
    # What is named was taken already, so a part has nothing more to look at.
    last_ids = [0 if selection.ids else each.last_id for each in found]
    await connection.execute(
        ADD_PARTS,
        job,
        [each.endpoint_id for each in found],
        [each.first_id for each in found],
        last_ids,
        [each.numbers for each in found],
        [None] * len(found),
    )
    return job


async def _sweep(connection: Connection[Any], selection: Selection) -> list[Found]:
    its = selection.filter
    rows = await connection.fetch(
        COUNT_DEAD, await endpoint_ids(connection, its.endpoint, its.owner), *its.arguments
    )
    found = []
    for row in rows:
        why = _GONE.get(row["state"], "erased" if row["erased"] else None)
        found.append(
            Found(
                row["endpoint_id"],
                row["endpoint"],
                row["letters"],
                row["numbers"],
                row["letters"] if row["state"] in _GONE else row["erased"],
                why,
                row["first_id"],
                row["last_id"],
            )
        )
    return found


_GONE = {
    "removing": "removed",
    "removed": "removed",
    "disabling": "disabled",
    "disabled": "disabled",
}


def _by_endpoint(rows: Sequence[Any]) -> list[Found]:
    """The same of letters that were named."""
    found: dict[UUID, Found] = {}
    for row in rows:
        was = found.get(row["endpoint_id"])
        letters, numbers = (was.letters, was.numbers) if was else (0, 0)
        found[row["endpoint_id"]] = Found(
            row["endpoint_id"],
            row["endpoint"],
            letters + 1,
            numbers + row["to_seq"] - row["seq"] + 1,
            0,
            None,
            1,
            0,
        )
    return list(found.values())


def _outcome(found: Sequence[Found], job: int | None) -> Outcome:
    skipped = Counter[str]()
    for each in found:
        if each.why is not None:
            skipped[each.why] += each.skipped
    todo = {e.endpoint: e.letters - e.skipped for e in found if e.letters > e.skipped}
    return Outcome(sum(todo.values()), dict(skipped), job, todo)


def _only(found: Sequence[Found]) -> UUID | None:
    """The endpoint, if there is but one."""
    return found[0].endpoint_id if len(found) == 1 else None


def said(value: Any) -> Any:
    """A part of a selection as the journal keeps it."""
    return rfc3339(value) if hasattr(value, "astimezone") else value


async def _named(connection: Connection[Any], ids: Sequence[int], why_not: Any) -> list[Any]:
    """The dead letters of these numbers, locked; all of them, or none."""
    rows: list[Any] = await connection.fetch(LOCK_DEAD, sorted(set(ids)))
    missing = set(ids) - {row["id"] for row in rows}
    if missing:
        raise no_such(min(missing))
    for row in rows:
        if (explanation := why_not(row)) is None:
            continue
        if row["state"] == "replaying":
            raise await _sent_again(connection, row["id"])
        raise Conflict(f"dead letter {row['id']} {explanation}")
    return rows


async def named_dead(connection: Connection[Any], ids: Sequence[int]) -> list[Any]:
    """Those of these numbers, locked; all of them are dead.

    Raises:
        NotFound: there is one that does not exist.
        Conflict: one of them is not dead any more.
    """
    return await _named(connection, ids, why_not_dead)


async def _sent_again(connection: Connection[Any], dead_id: int) -> Conflict:
    """Why not once more: what became of the last replay."""
    last = (await replays_of(connection, dead_id))[-1]
    as_number = "" if last.sequence is None else f" as number {last.sequence}"
    text = {
        "replaying": "is being sent again already",
        "replayed": f"was sent again{as_number}",
        "dead_again": f"was sent again, and is dead again as {last.again}",
    }[last.state]
    shown = last.again or dead_id
    return Conflict(f"dead letter {dead_id} {text}; see: outbox dead show {shown}")


def why_not_dead(row: Any) -> str | None:
    """Why nothing can be decided about it any more."""
    match row["state"]:
        case "replaying":
            return "is being sent again already"
        case "discarded":
            return "was discarded"
    return None


def why_not_again(row: Any) -> str | None:
    """Why it cannot be sent again."""
    if row["state"] != "dead":
        return why_not_dead(row)
    name = row["endpoint"]
    match _GONE.get(row["endpoint_state"]):
        case "removed":
            return f'belongs to the endpoint "{name}", which was removed'
        case "disabled":
            return (
                f'belongs to the endpoint "{name}", which is disabled; '
                f"enable it first: outbox endpoint enable {shlex.quote(name)}"
            )
    return "has no event any more: it was erased" if row["is_erased"] else None
