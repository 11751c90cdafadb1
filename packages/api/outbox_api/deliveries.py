"""/v1/deliveries and /v1/endpoints/{name}/deliveries: the delivery log."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field

from outbox.operations.deliveries import queries
from outbox.operations.deliveries.model import (
    OUTCOMES,
    DeliveryFilter,
    DeliveryPosition,
    DeliveryRow,
    RemovedLog,
    StatusRange,
)
from outbox_api import route, tenancy
from outbox_api.endpoint_credentials import NAME, vault_of
from outbox_api.field_types import Name, Text
from outbox_api.redaction import redactor_for
from outbox_api.request_parsing import Paging, TimeOrAge
from outbox_api.route import Call, NoQuery, Page, PageOf, ResponseModel, TenantAccess, TypePatterns
from outbox_doctor.trace import queries as trace
from outbox_doctor.trace.model import EventTrace
from outbox_doctor.trace.rebuilt_requests import add_requests

DELIVERIES_MAX = 1000
STATUS_PATTERN = "^[1-5]([0-9][0-9]|xx)$"


class DeliveriesQuery(Paging):
    limit: int = Field(default=100, ge=1, le=DELIVERIES_MAX)
    """Maximum number of deliveries.  A page may have fewer and a `next`: a search scans 20,000
    deliveries a page."""
    failed: bool = False
    """Deliveries of which an attempt failed, and dead letters."""
    outcome: Literal[OUTCOMES] | None = None  # type: ignore[valid-type]
    """What became of them.  `dead`: a dead letter of any reason; the others are its reasons."""
    status: Annotated[str, Field(json_schema_extra={"pattern": STATUS_PATTERN})] | None = None
    """The status of one of their attempts, such as 404, or a class: 5xx."""
    type: TypePatterns = ()
    """Type patterns such as order.*; repeatable."""
    key: Text | None = None
    """Ordering key of their events.  The newest event is first."""
    event: Text | None = None
    """Event id, X-Delivery, idempotency key or outbox id of their event."""
    tenant: Name | None = None
    since: TimeOrAge | None = None
    """Sequenced at this time or later."""
    until: TimeOrAge | None = None
    """Sequenced before this time."""


class LogExtent(ResponseModel):
    """Extent of the search."""

    scanned: int | None
    """Number of scanned deliveries; null for tenant tokens."""
    scanned_back_to: datetime | None
    """When the oldest scanned delivery was sequenced."""
    removed: RemovedLog | None
    """What retention removed of the log, on the last page."""
    events_removed: RemovedLog | None
    """What it removed of the events, on the last page of a search for types or a tenant: their
    deliveries match nothing, unless they are dead letters."""
    ranges: int
    """Dead letters of several deliveries, which are no part of a list of failures: see
    /v1/dead-letters."""


async def _read_page(call: Call[DeliveriesQuery, None], endpoint: str | None) -> Page[Any]:
    query = call.query
    tenant = tenancy.resolve_tenant(call.tenant, query.tenant)
    page = await call.run(
        queries.list_deliveries,
        endpoint=endpoint,
        tenant=tenant,
        owner=call.tenant,
        only=DeliveryFilter(
            types=query.type,
            outcome=query.outcome,
            failed=query.failed,
            status=None if query.status is None else StatusRange.parse(query.status),
            since=query.since,
            until=query.until,
            tenant=tenant if endpoint is not None else None,
        ),
        key=query.key,
        event=query.event,
        once_key=None if query.event is None else tenancy.stored_key(call.tenant, query.event),
        limit=query.limit,
        after=None if query.after is None else DeliveryPosition.parse(query.after),
    )
    redactor = await redactor_for(call)
    return Page(
        [redactor.redact_delivery_row(row) for row in page.deliveries],
        None if page.next is None else str(page.next),
        {
            "scanned": page.scanned if call.tenant is None else None,
            "scanned_back_to": page.scanned_back_to,
            "removed": page.removed,
            "events_removed": page.events_removed,
            "ranges": page.ranges,
        },
    )


@route.get(
    f"{NAME}/deliveries",
    "List the deliveries of an endpoint, newest first",
    scope="read",
    tenants=TenantAccess.ENDPOINT,
    responses={200: PageOf(DeliveryRow, LogExtent)},
)
async def _list_of_endpoint(call: Call[DeliveriesQuery, None]) -> Page[Any]:
    return await _read_page(call, call.path["name"])


@route.get(
    "/v1/deliveries",
    "List the deliveries of a tenant's endpoints, or of an event or a key, newest first",
    scope="read",
    tenants=TenantAccess.NARROWED,
    responses={200: PageOf(DeliveryRow, LogExtent)},
)
async def _list(call: Call[DeliveriesQuery, None]) -> Page[Any]:
    return await _read_page(call, None)


@route.get(
    "/v1/deliveries/{id}",
    "Show a delivery by its X-Delivery, with all attempts",
    scope="read",
    tenants=TenantAccess.NARROWED,
)
async def _get(call: Call[NoQuery, None]) -> EventTrace:
    found = await call.run(trace.trace_delivery, call.path["id"], tenant=call.tenant)
    found = await call.run(add_requests, found, vault=vault_of(call))
    return (await redactor_for(call)).redact_trace(found)
