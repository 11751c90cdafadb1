"""/v1/endpoints/{name}/pause, resume and enable, and the same for many endpoints at once."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import StrictBool

from outbox.operations.endpoints import states as endpoint_states
from outbox.operations.endpoints.states import StateChange
from outbox_api import route, tenancy
from outbox_api.endpoint_bulk import (
    CHANGED_ENDPOINTS_MAX,
    BulkChange,
    EndpointVerb,
    change_endpoints,
)
from outbox_api.endpoint_credentials import NAME
from outbox_api.endpoints import ChangeBody
from outbox_api.field_types import Name
from outbox_api.route import (
    Call,
    Comment,
    NoQuery,
    RequestModel,
    Route,
    TenantAccess,
    at_most,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


class EndpointNamesBody(RequestModel):
    """Endpoints by name."""

    example: ClassVar = {"names": ["billing"], "comment": "the receiver is upgraded until noon"}

    names: Annotated[tuple[Name, ...], at_most(CHANGED_ENDPOINTS_MAX, at_least=1)]
    comment: Comment | None = None
    """Recorded with the change and in the journal."""
    dry_run: StrictBool = False
    """Whether the response only reports what would happen."""


class EnableBody(ChangeBody):
    """How a disabled endpoint goes on."""

    example: ClassVar = {"comment": "they have a new address", "catch_up": False}

    catch_up: StrictBool = False
    """Whether it first gets what it has missed, in order: what was pending when it was disabled,
    and what was sequenced since."""


def _state_route(
    verb: str, summary: str, operation: Callable[..., Awaitable[list[StateChange]]]
) -> Route:
    @route.post(
        f"{NAME}/{verb}",
        summary,
        scope="operate",
        tenants=TenantAccess.ENDPOINT,
        body_required=False,
    )
    async def change(call: Call[NoQuery, ChangeBody]) -> StateChange:
        (changed,) = await call.run(
            operation,
            [call.path["name"]],
            actor=call.actor,
            owner=call.tenant,
            comment=call.body.comment,
        )
        return changed

    return change


_PAUSE = _state_route("pause", "Pause deliveries", endpoint_states.pause_endpoints)
_RESUME = _state_route(
    "resume",
    "Resume deliveries, retry immediately, and unblock lanes",
    endpoint_states.resume_endpoints,
)


@route.post(
    f"{NAME}/enable",
    "Re-enable a disabled endpoint for new events",
    scope="operate",
    tenants=TenantAccess.ENDPOINT,
    body_required=False,
)
async def _enable(call: Call[NoQuery, EnableBody]) -> StateChange:
    enabled = await call.run(
        endpoint_states.enable_endpoint,
        call.path["name"],
        actor=call.actor,
        owner=call.tenant,
        comment=call.body.comment,
        catch_up=call.body.catch_up,
    )
    return enabled if call.tenant is None else replace(enabled, catches_up_events=None)


def _bulk_route(verb: EndpointVerb, summary: str) -> Route:
    @route.post(f"/v1/endpoints/{verb}", summary, scope="operate", tenants=TenantAccess.NARROWED)
    async def change_many(call: Call[NoQuery, EndpointNamesBody]) -> BulkChange:
        body = call.body
        await tenancy.require_endpoints(call.db, call.tenant, body.names)
        return await call.run(
            change_endpoints,
            verb,
            body.names,
            actor=call.actor,
            comment=body.comment,
            owner=call.tenant,
            dry_run=body.dry_run,
        )

    return change_many


_PAUSE_MANY = _bulk_route("pause", "Pause deliveries of endpoints, as far as their states permit")
_RESUME_MANY = _bulk_route(
    "resume", "Resume deliveries of endpoints, retry immediately, and unblock lanes"
)
_ENABLE_MANY = _bulk_route("enable", "Re-enable disabled endpoints for new events")
