"""The tokens of the API, and their scopes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.core.model.api_token import is_token
from outbox.operations.tokens import api as api_tokens
from outbox_api.logins import KEPT_S, REALM, TokenKind
from outbox_api.problem import Problem, ProblemKind
from outbox_api.route import Caller

if TYPE_CHECKING:
    from asyncpg import Connection

    from outbox.core.model.api_token import Scope


async def _find_caller(connection: Connection[Any], schema: str, secret: str) -> Caller | str:
    row = await api_tokens.find_token(connection, schema, secret)
    if row is None:
        return "the token is unknown"
    if row.state != "live":
        return "the token was revoked" if row.state == "revoked" else "the token has expired"
    return Caller(row.id, row.name, row.scopes, row.tenant, row.expires_at)


# Ten concurrent requests of a page need one query; a revocation is effective after that time.
API_TOKENS = TokenKind(
    "token", "token", "create a token with outbox token add", is_token, _find_caller, KEPT_S
)


def require_scope(caller: Caller, scope: Scope | None) -> None:
    """Check a scope.

    Raises:
        Problem: the token lacks the scope.
    """
    if scope is not None and scope not in caller.scopes:
        has = ", ".join(caller.scopes)
        raise Problem(
            ProblemKind.SCOPE_MISSING,
            f'this route needs the scope "{scope}"; the token "{caller.name}" has {has}',
            {"WWW-Authenticate": f'{REALM}, error="insufficient_scope", scope="{scope}"'},
        )
