"""Event lookup by event id, X-Delivery, idempotency key, key or outbox id.

Event ids and keys are found through a bloom-filter (BRIN) index, idempotency keys in their
table.  An X-Delivery encodes the outbox id, given the endpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

from outbox.core.model.ids import delivery_id, outbox_id_of
from outbox.errors import NotFound
from outbox.store.connection.connect import map_errors
from outbox.store.erasure import PLAN_BY_INDEX

if TYPE_CHECKING:
    from asyncpg import Connection

ID_MAX = 2**63 - 1

# Walk the ordered key, instead of a bitmap scan of everything followed by a sort.
PLAN_BY_ID = f"{PLAN_BY_INDEX.strip()}; SET LOCAL enable_bitmapscan = off"

FIND_BY_EVENT_ID = """
SELECT id FROM outbox WHERE event_id = $1
 UNION
SELECT outbox_id FROM dead_letter WHERE event_id = $1 AND outbox_id IS NOT NULL
"""

# OFFSET 0: use the index of keys, not a walk from the newest id down.
FIND_BY_KEY = """
SELECT id FROM (
       SELECT id FROM outbox WHERE key = $1 AND ($4::text IS NULL OR tenant = $4) OFFSET 0) found
 WHERE id < $2 ORDER BY id DESC LIMIT $3
"""

FIND_BY_IDEMPOTENCY_KEY = "SELECT event_id FROM idempotency_key WHERE key = $1"

# A future event: published, but not due yet.
FIND_FUTURE = """
SELECT deliver_at FROM future_event WHERE event_id = $1 AND ($2::text IS NULL OR tenant = $2)
"""

# The events among $1 that belong to a tenant.
FILTER_BY_TENANT = """
SELECT id FROM outbox WHERE id = ANY ($1) AND tenant = $2
 UNION
SELECT outbox_id FROM dead_letter WHERE outbox_id = ANY ($1) AND tenant = $2
"""

# Candidates for the endpoint of an X-Delivery.
READ_ENDPOINT_IDS = "SELECT id FROM endpoint"
LAST_ID = """
SELECT coalesce(pg_sequence_last_value(pg_get_serial_sequence('outbox', 'id')::regclass), 0)
"""
# Backfills of the candidate events: each backfill has its own X-Deliveries.
READ_BACKFILLS = """
SELECT DISTINCT outbox_id, backfill_id FROM delivery
 WHERE outbox_id = ANY ($1) AND backfill_id IS NOT NULL
   AND (replay_id IS NOT NULL OR backfill_id IS NOT NULL)
"""
READ_EVENT_IDS = """
SELECT id, event_id FROM outbox WHERE id = ANY ($1)
 UNION
SELECT outbox_id, event_id FROM dead_letter WHERE outbox_id = ANY ($1) AND event_id IS NOT NULL
"""


@dataclass(frozen=True, slots=True)
class EventMatch:
    """The events that a search text identifies."""

    by: str
    """Kind of the match: event id, X-Delivery, once key, key or outbox id."""
    outbox_ids: tuple[int, ...]
    """Newest first."""
    more: bool
    """Older events match, too."""


async def find_events(
    connection: Connection[Any],
    schema: str,
    text: str,
    *,
    limit: int = 5,
    below: int = ID_MAX,
    tenant: str | None = None,
) -> EventMatch:
    """Find the events for an event id, X-Delivery, once key, key or outbox id.

    Args:
        limit: maximum number of events of a key, newest first.
        below: for a key, only events with a lower outbox id.
        tenant: only events of this tenant; None: all.

    Raises:
        NotFound: no event matches, or it is a future event.
    """
    unknown = NotFound(
        f'no event found for "{text}": no event id, key, X-Delivery or once key matches; events '
        "older than the retention are deleted"
    )
    if "\0" in text:  # Not allowed in a PostgreSQL text.
        raise unknown
    with map_errors(schema):
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            await connection.execute(PLAN_BY_INDEX)
            uuid = _parse_uuid(text)
            if uuid is not None:
                if ids := await _filter_by_tenant(
                    connection, tenant, await _find_by_event_id(connection, uuid)
                ):
                    return EventMatch("event id", ids, more=False)
                await _reject_future_event(connection, uuid, tenant)
                if ids := await _filter_by_tenant(
                    connection, tenant, await _find_by_delivery_id(connection, uuid)
                ):
                    return EventMatch("X-Delivery", ids, more=False)
            event_id = await connection.fetchval(FIND_BY_IDEMPOTENCY_KEY, text)
            if event_id is not None:
                if ids := await _filter_by_tenant(
                    connection, tenant, await _find_by_event_id(connection, event_id)
                ):
                    return EventMatch("once key", ids, more=False)
                await _reject_future_event(connection, event_id, tenant)
            rows = await connection.fetch(FIND_BY_KEY, text, below, limit + 1, tenant)
            if rows:
                ids = tuple(row["id"] for row in rows)
                return EventMatch("key", ids[:limit], more=len(ids) > limit)
            if text.isascii() and text.isdigit() and 0 < int(text) <= ID_MAX:
                known = await connection.fetch(READ_EVENT_IDS, [int(text)])
                if ids := await _filter_by_tenant(
                    connection, tenant, (int(text),) if known else ()
                ):
                    return EventMatch("outbox id", ids, more=False)
    raise unknown


async def _filter_by_tenant(
    connection: Connection[Any], tenant: str | None, ids: tuple[int, ...]
) -> tuple[int, ...]:
    """Keep only the events of the tenant; all of them without a tenant."""
    if tenant is None or not ids:
        return ids
    own = {row["id"] for row in await connection.fetch(FILTER_BY_TENANT, ids, tenant)}
    return tuple(outbox_id for outbox_id in ids if outbox_id in own)


async def _reject_future_event(
    connection: Connection[Any], event_id: UUID, tenant: str | None
) -> None:
    """Reject a future event, which is not in the outbox yet.

    Raises:
        NotFound: the event is due later.
    """
    deliver_at = await connection.fetchval(FIND_FUTURE, event_id, tenant)
    if deliver_at is not None:
        raise NotFound(
            f"event {event_id} is scheduled for {deliver_at.isoformat(sep=' ')}; it has no "
            "deliveries yet"
        )


async def _find_by_event_id(connection: Connection[Any], event_id: UUID) -> tuple[int, ...]:
    rows = await connection.fetch(FIND_BY_EVENT_ID, event_id)
    return tuple(sorted((row["id"] for row in rows), reverse=True))


async def _find_by_delivery_id(connection: Connection[Any], x_delivery: UUID) -> tuple[int, ...]:
    """Decode an X-Delivery with every endpoint: it encodes the outbox id, given the endpoint."""
    last_id: int = await connection.fetchval(LAST_ID)
    candidates: dict[int, list[UUID]] = {}
    for row in await connection.fetch(READ_ENDPOINT_IDS):
        outbox_id = outbox_id_of(x_delivery, row["id"])
        if outbox_id is not None and outbox_id <= last_id:
            candidates.setdefault(outbox_id, []).append(row["id"])
    backfills: dict[int, list[int | None]] = {}
    for row in await connection.fetch(READ_BACKFILLS, list(candidates)):
        backfills.setdefault(row["outbox_id"], [None]).append(row["backfill_id"])
    return tuple(
        row["id"]
        for row in await connection.fetch(READ_EVENT_IDS, list(candidates))
        if any(
            delivery_id(endpoint_id, row["id"], row["event_id"], backfill_id) == x_delivery
            for endpoint_id in candidates[row["id"]]
            for backfill_id in backfills.get(row["id"], [None])
        )
    )


def _parse_uuid(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None
