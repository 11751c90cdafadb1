"""/v1/erase: erase the content of events; ids, states and times are kept."""

from __future__ import annotations

from typing import ClassVar

from pydantic import StrictBool

from outbox.errors import UsageError
from outbox.operations.events import erase
from outbox.operations.events.erase import ErasureReport, ErasureTarget
from outbox_api import route, tenancy
from outbox_api.field_types import Text
from outbox_api.route import (
    Call,
    NoQuery,
    RequestModel,
    TenantAccess,
)

ERASE_TIMEOUT_S = 600.0
"""Erasure runs in committed steps; after a timeout, repeat the request to continue."""


class EraseBody(RequestModel):
    """Events of a tenant, or with a key."""

    example: ClassVar = {"key": "customer-7", "dry_run": True}

    tenant: Text | None = None
    key: Text | None = None
    dry_run: StrictBool = False
    """Count only."""


@route.post(
    "/v1/erase",
    "Erase payloads, headers and responses of a tenant's or a key's events permanently",
    scope="operate",
    tenants=TenantAccess.NARROWED,
    timeout_s=ERASE_TIMEOUT_S,
    long=True,
)
async def _erase(call: Call[NoQuery, EraseBody]) -> ErasureReport:
    body = call.body
    if call.tenant is not None and body.key is not None:
        raise UsageError(
            "key: other tenants may use the same key; a tenant token erases by tenant only"
        )
    target = ErasureTarget(tenancy.resolve_tenant(call.tenant, body.tenant), body.key)
    if body.dry_run:
        return await call.run(erase.count_erasable, target)
    # A tenant's token that erases again and again must not scan everything each time.
    only_later = call.tenant is not None
    return await call.run(erase.erase_events, target, actor=call.actor, only_later=only_later)
