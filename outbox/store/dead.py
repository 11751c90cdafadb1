"""Dead letters: looking at them, sending them again, setting them aside.

A dead letter that is sent again stays: its delivery is a new one at the end of
its lane, which may die again as a dead letter of its own.  The table knows it as
`replaying` for good; what became of the new delivery is read from its lane's
progress, so that an acknowledgement costs no write here.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import orjson

from outbox.core.identity import lane_name
from outbox.errors import NotFound, UsageError
from outbox.store.changes import change, write_journal
from outbox.store.connect import map_errors
from outbox.store.endpoints import not_found

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID

    from asyncpg import Connection

State = Literal["dead", "replaying", "replayed", "dead_again", "discarded"]
"""Sent again: `replaying` while it is owed, then `replayed`, or `dead_again`."""
STATES: tuple[State, ...] = get_args(State)

# A name may have been used by several endpoints, one after the other; dead
# letters outlive them, so all of them are meant.
FIND_ENDPOINTS = "SELECT id FROM endpoint WHERE name = $1"

# Replays, and what became of each.  It was given up when a dead letter of its
# lane has its number (numbers of ranges do not overlap, so the nearest one
# below decides), and else delivered when the lane's progress is past it.
_REPLAYS = """
SELECT r.id, r.dead_id, r.asked_at, r.lane_id, r.seq,
       CASE WHEN died.to_seq >= r.seq THEN died.id END AS again,
       CASE WHEN died.to_seq >= r.seq THEN 'dead_again'
            WHEN r.seq <= p.acked_seq
                 OR EXISTS (SELECT FROM attempt a
                             WHERE a.lane_id = r.lane_id AND a.batch = r.batch
                               AND a.seq = r.seq AND a.outcome = 'delivered') THEN 'replayed'
            ELSE 'replaying' END AS state
  FROM replay r
  LEFT JOIN lane_progress p ON p.lane_id = r.lane_id
  LEFT JOIN LATERAL (
       SELECT x.id, x.to_seq FROM dead_letter x
        WHERE x.lane_id = r.lane_id AND x.seq <= r.seq
        ORDER BY x.seq DESC LIMIT 1) died ON true
"""

_LAST_REPLAY = f"""
  LEFT JOIN LATERAL (
       SELECT s.state, s.again FROM ({_REPLAYS}) s
        WHERE s.dead_id = d.id AND d.state = 'replaying'
        ORDER BY s.id DESC LIMIT 1) t ON true
"""  # noqa: S608 (constants only)

# The stored state first: what is dead stands in an index of its own.
LIST_DEAD = f"""
SELECT d.id, e.name AS endpoint, d.endpoint_id, l.generation, l.slot, d.seq, d.to_seq,
       d.event_id, d.type, d.reason, (d.last_answer ->> 'status')::integer AS status,
       d.attempts, d.at, coalesce(t.state, d.state) AS state, t.again
  FROM dead_letter d
  JOIN endpoint e ON e.id = d.endpoint_id
  JOIN lane l ON l.id = d.lane_id
{_LAST_REPLAY}
 WHERE d.id > $1 AND d.state = ANY ($2) AND coalesce(t.state, d.state) = ANY ($5)
   AND ($3::uuid[] IS NULL OR d.endpoint_id = ANY ($3))
 ORDER BY d.id LIMIT $4
"""  # noqa: S608

GET_DEAD = f"""
SELECT d.id, e.name AS endpoint, d.endpoint_id, l.generation, l.slot, d.seq, d.to_seq,
       d.event_id, d.type, d.reason, (d.last_answer ->> 'status')::integer AS status,
       d.attempts, d.at, coalesce(t.state, d.state) AS state, t.again,
       d.tenant, d.key, d.payload::text AS payload, d.headers::text AS headers,
       d.published_at, d.expires_at, d.last_answer::text AS last_answer
  FROM dead_letter d
  JOIN endpoint e ON e.id = d.endpoint_id
  JOIN lane l ON l.id = d.lane_id
{_LAST_REPLAY}
 WHERE d.id = $1
"""  # noqa: S608

# When it was asked to be sent again, which delivery that became, and what of it.
GET_REPLAYS = f"""
SELECT r.asked_at, l.endpoint_id, l.generation, l.slot, r.seq, r.state, r.again
  FROM ({_REPLAYS}) r LEFT JOIN lane l ON l.id = r.lane_id
 WHERE r.dead_id = $1 ORDER BY r.id
"""  # noqa: S608

# Locked in the order of their ids, as everybody does who locks several.
LOCK_DEAD = """
SELECT d.id, d.state, d.seq <> d.to_seq AS is_range, d.payload IS NULL AS is_erased,
       d.seq, d.to_seq, e.state AS endpoint_state, e.name AS endpoint, d.endpoint_id
  FROM dead_letter d JOIN endpoint e ON e.id = d.endpoint_id
 WHERE ($1::bigint[] IS NULL OR d.id = ANY ($1))
   AND ($2::uuid[] IS NULL OR d.endpoint_id = ANY ($2))
   AND ($1::bigint[] IS NOT NULL OR d.state = 'dead')
 ORDER BY d.id FOR UPDATE OF d
"""

# The next batch makes deliveries of them.
ASK_REPLAY = "INSERT INTO replay (dead_id) SELECT unnest($1::bigint[])"

SET_STATE = "UPDATE dead_letter SET state = $2 WHERE id = ANY ($1)"


@dataclass(frozen=True, slots=True)
class DeadRow:
    """A dead letter as listings show it."""

    id: int
    endpoint: str
    lane: str
    sequence: int
    to_sequence: int
    event: UUID | None
    """None for a range."""
    type: str | None
    reason: str
    status: int | None
    """Of the last answer; None when there was none."""
    attempts: int
    at: datetime
    state: State
    again: int | None
    """The dead letter that it became when it was sent again."""


@dataclass(frozen=True, slots=True)
class ReplayRow:
    """A replay that was asked for; lane and number are the next batch's to give."""

    asked_at: datetime
    lane: str | None
    sequence: int | None
    state: State
    again: int | None


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Everything that is known of a dead letter; JSON is parsed."""

    row: DeadRow
    tenant: str | None
    key: str | None
    payload: Any
    headers: dict[str, str] | None
    published_at: datetime | None
    expires_at: datetime | None
    last_answer: dict[str, Any] | None
    replays: tuple[ReplayRow, ...]


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


async def page(
    connection: Connection[Any],
    schema: str,
    *,
    endpoint: str | None = None,
    states: Sequence[State] = ("dead",),
    limit: int = 100,
    after: int = 0,
) -> list[DeadRow]:
    """Dead letters by id, at most `limit`, the ones behind `after`.

    Raises:
        NotFound: no endpoint was ever called so.
    """
    with map_errors(schema):
        endpoint_ids = await _endpoint_ids(connection, endpoint)
        rows = await connection.fetch(
            LIST_DEAD, after, _stored(states), endpoint_ids, limit, list(states)
        )
    return [_row(row) for row in rows]


async def get(connection: Connection[Any], schema: str, dead_id: int) -> DeadLetter:
    """One dead letter with its event and its replays.

    Raises:
        NotFound: there is none with this id.
    """
    with map_errors(schema):
        row = await connection.fetchrow(GET_DEAD, dead_id)
        if row is None:
            raise _none(dead_id)
        replays = await connection.fetch(GET_REPLAYS, dead_id)
    return DeadLetter(
        row=_row(row),
        tenant=row["tenant"],
        key=row["key"],
        payload=_json(row["payload"]),
        headers=_json(row["headers"]),
        published_at=row["published_at"],
        expires_at=row["expires_at"],
        last_answer=_json(row["last_answer"]),
        replays=tuple(
            ReplayRow(
                asked_at=r["asked_at"],
                lane=None if r["seq"] is None else _lane(r),
                sequence=r["seq"],
                state=r["state"],
                again=r["again"],
            )
            for r in replays
        ),
    )


async def replay(
    connection: Connection[Any], schema: str, selection: Selection, *, actor: str
) -> Outcome:
    """Send dead letters again, at the end of their lanes, from the next batch on.

    What was named by id must be possible; a sweep passes over what is not.

    Raises:
        NotFound: an id or endpoint that does not exist.
        UsageError: one named by id is a range, erased, not dead any more, or
            of an endpoint that is removed.
    """
    async with change(connection, schema):
        chosen, skipped = await _choose(connection, selection, _why_not_again)
        await connection.execute(ASK_REPLAY, [row["id"] for row in chosen])
        await connection.execute(SET_STATE, [row["id"] for row in chosen], "replaying")
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
    with map_errors(schema):
        async with connection.transaction(isolation="read_committed"):
            chosen, skipped = await _choose(connection, selection, _why_not_dead)
            await connection.execute(SET_STATE, [row["id"] for row in chosen], "discarded")
            data = {} if reason is None else {"reason": reason}
            await _tell(connection, "dead_discarded", actor, chosen, data)
    return Outcome(len(chosen), skipped)


async def _choose(
    connection: Connection[Any], selection: Selection, why_not: Any
) -> tuple[list[Any], dict[str, int]]:
    """Rows to act on, locked, and how many were passed over for each reason."""
    endpoint_ids = await _endpoint_ids(connection, selection.endpoint)
    ids = sorted(set(selection.ids)) or None
    rows = await connection.fetch(LOCK_DEAD, ids, endpoint_ids)
    missing = set(ids or ()) - {row["id"] for row in rows}
    if missing:
        raise _none(min(missing))
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
    last = (await connection.fetch(GET_REPLAYS, dead_id))[-1]
    text = {
        "replaying": "is being sent again already",
        "replayed": f"was sent again as number {last['seq']}",
        "dead_again": f"was sent again, and is dead again as {last['again']}",
    }[last["state"]]
    shown = last["again"] or dead_id
    return UsageError(f"dead letter {dead_id} {text}; see: outbox dead show {shown}")


def _stored(states: Sequence[State]) -> list[str]:
    """States as the table has them."""
    sent_again = ("replayed", "dead_again")
    return sorted({"replaying" if state in sent_again else state for state in states})


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
    if row["endpoint_state"] != "active":
        return "removed", f'belongs to the endpoint "{row["endpoint"]}", which was removed'
    if row["is_range"]:
        return "range", (
            f"stands for the numbers {row['seq']} to {row['to_seq']} of its lane; "
            "a range cannot be sent again"
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


async def _endpoint_ids(connection: Connection[Any], name: str | None) -> list[UUID] | None:
    if name is None:
        return None
    rows = await connection.fetch(FIND_ENDPOINTS, name)
    if not rows:
        raise await not_found(connection, name)
    return [row["id"] for row in rows]


def _row(row: Any) -> DeadRow:
    return DeadRow(
        id=row["id"],
        endpoint=row["endpoint"],
        lane=_lane(row),
        sequence=row["seq"],
        to_sequence=row["to_seq"],
        event=row["event_id"],
        type=row["type"],
        reason=row["reason"],
        status=row["status"],
        attempts=row["attempts"],
        at=row["at"],
        state=row["state"],
        again=row["again"],
    )


def _lane(row: Any) -> str:
    return lane_name(row["endpoint_id"], row["generation"], row["slot"])


def _json(text: str | None) -> Any:
    return None if text is None else orjson.loads(text)


def _none(dead_id: int) -> NotFound:
    return NotFound(f"there is no dead letter {dead_id}; see: outbox dead list")
