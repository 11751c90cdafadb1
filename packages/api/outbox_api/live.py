"""/v1/live: current totals, rates and lanes, for polling clients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pydantic import AwareDatetime, Field

from outbox_api import route
from outbox_api.live_cache import LIVE_ENDPOINTS, LIVE_ENDPOINTS_MAX, Sample
from outbox_api.live_status import EndpointView, LiveTotals
from outbox_api.route import Call, RequestModel, ResponseModel, TenantAccess


class LiveQuery(RequestModel):
    endpoints: int = Field(default=LIVE_ENDPOINTS, ge=0, le=LIVE_ENDPOINTS_MAX)
    """Maximum number of endpoints: those that fail first, then those with the most pending
    deliveries."""
    since: AwareDatetime | None = None
    """Return only samples after this time."""


class Live(ResponseModel):
    """Current totals, rates and lanes."""

    totals: LiveTotals
    """Totals; for a tenant token of the tenant's endpoints, with `batch` null."""
    samples: list[Sample]
    """Rates of the last minutes, as far as clients polled."""
    endpoints: list[EndpointView]


@route.get(
    "/v1/live",
    "Current totals, rates and lanes, for polling",
    scope="read",
    tenants=TenantAccess.NARROWED,
    responses={200: Live},
)
async def _live(call: Call[LiveQuery, None]) -> dict[str, Any]:
    snapshot, samples = await call.run(call.live.snapshot, call.tenant, call.query.endpoints)
    since = call.query.since
    totals = snapshot.totals if call.tenant is None else replace(snapshot.totals, batch=None)
    return {
        "totals": totals,
        "samples": [each for each in samples if since is None or each.at > since],
        "endpoints": snapshot.endpoints,
    }
