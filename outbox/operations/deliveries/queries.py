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
from outbox.operations.criteria import (
    Criteria,
    absolute_time,
    find_endpoint_ids,
    read_now,
)
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

KEY_EVENTS_MAX = 100
"""Events of a key in a page."""
EVENTS_PORTION = 10
"""Events whose deliveries are read together: each may have been sent to thousands of endpoints."""


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
    once_key: str | None = None,
    limit: int = 100,
    after: DeliveryPosition | None = None,
) -> DeliveryPage:
    """List the deliveries of an endpoint, or of the endpoints of a tenant, newest first.

    With a key or an event they are ordered by event, the newest first, replays with it.

    Args:
        endpoint: the endpoints that ever had this name.
        owner: the tenant of the caller's token: only its current endpoints, and its events.
        key: only events with this ordering key.
        event: only the event with this event id, X-Delivery, idempotency key or outbox id; or the
            events with this ordering key.
        once_key: the event as an idempotency key of the tenant.
        after: where the page before ended.

    Raises:
        NotFound: no endpoint ever had this name, or no event matches.
        UsageError: neither endpoint nor tenant, key or event is given.
    """
    only = only or DeliveryFilter()
    if tenant == "":
        raise UsageError("tenant is empty")
    if owner is not None:
        only = replace(only, tenant=owner)
    if key is not None and event is not None:
        raise UsageError("give a key or an event, not both")
    outbox_ids: Sequence[int] | None = None
    if event is not None:
        match = await find_events(
            connection, schema, event, tenant=only.tenant, once_key=once_key, limit=1
        )
        if match.by == "key":
            key = event
        else:
            outbox_ids = match.outbox_ids
    with map_errors(schema):
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            await connection.execute(PLAN_BY_INDEX)
            of_tenant = owner if endpoint is not None else owner or tenant
            endpoint_ids = await find_endpoint_ids(connection, endpoint, of_tenant)
            if endpoint_ids is None and key is None and event is None:
                raise UsageError("name an endpoint, a tenant, a key or an event")
            now = await read_now(connection)
            only = replace(
                only, since=absolute_time(only.since, now), until=absolute_time(only.until, now)
            )
            if key is not None:
                outbox_ids = await _find_by_key(connection, key, only.tenant, after or NEWEST)
            if outbox_ids is not None:
                return await _read_of_events(
                    connection, endpoint_ids, outbox_ids, only, after or NEWEST, limit
                )
            assert endpoint_ids is not None
            return await _read_of_lanes(
                connection, endpoint_ids, only, after or NEWEST, limit, owner
            )


async def _read_of_lanes(
    connection: Connection[Any],
    endpoint_ids: Sequence[UUID],
    only: DeliveryFilter,
    after: DeliveryPosition,
    limit: int,
    owner: str | None,
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
        position = _position(places[-1])
    page = DeliveryPage(
        deliveries=await read_rows(connection, places),
        next=position,
        scanned=walk.scanned,
        scanned_back_to=walk.scanned_back_to,
        removed=None,
    )
    if only.selects_failures:
        given = endpoint_ids, within["top"], only.reason, owner
        page = replace(page, ranges=await connection.fetchval(COUNT_RANGES, *given))
    return page if position is not None else await _with_removed(connection, page, only)


async def _find_by_key(
    connection: Connection[Any], key: str, tenant: str | None, after: DeliveryPosition
) -> list[int]:
    """The next events of a key, with the one that the page before ended in."""
    below = min(after.outbox_id, ID_MAX - 1) + 1
    criteria = Criteria(tenant=tenant).arguments
    rows = await connection.fetch(FIND_BY_KEY, below, KEY_EVENTS_MAX, *criteria, key)
    return [row["outbox_id"] for row in rows]


async def _read_of_events(
    connection: Connection[Any],
    endpoint_ids: Sequence[UUID] | None,
    outbox_ids: Sequence[int],
    only: DeliveryFilter,
    after: DeliveryPosition,
    limit: int,
) -> DeliveryPage:
    lanes = None
    if endpoint_ids is not None:
        rows = await connection.fetch(READ_LANES, endpoint_ids)
        lanes = [row["lane_id"] for row in rows]
    places: list[Record] = []
    for first in range(0, len(outbox_ids), EVENTS_PORTION):
        places += await connection.fetch(
            FIND_BY_EVENTS,
            *filter_arguments(only),
            limit + 1 - len(places),
            outbox_ids[first : first + EVENTS_PORTION],
            lanes,
            after,
        )
        if len(places) > limit:
            break
    position = None
    if len(places) > limit:
        places = places[:limit]
        position = _position(places[-1])
    elif len(outbox_ids) == KEY_EVENTS_MAX:
        position = DeliveryPosition(0, outbox_ids[-1], 0, 0)
    found = await read_rows(connection, places)
    page = DeliveryPage(
        deliveries=[row for row in found if only.includes(row)],
        next=position,
        scanned=len(found),
        scanned_back_to=min((row.sequenced_at for row in found), default=None),
        removed=None,
    )
    return page if position is not None else await _with_removed(connection, page, only)


def _position(place: Record) -> DeliveryPosition:
    return DeliveryPosition(*(place[name] for name in POSITION))


async def _with_removed(
    connection: Connection[Any], page: DeliveryPage, only: DeliveryFilter
) -> DeliveryPage:
    """The last page, with what retention removed behind it."""
    log, events = [await connection.fetchrow(READ_REMOVED, kind) for kind in ("log", "events")]
    if not (only.types or only.tenant):
        events = None
    return replace(
        page,
        removed=None if log is None else from_row(RemovedLog, log),
        events_removed=None if events is None else from_row(RemovedLog, events),
    )
