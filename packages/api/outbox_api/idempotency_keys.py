"""/v1/once: idempotency keys."""

from __future__ import annotations

from dataclasses import replace

from outbox.operations.events import idempotency_keys
from outbox.operations.events.idempotency_keys import (
    IdempotencyKey,
    IdempotencyKeyRow,
    IdempotencyKeyState,
    ResetKey,
)
from outbox_api import route, tenancy
from outbox_api.field_types import Text
from outbox_api.request_parsing import Paging, TimeOrAge
from outbox_api.route import (
    Call,
    NoQuery,
    Page,
    TenantAccess,
    page_of_rows,
)


class OnceQuery(Paging):
    prefix: Text = ""
    """Keys with this prefix only."""
    since: TimeOrAge | None = None
    """Claimed at this time or later."""
    until: TimeOrAge | None = None
    """Claimed before this time."""
    state: IdempotencyKeyState | None = None


@route.get("/v1/once", "List idempotency keys by key", scope="read", tenants=TenantAccess.NARROWED)
async def _list(call: Call[OnceQuery, None]) -> Page[IdempotencyKeyRow]:
    query, tenant = call.query, call.tenant
    rows = await call.run(
        idempotency_keys.list_keys,
        prefix=tenancy.stored_key(tenant, query.prefix),
        since=query.since,
        until=query.until,
        state=query.state,
        limit=query.limit,
        after="" if query.after is None else tenancy.stored_key(tenant, query.after),
    )
    return page_of_rows(
        rows,
        lambda row: row.key,
        lambda row: replace(row, key=tenancy.public_key(tenant, row.key)),
    )


@route.get(
    "/v1/once/{key}",
    "Show the event and the expiry of an idempotency key",
    scope="read",
    tenants=TenantAccess.NARROWED,
)
async def _show(call: Call[NoQuery, None]) -> IdempotencyKey:
    key = call.path["key"]
    found = await call.run(idempotency_keys.get_key, tenancy.stored_key(call.tenant, key))
    return replace(found, key=key)


@route.post(
    "/v1/once/{key}/reset",
    "Reset an idempotency key, so that it can be used again",
    scope="operate",
    tenants=TenantAccess.NARROWED,
)
async def _reset(call: Call[NoQuery, None]) -> ResetKey:
    key = call.path["key"]
    own = tenancy.stored_key(call.tenant, key)
    done = await call.run(idempotency_keys.reset_key, own, actor=call.actor)
    return replace(done, key=key)
