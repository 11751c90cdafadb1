"""/v1/tokens: who may use this, and for what."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from outbox.api.auth import require
from outbox.api.problem import Kind, Problem
from outbox.api.request_parsing import NoQuery, Paging, Seconds
from outbox.api.route import Call, Model, Page, PageOf, Reply, Route, Shown, id_cursor, paged
from outbox.core.model.api_token import TokenSettings
from outbox.operations import api_tokens
from outbox.operations.api_tokens import NewToken, TokenRow


class TokensQuery(Paging):
    revoked: bool = False
    """Those that were revoked, too."""


class TokenBody(Model):
    """A token, by the names of `outbox token add`."""

    name: str
    scopes: tuple[str, ...]
    """read, publish, operate: none stands for another one."""
    tenant: str | None = None
    """Only what belongs to this tenant."""
    expires: Seconds | None = None
    """It is good for so long; until it is revoked where it is not said."""


class Revoked(Shown):
    """The name of the token that has ended."""

    revoked: str


async def _list(call: Call[TokensQuery, None]) -> Page:
    query = call.query
    rows = await api_tokens.page(
        call.db,
        call.schema,
        revoked=query.revoked,
        limit=query.limit + 1,
        after=id_cursor(query.after, 0),
    )
    return paged(rows, query.limit, lambda row: row.id)


async def _add(call: Call[NoQuery, TokenBody]) -> Reply:
    body = call.body
    scopes: Any = body.scopes
    wanted = TokenSettings(
        name=body.name, scopes=scopes, tenant=body.tenant, expires_in_s=body.expires
    )
    # Or whoever may operate could read what it may not.
    for scope in wanted.scopes:
        require(call.caller, scope)
    # Nor may a token outlive the one that made it.
    ends_at = call.caller.expires_at
    if ends_at is not None:
        left_s = (ends_at - datetime.now(UTC)).total_seconds()
        if wanted.expires_in_s is None or wanted.expires_in_s > left_s:
            raise Problem(
                Kind.SCOPE_MISSING,
                "a token that this one makes ends no later than itself: say expires, "
                f"{left_s:.0f}s at most",
            )
    return Reply(await api_tokens.add(call.db, call.schema, wanted, actor=call.actor), 201)


async def _revoke(call: Call[NoQuery, None]) -> dict[str, Any]:
    name = call.path["name"]
    await api_tokens.revoke(call.db, call.schema, name, actor=call.actor)
    return {"revoked": name}


ROUTES = (
    Route(
        method="GET",
        path="/v1/tokens",
        summary="Tokens, the oldest first; their secrets are not kept",
        handler=_list,
        scope="operate",
        query=TokensQuery,
        answers={200: PageOf(TokenRow)},
    ),
    Route(
        method="POST",
        path="/v1/tokens",
        summary="Make a token; shows its secret, this once",
        handler=_add,
        scope="operate",
        body=TokenBody,
        answers={201: NewToken},
    ),
    Route(
        method="DELETE",
        path="/v1/tokens/{name}",
        summary="End a token; every relay refuses it within two seconds",
        handler=_revoke,
        scope="operate",
        answers={200: Revoked},
    ),
)
