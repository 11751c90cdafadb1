"""Finding an event by whatever a person has in hand.

An event's id and its key are found through an index of bloom filters, a once key in its
table; an X-Delivery leads back to its event by itself.
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

# Down a key that is ordered, and not through all of it to sort what was found.
PLAN_BY_ID = f"{PLAN_BY_INDEX.strip()}; SET LOCAL enable_bitmapscan = off"

FIND_BY_EVENT_ID = """
SELECT id FROM outbox WHERE event_id = $1
 UNION
SELECT outbox_id FROM dead_letter WHERE event_id = $1 AND outbox_id IS NOT NULL
"""

# OFFSET 0: the newest are not looked for from the newest id down.
FIND_BY_KEY = """
SELECT id FROM (
       SELECT id FROM outbox WHERE key = $1 AND ($4::text IS NULL OR tenant = $4) OFFSET 0) found
 WHERE id < $2 ORDER BY id DESC LIMIT $3
"""

FIND_ONCE = "SELECT event_id FROM once WHERE key = $1"

# It is published, and waits for its time.
FIND_FUTURE = """
SELECT deliver_at FROM future_event WHERE event_id = $1 AND ($2::text IS NULL OR tenant = $2)
"""

# Which of some events are a tenant's.
FIND_OWN = """
SELECT id FROM outbox WHERE id = ANY ($1) AND tenant = $2
 UNION
SELECT outbox_id FROM dead_letter WHERE outbox_id = ANY ($1) AND tenant = $2
"""

# Whom an X-Delivery may be of.
READ_ENDPOINT_IDS = "SELECT id FROM endpoint"
LAST_ID = """
SELECT coalesce(pg_sequence_last_value(pg_get_serial_sequence('outbox', 'id')::regclass), 0)
"""
# And of those that are candidates, the backfills: each has X-Deliveries of its own.
READ_BACKFILLS = """
SELECT DISTINCT outbox_id, backfill_id, was_backfill_id FROM delivery
 WHERE outbox_id = ANY ($1) AND backfill_id IS NOT NULL
   AND (replay_id IS NOT NULL OR backfill_id IS NOT NULL)
"""
READ_EVENT_IDS = """
SELECT id, event_id FROM outbox WHERE id = ANY ($1)
 UNION
SELECT outbox_id, event_id FROM dead_letter WHERE outbox_id = ANY ($1) AND event_id IS NOT NULL
"""


@dataclass(frozen=True, slots=True)
class Found:
    """Events that something stands for."""

    by: str
    """What it turned out to be: event id, X-Delivery, once key, key or outbox id."""
    outbox_ids: tuple[int, ...]
    """The newest first."""
    more: bool
    """There are older ones."""


async def find(
    connection: Connection[Any],
    schema: str,
    text: str,
    *,
    limit: int = 5,
    below: int = ID_MAX,
    tenant: str | None = None,
) -> Found:
    """Which events an event id, X-Delivery, once key, key or outbox id stands for.

    Args:
        limit: of the events of a key, at most so many, the newest first;
        below: and of those only the ones with a lower outbox id.
        tenant: events of any other one are not known.

    Raises:
        NotFound: none; or one that waits for its time.
    """
    unknown = NotFound(
        f'nothing is known of "{text}": no event has this id or key, no delivery this '
        "X-Delivery, and no once key is called so; events older than the retention are gone"
    )
    if "\0" in text:  # Which no text of PostgreSQL's holds.
        raise unknown
    with map_errors(schema):
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            await connection.execute(PLAN_BY_INDEX)
            uuid = _uuid(text)
            if uuid is not None:
                if ids := await _own(connection, tenant, await _by_event_id(connection, uuid)):
                    return Found("event id", ids, more=False)
                await _not_before_its_time(connection, uuid, tenant)
                if ids := await _own(connection, tenant, await _by_delivery_id(connection, uuid)):
                    return Found("X-Delivery", ids, more=False)
            event_id = await connection.fetchval(FIND_ONCE, text)
            if event_id is not None:
                if ids := await _own(connection, tenant, await _by_event_id(connection, event_id)):
                    return Found("once key", ids, more=False)
                await _not_before_its_time(connection, event_id, tenant)
            rows = await connection.fetch(FIND_BY_KEY, text, below, limit + 1, tenant)
            if rows:
                ids = tuple(row["id"] for row in rows)
                return Found("key", ids[:limit], more=len(ids) > limit)
            if text.isascii() and text.isdigit() and 0 < int(text) <= ID_MAX:
                known = await connection.fetch(READ_EVENT_IDS, [int(text)])
                if ids := await _own(connection, tenant, (int(text),) if known else ()):
                    return Found("outbox id", ids, more=False)
    raise unknown


async def _own(
    connection: Connection[Any], tenant: str | None, ids: tuple[int, ...]
) -> tuple[int, ...]:
    """Of these events those that are the tenant's; all of them without one."""
    if tenant is None or not ids:
        return ids
    own = {row["id"] for row in await connection.fetch(FIND_OWN, ids, tenant)}
    return tuple(outbox_id for outbox_id in ids if outbox_id in own)


async def _not_before_its_time(
    connection: Connection[Any], event_id: UUID, tenant: str | None
) -> None:
    """Refuse an event that is not in the outbox yet.

    Raises:
        NotFound: it waits.
    """
    deliver_at = await connection.fetchval(FIND_FUTURE, event_id, tenant)
    if deliver_at is not None:
        raise NotFound(
            f"event {event_id} waits for its time, {deliver_at.isoformat(sep=' ')}; "
            "nothing has happened to it yet"
        )


async def _by_event_id(connection: Connection[Any], event_id: UUID) -> tuple[int, ...]:
    rows = await connection.fetch(FIND_BY_EVENT_ID, event_id)
    return tuple(sorted((row["id"] for row in rows), reverse=True))


async def _by_delivery_id(connection: Connection[Any], asked: UUID) -> tuple[int, ...]:
    """The X-Delivery tells its event to whoever knows its endpoint; so all are tried."""
    last_id: int = await connection.fetchval(LAST_ID)
    candidates: dict[int, list[UUID]] = {}
    for row in await connection.fetch(READ_ENDPOINT_IDS):
        outbox_id = outbox_id_of(asked, row["id"])
        if outbox_id is not None and outbox_id <= last_id:
            candidates.setdefault(outbox_id, []).append(row["id"])
    backfills: dict[int, list[tuple[int | None, int | None]]] = {}
    for row in await connection.fetch(READ_BACKFILLS, list(candidates)):
        which = row["backfill_id"], row["was_backfill_id"]
        backfills.setdefault(row["outbox_id"], [(None, None)]).append(which)
    return tuple(
        row["id"]
        for row in await connection.fetch(READ_EVENT_IDS, list(candidates))
        if any(
            delivery_id(endpoint_id, row["id"], row["event_id"], *which) == asked
            for endpoint_id in candidates[row["id"]]
            for which in backfills.get(row["id"], [(None, None)])
        )
    )


def _uuid(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None
