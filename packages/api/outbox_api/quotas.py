"""/v1/quotas: what each tenant may have."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from outbox.errors import NotFound
from outbox.operations import quotas
from outbox.operations.quotas import QUOTA_MAX, Quota, QuotaUse
from outbox_api import route
from outbox_api.request_parsing import Paging
from outbox_api.route import Call, NoQuery, Page, RequestModel, TenantAccess, page_of_rows
from outbox_api.tenancy import NOT_OWNED

Maximum = Annotated[int, Field(ge=0, le=QUOTA_MAX)]
TENANT = "/v1/quotas/{tenant}"
CURSOR = "="
"""What a cursor begins with: the one after the row of all tenants is not empty."""


class QuotaBody(RequestModel):
    """Quotas to set; the others keep their values."""

    example: ClassVar = {"tenant": "acme", "endpoints": 20, "lanes": 200}

    tenant: str | None = None
    """The tenant; null: all tenants without a value of their own."""
    endpoints: Maximum | None = None
    """Maximum number of endpoints."""
    lanes: Maximum | None = None
    """Maximum number of lanes of all endpoints together."""
    schedules: Maximum | None = None
    """Maximum number of schedules."""
    once_keys: Maximum | None = None
    """Maximum number of idempotency keys of the tenant's tokens."""


@route.get("/v1/quotas", "List the quotas that are set, those of all tenants first", scope="read")
async def _list(call: Call[Paging, None]) -> Page[Quota]:
    after = call.query.after
    if after is not None:
        after = after.removeprefix(CURSOR)
    rows = await call.run(quotas.list_quotas, limit=call.query.limit, after=after)
    return page_of_rows(rows, lambda row: f"{CURSOR}{row.tenant or ''}")


@route.put("/v1/quotas", "Set quotas of a tenant, or of all tenants", scope="operate")
async def _set(call: Call[NoQuery, QuotaBody]) -> Quota:
    values = call.body.model_dump()
    tenant = values.pop("tenant")
    return await call.run(quotas.set_quota, tenant, values, actor=call.actor)


@route.get(
    TENANT,
    "Show what a tenant has of what it may have",
    scope="read",
    tenants=TenantAccess.NARROWED,
)
async def _show(call: Call[NoQuery, None]) -> QuotaUse:
    tenant = call.path["tenant"]
    if call.tenant not in (None, tenant):
        raise NotFound(NOT_OWNED)
    return await call.run(quotas.read_quota_use, tenant)


@route.delete(TENANT, "Let a tenant have the quotas of all tenants", scope="operate")
async def _unset(call: Call[NoQuery, None]) -> QuotaUse:
    return await call.run(quotas.unset_quota, call.path["tenant"], actor=call.actor)
