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
from outbox.operations.dead_letters import dead_letter_not_found, list_replays
from outbox.operations.new_replay_job import READ_NEW_JOB, JobPart, add_job
from outbox.store.change import NEW_JOB, make_change_and_read
from outbox.store.connection.connect import map_errors
from outbox.store.connection.message import WriteStatement
from outbox.store.replay_feed import MATCHES_SELECTION

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from asyncpg import Connection

    from outbox.operations.dead_letter_filter import DeadLetterSelection
    from outbox.store.change import Change

READ_DEAD = """
SELECT d.id, d.state, d.outbox_id IS NOT NULL AND d.payload IS NULL AS is_erased,
       e.state AS endpoint_state, e.name AS endpoint, d.endpoint_id, d.seq, d.to_seq
  FROM dead_letter d JOIN endpoint e ON e.id = d.endpoint_id
 WHERE d.id = ANY ($1) ORDER BY d.id
"""

# Locks dead letters, and aborts if one has another state than `dead`.  In the order of ids, like
# all statements that lock several, to prevent deadlocks.
REQUIRE_DEAD = WriteStatement(
    "require_dead",
    """
WITH found AS MATERIALIZED (
    SELECT id, state FROM dead_letter WHERE id = ANY ($1::bigint[]) ORDER BY id FOR UPDATE)
SELECT abort_unless(
    (SELECT count(*) FROM found WHERE state = 'dead') = cardinality($1::bigint[]))
""",
)

# Dead letters that match a filter, by endpoint.
COUNT_DEAD = f"""
SELECT d.endpoint_id, e.name AS endpoint, e.state,
       count(*) AS dead_letters, sum(d.to_seq - d.seq + 1)::bigint AS numbers,
       count(*) FILTER (WHERE d.outbox_id IS NOT NULL AND d.payload IS NULL) AS erased,
       min(d.id) AS first_id, max(d.id) AS last_id
  FROM dead_letter d
  JOIN endpoint e ON e.id = d.endpoint_id,
       (SELECT {filter_parameters(2)}) s
 WHERE d.state = 'dead' AND ($1::uuid[] IS NULL OR d.endpoint_id = ANY ($1)) AND {MATCHES_SELECTION}
 GROUP BY d.endpoint_id, e.name, e.state
 ORDER BY e.name
"""  # noqa: S608 (constants only)

# The next batches create the deliveries.
ADD_REPLAYS = WriteStatement(
    "add_replays",
    f"""
INSERT INTO replay (job_id, endpoint_id, dead_id, next_seq, next_batch, to_seq)
SELECT {NEW_JOB}, endpoint_id, id, seq, batch, to_seq
  FROM dead_letter WHERE id = ANY ($1) ORDER BY id
""",  # noqa: S608 (constants only)
)

SET_STATE = WriteStatement(
    "set_dead_letter_state", "UPDATE dead_letter SET state = $2 WHERE id = ANY ($1)"
)

# Unblock the lanes that wait for a decision about these dead letters.
UNBLOCK = WriteStatement(
    "unblock_dead_letters",
    """
DELETE FROM lane_block b USING dead_letter d
 WHERE d.id = ANY ($1) AND b.lane_id = d.lane_id AND b.seq = d.seq
""",
)


@dataclass(frozen=True, slots=True)
class ReplayCandidates:
    """Dead letters of one endpoint that a replay selects."""

    endpoint_id: UUID
    endpoint: str
    dead_letters: int
    numbers: int
    """Number of deliveries; a range has many."""
    skipped: int
    """Number of `dead_letters` that cannot be replayed, because of `reason`."""
    reason: str | None
    first_id: int
    last_id: int


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """Result of a replay, or of its dry run."""

    dry_run: bool
    replaying: int
    """Number of dead letters."""
    by_endpoint: dict[str, int]
    skipped: dict[str, int]
    """Number of skipped dead letters by reason."""
    job: int | None
    """The replay job, which shows the progress; None: nothing to replay."""


async def start_replay(
    connection: Connection[Any],
    schema: str,
    selection: DeadLetterSelection,
    *,
    actor: str,
    rate_per_s: float | None = None,
    dry_run: bool = False,
) -> ReplayReport:
    """Replay dead letters: add new deliveries at the end of their lanes, behind live events.

    Each delivery of a range is replayed, in order, interleaved with other events.  A dead letter
    selected by id must be replayable; a filter skips those that are not.

    Args:
        rate_per_s: maximum rate in deliveries per second; None: no limit.
        dry_run: count only.

    Raises:
        NotFound: an id or endpoint does not exist.
        Conflict: a dead letter selected by id is erased, not dead, or of a disabled or removed
            endpoint.
    """
    candidates: list[ReplayCandidates] = []
    if dry_run or not selection.ids:
        # Not planned again if routing changes: this may read many dead letters.
        with map_errors(schema, None if dry_run else "operator"):
            candidates = await _find_candidates(connection, selection)
        if dry_run or not any(each.dead_letters > each.skipped for each in candidates):
            return _report(candidates, None, dry_run=dry_run)

    async def plan(change: Change) -> list[ReplayCandidates]:
        if selection.ids:
            return await _plan_named(change, selection, rate_per_s)
        some = [each for each in candidates if each.dead_letters > each.skipped]
        parts = [JobPart(e.endpoint_id, e.first_id, e.last_id, e.numbers) for e in some]
        _add_selection_job(change, selection, parts, rate_per_s)
        criteria = {
            name: to_journal_value(value) for name, value in selection.filter.criteria.items()
        }
        data = {"selection": criteria, "dead_letters": _report(candidates, None).replaying}
        change.journal("dead_replayed", _single_endpoint(some), data, with_job=True)
        return candidates

    async def read_back(db: Any, request: UUID, replayed: list[ReplayCandidates]) -> ReplayReport:
        return _report(replayed, await db.fetchval(READ_NEW_JOB, request))

    return await make_change_and_read(connection, schema, actor, plan, read_back)


def write_dead_letter_state(change: Change, ids: Sequence[int], state: str) -> None:
    """Set the state of dead letters, which must still be `dead`, and unblock their lanes."""
    change.write(REQUIRE_DEAD, ids)
    change.write(SET_STATE, ids, state)
    change.write(UNBLOCK, ids)


async def _plan_named(
    change: Change, selection: DeadLetterSelection, rate_per_s: float | None
) -> list[ReplayCandidates]:
    """Plan the replay of dead letters selected by id."""
    rows = await _read_named(change.db, selection.ids, again=True)
    found, ids = _by_endpoint(rows), [row["id"] for row in rows]
    # They are replayed already, so their part has an empty id range.
    parts = [JobPart(each.endpoint_id, 1, 0, each.numbers) for each in found]
    _add_selection_job(change, selection, parts, rate_per_s)
    write_dead_letter_state(change, ids, "replaying")
    change.write(ADD_REPLAYS, ids)
    change.journal("dead_replayed", _single_endpoint(found), {"dead": ids}, with_job=True)
    return found


def _add_selection_job(
    change: Change,
    selection: DeadLetterSelection,
    parts: Sequence[JobPart],
    rate_per_s: float | None,
) -> None:
    dead_letter_filter = selection.filter
    names = ("types", "tenant", "reason", "since", "until")
    criteria = dict(zip(names, dead_letter_filter.arguments, strict=True))
    row = {
        "kind": "dead",
        "endpoint": dead_letter_filter.endpoint,
        **criteria,
        "rate_per_s": rate_per_s,
    }
    add_job(change, row, parts)


async def _find_candidates(
    connection: Connection[Any], selection: DeadLetterSelection
) -> list[ReplayCandidates]:
    if selection.ids:
        return _by_endpoint(await _read_named(connection, selection.ids, again=True))
    dead_letter_filter = selection.filter
    rows = await connection.fetch(
        COUNT_DEAD,
        await find_endpoint_ids(connection, dead_letter_filter.endpoint, dead_letter_filter.owner),
        *dead_letter_filter.arguments,
    )
    candidates = []
    for row in rows:
        reason = _UNAVAILABLE.get(row["state"], "erased" if row["erased"] else None)
        candidates.append(
            ReplayCandidates(
                row["endpoint_id"],
                row["endpoint"],
                row["dead_letters"],
                row["numbers"],
                row["dead_letters"] if row["state"] in _UNAVAILABLE else row["erased"],
                reason,
                row["first_id"],
                row["last_id"],
            )
        )
    return candidates


_UNAVAILABLE = {
    "removing": "removed",
    "removed": "removed",
    "disabling": "disabled",
    "disabled": "disabled",
}


def _by_endpoint(rows: Sequence[Any]) -> list[ReplayCandidates]:
    """Group dead letters selected by id by endpoint."""
    candidates: dict[UUID, ReplayCandidates] = {}
    for row in rows:
        previous = candidates.get(row["endpoint_id"])
        count, numbers = (previous.dead_letters, previous.numbers) if previous else (0, 0)
        candidates[row["endpoint_id"]] = ReplayCandidates(
            row["endpoint_id"],
            row["endpoint"],
            count + 1,
            numbers + row["to_seq"] - row["seq"] + 1,
            0,
            None,
            1,
            0,
        )
    return list(candidates.values())


def _report(
    candidates: Sequence[ReplayCandidates], job: int | None, *, dry_run: bool = False
) -> ReplayReport:
    skipped = Counter[str]()
    for each in candidates:
        if each.reason is not None:
            skipped[each.reason] += each.skipped
    todo = {
        e.endpoint: e.dead_letters - e.skipped for e in candidates if e.dead_letters > e.skipped
    }
    return ReplayReport(dry_run, sum(todo.values()), todo, dict(skipped), job)


def _single_endpoint(candidates: Sequence[ReplayCandidates]) -> UUID | None:
    """The endpoint, when there is exactly one."""
    return candidates[0].endpoint_id if len(candidates) == 1 else None


def to_journal_value(value: Any) -> Any:
    """Convert a filter value to its journal form."""
    return rfc3339(value) if hasattr(value, "astimezone") else value


async def _read_named(connection: Connection[Any], ids: Sequence[int], *, again: bool) -> list[Any]:
    """The dead letters with these ids, which must all be `dead`.

    Args:
        again: they must be replayable, too.
    """
    rows: list[Any] = await connection.fetch(READ_DEAD, sorted(set(ids)))
    missing = set(ids) - {row["id"] for row in rows}
    if missing:
        raise dead_letter_not_found(min(missing))
    for row in rows:
        explanation = explain_not_replayable(row) if again else explain_not_dead(row)
        if explanation is None:
            continue
        if row["state"] == "replaying":
            raise await _replay_conflict(connection, row["id"])
        raise Conflict(f"dead letter {row['id']} {explanation}")
    return rows


async def read_dead_letters(connection: Connection[Any], ids: Sequence[int]) -> list[Any]:
    """The dead letters with these ids, which must have the state `dead`.

    Raises:
        NotFound: an id does not exist.
        Conflict: a dead letter has another state.
    """
    return await _read_named(connection, ids, again=False)


async def _replay_conflict(connection: Connection[Any], dead_id: int) -> Conflict:
    """The error for a dead letter that was replayed before, with the result of the replay."""
    last = (await list_replays(connection, dead_id))[-1]
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
