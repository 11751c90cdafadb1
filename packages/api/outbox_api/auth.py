"""Authentication: bearer tokens (RFC 6750).

A valid token is cached for `CACHED_S`, so that ten concurrent requests of a page need one
query; a revocation is effective after that time at every relay.  A malformed token causes
no query.  Lookups are serialized on one connection, which bounds the load of guessing.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING

from outbox.core.model.api_token import digest, is_token
from outbox.operations import api_tokens
from outbox_api.in_flight import UNKNOWN_ADDRESS
from outbox_api.problem import Problem, ProblemKind
from outbox_api.route import Caller

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox.core.model.api_token import Scope
    from outbox.operations.api_tokens import TokenRow
    from outbox_api.database import Database
    from outbox_api.login_failures import FailedLogins
    from outbox_api.rate_limit import RateLimiter

CACHED_S = 2.0
CACHED_TOKENS_MAX = 1000
REALM = 'Bearer realm="outbox"'


class Authenticator:
    """Finds the caller of a request.

    Args:
        failures: records failed logins.
        limits: limits failed logins by address.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        database: Database,
        failures: FailedLogins,
        limits: RateLimiter,
        clock: Callable[[], float],
    ) -> None:
        self._database = database
        self._failures = failures
        self._limits = limits
        self._clock = clock
        self._cached: OrderedDict[bytes, tuple[Caller, float]] = OrderedDict()
        self._lookup_lock = asyncio.Lock()

    async def caller(self, authorization: str | None, remote: str | None) -> Caller:
        """Authenticate an Authorization header.

        Raises:
            Problem: the header is missing, the token is malformed, unknown, expired or
                revoked, or the address had too many failed logins.
            OutboxError: the database is unavailable.
        """
        try:
            return await self._caller(authorization, remote or UNKNOWN_ADDRESS)
        except Problem as problem:
            self._failures.record_failure(remote or UNKNOWN_ADDRESS, problem.detail)
            raise

    async def _caller(self, authorization: str | None, address: str) -> Caller:
        if authorization is None:
            raise Problem(
                ProblemKind.UNAUTHENTICATED,
                "send Authorization: Bearer TOKEN; create a token with outbox token add",
                {"WWW-Authenticate": REALM},
            )
        scheme, _, secret = authorization.partition(" ")
        secret = secret.strip()
        if scheme.lower() != "bearer" or not is_token(secret):
            self._limits.require_login_quota(address, None)
            self._limits.record_bad_token(address, None)
            raise _invalid_token("malformed token")
        key = digest(secret)
        if (caller := self._find_cached(key)) is not None:
            return caller
        # Check before waiting for the lock, and again after it.
        self._limits.require_login_quota(address, key)
        async with self._lookup_lock:
            # An earlier waiter may have cached the same token.
            if (caller := self._find_cached(key)) is not None:
                return caller
            self._limits.require_login_quota(address, key)
            async with self._database.login() as connection:
                row = await api_tokens.find_token(connection, self._database.schema, secret)
            if row is None or row.state != "live":
                self._limits.record_bad_token(address, key)
                raise _invalid_token(f"the token {_describe_ended(row)}")
            self._limits.record_good_token(key)
            caller = Caller(row.id, row.name, row.scopes, row.tenant, row.expires_at)
            self._cached[key] = caller, self._clock() + CACHED_S
            while len(self._cached) > CACHED_TOKENS_MAX:
                self._cached.popitem(last=False)
        return caller

    def _find_cached(self, key: bytes) -> Caller | None:
        found = self._cached.get(key)
        if found is None:
            return None
        caller, until = found
        if self._clock() < until:
            return caller
        del self._cached[key]
        return None


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


def _describe_ended(row: TokenRow | None) -> str:
    if row is None:
        return "is unknown"
    return "was revoked" if row.state == "revoked" else "has expired"


def _invalid_token(detail: str) -> Problem:
    return Problem(
        ProblemKind.UNAUTHENTICATED,
        f"{detail}; create a token with outbox token add",
        {"WWW-Authenticate": f'{REALM}, error="invalid_token"'},
    )
