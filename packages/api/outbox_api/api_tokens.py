"""/v1/tokens: API tokens."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar

from outbox.core.model.api_token import EXPIRES_IN_S_MAX, SCOPES, Scope, TokenSettings
from outbox.operations.tokens import api as api_tokens
from outbox.operations.tokens.api import NewToken, RevokedToken, TokenRow
from outbox_api import route
from outbox_api.auth import require_scope
from outbox_api.field_types import Tenant, Text, TokenName
from outbox_api.problem import Problem, ProblemKind
from outbox_api.request_parsing import IdPaging, Seconds, up_to
from outbox_api.route import (
    Call,
    NoQuery,
    Page,
    RequestModel,
    at_most,
    id_cursor,
    page_of_rows,
)


class TokensQuery(IdPaging):
    revoked: bool = False
    """Whether revoked tokens are included."""
    search: Text | None = None
    """Text in the name."""
    tenant: Text | None = None
    scope: Scope | None = None


class TokenBody(RequestModel):
    """A new token."""

    example: ClassVar = {"name": "dashboard", "scopes": ["read"], "expires": "90d"}

    name: TokenName
    scopes: Annotated[tuple[Scope, ...], at_most(len(SCOPES), at_least=1)]
    """`read`, `publish`, `operate`; scopes are independent."""
    tenant: Tenant | None = None
    """Restrict the token to this tenant."""
    expires: Annotated[Seconds, up_to(EXPIRES_IN_S_MAX)] | None = None
    """Lifetime; null: until it is revoked."""


@route.get("/v1/tokens", "List tokens, oldest first, without their secrets", scope="operate")
async def _list(call: Call[TokensQuery, None]) -> Page[TokenRow]:
    query = call.query
    rows = await call.run(
        api_tokens.list_tokens,
        revoked=query.revoked,
        search=query.search,
        tenant=query.tenant,
        scope=query.scope,
        limit=query.limit,
        after=id_cursor(query.after, 0),
    )
    return page_of_rows(rows, lambda row: row.id)


@route.post(
    "/v1/tokens",
    "Create a token; the response contains its secret, once",
    scope="operate",
    status=201,
)
async def _add(call: Call[NoQuery, TokenBody]) -> NewToken:
    body = call.body
    scopes: Any = body.scopes
    settings = TokenSettings(
        name=body.name, scopes=scopes, tenant=body.tenant, expires_in_s=body.expires
    )
    # Prevents privilege escalation: a token cannot grant scopes that it lacks.
    for scope in settings.scopes:
        require_scope(call.caller, scope)
    # A token cannot outlive its creator.
    ends_at = call.caller.expires_at
    if ends_at is not None:
        left_s = (ends_at - datetime.now(UTC)).total_seconds()
        if settings.expires_in_s is None or settings.expires_in_s > left_s:
            raise Problem(
                ProblemKind.SCOPE_MISSING,
                "expires: a new token cannot outlive the token that creates it; "
                f"at most {left_s:.0f}s",
            )
    return await call.run(api_tokens.add_token, settings, actor=call.actor)


@route.delete(
    "/v1/tokens/{name}",
    "Revoke a token; every relay rejects it within two seconds",
    scope="operate",
)
async def _revoke(call: Call[NoQuery, None]) -> RevokedToken:
    return await call.run(api_tokens.revoke_token, call.path["name"], actor=call.actor)
