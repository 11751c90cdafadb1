"""/v1/once: what once keys stand for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from outbox.api import tenancy
from outbox.api.request_parsing import NoQuery, Paging, When, moment
from outbox.api.route import Call, For, Page, PageOf, Route, Shown, paged
from outbox.api.schemas import joined
from outbox.operations import dead_letter_filter, idempotency_keys
from outbox.operations.idempotency_keys import OnceRow, State
from outbox.operations.views.merge import flat


class OnceQuery(Paging):
    prefix: str = ""
    """Only keys that begin like this."""
    since: When | None = None
    """Claimed then or later."""
    until: When | None = None
    """Claimed before."""
    state: State | None = None


class Reset(Shown):
    """Whether the key is free now, and was held."""

    key: str
    reset: bool
    """False: it was free already."""


async def _list(call: Call[OnceQuery, None]) -> Page:
    query, tenant = call.query, call.tenant
    now = await dead_letter_filter.now(call.db)
    rows = await idempotency_keys.page(
        call.db,
        call.schema,
        prefix=tenancy.once_key(tenant, query.prefix),
        since=moment(query.since, now),
        until=moment(query.until, now),
        state=query.state,
        limit=query.limit + 1,
        after="" if query.after is None else tenancy.once_key(tenant, query.after),
    )
    told = [replace(row, key=tenancy.told_once_key(tenant, row.key)) for row in rows]
    return paged(told, query.limit, lambda row: row.key)


async def _show(call: Call[NoQuery, None]) -> dict[str, Any]:
    key = call.path["key"]
    found = await idempotency_keys.get(call.db, call.schema, tenancy.once_key(call.tenant, key))
    return flat(replace(found.row, key=key)) | {"type": found.type}


async def _reset(call: Call[NoQuery, None]) -> dict[str, Any]:
    key = call.path["key"]
    own = tenancy.once_key(call.tenant, key)
    return {
        "key": key,
        "reset": await idempotency_keys.reset(call.db, call.schema, own, actor=call.actor),
    }


ROUTES = (
    Route(
        method="GET",
        path="/v1/once",
        summary="Once keys by key",
        handler=_list,
        scope="read",
        tenants=For.NARROWED,
        query=OnceQuery,
        answers={200: PageOf(OnceRow)},
    ),
    Route(
        method="GET",
        path="/v1/once/{key}",
        summary="What a once key stands for, and until when",
        handler=_show,
        scope="read",
        tenants=For.NARROWED,
        answers={200: joined("OnceKey", OnceRow, type=str | None)},
    ),
    Route(
        method="POST",
        path="/v1/once/{key}/reset",
        summary="Free a once key, so that its next event is published again",
        handler=_reset,
        scope="operate",
        tenants=For.NARROWED,
        answers={200: Reset},
    ),
)
