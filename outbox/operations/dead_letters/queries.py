"""Dead letter queries: listing, counting and details.

A replay keeps the dead letter and adds new deliveries at the end of their lanes, which may
become new dead letters.  The table stores the state `replaying` permanently; the result of the
replay is derived from the progress of the lanes, so an acknowledgement needs no write here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from outbox.errors import NotFound
from outbox.operations.criteria import Criteria, criteria_parameters, find_endpoint_ids
from outbox.operations.pages import convert, page_of
from outbox.operations.rows import from_row
from outbox.operations.tenancy import OWNS_RANGE
from outbox.store.connection.connect import map_errors
from outbox.store.replays.replay_feed import MATCHES_SELECTION
from outbox.store.retention.erasure import PLAN_BY_INDEX
from outbox.store.sql.expressions import PAYLOAD_SIZE

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID

    from asyncpg import Connection

    from outbox.operations.rows import RowPage

DeadLetterState = Literal["dead", "replaying", "replayed", "dead_again", "discarded"]
"""State of a dead letter.  A replayed one is `replaying` while any new delivery is pending, then
`replayed` or `dead_again`."""
STATES: tuple[DeadLetterState, ...] = get_args(DeadLetterState)

# Replays and their states.  The deliveries of a replay are in order in each lane, between
# others, so the last one in a lane shows whether any is pending there: `ends` skips from lane to
# lane (a loose index scan), instead of reading a million rows.  A later dead letter between the
# first and the last delivery belongs to this replay if it contains one of its deliveries
# (ranges do not overlap, so at most the nearest one below begins before the first).
_REPLAYS = """
SELECT r.id, r.dead_id, r.requested_at, r.next_seq, made.lane_id, made.seq, made.again,
       CASE WHEN r.next_seq <= r.to_seq OR made.pending THEN 'replaying'
            WHEN made.again IS NOT NULL THEN 'dead_again'
            ELSE 'replayed' END AS state
  FROM replay r
 CROSS JOIN LATERAL (
       WITH RECURSIVE ends AS (
          (SELECT lane_id, batch, seq FROM delivery_run WHERE replay_id = r.id
            ORDER BY lane_id DESC, seq DESC LIMIT 1)
           UNION ALL
          SELECT below.* FROM ends CROSS JOIN LATERAL (
               SELECT lane_id, batch, seq FROM delivery_run
                WHERE replay_id = r.id AND lane_id < ends.lane_id
                ORDER BY lane_id DESC, seq DESC LIMIT 1) below)
       SELECT min(ends.lane_id) AS lane_id, min(ends.seq) AS seq, min(died.id) AS again,
              bool_or(ends.seq > p.acked_seq AND NOT EXISTS (
                  SELECT FROM attempt a
                   WHERE a.lane_id = ends.lane_id AND a.batch = ends.batch
                     AND a.seq = ends.seq AND a.outcome = 'delivered')) AS pending
         FROM ends
         JOIN lane_progress p ON p.lane_id = ends.lane_id
        CROSS JOIN LATERAL (
              SELECT seq FROM delivery_run
               WHERE replay_id = r.id AND lane_id = ends.lane_id ORDER BY seq LIMIT 1) first
         LEFT JOIN LATERAL (
              SELECT x.id FROM dead_letter x
               WHERE x.lane_id = ends.lane_id AND x.id > r.dead_id AND x.seq <= ends.seq
                 AND x.seq >= coalesce((
                     SELECT y.seq FROM dead_letter y
                      WHERE y.lane_id = ends.lane_id AND y.seq <= first.seq
                      ORDER BY y.seq DESC LIMIT 1), first.seq)
                 AND EXISTS (
                     SELECT FROM delivery_run d
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
    """SQL condition: the dead letter `d` is of an event, or a range of events, of the tenant.

    The endpoint may have belonged to another tenant, or to all tenants, before.
    """
    return f"(${n}::text IS NULL OR d.tenant = ${n} OR {OWNS_RANGE.format(tenant=f'${n}')})"


_COLUMNS = """
       d.id, e.name AS endpoint, lane_name(l.endpoint_id, l.generation, l.slot) AS lane,
       d.seq AS sequence, d.to_seq AS to_sequence, d.event_id AS event, d.type, d.key, d.reason,
       (d.last_response ->> 'status')::integer AS status, d.last_response ->> 'failure' AS failure,
       left(coalesce(nullif(d.last_response ->> 'detail', ''), d.last_response ->> 'body'), 200)
           AS excerpt,
       d.attempts, d.at,
       coalesce(t.state, d.state) AS state, t.again
"""
_FROM = f"""
  FROM dead_letter d
  JOIN endpoint e ON e.id = d.endpoint_id
  JOIN lane l ON l.id = d.lane_id
{LAST_REPLAY}
"""

# Filter by the stored state first, to use the partial index of state `dead`.
LIST_DEAD = f"""
SELECT {_COLUMNS} {_FROM}
 CROSS JOIN (SELECT {criteria_parameters(6)}) s
 WHERE d.id > $1 AND d.state = ANY ($2) AND coalesce(t.state, d.state) = ANY ($5)
   AND ($3::uuid[] IS NULL OR d.endpoint_id = ANY ($3)) AND {MATCHES_SELECTION}
   AND {_owned(11)}
 ORDER BY d.id LIMIT $4
"""

GET_DEAD = f"""
SELECT {_COLUMNS}, d.tenant, d.payload::text AS payload, d.headers::text AS headers,
       d.published_at, d.expires_at, d.last_response::text AS last_response,
       {PAYLOAD_SIZE} AS payload_bytes, d.content_type
{_FROM}
 WHERE d.id = $1
"""

# Replays of a dead letter: request time, progress, and the new delivery (only of a single
# delivery; those of a range may be in several lanes).
GET_REPLAYS = f"""
SELECT r.requested_at, r.next_seq - d.seq AS taken,
       lane_name(l.endpoint_id, l.generation, l.slot) AS lane,
       CASE WHEN d.outbox_id IS NOT NULL THEN r.seq END AS sequence, r.state, r.again
  FROM ({_REPLAYS}) r
  JOIN dead_letter d ON d.id = r.dead_id
  LEFT JOIN lane l ON l.id = r.lane_id AND d.outbox_id IS NOT NULL
 WHERE r.dead_id = $1 ORDER BY r.id
"""  # noqa: S608


# Most replayed dead letters are single deliveries, whose state follows from the one new
# delivery; that is faster than `_REPLAYS`.
COUNT_DEAD = f"""
SELECT e.name AS endpoint, n.reason, n.state, sum(n.dead_letters)::bigint AS dead_letters,
       sum(n.numbers)::bigint AS numbers
  FROM (SELECT d.endpoint_id, d.reason, coalesce(t.state, d.state) AS state,
               count(*) AS dead_letters, sum(d.to_seq - d.seq + 1) AS numbers
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
                      SELECT lane_id, batch, seq FROM delivery_run
                       WHERE replay_id = r.id LIMIT 1) made ON true
                 LEFT JOIN lane_progress p ON p.lane_id = made.lane_id
                WHERE d.state = 'replaying' AND d.outbox_id IS NOT NULL
                UNION ALL
               (SELECT s.state FROM ({_REPLAYS}) s
                 WHERE s.dead_id = d.id AND d.state = 'replaying' AND d.outbox_id IS NULL
                 ORDER BY s.id DESC LIMIT 1)) t ON true
         CROSS JOIN (SELECT {criteria_parameters(2)}) s
         WHERE ($1::uuid[] IS NULL OR d.endpoint_id = ANY ($1)) AND {MATCHES_SELECTION}
           AND {_owned(7)}
         GROUP BY d.endpoint_id, d.reason, coalesce(t.state, d.state)) n
  JOIN endpoint e ON e.id = n.endpoint_id
 GROUP BY e.name, n.reason, n.state
 ORDER BY e.name, n.reason, n.state
"""  # noqa: S608

# Force index lookups: the planner would choose hash or merge joins over whole tables.
PLAN_COUNT = (
    "SET LOCAL enable_hashjoin = off; SET LOCAL enable_mergejoin = off; SET LOCAL jit = off"
)

ANY = Criteria()


@dataclass(frozen=True, slots=True)
class DeadLetterCount:
    """Number of dead letters of one endpoint with the same reason and state."""

    endpoint: str
    reason: str
    state: DeadLetterState
    dead_letters: int
    numbers: int
    """Number of deliveries; a range has many."""


@dataclass(frozen=True, slots=True)
class DeadLetterCounts:
    """Counts of dead letters."""

    total: dict[DeadLetterState, int]
    counts: list[DeadLetterCount]


@dataclass(frozen=True, slots=True)
class DeadLetterRow:
    """A dead letter in a listing."""

    id: int
    endpoint: str
    lane: str
    sequence: int
    to_sequence: int
    event: UUID | None
    """The event; None for a range."""
    type: str | None
    key: str | None
    reason: str
    status: int | None
    """Status of the last response; None: no response."""
    failure: str | None
    """Why the last attempt has no status."""
    excerpt: str | None
    """The beginning of the last response's body, or a detail of its failure; null for callers that
    may not read responses."""
    attempts: int
    at: datetime
    state: DeadLetterState
    again: int | None
    """Id of the dead letter that its replay ended in."""


@dataclass(frozen=True, slots=True)
class ReplayRow:
    """A replay of a dead letter; lane and sequence are set by the next batch."""

    requested_at: datetime
    taken: int
    """Number of deliveries replayed so far."""
    lane: str | None
    """The lane.  It is None, like `sequence`, for a range: its deliveries may go to several
    lanes."""
    sequence: int | None
    state: DeadLetterState
    again: int | None


@dataclass(frozen=True, slots=True)
class DeadLetter(DeadLetterRow):
    """A dead letter with its event and replays; JSON is parsed."""

    tenant: str | None
    payload: Any
    """The payload; None also if it is not JSON."""
    payload_bytes: int | None
    """The payload's size; None: the payload was erased, or it is a range."""
    content_type: str | None
    """The content type of a payload that is not JSON."""
    headers: dict[str, str] | None
    published_at: datetime | None
    expires_at: datetime | None
    last_response: dict[str, Any] | None
    replays: tuple[ReplayRow, ...]


async def list_dead_letters(
    connection: Connection[Any],
    schema: str,
    *,
    only: Criteria = ANY,
    states: Sequence[DeadLetterState] = ("dead",),
    limit: int = 100,
    after: int = 0,
) -> RowPage[DeadLetterRow]:
    """List dead letters by id, at most `limit`, starting after the id `after`.

    Raises:
        NotFound: no endpoint ever had this name.
    """
    sent_again = ("replayed", "dead_again")
    stored = sorted({"replaying" if state in sent_again else state for state in states})
    with map_errors(schema):
        only = await only.resolve(connection)
        ids = await find_endpoint_ids(connection, only.endpoint, only.owner)
        async with connection.transaction(readonly=True):
            await connection.execute(PLAN_BY_INDEX)
            rows = await connection.fetch(
                LIST_DEAD, after, stored, ids, limit + 1, states, *only.arguments, only.owner
            )
    return await convert(page_of(rows, limit), lambda row: from_row(DeadLetterRow, row))


async def count_by_state(
    connection: Connection[Any], schema: str, *, only: Criteria = ANY
) -> DeadLetterCounts:
    """Count dead letters by endpoint, reason and state.

    Raises:
        NotFound: no endpoint ever had this name.
    """
    with map_errors(schema):
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            await connection.execute(PLAN_COUNT)
            only = await only.resolve(connection)
            ids = await find_endpoint_ids(connection, only.endpoint, only.owner)
            rows = await connection.fetch(COUNT_DEAD, ids, *only.arguments, only.owner)
    counts = [DeadLetterCount(**row) for row in rows]
    total: dict[DeadLetterState, int] = dict.fromkeys(STATES, 0)
    for each in counts:
        total[each.state] += each.dead_letters
    return DeadLetterCounts(total, counts)


async def get_dead_letter(connection: Connection[Any], schema: str, dead_id: int) -> DeadLetter:
    """Read one dead letter with its event and its replays.

    Raises:
        NotFound: no dead letter has this id.
    """
    with map_errors(schema):
        row = await connection.fetchrow(GET_DEAD, dead_id)
        if row is None:
            raise dead_letter_not_found(dead_id)
        replays = tuple(await list_replays(connection, dead_id))
    parse = ("headers", "last_response")
    return from_row(DeadLetter, row, parse=parse, embed=("payload",), replays=replays)


async def list_replays(connection: Connection[Any], dead_id: int) -> list[ReplayRow]:
    """List the replays of a dead letter, oldest first."""
    return [from_row(ReplayRow, row) for row in await connection.fetch(GET_REPLAYS, dead_id)]


def dead_letter_not_found(dead_id: int) -> NotFound:
    """The error for an unknown dead letter id."""
    return NotFound(f"there is no dead letter {dead_id}; see: outbox dead list")
