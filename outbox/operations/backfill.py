"""Asking for the history of an endpoint to be sent to it, once more or for the first time.

A backfill is of the events that were sequenced when it was asked for; everything
later comes live.  It goes by the subscription that the endpoint has now.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.core.delivery.message import rfc3339
from outbox.core.model import pattern
from outbox.core.sequencing.partition_window import WIDTH
from outbox.errors import Conflict
from outbox.operations.dead_letter_filter import require_order
from outbox.operations.replays import ADD_JOB, ADD_PARTS
from outbox.store.connection.connect import map_errors
from outbox.store.endpoints import endpoint_not_found
from outbox.store.routing_change import change, write_journal
from outbox.store.type_match import FILTER_MET, MATCHES, TYPE_MATCHES

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from asyncpg import Connection

FIND_ENDPOINT = """
SELECT e.id, e.state, EXISTS (SELECT FROM subscription s
                               WHERE s.endpoint_id = e.id AND s.to_batch IS NULL) AS subscribed
  FROM endpoint e WHERE e.name = $1 AND e.state <> 'removed'
"""

# One statement, because all of it has to be of the same batch: up to `high` everything
# is sequenced, or is one of the open gaps, or will never be.
READ_CURSOR = """
SELECT b.high,
       b.young + coalesce((SELECT range_agg(int8range(lo, hi, '[]')) FROM gap), '{}') AS gaps
  FROM (SELECT high, young FROM batch ORDER BY batch DESC LIMIT 1) b
"""

# Ids are given out as time goes on: what a batch had passed before `since` was there
# before it.  From there on it is looked for, and from the other end for `until`.
FIND_FIRST = """
SELECT id FROM outbox
 WHERE id > coalesce((SELECT high FROM batch WHERE at < $1 ORDER BY at DESC LIMIT 1), 0)
   AND id <= $2 AND created_at >= $1
 ORDER BY id LIMIT 1
"""
FIND_LAST = """
SELECT id FROM outbox WHERE id BETWEEN $1 AND $2 AND ($3::timestamptz IS NULL OR created_at < $3)
 ORDER BY id DESC LIMIT 1
"""

# What is dropped from now on minds us; what was dropped a moment ago may still be seen.
READ_FIRST_KEPT = f"""
SELECT min(number) * {WIDTH} FROM period WHERE kind = 'events' AND dropped_at IS NULL
"""  # noqa: S608 (a constant only)

COUNT_HISTORY = f"""
SELECT count(*)
  FROM outbox o
  JOIN subscription s ON s.endpoint_id = $1 AND s.to_batch IS NULL,
       (SELECT $7::text[] AS types) j
 WHERE o.id BETWEEN $2 AND $3 AND NOT $4::int8multirange @> o.id
   AND o.created_at >= $5 AND ($6::timestamptz IS NULL OR o.created_at < $6)
   AND (j.types IS NULL OR {TYPE_MATCHES.replace("s.types", "j.types")})
   AND {MATCHES} AND {FILTER_MET} IS NOT FALSE
"""  # noqa: S608 (constants only)


@dataclass(frozen=True, slots=True)
class Backfill:
    """Which history is to be sent to an endpoint.

    Raises:
        UsageError: a type is no pattern, or it ends before it begins.
    """

    endpoint: str
    since: datetime
    until: datetime | None = None
    """Published at or after `since`, and before `until`."""
    types: tuple[str, ...] = ()
    """Only those of its subscription that match any of these, too."""

    def __post_init__(self) -> None:
        for text in self.types:
            pattern.parse(text)
        require_order(self.since, self.until)


@dataclass(frozen=True, slots=True)
class Range:
    """What a backfill covers, in ids of events."""

    endpoint_id: UUID
    first_id: int
    last_id: int
    gaps: Any
    """Ids in it that were not sequenced yet, and so will come live."""


async def plan(connection: Connection[Any], schema: str, asked: Backfill) -> int:
    """How many deliveries it would make now; nothing is changed.

    Raises:
        NotFound, UsageError: as `ask`.
    """
    with map_errors(schema):
        covered = await _range(connection, asked)
        deliveries: int = await connection.fetchval(
            COUNT_HISTORY,
            covered.endpoint_id,
            covered.first_id,
            covered.last_id,
            covered.gaps,
            asked.since,
            asked.until,
            list(asked.types) or None,
        )
    return deliveries


async def ask(
    connection: Connection[Any],
    schema: str,
    asked: Backfill,
    *,
    actor: str,
    rate_per_s: float | None = None,
) -> int:
    """Have it sent, in order, in the pace that live events leave; returns the job.

    Args:
        rate_per_s: at most so many deliveries.

    Raises:
        NotFound: there is no such endpoint.
        Conflict: it is disabled, being removed, or gets nothing any more.
    """
    with map_errors(schema, "operator"):
        covered = await _range(connection, asked)
    types = list(asked.types) or None
    async with change(connection, schema):
        first_id = max(covered.first_id, await connection.fetchval(READ_FIRST_KEPT))
        job: int = await connection.fetchval(
            ADD_JOB,
            "history",
            asked.endpoint,
            types,
            None,
            None,
            asked.since,
            asked.until,
            rate_per_s,
            actor,
            covered.gaps,
            None,
        )
        first, last = [first_id], [covered.last_id]
        await connection.execute(ADD_PARTS, job, [covered.endpoint_id], first, last, [None], first)
        told: dict[str, Any] = {"job": job, "since": rfc3339(asked.since)}
        if asked.until is not None:
            told["until"] = rfc3339(asked.until)
        if types is not None:
            told["types"] = types
        told |= {"from_id": first_id, "to_id": covered.last_id}
        await write_journal(connection, "backfill_asked", actor, covered.endpoint_id, told)
    return job


async def _range(connection: Connection[Any], asked: Backfill) -> Range:
    name = asked.endpoint
    found = await connection.fetchrow(FIND_ENDPOINT, name)
    if found is None:
        raise await endpoint_not_found(connection, name)
    if found["state"] in ("disabling", "disabled"):
        raise Conflict(
            f'endpoint "{name}" is disabled; enable it first: '
            f"outbox endpoint enable {shlex.quote(name)}"
        )
    if found["state"] == "removing" or not found["subscribed"]:
        raise Conflict(f'endpoint "{name}" is being removed, and gets nothing new')
    at = await connection.fetchrow(READ_CURSOR)
    first = await connection.fetchval(FIND_FIRST, asked.since, at["high"])
    last = first and await connection.fetchval(FIND_LAST, first, at["high"], asked.until)
    if not last:
        # Nothing: a job about it ends at once.
        return Range(found["id"], 1, 0, [])
    # There can be very many, and each event is held against them.
    gaps = [gap for gap in at["gaps"] if gap.upper > first and gap.lower <= last]
    return Range(found["id"], first, last, gaps)
