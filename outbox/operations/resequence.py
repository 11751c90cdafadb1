"""Sequencing of committed events that were skipped (see `outbox.store.sequencing.skipped_events`).

Their ids become open gaps, so that the next batches find the events, as late ones.  Relays cache
the open gaps: their registrations are ended like those of an expired replica, which fences off
results of requests in flight; they register again within a second and reload.  The events are
found without locks, and a message does nothing if they changed meanwhile, or a relay has
registered.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from outbox.store.change import make_change
from outbox.store.cluster.replicas import LOCK_REPLICA, RELEASE_ALL, REMOVE_REPLICA
from outbox.store.cluster.timeline import LOCK_EPOCHS
from outbox.store.connection.connect import map_errors
from outbox.store.connection.message import WriteStatement
from outbox.store.retention.periods import END_LEADERSHIP
from outbox.store.sequencing.skipped_events import SKIPPED_EVENTS, SKIPPED_IDS_MAX

if TYPE_CHECKING:
    from asyncpg import Connection

    from outbox.store.change import Change

BATCHES_PER_MESSAGE = 1_000
"""Batches in one message, which reads the skipped events of each again, under its locks."""

_SKIPPED = SKIPPED_EVENTS.format(examined="batch")
_SKIPPED_OF_BATCHES = SKIPPED_EVENTS.format(
    examined="(SELECT batch, dead FROM batch WHERE batch = ANY ($1::bigint[]))"
)

FIND_BATCHES = f"SELECT DISTINCT batch FROM ({_SKIPPED}) s ORDER BY batch"  # noqa: S608

# The skipped events of batches.
#   ids: all of them; they are no longer dead.
#   missing: those without a delivery; the others would get a second one.
READ_SKIPPED = f"""
WITH skipped AS MATERIALIZED ({_SKIPPED_OF_BATCHES}),
sequenced AS MATERIALIZED (
    SELECT DISTINCT outbox_id AS id FROM delivery
     WHERE replay_id IS NULL AND backfill_id IS NULL
       AND outbox_id IN (SELECT id FROM skipped))
SELECT batch, range_agg(int8range(id, id, '[]'))::text AS ids,
       coalesce(range_agg(int8range(id, id, '[]')) FILTER (WHERE is_missing), '{{}}')::text
           AS missing,
       count(*) FILTER (WHERE is_missing) AS missing_count,
       (array_agg(id ORDER BY id) FILTER (WHERE is_missing))[:{SKIPPED_IDS_MAX}] AS first_ids
  FROM (SELECT batch, id, id NOT IN (SELECT id FROM sequenced) AS is_missing FROM skipped) found
 GROUP BY batch ORDER BY batch
"""  # noqa: S608 (constants only)

FINGERPRINT = f"""
SELECT coalesce(md5(string_agg(format('%s %s', batch, id), ' ' ORDER BY batch, id)), '')
  FROM ({_SKIPPED_OF_BATCHES}) s
"""  # noqa: S608 (constants only)

REQUIRE_SKIPPED = WriteStatement("require_skipped", f"SELECT abort_unless(({FINGERPRINT}) = $2)")

OPEN_GAPS = WriteStatement(
    "open_gaps",
    """
WITH skipped AS (
    SELECT * FROM unnest($1::bigint[], $2::text[]::int8multirange[],
                         $3::text[]::int8multirange[]) AS v(batch, ids, missing)),
corrected AS (
    UPDATE batch b SET dead = b.dead - s.ids FROM skipped s WHERE b.batch = s.batch)
INSERT INTO gap (lo, hi)
SELECT lower(open), upper(open) - 1
  FROM (SELECT range_agg(missing) AS ids FROM skipped) missing, unnest(missing.ids) open
""",
)

# Dead ids that are counted already are not dead any more.  Locked in a statement before, so that
# none is counted meanwhile.
LOCK_ACCOUNT = WriteStatement("lock_account", "SELECT FROM event_account FOR UPDATE")
DISCOUNT_DEAD_IDS = WriteStatement(
    "discount_dead_ids",
    """
SELECT discount_dead_ids(range_agg(skipped.ids))
  FROM unnest($1::bigint[], $2::text[]::int8multirange[]) AS s(batch, ids),
       unnest(s.ids) AS skipped(ids)
 WHERE s.batch <= (SELECT batch FROM event_account)
""",
)

READ_REPLICAS = "SELECT id FROM replica ORDER BY id"
REQUIRE_NO_REPLICAS = WriteStatement(
    "require_no_replicas", "SELECT abort_unless(NOT EXISTS (SELECT FROM replica))"
)


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
    # First: what changes between the two makes the message abort.
    fingerprint = await change.db.fetchval(FINGERPRINT, batches)
    rows = list(await change.db.fetch(READ_SKIPPED, batches))
    if dry_run or not rows:
        return rows
    missing = any(row["missing_count"] for row in rows)
    # Without missing events no gap is opened, and relays cache nothing that changes.
    replicas = await change.db.fetch(READ_REPLICAS) if missing else []
    expirables = [(row["id"], None, None) for row in replicas]
    # Locked first: relays that write wait, and are fenced off then.
    for each in expirables:
        change.write(LOCK_REPLICA, *each)
    if missing:
        change.write(LOCK_EPOCHS)
    change.write(REQUIRE_SKIPPED, batches, fingerprint)
    batch_ids = [row["batch"] for row in rows], [row["ids"] for row in rows]
    change.write(LOCK_ACCOUNT)
    change.write(DISCOUNT_DEAD_IDS, *batch_ids)
    change.write(OPEN_GAPS, *batch_ids, [row["missing"] for row in rows])
    for each in expirables:
        change.write(RELEASE_ALL, *each, change.actor, "events resequenced")
        change.write(REMOVE_REPLICA, *each)
    if missing:
        change.write(REQUIRE_NO_REPLICAS)
        change.write(END_LEADERSHIP)
    done = _result(rows, dry_run=False)
    data = {"events": done.events, "batches": done.batches, "first_ids": done.first_ids}
    change.journal("events_resequenced", None, data)
    return rows


def _result(rows: list[Any], *, dry_run: bool) -> Resequenced:
    ids = sorted(n for row in rows for n in row["first_ids"] or ())
    events = sum(row["missing_count"] for row in rows)
    return Resequenced(dry_run, events, len(rows), tuple(ids[:SKIPPED_IDS_MAX]))
