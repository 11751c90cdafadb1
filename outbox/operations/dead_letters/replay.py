"""Replay of dead letters.

Dead letters selected by id are replayed at once; those that cannot be are skipped.  Criteria
create a replay job in constant time, independent of the number of dead letters; the
leader processes it in chunks, at a rate that leaves capacity to live events.
"""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from outbox.core.model.text import count
from outbox.errors import Conflict
from outbox.operations.criteria import criteria_parameters, find_endpoint_ids
from outbox.operations.dead_letters.queries import dead_letter_not_found, list_replays
from outbox.operations.replays.claims import ADD_REPLAYS, write_dead_letter_state
from outbox.operations.replays.jobs import JobRange, add_job, read_new_job
from outbox.operations.rows import from_row
from outbox.store.change import make_change_and_read
from outbox.store.connection.connect import map_errors
from outbox.store.replays.replay_feed import END_REASON, IS_ERASED, MATCHES_SELECTION

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID

    from asyncpg import Connection

    from outbox.operations.criteria import DeadLetterSelection
    from outbox.store.change import Change

T = TypeVar("T")

READ_DEAD = f"""
SELECT d.id, d.state, e.name AS endpoint, {END_REASON} AS end_reason, {IS_ERASED} AS is_erased
  FROM dead_letter d JOIN endpoint e ON e.id = d.endpoint_id
 WHERE d.id = ANY ($1) ORDER BY d.id
"""  # noqa: S608 (constants only)

# Dead letters that a selection includes, by endpoint.
COUNT_SELECTED = f"""
SELECT e.id AS endpoint_id, e.name AS endpoint, count(*) AS dead_letters,
       sum(d.to_seq - d.seq + 1)::bigint AS numbers,
       count(*) FILTER (WHERE {END_REASON} IS NOT NULL OR {IS_ERASED}) AS skipped,
       coalesce({END_REASON}, CASE WHEN bool_or({IS_ERASED}) THEN 'erased' END) AS reason,
       min(d.id) AS first_id, max(d.id) AS last_id
  FROM dead_letter d
  JOIN endpoint e ON e.id = d.endpoint_id,
       (SELECT {criteria_parameters(3)}) s
 WHERE d.state = 'dead' AND ($1::bigint[] IS NULL OR d.id = ANY ($1))
   AND ($2::uuid[] IS NULL OR d.endpoint_id = ANY ($2)) AND {MATCHES_SELECTION}
 GROUP BY e.id ORDER BY e.name
"""  # noqa: S608


@dataclass(frozen=True, slots=True)
class ReplayCandidates:
    """Dead letters of one endpoint that a selection includes."""

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

    @property
    def replayable(self) -> int:
        return self.dead_letters - self.skipped


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
    until: datetime | None = None
    """The time at which a dry run counted them, by the database's clock: with this `until`, nothing
    that is dead-lettered later is selected.  None: they were selected by id, or this is no dry
    run."""


async def start_replay(
    connection: Connection[Any],
    schema: str,
    selection: DeadLetterSelection,
    *,
    actor: str,
    rate_per_s: float | None = None,
    counted: int | None = None,
    dry_run: bool = False,
) -> ReplayReport:
    """Replay dead letters: add new deliveries at the end of their lanes, behind live events.

    Each delivery of a range is replayed, in order, interleaved with other events.  What cannot be
    replayed is skipped, and counted in the report: dead letters that are erased, or of endpoints
    that are disabled or removed.

    Args:
        rate_per_s: maximum rate in deliveries per second; None: no limit.
        counted: the number of a dry run; more dead letters are not replayed.
        dry_run: count only.

    Raises:
        NotFound: an id or endpoint does not exist.
        Conflict: a dead letter selected by id is not dead; none of those selected by id can be
            replayed; or there are more than were counted.
    """
    candidates: list[ReplayCandidates] = []
    if dry_run or not selection.ids:
        # Not planned again if routing changes: this may read many dead letters.
        with map_errors(schema, None if dry_run else "operator"):
            if dry_run:
                selection = await selection.resolve_until_now(connection)
            else:
                selection = await selection.resolve(connection)
            candidates = await find_candidates(connection, selection, to_replay=True)
        if dry_run:
            return replace(_report(candidates, None, dry_run=True), until=selection.until)
        require_counted(sum(each.replayable for each in candidates), counted)
        if not any(each.replayable for each in candidates):
            return _report(candidates, None)

    async def plan(change: Change) -> list[ReplayCandidates]:
        criteria = selection.criteria
        ids = await choose_dead(change.db, selection.ids, to_replay=True)
        found = candidates or await find_candidates(change.db, selection, to_replay=True)
        # An event that is erased meanwhile still gets a part, as its id is in the list.
        some = [each for each in found if each.replayable or (ids and each.reason == "erased")]
        # Those selected by id are replayed already, so their part has an empty id range.
        ranges = [
            JobRange(e.endpoint_id, 1, 0, e.numbers - e.skipped)
            if ids
            else JobRange(e.endpoint_id, e.first_id, e.last_id, e.numbers)
            for e in some
        ]
        add_job(change, "dead", criteria, ranges, rate_per_s=rate_per_s)
        data: dict[str, Any] = {"dead": ids}
        if ids:
            write_dead_letter_state(change, ids, "replaying")
            change.write(ADD_REPLAYS, ids)
        else:
            dead_letters = sum(each.replayable for each in some)
            data = {"selection": criteria.journal_data, "dead_letters": dead_letters}
        endpoint = single([each.endpoint_id for each in some])
        change.journal("dead_replayed", endpoint, data, with_job=True)
        return found

    async def read_back(db: Any, request: UUID, replayed: list[ReplayCandidates]) -> ReplayReport:
        return _report(replayed, await read_new_job(db, request, replayed))

    return await make_change_and_read(connection, schema, actor, plan, read_back)


async def find_candidates(
    connection: Connection[Any], selection: DeadLetterSelection, *, to_replay: bool
) -> list[ReplayCandidates]:
    """Count the dead letters that a selection includes, by endpoint.

    Args:
        to_replay: see `choose_dead`.

    Raises:
        NotFound: an id or endpoint does not exist.
        Conflict: as in `choose_dead`.
    """
    await choose_dead(connection, selection.ids, to_replay=to_replay)
    only = selection.criteria
    endpoint_ids = await find_endpoint_ids(connection, only.endpoint, only.owner)
    rows = await connection.fetch(
        COUNT_SELECTED, selection.ids or None, endpoint_ids, *only.arguments
    )
    return [from_row(ReplayCandidates, row) for row in rows]


def require_counted(selected: int, counted: int | None) -> None:
    """Require that a selection has no more dead letters than its dry run counted.

    A transaction that wrote some may have been committed after the dry run, with an earlier time.

    Raises:
        Conflict: it has more; nothing was changed.
    """
    if counted is not None and selected > counted:
        raise Conflict(
            f"{count(selected, 'dead letter')} match by now, but {counted} were counted; nothing "
            "was changed; count them again"
        )


def single(values: Sequence[T]) -> T | None:
    """The value, when there is exactly one."""
    return values[0] if len(values) == 1 else None


def _report(
    candidates: Sequence[ReplayCandidates], job: int | None, *, dry_run: bool = False
) -> ReplayReport:
    skipped = Counter[str]()
    for each in candidates:
        if each.reason is not None:
            skipped[each.reason] += each.skipped
    todo = {each.endpoint: each.replayable for each in candidates if each.replayable}
    return ReplayReport(dry_run, sum(todo.values()), todo, dict(skipped), job)


async def choose_dead(
    connection: Connection[Any], ids: Sequence[int], *, to_replay: bool
) -> list[int]:
    """Choose dead letters by id; all of them must be `dead`.

    Args:
        to_replay: whether they are to be replayed, which not all of them can be.

    Returns:
        Their ids, in order; to be replayed, only those that can be.

    Raises:
        NotFound: an id does not exist.
        Conflict: one has another state; or none of them can be replayed.
    """
    if not ids:
        return []
    rows = await connection.fetch(READ_DEAD, sorted(set(ids)))
    if missing := set(ids) - {row["id"] for row in rows}:
        raise dead_letter_not_found(min(missing))
    for row in rows:
        if row["state"] == "replaying":
            raise await _replay_conflict(connection, row["id"])
        if row["state"] == "discarded":
            raise Conflict(f"dead letter {row['id']} was discarded")
    obstacles = {row["id"]: _explain_not_replayable(row) if to_replay else None for row in rows}
    if all(obstacles.values()):
        first, reason = next(iter(obstacles.items()))
        raise Conflict(f"dead letter {first} {reason}")
    return [id_ for id_, obstacle in obstacles.items() if obstacle is None]


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


def _explain_not_replayable(row: Any) -> str | None:
    """Why a dead letter of the state `dead` cannot be replayed; None: it can."""
    name = row["endpoint"]
    match row["end_reason"]:
        case "removed":
            return f'belongs to the endpoint "{name}", which was removed'
        case "disabled":
            return (
                f'belongs to the endpoint "{name}", which is disabled; '
                f"enable it first: outbox endpoint enable {shlex.quote(name)}"
            )
    return "has no payload: its event was erased" if row["is_erased"] else None
