"""Sequencing of committed events that were skipped (see `outbox.store.sequencing.skipped_events`).

Their ids become open gaps, so that the next batches find the events, as late ones.  Relays cache
the open gaps: their registrations are ended like those of an expired replica, which fences off
results of requests in flight; they register again within a second and reload.  The events are
found without locks, and a message does nothing if they changed meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from outbox.store.change import make_change
from outbox.store.connection.connect import map_errors
from outbox.store.sequencing.skipped_events import SKIPPED_EVENTS, SKIPPED_IDS_MAX
from outbox.store.sql.message import WriteStatement

if TYPE_CHECKING:
    from asyncpg import Connection

    from outbox.store.change import Change

BATCHES_PER_MESSAGE = 1_000
"""Batches in one message, which reads the skipped events of each again, under its locks."""

FIND_BATCHES = f"""
SELECT DISTINCT batch FROM ({SKIPPED_EVENTS.format(examined="batch")}) s ORDER BY batch
"""  # noqa: S608 (constants only)

# The skipped events of batches.
#   missing_count, first_ids: of those without a delivery.
READ_SKIPPED = f"""
SELECT s.batch, s.ids::text AS ids, count(open.id) AS missing_count,
       (array_agg(open.id ORDER BY open.id))[:{SKIPPED_IDS_MAX}] AS first_ids
  FROM skipped_events($1) s
  LEFT JOIN LATERAL (
       SELECT generate_series(lower(part.ids), upper(part.ids) - 1) AS id
         FROM unnest(s.missing) AS part(ids)) open ON true
 GROUP BY s.batch, s.ids ORDER BY s.batch
"""  # noqa: S608 (constants only)

# Aborts if the events are not the planned ones.
RESEQUENCE = WriteStatement("resequence", "SELECT resequence($1::bigint[], $2::text[], $3)")


@dataclass(frozen=True, slots=True)
class Resequenced:
    """Skipped events that the next batches sequence, or would without a dry run."""

    dry_run: bool
    events: int
    """Their number, without those that have deliveries already."""
    batches: int
    """Number of batches that skipped events."""
    first_ids: tuple[int, ...]
    """The lowest of their ids, at most `SKIPPED_IDS_MAX`."""


async def resequence(
    connection: Connection[Any], schema: str, *, actor: str, dry_run: bool = False
) -> Resequenced:
    """Let the next batches sequence all committed events that were skipped.

    Raises:
        CannotRun: a row was locked for too long; some batches may be done.
        SchemaMissing, DatabaseUnavailable: as in `map_errors`.
    """
    with map_errors(schema, "operator"):
        batches = [row["batch"] for row in await connection.fetch(FIND_BATCHES)]
    found: list[Any] = []
    for n in range(0, len(batches), BATCHES_PER_MESSAGE):
        plan = partial(_plan, batches[n : n + BATCHES_PER_MESSAGE], dry_run)
        found += await make_change(connection, schema, actor, plan, long=True)
    return _result(found, dry_run=dry_run)


async def _plan(batches: list[int], dry_run: bool, change: Change) -> list[Any]:
    rows = list(await change.db.fetch(READ_SKIPPED, batches))
    if dry_run or not rows:
        return rows
    change.write(
        RESEQUENCE, [row["batch"] for row in rows], [row["ids"] for row in rows], change.actor
    )
    done = _result(rows, dry_run=False)
    data = {"events": done.events, "batches": done.batches, "first_ids": done.first_ids}
    change.journal("events_resequenced", None, data)
    return rows


def _result(rows: list[Any], *, dry_run: bool) -> Resequenced:
    ids = sorted(n for row in rows for n in row["first_ids"] if n is not None)
    events = sum(row["missing_count"] for row in rows)
    return Resequenced(dry_run, events, len(rows), tuple(ids[:SKIPPED_IDS_MAX]))
