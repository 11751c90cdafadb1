"""Erasing what events say, for a tenant or a key: in the outbox, dead letters and answers.

What happened stays: which events there were, to whom they went and when.  Gone are
payloads, headers, and what is kept of receivers' answers, which may repeat them.
What is owed is not sent any more, and becomes a dead letter with the reason
`erased`; its place in the lane is kept.

In steps, so that no transaction is long; whoever is interrupted begins again, and
finds what is left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.core.periods import WIDTH
from outbox.errors import UsageError
from outbox.store.changes import LOCK_CURSOR, write_journal
from outbox.store.connect import map_errors
from outbox.store.lookup import PLAN_BY_INDEX
from outbox.store.notify import WAKE_ALL

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from asyncpg import Connection

STEP_EVENTS = 2_000
"""Events that are looked at in one transaction."""

# Events by id, from one on; of a key they are found by the index of keys.
NEXT_OF_TENANT = """
SELECT id, tenant = $3 AS wanted FROM outbox WHERE id > $1 ORDER BY id LIMIT $2
"""
ALL_OF_KEY = "SELECT array_agg(id ORDER BY id) FROM outbox WHERE key = $1"

ABOUT = """
SELECT coalesce(sum(greatest(reltuples, 0)), 0)::bigint
  FROM pg_inherits JOIN pg_class c ON c.oid = inhrelid WHERE inhparent = 'outbox'::regclass
"""

ERASE_EVENTS = """
WITH erased AS (
    UPDATE outbox SET payload = NULL, headers = NULL, erased_at = clock_timestamp()
     WHERE id = ANY ($1) AND erased_at IS NULL RETURNING 1)
SELECT count(*) FROM erased
"""

# All deliveries of some events: those of the batch that sequenced them, which is the
# first one that is as high, or the one that found them late; and those of replays.
_DELIVERIES = f"""
passed AS MATERIALIZED (
    SELECT e.id, b.batch, b.late
      FROM unnest($1::bigint[]) AS e(id)
     CROSS JOIN LATERAL (
           SELECT batch, young @> e.id OR batch > 0 AND batch = (
                      SELECT min(number) * {WIDTH} FROM period
                       WHERE kind = 'log' AND dropped_at IS NULL) AS late
             FROM batch WHERE high >= e.id ORDER BY high, batch LIMIT 1) b),
sequenced AS MATERIALIZED (
    SELECT batch FROM passed WHERE NOT late
     UNION
    SELECT b.batch FROM passed p CROSS JOIN LATERAL (
           SELECT batch FROM batch
            WHERE p.late AND batch > p.batch AND NOT isempty(found) AND found @> p.id
            ORDER BY batch LIMIT 1) b),
given AS MATERIALIZED (
    SELECT d.lane_id, d.batch, d.seq
      FROM sequenced s
     CROSS JOIN LATERAL (SELECT lanes FROM batch WHERE batch = s.batch LIMIT 1) b
     CROSS JOIN LATERAL unnest(b.lanes) AS lane(id)
     CROSS JOIN LATERAL (
           SELECT lane_id, batch, seq FROM delivery
            WHERE lane_id = lane.id AND batch = s.batch AND outbox_id = ANY ($1) OFFSET 0) d
     UNION
    SELECT lane_id, batch, seq FROM delivery
     WHERE outbox_id = ANY ($1) AND (replay_id IS NOT NULL OR backfill_id IS NOT NULL))
"""  # noqa: S608 (a constant only)

# Of what owners write to, only what nobody is writing just now: they wait for nobody,
# and what is left over is looked for again (`sweep`).
ERASE_ANSWERS = f"""
WITH {_DELIVERIES},
answered AS (
    UPDATE attempt a SET answer = a.answer - 'body' - 'headers'
      FROM given g
     WHERE a.lane_id = g.lane_id AND a.batch = g.batch AND a.seq = g.seq
       AND a.answer ?| '{{body,headers}}'
    RETURNING 1),
heads AS MATERIALIZED (
    SELECT p.lane_id FROM lane_progress p JOIN given g ON p.lane_id = g.lane_id
     WHERE p.head_seq = g.seq AND p.last_answer ?| '{{body,headers}}'
     ORDER BY p.lane_id FOR NO KEY UPDATE OF p SKIP LOCKED),
stripped AS (
    UPDATE lane_progress p SET last_answer = p.last_answer - 'body' - 'headers'
      FROM heads WHERE p.lane_id = heads.lane_id),
ill AS MATERIALIZED (
    SELECT h.endpoint_id FROM endpoint_health h
     WHERE h.last_answer ?| '{{body,headers}}' AND h.endpoint_id IN (
           SELECT l.endpoint_id FROM given g JOIN lane l ON l.id = g.lane_id)
     ORDER BY h.endpoint_id FOR NO KEY UPDATE OF h SKIP LOCKED),
told AS (
    UPDATE endpoint_health h SET last_answer = h.last_answer - 'body' - 'headers'
      FROM ill WHERE h.endpoint_id = ill.endpoint_id)
SELECT count(*) FROM answered
"""  # noqa: S608 (constants only)

# Locked in the order of their ids, as everybody does who locks several.
ERASE_DEAD = f"""
WITH found AS MATERIALIZED (
    SELECT id FROM dead_letter
     WHERE ($1::text IS NULL OR tenant = $1) AND ($2::text IS NULL OR key = $2)
       AND ($3::bigint[] IS NULL OR outbox_id = ANY ($3))
       AND (payload IS NOT NULL OR headers IS NOT NULL OR last_answer ?| '{{body,headers}}')
       AND outbox_id IS NOT NULL
     ORDER BY id LIMIT {STEP_EVENTS} FOR NO KEY UPDATE),
erased AS (
    UPDATE dead_letter d
       SET payload = NULL, headers = NULL, last_answer = last_answer - 'body' - 'headers'
      FROM found WHERE d.id = found.id
    RETURNING 1)
SELECT count(*) FROM erased
"""  # noqa: S608

READ_ERASED = """
SELECT id FROM outbox
 WHERE erased_at > statement_timestamp() - make_interval(secs => $1) AND id > $2
 ORDER BY id LIMIT $3
"""

# What is not published yet never will be.
CALL_OFF = """
WITH gone AS (
    DELETE FROM future_event
     WHERE ($1::text IS NULL OR tenant = $1) AND ($2::text IS NULL OR key = $2) RETURNING 1)
SELECT count(*) FROM gone
"""

# What a schedule publishes is for a person to decide about.
READ_SCHEDULES = """
SELECT name FROM schedule
 WHERE ($1::text IS NULL OR tenant = $1) AND ($2::text IS NULL OR key = $2) ORDER BY name
"""

COUNT_DEAD = """
SELECT count(*) FROM dead_letter
 WHERE ($1::text IS NULL OR tenant = $1) AND ($2::text IS NULL OR key = $2)
   AND payload IS NOT NULL
"""
COUNT_FUTURE = """
SELECT count(*) FROM future_event
 WHERE ($1::text IS NULL OR tenant = $1) AND ($2::text IS NULL OR key = $2)
"""
COUNT_EVENTS = "SELECT count(*) FROM outbox WHERE id = ANY ($1) AND erased_at IS NULL"

# Owners read again what they have in hand.
RAISE_ERASURES = "UPDATE cursor SET erasures = erasures + 1"


@dataclass(frozen=True, slots=True)
class Whose:
    """Whose events are meant.

    Raises:
        UsageError: nobody's, or both a tenant's and a key's.
    """

    tenant: str | None = None
    key: str | None = None

    def __post_init__(self) -> None:
        if (self.tenant is None) == (self.key is None):
            raise UsageError("say whose events: one of tenant and key")


@dataclass(slots=True)
class Erased:
    """What was erased, or would be."""

    events: int = 0
    dead_letters: int = 0
    future_events: int = 0
    """That wait for their time; they are deleted."""
    answers: int = 0
    """Of attempts; not counted beforehand."""
    looked_at: int = 0
    """Events of anybody's."""
    of_about: int = 0
    """How many there are to look at, as far as the planner knows."""
    schedules: tuple[str, ...] = ()
    """Those that go on publishing such events."""


async def count(
    connection: Connection[Any],
    schema: str,
    whose: Whose,
    *,
    on_progress: Callable[[Erased], None] = lambda _: None,
) -> Erased:
    """What would be erased by now.

    Raises:
        SchemaMissing, DatabaseUnavailable, CannotRun: as in `map_errors`.
    """
    found = Erased()
    with map_errors(schema):
        async for ids in _steps(connection, whose, found):
            found.events += await connection.fetchval(COUNT_EVENTS, ids)
            on_progress(found)
        found.dead_letters = await connection.fetchval(COUNT_DEAD, whose.tenant, whose.key)
        found.future_events = await connection.fetchval(COUNT_FUTURE, whose.tenant, whose.key)
        found.schedules = await _schedules(connection, whose)
    return found


async def erase(
    connection: Connection[Any],
    schema: str,
    whose: Whose,
    *,
    actor: str,
    on_progress: Callable[[Erased], None] = lambda _: None,
) -> Erased:
    """Erase what the events say that are committed by now.

    Raises:
        SchemaMissing, DatabaseUnavailable, CannotRun: as in `map_errors`.
    """
    done = Erased()
    with map_errors(schema, "operator"):
        # First, or one of them could be published behind our back.
        done.future_events = await connection.fetchval(CALL_OFF, whose.tenant, whose.key)
        async for ids in _steps(connection, whose, done):
            async with connection.transaction(isolation="read_committed"):
                await connection.execute(PLAN_BY_INDEX)
                done.events += await connection.fetchval(ERASE_EVENTS, ids)
                done.answers += await connection.fetchval(ERASE_ANSWERS, ids)
            on_progress(done)
        done.dead_letters = await _dead(connection, whose.tenant, whose.key, None)
        async with connection.transaction(isolation="read_committed"):
            await connection.execute(LOCK_CURSOR)
            done.schedules = await _schedules(connection, whose)
            await connection.execute(RAISE_ERASURES)
            data = {"tenant": whose.tenant} if whose.key is None else {"key": whose.key}
            told = ("events", "future_events", "dead_letters", "answers")
            counts = {name: getattr(done, name) for name in told}
            await write_journal(connection, "erased", actor, None, data | counts)
            await connection.execute(WAKE_ALL)
    return done


async def sweep(connection: Connection[Any], within_s: float) -> int:
    """Erase what was still being written when its event was erased; returns how much.

    A request that was on its way then has ended by now, and what came of it was
    written afterwards.

    Args:
        within_s: of events that were erased in so many last seconds.
    """
    swept = after = 0
    while ids := [
        row["id"] for row in await connection.fetch(READ_ERASED, within_s, after, STEP_EVENTS)
    ]:
        after = ids[-1]
        async with connection.transaction(isolation="read_committed"):
            await connection.execute(PLAN_BY_INDEX)
            swept += await connection.fetchval(ERASE_ANSWERS, ids)
        swept += await _dead(connection, None, None, ids)
    return swept


async def _dead(
    connection: Connection[Any], tenant: str | None, key: str | None, ids: list[int] | None
) -> int:
    """Erase what dead letters hold, a step at a time."""
    erased, step = 0, STEP_EVENTS
    while step == STEP_EVENTS:
        step = await connection.fetchval(ERASE_DEAD, tenant, key, ids)
        erased += step
    return erased


async def _schedules(connection: Connection[Any], whose: Whose) -> tuple[str, ...]:
    rows = await connection.fetch(READ_SCHEDULES, whose.tenant, whose.key)
    return tuple(row["name"] for row in rows)


async def _steps(
    connection: Connection[Any], whose: Whose, looked: Erased
) -> AsyncIterator[list[int]]:
    """The ids of their events, a step at a time; counts what was looked at."""
    if whose.key is not None:
        async with connection.transaction(readonly=True):
            await connection.execute(PLAN_BY_INDEX)
            ids: list[int] = await connection.fetchval(ALL_OF_KEY, whose.key) or []
        looked.of_about = len(ids)
        for at in range(0, len(ids), STEP_EVENTS):
            step = ids[at : at + STEP_EVENTS]
            looked.looked_at += len(step)
            yield step
        return
    looked.of_about = await connection.fetchval(ABOUT)
    after = 0
    while rows := await connection.fetch(NEXT_OF_TENANT, after, STEP_EVENTS, whose.tenant):
        after = rows[-1]["id"]
        looked.looked_at += len(rows)
        yield [row["id"] for row in rows if row["wanted"]]
