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

from outbox.errors import UsageError
from outbox.store.channels import WAKE_ALL
from outbox.store.connection.connect import map_errors
from outbox.store.erasure import (
    ERASE_ANSWERS,
    PLAN_BY_INDEX,
    STEP_EVENTS,
    erase_dead_letters,
)
from outbox.store.routing_change import LOCK_CURSOR, write_journal

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from asyncpg import Connection

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

# What is not published yet never will be.
DELETE_FUTURE_EVENTS = """
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
        done.future_events = await connection.fetchval(
            DELETE_FUTURE_EVENTS, whose.tenant, whose.key
        )
        async for ids in _steps(connection, whose, done):
            async with connection.transaction(isolation="read_committed"):
                await connection.execute(PLAN_BY_INDEX)
                done.events += await connection.fetchval(ERASE_EVENTS, ids)
                done.answers += await connection.fetchval(ERASE_ANSWERS, ids)
            on_progress(done)
        done.dead_letters = await erase_dead_letters(connection, whose.tenant, whose.key, None)
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
