"""Delivery log queries: what endpoints got, newest first, and what failed.

Nothing is written for the log: it reads the deliveries and attempts that the relay stores anyway.
A filter that no index serves scans
`outbox.operations.deliveries.walk.SCANNED_MAX` deliveries a page, and says how far back that
was, so a client can continue from there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from outbox.errors import UsageError
from outbox.operations.criteria import Criteria, absolute_time, find_endpoint_ids, read_now
from outbox.operations.deliveries.model import (
    NEWEST,
    POSITION,
    DeliveryFilter,
    DeliveryPage,
    DeliveryPosition,
    RemovedLog,
)
from outbox.operations.deliveries.statements import (
    COUNT_RANGES,
    FIND_BY_EVENTS,
    FIND_TENANTS_ENDPOINTS,
    READ_BATCH_RANGE,
    READ_LANES,
    READ_PENDING_LANES,
    READ_REMOVED,
)
from outbox.operations.deliveries.walk import Walk, filter_arguments, read_rows
from outbox.operations.events.queries import FIND_BY_KEY, find_events
from outbox.operations.rows import ID_MAX, from_row
from outbox.store.connection.connect import map_errors
from outbox.store.retention.erasure import PLAN_BY_INDEX

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from asyncpg import Connection, Record

EVENTS_MAX = 100
"""Events of a key in a page."""
EVENT_DELIVERIES_MAX = 10_000
"""Deliveries of one event in a page."""


async def list_deliveries(
    connection: Connection[Any],
    schema: str,
    *,
    endpoint: str | None = None,
    tenant: str | None = None,
    owner: str | None = None,
    only: DeliveryFilter | None = None,
    key: str | None = None,
    event: str | None = None,
    limit: int = 100,
    after: DeliveryPosition | None = None,
) -> DeliveryPage:
    """List the deliveries of an endpoint, or of the endpoints of a tenant, newest first.

    With a key or an event they are ordered by event, the newest first, and the position of the next
    page is one between events.

    Args:
        endpoint: the endpoints that ever had this name.
        owner: the tenant of the caller's token: only its current endpoints, and its events.
        key: only events with this ordering key.
        event: only the event with this event id, X-Delivery, idempotency key or outbox id.
        after: where the page before ended.

    Raises:
        NotFound: no endpoint ever had this name, or no event matches.
        UsageError: neither endpoint nor tenant, key or event is given.
    """
    only = only or DeliveryFilter()
    if owner is not None:
        only = replace(only, tenant=owner)
    if key is not None and event is not None:
        raise UsageError("give a key or an event, not both")
    outbox_ids: Sequence[int] | None = None
    if event is not None:
        match = await find_events(connection, schema, event, tenant=only.tenant, limit=EVENTS_MAX)
        outbox_ids = match.outbox_ids
    with map_errors(schema):
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            await connection.execute(PLAN_BY_INDEX)
            endpoint_ids = await find_endpoints(connection, endpoint, tenant, owner)
            if endpoint_ids is None and key is None and event is None:
                raise UsageError("name an endpoint, a tenant, a key or an event")
            now = await read_now(connection)
            only = replace(
                only, since=absolute_time(only.since, now), until=absolute_time(only.until, now)
            )
            if key is not None:
                outbox_ids = await _find_by_key(connection, key, only.tenant, after)
            if outbox_ids is not None:
                page = await _read_of_events(connection, endpoint_ids, outbox_ids, only, limit)
                return replace(page, removed=await _read_removed(connection))
            assert endpoint_ids is not None
            return await _read_of_lanes(connection, endpoint_ids, only, after or NEWEST, limit)


async def find_endpoints(
    connection: Connection[Any],
    name: str | None,
    tenant: str | None = None,
    owner: str | None = None,
) -> list[UUID] | None:
    """The ids of the endpoints that a log is about; None: all.

    Args:
        name, owner: see `find_endpoint_ids`.
        tenant: the endpoints of this tenant are meant if there is no name.

    Raises:
        NotFound: no endpoint ever had this name.
    """
    if name is None and owner is None and tenant is not None:
        return [row["id"] for row in await connection.fetch(FIND_TENANTS_ENDPOINTS, tenant)]
    return await find_endpoint_ids(connection, name, owner)


async def _read_of_lanes(
    connection: Connection[Any],
    endpoint_ids: Sequence[UUID],
    only: DeliveryFilter,
    after: DeliveryPosition,
    limit: int,
) -> DeliveryPage:
    statement = READ_PENDING_LANES if only.outcome == "pending" else READ_LANES
    lanes = await connection.fetch(statement, endpoint_ids)
    within = await connection.fetchrow(READ_BATCH_RANGE, only.since, only.until)
    walk = Walk(
        [
            (each["lane_id"], max(each["floor_batch"], within["floor"]), each["above_seq"])
            for each in lanes
        ],
        only,
        min(after, DeliveryPosition(within["top"], ID_MAX, ID_MAX, ID_MAX)),
        limit + 1,
    )
    await walk.read(connection)
    position, places = walk.position, walk.rows
    if len(places) > limit:
        places = places[:limit]
        position = DeliveryPosition(*(places[-1][name] for name in POSITION))
    return DeliveryPage(
        deliveries=await read_rows(connection, places),
        next=position,
        scanned=walk.scanned,
        scanned_back_to=walk.scanned_back_to,
        removed=await _read_removed(connection) if position is None else None,
        ranges=await connection.fetchval(COUNT_RANGES, endpoint_ids)
        if only.selects_failures
        else 0,
    )


async def _find_by_key(
    connection: Connection[Any], key: str, tenant: str | None, after: DeliveryPosition | None
) -> list[int]:
    below = ID_MAX if after is None else after.outbox_id
    criteria = Criteria(tenant=tenant).arguments
    rows = await connection.fetch(FIND_BY_KEY, below, EVENTS_MAX, *criteria, key)
    return [row["outbox_id"] for row in rows]


async def _read_of_events(
    connection: Connection[Any],
    endpoint_ids: Sequence[UUID] | None,
    outbox_ids: Sequence[int],
    only: DeliveryFilter,
    limit: int,
) -> DeliveryPage:
    """Whole events until there are `limit` deliveries."""
    lanes = None
    if endpoint_ids is not None:
        rows = await connection.fetch(READ_LANES, endpoint_ids)
        lanes = [row["lane_id"] for row in rows]
    places: list[Record] = await connection.fetch(
        FIND_BY_EVENTS, *filter_arguments(only), EVENT_DELIVERIES_MAX + 1, outbox_ids, lanes
    )
    last = None
    if len(places) > limit:
        last = places[limit - 1]["outbox_id"]
        places = [place for place in places if place["outbox_id"] >= last][:EVENT_DELIVERIES_MAX]
    elif len(outbox_ids) == EVENTS_MAX:
        last = outbox_ids[-1]
    found = await read_rows(connection, places)
    return DeliveryPage(
        deliveries=[row for row in found if only.includes(row)],
        next=None if last is None else DeliveryPosition(0, last, 0, 0),
        scanned=len(found),
        scanned_back_to=min((row.sequenced_at for row in found), default=None),
        removed=None,
    )


async def _read_removed(connection: Connection[Any]) -> RemovedLog | None:
    row = await connection.fetchrow(READ_REMOVED)
    return None if row is None else from_row(RemovedLog, row)
