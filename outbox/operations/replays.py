"""Replay of dead letters.

Dead letters selected by id are replayed at once, and each can be rejected individually.  A
filter creates a replay job in constant time, independent of the number of dead letters; the
leader processes it in chunks, at a rate that leaves capacity to live events.
"""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.core.delivery.message import rfc3339
from outbox.errors import Conflict
from outbox.operations.dead_letter_filter import filter_parameters, find_endpoint_ids
from outbox.operations.dead_letters import dead_letter_not_found, replays_of
from outbox.store.connection.connect import map_errors
from outbox.store.replay_feed import MATCHES_SELECTION
from outbox.store.routing_change import request_transaction, routing_transaction, write_journal

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from asyncpg import Connection

    from outbox.operations.dead_letter_filter import DeadLetterSelection

# Locked in the order of ids, like all statements that lock several, to prevent deadlocks.
LOCK_DEAD = """
SELECT d.id, d.state, d.outbox_id IS NOT NULL AND d.payload IS NULL AS is_erased,
       e.state AS endpoint_state, e.name AS endpoint, d.endpoint_id, d.seq, d.to_seq
  FROM dead_letter d JOIN endpoint e ON e.id = d.endpoint_id
 WHERE d.id = ANY ($1)
 ORDER BY d.id FOR UPDATE OF d
"""

# Dead letters that match a filter, by endpoint.
COUNT_DEAD = f"""
SELECT d.endpoint_id, e.name AS endpoint, e.state,
       count(*) AS letters, sum(d.to_seq - d.seq + 1)::bigint AS numbers,
       count(*) FILTER (WHERE d.outbox_id IS NOT NULL AND d.payload IS NULL) AS erased,
       min(d.id) AS first_id, max(d.id) AS last_id
  FROM dead_letter d
  JOIN endpoint e ON e.id = d.endpoint_id,
       (SELECT {filter_parameters(2)}) s
 WHERE d.state = 'dead' AND ($1::uuid[] IS NULL OR d.endpoint_id = ANY ($1)) AND {MATCHES_SELECTION}
 GROUP BY d.endpoint_id, e.name, e.state
 ORDER BY e.name
"""  # noqa: S608 (constants only)

ADD_JOB = """
INSERT INTO replay_job (kind, endpoint, types, tenant, reason, since, until, rate_per_s,
                        requested_by, gaps, lane_id)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, coalesce($10::int8multirange, '{}'), $11)
RETURNING id
"""

ADD_PARTS = """
INSERT INTO replay_job_endpoint (job_id, endpoint_id, first_id, next_id, last_id, expected, from_id)
SELECT $1, p.endpoint_id, p.first_id, p.first_id, p.last_id, p.expected, p.from_id
  FROM unnest($2::uuid[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[])
       AS p(endpoint_id, first_id, last_id, expected, from_id)
"""

# The next batches create the deliveries.
ADD_REPLAYS = """
INSERT INTO replay (job_id, endpoint_id, dead_id, next_seq, next_batch, to_seq)
SELECT $1, endpoint_id, id, seq, batch, to_seq FROM dead_letter WHERE id = ANY ($2) ORDER BY id
"""

SET_STATE = "UPDATE dead_letter SET state = $2 WHERE id = ANY ($1)"

# Unblock the lanes that wait for a decision about these dead letters.
UNBLOCK = """
DELETE FROM lane_block b USING dead_letter d
 WHERE d.id = ANY ($1) AND b.lane_id = d.lane_id AND b.seq = d.seq
"""


@dataclass(frozen=True, slots=True)
class ReplayCandidates:
    """Dead letters of one endpoint that a replay selects."""

    endpoint_id: UUID
    endpoint: str
    letters: int
    numbers: int
    """Number of deliveries; a range has many."""
    skipped: int
    """Number of `letters` that cannot be replayed, because of `reason`."""
    reason: str | None
    first_id: int
    last_id: int


@dataclass(frozen=True, slots=True)
class ReplayOutcome:
    """Result of a replay or discard: the number processed, and the skipped ones by reason."""

    done: int
    skipped: dict[str, int]
    job: int | None = None
    """The replay job; its progress is the progress of the replay."""
    by_endpoint: dict[str, int] | None = None


async def plan_replay(
    connection: Connection[Any], schema: str, selection: DeadLetterSelection
) -> tuple[list[ReplayCandidates], ReplayOutcome]:
    """Return what `start_replay` would do now, by endpoint and in all, without a change.

    Raises:
        NotFound, UsageError: as in `start_replay`.
    """
    with map_errors(schema):
        if selection.ids:
            async with connection.transaction():
                found = _by_endpoint(
                    await _lock_named(connection, selection.ids, explain_not_replayable)
                )
        else:
            found = await _find_candidates(connection, selection)
    return found, _outcome(found, None)


async def start_replay(
    connection: Connection[Any],
    schema: str,
    selection: DeadLetterSelection,
    *,
    actor: str,
    rate_per_s: float | None = None,
) -> ReplayOutcome:
    """Replay dead letters: add new deliveries at the end of their lanes, behind live events.

    Each delivery of a range is replayed, in order, interleaved with other events.  A dead letter
    selected by id must be replayable; a filter skips those that are not.

    Args:
        rate_per_s: maximum rate in deliveries per second; None: no limit.

    Raises:
        NotFound: an id or endpoint does not exist.
        Conflict: a dead letter selected by id is erased, not dead, or of a disabled or removed
            endpoint.
    """
    if selection.ids:
        async with routing_transaction(connection, schema):
            rows = await _lock_named(connection, selection.ids, explain_not_replayable)
            found = _by_endpoint(rows)
            ids = [row["id"] for row in rows]
            job = await _add_job(connection, selection, found, rate_per_s, actor)
            await connection.execute(ADD_REPLAYS, job, ids)
            await set_dead_letter_state(connection, ids, "replaying")
            data = {"job": job, "dead": ids}
            await write_journal(connection, "dead_replayed", actor, _single_endpoint(found), data)
        return _outcome(found, job)
    with map_errors(schema, "operator"):
        found = await _find_candidates(connection, selection)
    some = [each for each in found if each.letters > each.skipped]
    if not some:
        return _outcome(found, None)
    async with request_transaction(connection, schema):
        job = await _add_job(connection, selection, some, rate_per_s, actor)
        its = {name: to_journal_value(value) for name, value in selection.filter.criteria.items()}
        data = {"job": job, "selection": its, "letters": _outcome(found, job).done}
        await write_journal(connection, "dead_replayed", actor, _single_endpoint(some), data)
    return _outcome(found, job)


async def set_dead_letter_state(
    connection: Connection[Any], ids: Sequence[int], state: str
) -> None:
    """Set the state of dead letters, and unblock the lanes that wait for them."""
    await connection.execute(SET_STATE, ids, state)
    await connection.execute(UNBLOCK, ids)


async def _add_job(
    connection: Connection[Any],
    selection: DeadLetterSelection,
    found: Sequence[ReplayCandidates],
    rate_per_s: float | None,
    actor: str,
) -> int:
    """Add a replay job with one part per endpoint."""
    its = selection.filter
    job: int = await connection.fetchval(
        ADD_JOB, "dead", its.endpoint, *its.arguments, rate_per_s, actor, None, None
    )
    # Dead letters selected by id are replayed already: their part has an empty id range.
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


async def _find_candidates(
    connection: Connection[Any], selection: DeadLetterSelection
) -> list[ReplayCandidates]:
    its = selection.filter
    rows = await connection.fetch(
        COUNT_DEAD, await find_endpoint_ids(connection, its.endpoint, its.owner), *its.arguments
    )
    found = []
    for row in rows:
        reason = _UNAVAILABLE.get(row["state"], "erased" if row["erased"] else None)
        found.append(
            ReplayCandidates(
                row["endpoint_id"],
                row["endpoint"],
                row["letters"],
                row["numbers"],
                row["letters"] if row["state"] in _UNAVAILABLE else row["erased"],
                reason,
                row["first_id"],
                row["last_id"],
            )
        )
    return found


_UNAVAILABLE = {
    "removing": "removed",
    "removed": "removed",
    "disabling": "disabled",
    "disabled": "disabled",
}


def _by_endpoint(rows: Sequence[Any]) -> list[ReplayCandidates]:
    """Group dead letters selected by id by endpoint."""
    found: dict[UUID, ReplayCandidates] = {}
    for row in rows:
        previous = found.get(row["endpoint_id"])
        letters, numbers = (previous.letters, previous.numbers) if previous else (0, 0)
        found[row["endpoint_id"]] = ReplayCandidates(
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


def _outcome(found: Sequence[ReplayCandidates], job: int | None) -> ReplayOutcome:
    skipped = Counter[str]()
    for each in found:
        if each.reason is not None:
            skipped[each.reason] += each.skipped
    todo = {e.endpoint: e.letters - e.skipped for e in found if e.letters > e.skipped}
    return ReplayOutcome(sum(todo.values()), dict(skipped), job, todo)


def _single_endpoint(found: Sequence[ReplayCandidates]) -> UUID | None:
    """The endpoint, when there is exactly one."""
    return found[0].endpoint_id if len(found) == 1 else None


def to_journal_value(value: Any) -> Any:
    """Convert a filter value to its journal form."""
    return rfc3339(value) if hasattr(value, "astimezone") else value


async def _lock_named(connection: Connection[Any], ids: Sequence[int], why_not: Any) -> list[Any]:
    """Lock the dead letters with these ids; all of them, or none."""
    rows: list[Any] = await connection.fetch(LOCK_DEAD, sorted(set(ids)))
    missing = set(ids) - {row["id"] for row in rows}
    if missing:
        raise dead_letter_not_found(min(missing))
    for row in rows:
        if (explanation := why_not(row)) is None:
            continue
        if row["state"] == "replaying":
            raise await _replay_conflict(connection, row["id"])
        raise Conflict(f"dead letter {row['id']} {explanation}")
    return rows


async def lock_dead_letters(connection: Connection[Any], ids: Sequence[int]) -> list[Any]:
    """Lock the dead letters with these ids, and require the state `dead`.

    Raises:
        NotFound: an id does not exist.
        Conflict: a dead letter has another state.
    """
    return await _lock_named(connection, ids, explain_not_dead)


async def _replay_conflict(connection: Connection[Any], dead_id: int) -> Conflict:
    """The error for a dead letter that was replayed before, with the result of the replay."""
    last = (await replays_of(connection, dead_id))[-1]
    as_sequence = "" if last.sequence is None else f" as sequence {last.sequence}"
    text = {
        "replaying": "is being replayed already",
        "replayed": f"was replayed{as_sequence}",
        "dead_again": f"was replayed, and dead-lettered again as {last.again}",
    }[last.state]
    shown = last.again or dead_id
    return Conflict(f"dead letter {dead_id} {text}; see: outbox dead show {shown}")


def explain_not_dead(row: Any) -> str | None:
    """Reason why a dead letter cannot be decided; None: it can."""
    match row["state"]:
        case "replaying":
            return "is being replayed already"
        case "discarded":
            return "was discarded"
    return None


def explain_not_replayable(row: Any) -> str | None:
    """Reason why a dead letter cannot be replayed; None: it can."""
    if row["state"] != "dead":
        return explain_not_dead(row)
    name = row["endpoint"]
    match _UNAVAILABLE.get(row["endpoint_state"]):
        case "removed":
            return f'belongs to the endpoint "{name}", which was removed'
        case "disabled":
            return (
                f'belongs to the endpoint "{name}", which is disabled; '
                f"enable it first: outbox endpoint enable {shlex.quote(name)}"
            )
    return "has no payload: its event was erased" if row["is_erased"] else None
