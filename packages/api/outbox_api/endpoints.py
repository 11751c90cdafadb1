"""/v1/endpoints: create, read, change, remove and test endpoints."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, ClassVar, get_args

from pydantic import StrictBool
from yarl import URL

from outbox.core.model import endpoint_config
from outbox.core.model.endpoint_condition import EndpointCondition
from outbox.core.model.start import parse_start
from outbox.destinations.brokers import require_for_tenant
from outbox.destinations.endpoint_test import EndpointTestResult
from outbox.destinations.endpoint_validation import (
    check_reachable,
    policy_of,
    trust_error,
)
from outbox.errors import Conflict, UsageError
from outbox.operations.endpoints import changes as endpoint_changes
from outbox.operations.endpoints import queries as endpoints
from outbox.operations.endpoints import removal as endpoint_removal
from outbox.operations.endpoints.changes import NewEndpoint, Updated
from outbox.operations.endpoints.filter import EndpointFilter
from outbox.operations.endpoints.queries import EndpointDetail, EndpointRow
from outbox.operations.endpoints.removal import DrainStatus, Removal
from outbox.operations.endpoints.repair import RequestedRepair, request_adoption, request_refill
from outbox.operations.preview import RequestPreview, preview_request
from outbox.store.delivery.endpoints import find_endpoint
from outbox_api import route, tenancy
from outbox_api.endpoint_bodies import EndpointBody, NewEndpointBody, SettingsBody
from outbox_api.endpoint_bulk import EndpointVerb
from outbox_api.endpoint_credentials import NAME, vault_of
from outbox_api.endpoint_tester import TEST_RETRY_S, TEST_S, TooManyTests
from outbox_api.field_types import Name, Text
from outbox_api.problem import ProblemKind
from outbox_api.rate_limit import too_many_requests
from outbox_api.redaction import redactor_for
from outbox_api.request_parsing import Paging
from outbox_api.route import (
    Call,
    Comment,
    DeferredReply,
    NoQuery,
    Page,
    PageOf,
    Reply,
    RequestModel,
    ResponseModel,
    TenantAccess,
    page_of_rows,
)

TEST_TIMEOUT_S = TEST_S + 10.0


class RemovalQuery(RequestModel):
    dead_letter: bool = False
    """Dead-letter pending deliveries."""
    drain: bool = False
    """Stop new events, and remove the endpoint after its backlog is delivered.  202 means
    that it is not removed yet: repeat the request."""


class ChangeBody(RequestModel):
    """Comment on a change, recorded with it and in the journal."""

    example: ClassVar = {"comment": "the receiver is upgraded until noon"}

    comment: Comment | None = None


class AdoptionBody(ChangeBody):
    """Options of an adoption."""

    example: ClassVar = {"comment": "the stream was restored", "dry_run": False}

    dry_run: StrictBool = False
    """Whether the response only shows what would happen."""


class EndpointsQuery(Paging):
    search: Name | None = None
    """Text in the name or the URL."""
    condition: EndpointCondition | None = None
    type: Text | None = None
    """Type of an event that the endpoint's types match."""
    tenant: Name | None = None

    @property
    def only(self) -> EndpointFilter:
        return EndpointFilter(self.search, self.tenant, self.type, self.condition)


class EndpointsExtra(ResponseModel):
    total: int
    """Endpoints that match, on all pages."""


@route.get(
    "/v1/endpoints",
    "List endpoints by name",
    scope="read",
    tenants=TenantAccess.NARROWED,
    responses={200: PageOf(EndpointRow, EndpointsExtra)},
)
async def _list(call: Call[EndpointsQuery, None]) -> Page[Any]:
    query, tenant = call.query, call.tenant
    rows = await call.run(
        endpoints.list_endpoints,
        tenant=tenant,
        only=query.only,
        limit=query.limit,
        after=query.after,
    )
    total = await call.run(endpoints.count_endpoints, tenant=tenant, only=query.only)
    redactor = await redactor_for(call)
    page = page_of_rows(rows, lambda row: row.name, redactor.redact_endpoint)
    return Page(page.items, page.next, {"total": total})


@route.post(
    "/v1/endpoints",
    "Create an endpoint; the response contains its signing secret, once",
    scope="operate",
    tenants=TenantAccess.NARROWED,
    bodies=(NewEndpointBody,),
    status=201,
)
async def _add(call: Call[NoQuery, SettingsBody]) -> NewEndpoint:
    fields = call.body.given_fields()
    fields["tenant"] = tenancy.resolve_tenant(call.tenant, fields.get("tenant"))
    ed25519 = fields.pop("ed25519", False)
    secret = endpoint_config.pop_secret(fields)
    start = None if (text := fields.pop("from", None)) is None else parse_start(text)
    settings = endpoint_config.parse_one(fields)
    _check_tenant_rules(call, settings)
    _require_name(call, settings.name)
    check_reachable(settings, policy_of(call.settings))
    if (ca_error := trust_error(settings.ca)) is not None:
        raise ca_error
    made = await call.run(
        endpoint_changes.add_endpoint,
        settings,
        actor=call.actor,
        vault=vault_of(call),
        ed25519=ed25519,
        secret=secret,
        start=start,
    )
    return made if call.tenant is None else replace(made, waiting=None, events_before=None)


@route.get(
    NAME, "Show an endpoint with its health and lanes", scope="read", tenants=TenantAccess.ENDPOINT
)
async def _show(call: Call[NoQuery, None]) -> EndpointDetail:
    found = await call.run(endpoints.get_endpoint, call.path["name"])
    return (await redactor_for(call)).redact_endpoint_detail(found)


@route.patch(
    NAME,
    "Change an endpoint; omitted settings are kept, null resets one to its default",
    scope="operate",
    tenants=TenantAccess.ENDPOINT,
    bodies=(EndpointBody,),
)
async def _update(call: Call[NoQuery, SettingsBody]) -> Updated:
    fields = call.body.given_fields()
    # Before the change, which may be planned several times: parsing certificates is slow.
    ca_error = trust_error(fields.get("ca"))

    def edit(current: Any) -> Any:
        settings = endpoint_config.parse_one(fields, current)
        _check_tenant_rules(call, settings, current)
        if call.tenant is not None and _origin(settings.url) != _origin(current.url):
            _require_headers_given(settings, fields.get("headers"))
        check_reachable(settings, policy_of(call.settings), current)
        if ca_error is not None and settings.ca != current.ca:
            raise ca_error
        if settings.name != current.name:
            _require_name(call, settings.name)
        return settings

    return await call.run(
        endpoint_changes.update_endpoint,
        call.path["name"],
        edit,
        actor=call.actor,
        owner=call.tenant,
        vault=vault_of(call),
    )


@route.delete(
    NAME,
    "Remove an endpoint; 409 if deliveries are pending, without drain or dead_letter",
    scope="operate",
    tenants=TenantAccess.ENDPOINT,
    responses={200: Removal, 202: DrainStatus},
)
async def _remove(call: Call[RemovalQuery, None]) -> Any:
    name, query = call.path["name"], call.query
    if query.drain and query.dead_letter:
        raise UsageError("dead_letter, drain: are mutually exclusive")
    if query.drain:
        left = await call.run(
            endpoint_removal.drain_endpoint, name, actor=call.actor, owner=call.tenant
        )
        if left.drains:
            return Reply(left, 202)
    try:
        return await call.run(
            endpoint_removal.remove_endpoint,
            name,
            actor=call.actor,
            owner=call.tenant,
            dead_letter=query.dead_letter,
        )
    except endpoint_removal.StillPending as still:
        raise Conflict(f"{still} (use drain or dead_letter)") from None


@route.post(
    f"{NAME}/refill",
    "Append again what the streams of a broker have lost",
    scope="operate",
    tenants=TenantAccess.ENDPOINT,
    body_required=False,
)
async def _refill(call: Call[NoQuery, ChangeBody]) -> RequestedRepair:
    return await call.run(
        request_refill,
        call.path["name"],
        actor=call.actor,
        owner=call.tenant,
        comment=call.body.comment,
    )


@route.post(
    f"{NAME}/adopt",
    "Go on with the streams of a broker as they are, although they do not match",
    scope="operate",
    tenants=TenantAccess.ENDPOINT,
    body_required=False,
)
async def _adopt(call: Call[NoQuery, AdoptionBody]) -> RequestedRepair:
    return await call.run(
        request_adoption,
        call.path["name"],
        actor=call.actor,
        owner=call.tenant,
        comment=call.body.comment,
        dry_run=call.body.dry_run,
    )


@route.post(
    f"{NAME}/test",
    "Send one signed test delivery from the process of the API",
    scope="operate",
    tenants=TenantAccess.ENDPOINT,
    timeout_s=TEST_TIMEOUT_S,
    responses={200: EndpointTestResult},
)
async def _test(call: Call[NoQuery, None]) -> DeferredReply:
    endpoint = await call.run(find_endpoint, call.path["name"], vault_of(call))
    redactor = await redactor_for(call)

    async def send_test() -> EndpointTestResult:
        try:
            return redactor.redact_test(await call.endpoint_tester.run_test(endpoint, call.tenant))
        except TooManyTests as error:
            raise too_many_requests(str(error), TEST_RETRY_S) from None

    return DeferredReply(send_test)


class PreviewQuery(RequestModel):
    event: Name
    """Event id, X-Delivery, once key, key (its newest event) or outbox id."""


@route.get(
    f"{NAME}/preview",
    "Show the request that delivers an event; nothing is sent",
    scope="read",
    tenants=TenantAccess.ENDPOINT,
    problems=(ProblemKind.SECRET_ALTERED,),
)
async def _preview(call: Call[PreviewQuery, None]) -> RequestPreview:
    return await call.run(
        preview_request,
        call.path["name"],
        call.query.event,
        vault=vault_of(call),
        now=time.time(),
        tenant=call.tenant,
        once_key=tenancy.stored_key(call.tenant, call.query.event),
    )


def _require_name(call: Call[Any, Any], name: str) -> None:
    """Check the new name of an endpoint.

    Raises:
        UsageError: the prefix of the tenant is missing, or a path with this name is another one.
    """
    if name in get_args(EndpointVerb):
        raise UsageError(f'name: "/v1/endpoints/{name}" is the path of an action; choose another')
    tenancy.require_name(call.tenant, name)


def _require_headers_given(settings: Any, given: dict[str, Any] | None) -> None:
    """Prevent a URL change from sending stored header values to another host.

    Raises:
        UsageError: the request does not set a stored header again.
    """
    names_given = {name.lower() for name, value in (given or {}).items() if value is not None}
    for name in settings.headers:
        if name.lower() not in names_given:
            raise UsageError(
                f"url: the new host would receive the stored header {name}; send headers as well: "
                "with their values, or {} for none"
            )


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = URL(url)
    return parts.scheme, parts.host, parts.port


def _check_tenant_rules(call: Call[Any, Any], settings: Any, current: Any = None) -> None:
    """Check the settings that a tenant token may not change.

    Raises:
        UsageError: the endpoint would belong to another tenant, to all or to none; or it
            would use a private network that an operator opened for another URL.
    """
    if call.tenant is None:
        return
    if settings.tenant != call.tenant:
        raise UsageError(f'tenant: this token is restricted to "{call.tenant}"; omit the field')
    if settings.allow_networks != (() if current is None else current.allow_networks):
        raise UsageError("allow_networks: a tenant token cannot open networks; ask an operator")
    require_for_tenant(settings.url, None if current is None else current.url)
    if settings.allow_networks and settings.url != current.url:
        raise UsageError(
            "url: a private network is open for the current URL only; ask an operator to change it"
        )
