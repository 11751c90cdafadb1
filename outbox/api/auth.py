"""Who asks: bearer tokens (RFC 6750), and what becomes of those who have none.

A token that was good is believed for `KNOWN_S` more, so that a page that asks ten
things at once asks the database once; a revocation therefore holds after that time
everywhere.  What does not even look like a token never reaches the database, and
whoever guesses has one connection for all of the guesses, one after the other.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING

from outbox.api.problem import Kind, Problem
from outbox.api.route import Caller
from outbox.core.model.api_token import digest, is_token
from outbox.operations import api_tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox.api.database import Database
    from outbox.api.login_failures import FailedLogins
    from outbox.api.rate_limit import Limits
    from outbox.core.model.api_token import Scope
    from outbox.operations.api_tokens import TokenRow

KNOWN_S = 2.0
KNOWN_MAX = 1000
UNKNOWN = "unknown"
"""An address that nobody knows."""
REALM = 'Bearer realm="outbox"'


class Authenticator:
    """Tells whose a token is.

    Args:
        failures: is told of those who have none that is good.
        limits: how often somebody may come with such a one.
        clock: seconds that nobody sets.
    """

    def __init__(
        self,
        database: Database,
        failures: FailedLogins,
        limits: Limits,
        clock: Callable[[], float],
    ) -> None:
        self._database = database
        self._failures = failures
        self._limits = limits
        self._clock = clock
        self._known: OrderedDict[bytes, tuple[Caller, float]] = OrderedDict()
        self._turn = asyncio.Lock()

    async def caller(self, authorization: str | None, remote: str | None) -> Caller:
        """Who sent this header.

        Raises:
            Problem: it is missing, or its token is none, expired or revoked; or there were
                too many such from there.
            OutboxError: the database cannot be asked.
        """
        try:
            return await self._caller(authorization, remote or UNKNOWN)
        except Problem as problem:
            self._failures.note(remote or UNKNOWN, problem.detail)
            raise

    async def _caller(self, authorization: str | None, address: str) -> Caller:
        if authorization is None:
            raise Problem(
                Kind.UNAUTHENTICATED,
                "send Authorization: Bearer TOKEN; outbox token add makes one",
                {"WWW-Authenticate": REALM},
            )
        scheme, _, secret = authorization.partition(" ")
        secret = secret.strip()
        if scheme.lower() != "bearer" or not is_token(secret):
            self._limits.let_try(address, None)
            self._limits.was_bad(address, None)
            raise _bad("this is not a token")
        key = digest(secret)
        if (caller := self._believed(key)) is not None:
            return caller
        # Now, not to wait in vain; and again when it is our turn.
        self._limits.let_try(address, key)
        async with self._turn:
            # Whoever waited before us may have asked about the same one.
            if (caller := self._believed(key)) is not None:
                return caller
            self._limits.let_try(address, key)
            async with self._database.login() as connection:
                row = await api_tokens.find(connection, self._database.schema, secret)
            if row is None or row.state != "live":
                self._limits.was_bad(address, key)
                raise _bad(f"the token {_ended(row)}")
            self._limits.was_good(key)
            caller = Caller(row.id, row.name, row.scopes, row.tenant, row.expires_at)
            self._known[key] = caller, self._clock() + KNOWN_S
            while len(self._known) > KNOWN_MAX:
                self._known.popitem(last=False)
        return caller

    def _believed(self, key: bytes) -> Caller | None:
        found = self._known.get(key)
        if found is None:
            return None
        caller, until = found
        if self._clock() < until:
            return caller
        del self._known[key]
        return None


def require(caller: Caller, scope: Scope | None) -> None:
    """Refuse a token that may not do this.

    Raises:
        Problem: it has not this scope.
    """
    if scope is not None and scope not in caller.scopes:
        has = ", ".join(caller.scopes)
        raise Problem(
            Kind.SCOPE_MISSING,
            f'this needs a token with the scope "{scope}"; "{caller.name}" has {has}',
            {"WWW-Authenticate": f'{REALM}, error="insufficient_scope", scope="{scope}"'},
        )


def _ended(row: TokenRow | None) -> str:
    if row is None:
        return "is not known"
    return "was revoked" if row.state == "revoked" else "has expired"


def _bad(detail: str) -> Problem:
    return Problem(
        Kind.UNAUTHENTICATED,
        f"{detail}; outbox token add makes one",
        {"WWW-Authenticate": f'{REALM}, error="invalid_token"'},
    )
