"""/v1/live: current totals, rates and lanes, for polling clients."""

from __future__ import annotations

from dataclasses import replace

from pydantic import Field

from outbox_api import route
from outbox_api.live_cache import LIVE_ENDPOINTS, LIVE_ENDPOINTS_MAX
from outbox_api.live_status import LiveStatus
from outbox_api.request_parsing import Time
from outbox_api.route import Call, RequestModel, TenantAccess


class LiveQuery(RequestModel):
    endpoints: int = Field(default=LIVE_ENDPOINTS, ge=0, le=LIVE_ENDPOINTS_MAX)
    """Maximum number of endpoints: those that fail first, then those with the most pending
    deliveries."""
    since: Time | None = None
    """Return only samples after this time."""


@route.get(
    "/v1/live",
    "Current totals, rates and lanes, for polling",
    scope="read",
    tenants=TenantAccess.NARROWED,
)
async def _live(call: Call[LiveQuery, None]) -> LiveStatus:
    status = await call.run(call.live.read, call.tenant, call.query.endpoints)
    since = call.query.since
    return replace(status, samples=[s for s in status.samples if since is None or s.at > since])
