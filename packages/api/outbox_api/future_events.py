"""/v1/future-events: events that are accepted, and not in the outbox yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.operations.events.future import COLUMNS, OLDEST_HELD, FutureEvent, HeldEvents, read_held
from outbox.operations.pages import page_of
from outbox.operations.rows import ID_MAX, from_row
from outbox.store.connection.connect import map_errors
from outbox_api import route, tenancy
from outbox_api.request_parsing import Paging
from outbox_api.route import Call, Page, PageOf, ResponseModel, TenantAccess, id_cursor

if TYPE_CHECKING:
    from asyncpg import Connection

SCANNED_MAX = 20_000
"""Maximum of future events that are scanned for those of a tenant."""

# The future events `given`, the newest first.
#   oldest: of each tenant with held events ($3; NULL: of all).
_SHOW = f"""
SELECT {COLUMNS}
  FROM given
  JOIN future_event f ON f.id = given.id
  LEFT JOIN oldest ON f.held_before IS NOT NULL AND oldest.tenant = f.tenant COLLATE "C"
"""  # noqa: S608 (constants only)
_OLDEST = f"""
WITH oldest AS MATERIALIZED (
    SELECT s.tenant, first.held_before FROM tenant_share s CROSS JOIN LATERAL ({OLDEST_HELD}) first
     WHERE $3::text IS NULL OR s.tenant = $3)
"""  # noqa: S608 (constants only)

# The newest $2 held events with ids below $1: those of each tenant are in an index.
LIST_HELD = f"""
{_OLDEST},
given AS MATERIALIZED (
    SELECT newest.id
      FROM oldest CROSS JOIN LATERAL (
           SELECT id, tenant FROM future_event
            WHERE held_before IS NOT NULL AND (tenant COLLATE "C", id) < (oldest.tenant, $1)
            ORDER BY tenant COLLATE "C" DESC, id DESC LIMIT $2) newest
     WHERE newest.tenant = oldest.tenant
     ORDER BY newest.id DESC LIMIT $2)
{_SHOW} ORDER BY f.id DESC
"""  # noqa: S608 (constants only)

# The newest $2 future events with ids below $1, among the first $4.
#   extent: the number of scanned events and the lowest id tell their end from the limit.
LIST_FUTURE = f"""
{_OLDEST},
scanned AS MATERIALIZED (
    SELECT id, tenant FROM future_event WHERE id < $1 ORDER BY id DESC LIMIT $4),
given AS MATERIALIZED (
    SELECT id FROM scanned WHERE $3::text IS NULL OR tenant = $3 ORDER BY id DESC LIMIT $2)
SELECT extent.*, shown.*
  FROM (SELECT count(*) AS scanned, min(id) AS lowest FROM scanned) extent
  LEFT JOIN ({_SHOW}) shown ON true
 ORDER BY shown.future_id DESC
"""  # noqa: S608 (constants only)


@dataclass(frozen=True, slots=True)
class FuturePage:
    """A page of future events."""

    events: list[FutureEvent]
    next: int | None
    """Continue below this id; None: the list is complete."""


async def list_future_events(
    connection: Connection[Any],
    schema: str,
    *,
    tenant: str | None,
    held: bool,
    limit: int,
    below: int,
    scanned_max: int = SCANNED_MAX,
) -> FuturePage:
    """List future events, the newest first.

    Args:
        tenant: only those of this tenant; None: of all.
        held: only those that are held.
        below: only events with lower ids.
        scanned_max: events that are scanned for those of the tenant.
    """
    if tenant is None:
        scanned_max = limit + 1  # All of them match.
    arguments = (below, limit + 1, tenant)
    with map_errors(schema):
        if held:
            rows = await connection.fetch(LIST_HELD, *arguments)
        else:
            rows = await connection.fetch(LIST_FUTURE, *arguments, scanned_max)
    page = page_of([row for row in rows if row["id"] is not None], limit)
    events = [from_row(FutureEvent, row) for row in page]
    if page.more:
        return FuturePage(events, events[-1].future_id)
    cut = not held and rows[0]["scanned"] == scanned_max
    return FuturePage(events, rows[0]["lowest"] if cut else None)


class FutureEventsQuery(Paging):
    held: bool = False
    """Only events that are held for their tenant's share."""
    tenant: str | None = None


class FutureEventsExtra(ResponseModel):
    held: HeldEvents
    """What is held in all: of the tenant that was asked for, or of all tenants."""


@route.get(
    "/v1/future-events",
    "List events that are accepted and not published yet, newest first: held for the share of "
    "their tenant, or delayed",
    scope="read",
    tenants=TenantAccess.NARROWED,
    responses={200: PageOf(FutureEvent, FutureEventsExtra)},
)
async def _list(call: Call[FutureEventsQuery, None]) -> Page[Any]:
    query = call.query
    tenant = tenancy.resolve_tenant(call.tenant, query.tenant)
    found = await call.run(
        list_future_events,
        tenant=tenant,
        held=query.held,
        limit=query.limit,
        below=id_cursor(query.after, ID_MAX),
    )
    held = await call.run(read_held, tenant=tenant)
    return Page(found.events, None if found.next is None else str(found.next), {"held": held})
