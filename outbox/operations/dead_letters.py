"""Dead letters as a person looks at them.

A dead letter that is sent again stays: its deliveries are new ones at the end of
their lanes, which may die again as dead letters of their own.  The table knows
it as `replaying` for good; what became of the new deliveries is read from their
lanes' progress, so that an acknowledgement costs no write here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import orjson

from outbox.core.model.ids import lane_name
from outbox.errors import NotFound
from outbox.operations.dead_letter_filter import Filter, endpoint_ids, given
from outbox.operations.tenancy import OWNS_RANGE
from outbox.store.connection.connect import map_errors
from outbox.store.replay_feed import SELECTED

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID

    from asyncpg import Connection

State = Literal["dead", "replaying", "replayed", "dead_again", "discarded"]
"""Sent again: `replaying` while any of it is owed, then `replayed`, or `dead_again`."""
STATES: tuple[State, ...] = get_args(State)

# Replays, and what became of each.  Its deliveries follow one another in each
# lane, between others, so the last one in a lane tells whether any is owed there:
# `ends` hops from lane to lane, instead of reading a million of them.  A later
# dead letter that lies between the first and the last (numbers of ranges do not
# overlap, so at most the nearest one below begins before them) is of this replay
# if it holds one of its deliveries.
_REPLAYS = """
SELECT r.id, r.dead_id, r.asked_at, r.next_seq, made.lane_id, made.seq, made.again,
       CASE WHEN r.next_seq <= r.to_seq OR made.owed THEN 'replaying'
            WHEN made.again IS NOT NULL THEN 'dead_again'
            ELSE 'replayed' END AS state
  FROM replay r
 CROSS JOIN LATERAL (
       WITH RECURSIVE ends AS (
          (SELECT lane_id, batch, seq FROM delivery WHERE replay_id = r.id
            ORDER BY lane_id DESC, seq DESC LIMIT 1)
           UNION ALL
          SELECT below.* FROM ends CROSS JOIN LATERAL (
               SELECT lane_id, batch, seq FROM delivery
                WHERE replay_id = r.id AND lane_id < ends.lane_id
                ORDER BY lane_id DESC, seq DESC LIMIT 1) below)
       SELECT min(ends.lane_id) AS lane_id, min(ends.seq) AS seq, min(died.id) AS again,
              bool_or(ends.seq > p.acked_seq AND NOT EXISTS (
                  SELECT FROM attempt a
                   WHERE a.lane_id = ends.lane_id AND a.batch = ends.batch
                     AND a.seq = ends.seq AND a.outcome = 'delivered')) AS owed
         FROM ends
         JOIN lane_progress p ON p.lane_id = ends.lane_id
        CROSS JOIN LATERAL (
              SELECT seq FROM delivery
               WHERE replay_id = r.id AND lane_id = ends.lane_id ORDER BY seq LIMIT 1) first
         LEFT JOIN LATERAL (
              SELECT x.id FROM dead_letter x
               WHERE x.lane_id = ends.lane_id AND x.id > r.dead_id AND x.seq <= ends.seq
                 AND x.seq >= coalesce((
                     SELECT y.seq FROM dead_letter y
                      WHERE y.lane_id = ends.lane_id AND y.seq <= first.seq
                      ORDER BY y.seq DESC LIMIT 1), first.seq)
                 AND EXISTS (
                     SELECT FROM delivery d
                      WHERE d.replay_id = r.id AND d.lane_id = ends.lane_id
                        AND d.seq BETWEEN x.seq AND x.to_seq)
               ORDER BY x.seq LIMIT 1) died ON true) made
"""

LAST_REPLAY = f"""
  LEFT JOIN LATERAL (
       SELECT s.state, s.again FROM ({_REPLAYS}) s
        WHERE s.dead_id = d.id AND d.state = 'replaying'
        ORDER BY s.id DESC LIMIT 1) t ON true
"""  # noqa: S608 (constants only)


def _owned(n: int) -> str:
    """Whether a tenant's own endpoint has `d` for an event of that tenant, or for a range.

    It may have been another tenant's endpoint before, or everybody's.
    """
    return f"(${n}::text IS NULL OR d.tenant = ${n} OR {OWNS_RANGE.format(tenant=f'${n}')})"


# The stored state first: what is dead stands in an index of its own.
LIST_DEAD = f"""
SELECT d.id, e.name AS endpoint, d.endpoint_id, l.generation, l.slot, d.seq, d.to_seq,
       d.event_id, d.type, d.reason, (d.last_answer ->> 'status')::integer AS status,
       d.attempts, d.at, coalesce(t.state, d.state) AS state, t.again
  FROM dead_letter d
  JOIN endpoint e ON e.id = d.endpoint_id
  JOIN lane l ON l.id = d.lane_id
{LAST_REPLAY}
 CROSS JOIN (SELECT {given(6)}) s
 WHERE d.id > $1 AND d.state = ANY ($2) AND coalesce(t.state, d.state) = ANY ($5)
   AND ($3::uuid[] IS NULL OR d.endpoint_id = ANY ($3)) AND {SELECTED}
   AND {_owned(11)}
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
{LAST_REPLAY}
 WHERE d.id = $1
"""  # noqa: S608

# When it was asked to be sent again, how far that is, and which delivery it
# became (of a single one; those of a range are in several lanes).
GET_REPLAYS = f"""
SELECT r.asked_at, r.next_seq - d.seq AS taken, d.outbox_id IS NULL AS is_range,
       l.endpoint_id, l.generation, l.slot, r.seq, r.state, r.again
  FROM ({_REPLAYS}) r
  JOIN dead_letter d ON d.id = r.dead_id
  LEFT JOIN lane l ON l.id = r.lane_id
 WHERE r.dead_id = $1 ORDER BY r.id
"""  # noqa: S608


# Of single ones that were sent again, which are nearly all, the one delivery tells; that
# is quicker than to ask of each what `_REPLAYS` asks.
COUNT_DEAD = f"""
SELECT e.name AS endpoint, n.reason, n.state, sum(n.letters)::bigint AS letters,
       sum(n.numbers)::bigint AS numbers
  FROM (SELECT d.endpoint_id, d.reason, coalesce(t.state, d.state) AS state,
               count(*) AS letters, sum(d.to_seq - d.seq + 1) AS numbers
          FROM dead_letter d
          LEFT JOIN LATERAL (
               SELECT CASE WHEN made.seq IS NULL THEN 'replaying'
                           WHEN EXISTS (
                               SELECT FROM dead_letter x
                                WHERE x.lane_id = made.lane_id AND x.seq = (
                                      SELECT y.seq FROM dead_letter y
                                       WHERE y.lane_id = made.lane_id AND y.seq <= made.seq
                                       ORDER BY y.seq DESC LIMIT 1)
                                  AND x.to_seq >= made.seq) THEN 'dead_again'
                           WHEN made.seq <= p.acked_seq OR EXISTS (
                               SELECT FROM attempt a
                                WHERE a.lane_id = made.lane_id AND a.batch = made.batch
                                  AND a.seq = made.seq AND a.outcome = 'delivered') THEN 'replayed'
                           ELSE 'replaying' END AS state
                 FROM (SELECT id FROM replay WHERE dead_id = d.id ORDER BY id DESC LIMIT 1) r
                 LEFT JOIN LATERAL (
                      SELECT lane_id, batch, seq FROM delivery
                       WHERE replay_id = r.id LIMIT 1) made ON true
                 LEFT JOIN lane_progress p ON p.lane_id = made.lane_id
                WHERE d.state = 'replaying' AND d.outbox_id IS NOT NULL
                UNION ALL
               (SELECT s.state FROM ({_REPLAYS}) s
                 WHERE s.dead_id = d.id AND d.state = 'replaying' AND d.outbox_id IS NULL
                 ORDER BY s.id DESC LIMIT 1)) t ON true
         CROSS JOIN (SELECT {given(2)}) s
         WHERE ($1::uuid[] IS NULL OR d.endpoint_id = ANY ($1)) AND {SELECTED}
           AND {_owned(7)}
         GROUP BY d.endpoint_id, d.reason, coalesce(t.state, d.state)) n
  JOIN endpoint e ON e.id = n.endpoint_id
 GROUP BY e.name, n.reason, n.state
 ORDER BY e.name, n.reason, n.state
"""  # noqa: S608

# Each of very many is a look by index, whatever the planner thinks of so many.
PLAN_COUNT = (
    "SET LOCAL enable_hashjoin = off; SET LOCAL enable_mergejoin = off; SET LOCAL jit = off"
)

ANY = Filter()


@dataclass(frozen=True, slots=True)
class Count:
    """Dead letters of one endpoint that have reason and state in common."""

    endpoint: str
    reason: str
    state: State
    letters: int
    numbers: int
    """Deliveries that they stand for: a range has many."""


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
    taken: int
    """How many of its numbers were given a new one."""
    lane: str | None
    """None for a range, like `sequence`: its numbers may go to several lanes."""
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


async def page(
    connection: Connection[Any],
    schema: str,
    *,
    only: Filter = ANY,
    states: Sequence[State] = ("dead",),
    limit: int = 100,
    after: int = 0,
) -> list[DeadRow]:
    """Dead letters by id, at most `limit`, the ones behind `after`.

    Raises:
        NotFound: no endpoint was ever called so.
    """
    with map_errors(schema):
        ids = await endpoint_ids(connection, only.endpoint, only.owner)
        rows = await connection.fetch(
            LIST_DEAD,
            after,
            _stored(states),
            ids,
            limit,
            list(states),
            *only.arguments,
            only.owner,
        )
    return [_row(row) for row in rows]


async def counts(connection: Connection[Any], schema: str, *, only: Filter = ANY) -> list[Count]:
    """How many there are, by endpoint, reason and state.

    Raises:
        NotFound: no endpoint was ever called so.
    """
    with map_errors(schema):
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            await connection.execute(PLAN_COUNT)
            ids = await endpoint_ids(connection, only.endpoint, only.owner)
            rows = await connection.fetch(COUNT_DEAD, ids, *only.arguments, only.owner)
    return [Count(**dict(row)) for row in rows]


async def get(connection: Connection[Any], schema: str, dead_id: int) -> DeadLetter:
    """One dead letter with its event and its replays.

    Raises:
        NotFound: there is none with this id.
    """
    with map_errors(schema):
        row = await connection.fetchrow(GET_DEAD, dead_id)
        if row is None:
            raise no_such(dead_id)
        replays = await replays_of(connection, dead_id)
    return DeadLetter(
        row=_row(row),
        tenant=row["tenant"],
        key=row["key"],
        payload=_json(row["payload"]),
        headers=_json(row["headers"]),
        published_at=row["published_at"],
        expires_at=row["expires_at"],
        last_answer=_json(row["last_answer"]),
        replays=tuple(replays),
    )


async def replays_of(connection: Connection[Any], dead_id: int) -> list[ReplayRow]:
    """Every time it was sent again, oldest first."""
    return [
        ReplayRow(
            asked_at=r["asked_at"],
            taken=r["taken"],
            lane=None if r["is_range"] or r["seq"] is None else _lane(r),
            sequence=None if r["is_range"] else r["seq"],
            state=r["state"],
            again=r["again"],
        )
        for r in await connection.fetch(GET_REPLAYS, dead_id)
    ]


def _stored(states: Sequence[State]) -> list[str]:
    """States as the table has them."""
    sent_again = ("replayed", "dead_again")
    return sorted({"replaying" if state in sent_again else state for state in states})


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


def no_such(dead_id: int) -> NotFound:
    """The error for a number that no dead letter has."""
    return NotFound(f"there is no dead letter {dead_id}; see: outbox dead list")
