"""/v1/history, /v1/endpoint-histories and /v1/endpoints/{name}/history: the last 24 hours."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from outbox.core.delivery.delivery_history import HISTORY_INTERVAL_S
from outbox.operations.endpoints import history
from outbox.operations.endpoints.history import EndpointHistory, History
from outbox_api import route
from outbox_api.endpoint_credentials import NAME
from outbox_api.endpoints import EndpointsQuery
from outbox_api.route import Call, Page, RequestModel, TenantAccess, page_of_rows

HISTORIES_PAGE, HISTORIES_PAGE_MAX = 50, 100


class HistoryQuery(RequestModel):
    hours: Annotated[int, Field(ge=1, le=history.KEPT_HOURS)] = history.KEPT_HOURS
    """Only the last hours."""
    hourly: bool = False
    """Intervals of an hour instead of five minutes."""

    @property
    def interval_s(self) -> int:
        """Length of the intervals."""
        return history.HOUR_S if self.hourly else HISTORY_INTERVAL_S


class HistoriesQuery(EndpointsQuery):
    limit: int = Field(default=HISTORIES_PAGE, ge=1, le=HISTORIES_PAGE_MAX)
    """Maximum number of endpoints."""


@route.get(
    "/v1/history",
    "Show successes, failures and latencies of the last 24 hours",
    scope="read",
    tenants=TenantAccess.NARROWED,
)
async def _total(call: Call[HistoryQuery, None]) -> History:
    return await call.run(
        history.read_history,
        tenant=call.tenant,
        hours=call.query.hours,
        interval_s=call.query.interval_s,
    )


@route.get(
    "/v1/endpoint-histories",
    "List the last 24 hours of endpoints by the hour, by name",
    scope="read",
    tenants=TenantAccess.NARROWED,
)
async def _list(call: Call[HistoriesQuery, None]) -> Page[EndpointHistory]:
    query = call.query
    rows = await call.run(
        history.list_histories,
        tenant=call.tenant,
        only=query.only,
        limit=query.limit,
        after=query.after,
    )
    return page_of_rows(rows, lambda row: row.name)


@route.get(
    f"{NAME}/history",
    "Show successes, failures and latencies of an endpoint in the last 24 hours",
    scope="read",
    tenants=TenantAccess.ENDPOINT,
)
async def _of_endpoint(call: Call[HistoryQuery, None]) -> History:
    return await call.run(
        history.read_history,
        endpoint=call.path["name"],
        hours=call.query.hours,
        interval_s=call.query.interval_s,
    )
