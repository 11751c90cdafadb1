"""Finding events: by criteria, or by one of their ids or keys.

Types, tenants and times have no index, because each would slow down every producer.  Searches
for these scan a limited number of events, from the newest down, and return how far they scanned,
so a client can continue from there.

Event ids and keys are found through a bloom-filter (BRIN) index, idempotency keys in their
table.  An X-Delivery encodes the outbox id, given the endpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

from outbox.core.model.ids import delivery_id, outbox_id_of
from outbox.errors import NotFound
from outbox.operations.criteria import Criteria, criteria_parameters
from outbox.operations.events.delivery_counts import DeliveryCounts, count_deliveries
from outbox.operations.events.future import NotPublishedYet, find_future_event
from outbox.operations.pages import page_of
from outbox.operations.rows import ID_MAX, from_row
from outbox.store.connection.connect import CONNECTION_ERRORS, map_errors
from outbox.store.retention.erasure import PLAN_BY_INDEX
from outbox.store.sql.type_match import SUBSCRIBERS, TENANT_MATCHES, TYPE_MATCHES, matches_criteria

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from asyncpg import Connection, Record

SCANNED_MAX = 20_000
"""Maximum of events that one search scans."""

# Walk the ordered key, instead of a bitmap scan of everything followed by a sort.
PLAN_BY_ID = f"{PLAN_BY_INDEX.strip()}; SET LOCAL enable_bitmapscan = off"

_COLUMNS = """
       o.id AS outbox_id, o.event_id AS id, o.type, o.tenant, o.key, o.created_at AS published_at,
       o.expires_at, o.erased_at,
       CASE WHEN pg_column_size(o.payload) <= 8192 THEN left(o.payload::text, 120) END AS preview
"""
_GIVEN = f"(SELECT {criteria_parameters(3)}) s"
_MATCHES = matches_criteria("o", "created_at")

# The newest events, if all match: what most clients ask for, again and again, in one message.
LIST_NEWEST = f"""
SELECT {_COLUMNS} FROM outbox o WHERE o.id < $1 ORDER BY o.id DESC LIMIT $2
"""  # noqa: S608 (constants only)

# OFFSET 0: use the index of keys, not a walk from the newest id down.
FIND_BY_KEY = f"""
SELECT {_COLUMNS}
  FROM (SELECT * FROM outbox WHERE key = $8 OFFSET 0) o, {_GIVEN}
 WHERE o.id < $1 AND {_MATCHES}
 ORDER BY o.id DESC LIMIT $2
"""  # noqa: S608 (constants only)

# Ids that a batch passed before `since` are older, so the scan ends there.  `scanned` has the
# number of scanned events and the lowest id: it tells the end of the events from the limit.
FIND = f"""
WITH scanned AS MATERIALIZED (
    SELECT id, type, tenant, created_at FROM outbox
     WHERE id < $1
       AND id > coalesce((SELECT high FROM batch WHERE at < $6::timestamptz
                           ORDER BY at DESC LIMIT 1), 0)
     ORDER BY id DESC LIMIT $8),
found AS MATERIALIZED (
    SELECT o.id FROM scanned o, {_GIVEN} WHERE {_MATCHES} ORDER BY o.id DESC LIMIT $2)
SELECT l.events, l.lowest, l.oldest_at, {_COLUMNS}
  FROM (SELECT count(*) AS events, min(id) AS lowest, min(created_at) AS oldest_at FROM scanned) l
  LEFT JOIN (found f JOIN outbox o ON o.id = f.id) ON true
 ORDER BY o.id DESC
"""  # noqa: S608

# The events, and copies in dead letters of those that retention dropped.
_KNOWN = """
SELECT known.id, known.event_id
  FROM (SELECT id, event_id, tenant FROM outbox
         UNION
        SELECT outbox_id, event_id, tenant FROM dead_letter
         WHERE outbox_id IS NOT NULL AND event_id IS NOT NULL) known
 WHERE ($2::text IS NULL OR known.tenant = $2)
"""
FIND_BY_EVENT_ID = f"{_KNOWN} AND known.event_id = $1 ORDER BY known.id DESC"
FIND_BY_OUTBOX_ID = f"{_KNOWN} AND known.id = ANY ($1)"

FIND_BY_IDEMPOTENCY_KEY = """
SELECT event_id FROM idempotency_key WHERE key = $1 AND event_id IS NOT NULL
"""

# Candidates for the endpoint of an X-Delivery.
READ_ENDPOINT_IDS = "SELECT id FROM endpoint"
LAST_ID = """
SELECT coalesce(pg_sequence_last_value(pg_get_serial_sequence('outbox', 'id')::regclass), 0)
"""
# Backfills of the candidate events: each backfill has its own X-Deliveries.
READ_BACKFILLS = """
SELECT DISTINCT outbox_id, backfill_id FROM delivery_run
 WHERE outbox_id = ANY ($1) AND backfill_id IS NOT NULL
   AND (replay_id IS NOT NULL OR backfill_id IS NOT NULL)
"""


MAY_READ_SUBSCRIPTIONS = """
SELECT has_table_privilege('subscription', 'SELECT') AND has_table_privilege('feed', 'SELECT')
"""
FIND_SUBSCRIBERS = f"""
SELECT coalesce(bool_or(types), false) AS for_type,
       coalesce(bool_or(types AND tenants), false) AS for_event
  FROM (SELECT {TYPE_MATCHES} AS types, {TENANT_MATCHES} AS tenants
          FROM {SUBSCRIBERS} s, (SELECT $1::text AS type, $2::text AS tenant) o) _
"""  # noqa: S608 (constants only)


@dataclass(frozen=True, slots=True)
class EventRow:
    """An event in a listing; its trace has the whole payload."""

    outbox_id: int
    id: UUID
    type: str
    tenant: str | None
    key: str | None
    published_at: datetime
    expires_at: datetime | None
    erased_at: datetime | None
    preview: str | None
    """The beginning of a JSON payload; null for one that is large, erased, or not JSON."""
    deliveries: DeliveryCounts | None = None
    """Numbers of its deliveries; null: they were not requested, it is not sequenced yet, or its
    batch is for very many lanes."""


@dataclass(frozen=True, slots=True)
class EventPage:
    """A page of events, and the extent of the search."""

    events: list[EventRow]
    next: int | None
    """Continue below this id; None: the search is complete."""
    scanned: int | None
    """Number of scanned events; None: the search used the index of keys."""
    scanned_back_to: datetime | None
    """Publish time of the oldest scanned event."""


@dataclass(frozen=True, slots=True)
class EventMatch:
    """The events that a search text identifies."""

    by: str
    """Kind of the match: event id, X-Delivery, once key, key or outbox id."""
    outbox_ids: tuple[int, ...]
    """Newest first."""
    more: bool = False
    """Older events match, too."""
    endpoint_ids: tuple[UUID, ...] = ()
    """Whose X-Delivery it is; several only by chance."""


async def search_events(
    connection: Connection[Any],
    schema: str,
    criteria: Criteria,
    *,
    key: str | None = None,
    limit: int = 100,
    below: int = ID_MAX,
    scanned_max: int = SCANNED_MAX,
    deliveries: bool = False,
    owner: str | None = None,
) -> EventPage:
    """Search for events, newest first, with ids below `below`; with a key, only for its events.

    A page can have fewer than `limit` events, or none, although the search continues.

    Args:
        deliveries: count the deliveries of each event.
        owner: only deliveries to endpoints of this tenant; None: to all.
    """
    with map_errors(schema):
        if key is None and not (criteria or deliveries):
            return _newest(await connection.fetch(LIST_NEWEST, below, limit + 1), limit)
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            only = await criteria.resolve(connection)
            arguments = (below, limit + 1, *only.arguments)
            if key is not None:
                await connection.execute(PLAN_BY_INDEX)
                rows = await connection.fetch(FIND_BY_KEY, *arguments, key)
            else:
                if not only:
                    # All match: there is nothing to search for.
                    scanned_max = min(scanned_max, limit + 1)
                await connection.execute(PLAN_BY_ID)
                rows = await connection.fetch(FIND, *arguments, scanned_max)
            page = page_of(rows, limit)
            found = [row for row in page if row["id"] is not None]
            counts: dict[int, DeliveryCounts] = {}
            if deliveries:
                ids = [row["outbox_id"] for row in found]
                counts = await count_deliveries(connection, ids, owner=owner)
    events = [from_row(EventRow, row, deliveries=counts.get(row["outbox_id"])) for row in found]
    after = events[-1].outbox_id if page.more else None
    if key is not None:
        return EventPage(events, after, None, None)
    extent = rows[0]
    if after is None and extent["events"] == scanned_max:
        after = extent["lowest"]
    return EventPage(events, after, extent["events"], extent["oldest_at"])


async def explain_no_subscriber(
    connection: Connection[Any], event_type: str, tenant: str | None
) -> str | None:
    """Why no endpoint subscribes to an event, whatever its payload.

    Returns:
        A sentence; None: an endpoint does, or it is not known, because this role may not read
        the subscriptions or they cannot be read: the event is published already.
    """
    try:
        if not await connection.fetchval(MAY_READ_SUBSCRIPTIONS):
            return None
        found = await connection.fetchrow(FIND_SUBSCRIBERS, event_type, tenant)
    except CONNECTION_ERRORS:
        return None
    if found["for_event"]:
        return None
    if not found["for_type"]:
        return f'no endpoint subscribes to the type "{event_type}"'
    events = "events without a tenant" if tenant is None else f'events of tenant "{tenant}"'
    return f'no endpoint that subscribes to the type "{event_type}" receives {events}'


def _newest(rows: Sequence[Record], limit: int) -> EventPage:
    """The page of a list in which nothing is searched for."""
    page = page_of(rows, limit)
    events = [from_row(EventRow, row, deliveries=None) for row in page]
    after = events[-1].outbox_id if page.more else None
    return EventPage(events, after, len(rows), rows[-1]["published_at"] if rows else None)


async def find_events(
    connection: Connection[Any],
    schema: str,
    text: str,
    *,
    limit: int = 5,
    below: int = ID_MAX,
    tenant: str | None = None,
    once_key: str | None = None,
) -> EventMatch:
    """Find the events for an event id, X-Delivery, once key, key or outbox id.

    Args:
        limit: maximum number of events of a key, newest first.
        below: only events of a key with a lower outbox id.
        tenant: only events of this tenant; None: all.
        once_key: the text as an idempotency key of the tenant, tried last.

    Raises:
        NotFound: no event matches.
        NotPublishedYet: a future event does.
    """
    unknown = NotFound(
        f'no event found for "{text}": no event id, key, X-Delivery or once key matches; events '
        "older than the retention are deleted, and held or delayed ones are not found by key"
    )
    if "\0" in text:  # Not allowed in a PostgreSQL text.
        raise unknown
    with map_errors(schema):
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            await connection.execute(PLAN_BY_INDEX)
            uuid = _parse_uuid(text)
            if uuid is not None:
                if ids := await _find_by_event_id(connection, uuid, tenant):
                    return EventMatch("event id", ids)
                if (match := await _find_by_delivery_id(connection, uuid, tenant)) is not None:
                    return match
            if ids := await _find_by_once_key(connection, text, tenant):
                return EventMatch("once key", ids)
            of_tenant = Criteria(tenant=tenant).arguments
            rows = await connection.fetch(FIND_BY_KEY, below, limit + 1, *of_tenant, text)
            if rows:
                ids = tuple(row["outbox_id"] for row in rows)
                return EventMatch("key", ids[:limit], more=len(ids) > limit)
            if text.isascii() and text.isdigit() and 0 < int(text) <= ID_MAX:
                outbox_id = int(text)
                if await connection.fetch(FIND_BY_OUTBOX_ID, [outbox_id], tenant):
                    return EventMatch("outbox id", (outbox_id,))
            if once_key is not None and (
                ids := await _find_by_once_key(connection, once_key, tenant)
            ):
                return EventMatch("once key", ids)
    raise unknown


async def _find_by_once_key(
    connection: Connection[Any], key: str, tenant: str | None
) -> tuple[int, ...]:
    event_id = await connection.fetchval(FIND_BY_IDEMPOTENCY_KEY, key)
    if event_id is None:
        return ()
    return await _find_by_event_id(connection, event_id, tenant, by="once key")


async def _find_by_event_id(
    connection: Connection[Any], event_id: UUID, tenant: str | None, *, by: str = "event id"
) -> tuple[int, ...]:
    """Find by event id.

    Args:
        by: what has named it.

    Raises:
        NotPublishedYet: it is a future event.
    """
    if rows := await connection.fetch(FIND_BY_EVENT_ID, event_id, tenant):
        return tuple(row["id"] for row in rows)
    if (future := await find_future_event(connection, event_id, tenant)) is not None:
        raise NotPublishedYet(future, by)
    return ()


async def _find_by_delivery_id(
    connection: Connection[Any], x_delivery: UUID, tenant: str | None
) -> EventMatch | None:
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
    found = [
        (row["id"], endpoint_id)
        for row in await connection.fetch(FIND_BY_OUTBOX_ID, list(candidates), tenant)
        for endpoint_id in candidates[row["id"]]
        if any(
            delivery_id(endpoint_id, row["id"], row["event_id"], backfill_id) == x_delivery
            for backfill_id in backfills.get(row["id"], [None])
        )
    ]
    if not found:
        return None
    outbox_ids, endpoint_ids = (tuple(dict.fromkeys(each)) for each in zip(*found, strict=True))
    return EventMatch("X-Delivery", outbox_ids, endpoint_ids=endpoint_ids)


def _parse_uuid(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None
