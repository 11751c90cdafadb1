"""Erasure of event contents, for a tenant or a key: in the outbox, dead letters and responses.

Erasure deletes payloads, headers, and stored responses, which may quote them.  The history
remains: the events, their deliveries and times.  Pending deliveries are not sent; they become
dead letters with the reason `erased`, and keep their sequence numbers.

Events are erased in batches of one message for each step, so that a client that falls silent holds
nothing.  An interrupted erasure can be repeated: each step finds what is left to erase.

The journal entry of a complete erasure of a tenant says up to which id it has erased all events, so
that a later one may scan only later events.  That id was read before the scan: it is below the ids
of every transaction that could still commit an event (see `outbox.core.sequencing.gaps`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import orjson

from outbox.errors import UsageError
from outbox.store.channels import NOTIFY_ALL
from outbox.store.connection.connect import map_errors
from outbox.store.retention.erasure import (
    PLAN_BY_INDEX,
    SET_PLANNER,
    STEP_EVENTS,
    erase_dead_letters,
    erase_responses,
)
from outbox.store.routing_change import ADD_TO_JOURNAL
from outbox.store.sql.message import WriteStatement

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from asyncpg import Connection

    from outbox.store.connection.store_connection import StoreConnection

# Events of a tenant by an id scan; those of a key are found by the index of keys.
NEXT_OF_TENANT = """
SELECT id, tenant = $3 AS selected FROM outbox WHERE id > $1 ORDER BY id LIMIT $2
"""
# The id up to which all events are sequenced, or will never exist.
READ_SETTLED = """
SELECT least(high, lower(open_ids()) - 1) FROM batch ORDER BY batch DESC LIMIT 1
"""
READ_ERASED_THROUGH = """
SELECT coalesce((data ->> 'through_id')::bigint, 0) FROM journal
 WHERE kind = 'erased' AND data ->> 'tenant' = $1 ORDER BY id DESC LIMIT 1
"""
ALL_OF_KEY = "SELECT array_agg(id ORDER BY id) FROM outbox WHERE key = $1"

ESTIMATE_EVENTS = """
SELECT coalesce(sum(greatest(reltuples, 0)), 0)::bigint
  FROM pg_inherits JOIN pg_class c ON c.oid = inhrelid WHERE inhparent = 'outbox'::regclass
"""

# Erases events, and raises the number of erasures, with which relays throw away what they have
# read: in one transaction, because an erasure may be interrupted, or take long.
ERASE_EVENTS = WriteStatement(
    "erase_events",
    """
WITH erased AS (
    UPDATE outbox SET payload = NULL, body = NULL, content_type = NULL, headers = NULL,
                      erased_at = clock_timestamp()
     WHERE id = ANY ($1) AND erased_at IS NULL RETURNING 1),
raised AS (UPDATE cursor SET erasures = erasures + 1 WHERE EXISTS (SELECT FROM erased))
SELECT FROM erased
""",
)

# Events of which only dead letters are left: retention has dropped their rows.
NEXT_DROPPED = """
SELECT DISTINCT d.outbox_id AS id FROM dead_letter d
 WHERE ($1::text IS NULL OR d.tenant = $1) AND ($2::text IS NULL OR d.key = $2)
   AND d.outbox_id > $3 AND NOT EXISTS (SELECT FROM outbox WHERE id = d.outbox_id)
 ORDER BY d.outbox_id LIMIT $4
"""

_OF_TARGET = "($1::text IS NULL OR tenant = $1) AND ($2::text IS NULL OR key = $2)"

# Locks the shares of tenants whose held events are deleted: a relay that moves events waits for the
# deletion, and must not wait for a client that holds one.
LOCK_SHARES_OF_TARGET = WriteStatement(
    "lock_shares_of_target",
    f"""
SELECT FROM tenant_share s
 WHERE EXISTS (SELECT FROM future_event f WHERE f.tenant COLLATE "C" = s.tenant
                AND f.held_before IS NOT NULL AND {_OF_TARGET})
 ORDER BY s.tenant FOR UPDATE
""",  # noqa: S608 (a constant only)
)

# Future events are deleted, and never published.
#   selected: locked in id order, as by a relay that moves events.
#   named: where the newest held event is one of them, the share names the newest one that is left;
#     an event that is held meanwhile is named by its own session.
DELETE_FUTURE_EVENTS = WriteStatement(
    "delete_future_events",
    f"""
WITH selected AS MATERIALIZED (
    SELECT id FROM future_event WHERE {_OF_TARGET} ORDER BY id FOR UPDATE),
deleted AS (
    DELETE FROM future_event WHERE id IN (SELECT id FROM selected) RETURNING id),
named AS (
    UPDATE tenant_share s
       SET last_id = coalesce(
           (SELECT max(f.id) FROM future_event f
             WHERE f.tenant COLLATE "C" = s.tenant AND f.held_before IS NOT NULL
               AND NOT EXISTS (SELECT FROM deleted d WHERE d.id = f.id)), 0)
     WHERE s.last_id IN (SELECT id FROM deleted))
SELECT FROM deleted
""",  # noqa: S608 (a constant only)
)

# Schedules are only listed: an operator decides about what they publish.
READ_SCHEDULES = """
SELECT name FROM schedule
 WHERE ($1::text IS NULL OR tenant = $1) AND ($2::text IS NULL OR key = $2) ORDER BY name
"""

COUNT_DEAD = """
SELECT count(*) FROM dead_letter
 WHERE ($1::text IS NULL OR tenant = $1) AND ($2::text IS NULL OR key = $2)
   AND (payload IS NOT NULL OR body IS NOT NULL)
"""
COUNT_FUTURE = """
SELECT count(*) FROM future_event
 WHERE ($1::text IS NULL OR tenant = $1) AND ($2::text IS NULL OR key = $2)
"""
COUNT_EVENTS = "SELECT count(*) FROM outbox WHERE id = ANY ($1) AND erased_at IS NULL"

# Makes owners reload their delivery buffers.
RAISE_ERASURES = WriteStatement("raise_erasures", "UPDATE cursor SET erasures = erasures + 1")


@dataclass(frozen=True, slots=True)
class ErasureTarget:
    """The events to erase: those of a tenant, or of a key.

    Raises:
        UsageError: neither or both are given.
    """

    tenant: str | None = None
    key: str | None = None

    def __post_init__(self) -> None:
        if (self.tenant is None) == (self.key is None):
            raise UsageError("specify either tenant or key")


@dataclass(frozen=True, slots=True)
class ErasureReport:
    """Result of an erasure, or of its dry run."""

    dry_run: bool
    events: int
    future_events: int
    """Future events, which are deleted."""
    dead_letters: int
    responses: int | None
    """Responses of attempts; None in a dry run."""
    schedules: tuple[str, ...]
    """Schedules that still publish such events."""


OnProgress: TypeAlias = "Callable[[int, int], None]"
"""Called with the number of scanned events of all tenants, and with that of those to scan, as
estimated by the planner."""


def _ignore(_: int, __: int) -> None:
    """Report no progress."""


async def count_erasable(
    connection: Connection[Any],
    schema: str,
    target: ErasureTarget,
    *,
    on_progress: OnProgress = _ignore,
) -> ErasureReport:
    """Count what an erasure would erase now.

    Raises:
        SchemaMissing, DatabaseUnavailable, CannotRun: as in `map_errors`.
    """
    events = 0
    with map_errors(schema):
        async for ids in _event_batches(connection, target, 0, on_progress):
            events += await connection.fetchval(COUNT_EVENTS, ids)
        dead_letters = await connection.fetchval(COUNT_DEAD, target.tenant, target.key)
        future_events = await connection.fetchval(COUNT_FUTURE, target.tenant, target.key)
        schedules = await _schedules(connection, target)
    return ErasureReport(True, events, future_events, dead_letters, None, schedules)


async def erase_events(
    connection: StoreConnection,
    schema: str,
    target: ErasureTarget,
    *,
    actor: str,
    only_later: bool = False,
    on_progress: OnProgress = _ignore,
) -> ErasureReport:
    """Erase the contents of all events committed so far.

    Args:
        only_later: leave out the events that an earlier erasure of the tenant has erased.  They are
            there again if a backup of the table alone was restored.

    Raises:
        SchemaMissing, DatabaseUnavailable, CannotRun: as in `map_errors`.
    """
    events = responses = 0
    is_found = False
    with map_errors(schema, "operator"):
        after = 0
        if only_later:
            after = await connection.fetchval(READ_ERASED_THROUGH, target.tenant) or 0
        through_id = await connection.fetchval(READ_SETTLED) or 0
        # First, because a future event could become due and be published concurrently.
        of_target = target.tenant, target.key
        future_events = await connection.write_together(
            (LOCK_SHARES_OF_TARGET, *of_target), (DELETE_FUTURE_EVENTS, *of_target)
        )
        async for ids in _event_batches(connection, target, after, on_progress):
            events += await connection.write_together((SET_PLANNER,), (ERASE_EVENTS, ids))
            # Also for events that an interrupted erasure has erased.
            responses += await erase_responses(connection, ids)
            is_found = True
        dead_letters = await erase_dead_letters(connection, target.tenant, target.key, None)
        async for ids in _dropped_event_batches(connection, target, after):
            responses += await erase_responses(connection, ids)
            is_found = True
        schedules = await _schedules(connection, target)
        report = ErasureReport(False, events, future_events, dead_letters, responses, schedules)
        data: dict[str, object] = {"key": target.key}
        if target.key is None:
            data = {"tenant": target.tenant, "through_id": max(after, through_id)}
        fields = ("events", "future_events", "dead_letters", "responses")
        counts = {name: getattr(report, name) for name in fields}
        entry = orjson.dumps({**data, **counts}).decode()
        add_entry = ADD_TO_JOURNAL, "erased", actor, None, entry
        if is_found or dead_letters:
            await connection.write_together((RAISE_ERASURES,), add_entry, (NOTIFY_ALL,))
        else:  # Owners need not reload what they have.
            await connection.write(*add_entry)
    return report


async def _schedules(connection: Connection[Any], target: ErasureTarget) -> tuple[str, ...]:
    rows = await connection.fetch(READ_SCHEDULES, target.tenant, target.key)
    return tuple(row["name"] for row in rows)


async def _event_batches(
    connection: Connection[Any], target: ErasureTarget, after: int, on_progress: OnProgress
) -> AsyncIterator[list[int]]:
    """Yield the ids of the target's events above `after` in batches, and report progress."""
    if target.key is not None:
        async with connection.transaction(readonly=True):
            await connection.execute(PLAN_BY_INDEX)
            ids: list[int] = await connection.fetchval(ALL_OF_KEY, target.key) or []
        for at in range(0, len(ids), STEP_EVENTS):
            yield ids[at : at + STEP_EVENTS]
            on_progress(min(at + STEP_EVENTS, len(ids)), len(ids))
        return
    estimated_total = await connection.fetchval(ESTIMATE_EVENTS)
    scanned = 0
    while rows := await connection.fetch(NEXT_OF_TENANT, after, STEP_EVENTS, target.tenant):
        after = rows[-1]["id"]
        if ids := [row["id"] for row in rows if row["selected"]]:
            yield ids
        scanned += len(rows)
        on_progress(scanned, max(estimated_total, scanned))


async def _dropped_event_batches(
    connection: Connection[Any], target: ErasureTarget, after: int
) -> AsyncIterator[list[int]]:
    """Yield the ids of events above `after` that only dead letters show, in batches."""
    while rows := await connection.fetch(
        NEXT_DROPPED, target.tenant, target.key, after, STEP_EVENTS
    ):
        after = rows[-1]["id"]
        yield [row["id"] for row in rows]
