"""/v1/declaration: declarative configuration of all endpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from outbox.core.model import endpoint_config
from outbox.destinations.endpoint_validation import check_declared, policy_of
from outbox.errors import UsageError
from outbox.operations.endpoints import queries as endpoints
from outbox.operations.endpoints.apply import ApplyReport, apply_file
from outbox.store.connection.secrets import Vault
from outbox_api import route
from outbox_api.limits import CONFIG_BODY_BYTES_MAX, CONFIG_ENDPOINTS_MAX
from outbox_api.request_parsing import Paging
from outbox_api.route import (
    Call,
    Page,
    RequestModel,
    at_most,
    page_of_rows,
)

if TYPE_CHECKING:
    from outbox.core.model.endpoint_config import DeclaredEndpoint
    from outbox.network.egress import EgressPolicy


class ApplyQuery(RequestModel):
    dry_run: bool = False
    """Return the plan without applying it."""
    prune: bool = False
    """Remove endpoints that are not declared."""
    dead_letter: bool = False
    """Whether `prune` also removes endpoints with pending deliveries, and dead-letters those."""


class DeclarationBody(RequestModel):
    """Endpoints in the format of `outbox apply`; omitted settings have their defaults."""

    example: ClassVar = {
        "defaults": {"retry": "patient"},
        "endpoints": [{"name": "crm", "url": "https://crm.example/hooks", "types": ["customer.*"]}],
    }

    defaults: dict[str, Any] | None = None
    endpoints: Annotated[tuple[dict[str, Any], ...], at_most(CONFIG_ENDPOINTS_MAX)]


@route.get(
    "/v1/declaration",
    "Export all endpoints as a declaration, without header values",
    scope="operate",
)
async def _export(call: Call[Paging, None]) -> Page[dict[str, Any]]:
    query = call.query
    rows = await call.run(endpoints.list_settings, limit=query.limit, after=query.after)
    return page_of_rows(rows, lambda each: each["name"], endpoints.declaration)


def _parse(body: DeclarationBody, policy: EgressPolicy) -> list[DeclaredEndpoint]:
    document = {"endpoints": list(body.endpoints), "defaults": body.defaults}
    declared = endpoint_config.parse_file(document)
    check_declared(declared, policy)
    return declared


@route.put(
    "/v1/declaration",
    "Apply a declaration in one transaction",
    scope="operate",
    body_bytes_max=CONFIG_BODY_BYTES_MAX,
)
async def _apply(call: Call[ApplyQuery, DeclarationBody]) -> ApplyReport:
    query = call.query
    if query.dead_letter and not query.prune:
        raise UsageError("dead_letter: needs prune as well")
    declared = _parse(call.body, policy_of(call.settings))
    return await call.run(
        apply_file,
        declared,
        actor=call.actor,
        prune=query.prune,
        dead_letter=query.dead_letter,
        dry_run=query.dry_run,
        vault=Vault.from_settings(call.settings),
    )
