"""/v1/once: idempotency keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from outbox.api import tenancy
from outbox.api.request_parsing import NoQuery, Paging, TimeOrAge, absolute_time
from outbox.api.route import Call, Page, PageOf, ResponseModel, Route, TenantAccess, page_of_rows
from outbox.operations import dead_letter_filter, idempotency_keys
from outbox.operations.idempotency_keys import (
    IdempotencyKey,
    IdempotencyKeyRow,
    IdempotencyKeyState,
)


class OnceQuery(Paging):
    prefix: str = ""
    """Keys with this prefix only."""
    since: TimeOrAge | None = None
    """Claimed at this time or later."""
    until: TimeOrAge | None = None
    """Claimed before this time."""
    state: IdempotencyKeyState | None = None


class ResetKey(ResponseModel):
    """Result of resetting an idempotency key."""

    key: str
    reset: bool
    """False: it was free already."""


async def _list(call: Call[OnceQuery, None]) -> Page:
    query, tenant = call.query, call.tenant
    now = await dead_letter_filter.read_now(call.db)
    rows = await idempotency_keys.list_keys(
        call.db,
        call.schema,
        prefix=tenancy.stored_key(tenant, query.prefix),
        since=absolute_time(query.since, now),
        until=absolute_time(query.until, now),
        state=query.state,
        limit=query.limit + 1,
        after="" if query.after is None else tenancy.stored_key(tenant, query.after),
    )
    items = [replace(row, key=tenancy.public_key(tenant, row.key)) for row in rows]
    return page_of_rows(items, query.limit, lambda row: row.key)


async def _show(call: Call[NoQuery, None]) -> IdempotencyKey:
    key = call.path["key"]
    found = await idempotency_keys.get_key(
        call.db, call.schema, tenancy.stored_key(call.tenant, key)
    )
    return replace(found, key=key)


async def _reset(call: Call[NoQuery, None]) -> dict[str, Any]:
    key = call.path["key"]
    own = tenancy.stored_key(call.tenant, key)
    return {
        "key": key,
        "reset": await idempotency_keys.reset_key(call.db, call.schema, own, actor=call.actor),
    }


ROUTES = (
    Route(
        method="GET",
        path="/v1/once",
        summary="List idempotency keys by key",
        handler=_list,
        scope="read",
        tenants=TenantAccess.NARROWED,
        query=OnceQuery,
        responses={200: PageOf(IdempotencyKeyRow)},
    ),
    Route(
        method="GET",
        path="/v1/once/{key}",
        summary="Show the event and the expiry of an idempotency key",
        handler=_show,
        scope="read",
        tenants=TenantAccess.NARROWED,
        responses={200: IdempotencyKey},
    ),
    Route(
        method="POST",
        path="/v1/once/{key}/reset",
        summary="Reset an idempotency key, so that it can be used again",
        handler=_reset,
        scope="operate",
        tenants=TenantAccess.NARROWED,
        responses={200: ResetKey},
    ),
)
