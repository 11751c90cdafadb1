"""Logins with bearer tokens (RFC 6750): a wrong token causes no query and refuses no valid one.

The first bytes of the hashes of all tokens are in memory, read by the first request.  A token that
is not among them is wrong, or newer than they are.  So its request waits for a query that looks for
all such tokens, and these queries take a small share of the time.  A token that is known is looked
up by its whole hash, and the result is kept for a short time.

The limit of failed logins of an address is checked when a token was found to be wrong: behind a
proxy all clients have one address.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from outbox.core.model.api_token import digest
from outbox.store.connection.connect import map_errors
from outbox.web.address import address_key
from outbox_api.in_flight import UNKNOWN_ADDRESS
from outbox_api.limits import REQUEST_TIMEOUT_S
from outbox_api.problem import Problem, ProblemKind, Refusal
from outbox_api.rate_limit import too_many_requests

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from asyncpg import Connection

    from outbox_api.database import Database
    from outbox_api.login_failures import FailedLogins
    from outbox_api.rate_limit import RateLimiter

Found = TypeVar("Found")

KEPT_S = 2.0
"""How long the result of a look-up is kept, at most."""
KEPT_TOKENS_MAX = 1000
PREFIX_BYTES = 8
READ_PREFIXES = "SELECT string_agg(substr(hash, 1, {}), '' ORDER BY hash) FROM {}"
"""One value: 100,000 tokens are 800 KB, in 50 ms, and take no time of the event loop."""
FIND_NEW = "SELECT array_agg(hash) FROM {} WHERE hash = ANY ($1)"
PAUSE = 20
"""The pause between two queries for new tokens, in durations of the last one..."""
PAUSE_MAX_S = 2.0
"""... and its maximum, if the database is slow."""
LOGINS_WAITING_MAX, ADDRESS_WAITING_MAX = 128, 32
"""Requests that wait for such a query, of all addresses and of one.  Each has a connection of the
listener, which has 512."""
SOUGHT_MAX = 10_000
"""Tokens that a query looks for: those of requests that wait, and of those that were refused, which
are known when their clients try again.  More than arrive between two queries."""
REALM = 'Bearer realm="outbox"'


@dataclass(frozen=True, slots=True)
class TokenKind(Generic[Found]):
    """The tokens of a listener."""

    noun: str
    table: str
    hint: str
    """How to create one."""
    is_well_formed: Callable[[str], bool]
    find: Callable[[Connection[Any], str, str], Awaitable[Found | str]]
    """Return what a secret gives access to, or why it is not valid."""
    kept_s: float
    """How long a valid token is kept, and with it one that is revoked meanwhile."""


class Logins(Generic[Found]):
    """Authenticates the requests of a listener.

    Args:
        failures: records failed logins.
        limits: limits failed logins by address.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        kind: TokenKind[Found],
        database: Database,
        failures: FailedLogins,
        limits: RateLimiter,
        clock: Callable[[], float],
    ) -> None:
        self._kind = kind
        self._database = database
        self._failures = failures
        self._limits = limits
        self._clock = clock
        self._kept: OrderedDict[bytes, tuple[Found | str, float]] = OrderedDict()
        self._find_lock = asyncio.Lock()
        self._prefixes: bytes | None = None
        """Sorted; None: they were not read yet."""
        self._new: set[bytes] = set()
        """The hashes of tokens that were found later."""
        self._sought: set[bytes] = set()
        """Those that the next query looks for."""
        self._next_query: asyncio.Task[None] | None = None
        self._querying = asyncio.Lock()
        self._query_after = float("-inf")
        self._waiting: Counter[str] = Counter()

    async def log_in(self, authorization: str | None, remote: str | None) -> Found:
        """Authenticate an Authorization header.

        Raises:
            Problem: the header is missing, or the token is malformed, unknown, expired or revoked;
                too many such logins of the address; the database does not respond.
            OutboxError: the database is unavailable.
        """
        address = remote or UNKNOWN_ADDRESS
        try:
            return await self._log_in(authorization, address)
        except Problem as problem:
            if problem.kind in (ProblemKind.UNAUTHENTICATED, ProblemKind.TOO_MANY_REQUESTS):
                self._failures.record_failure(address, problem.detail)
            raise

    async def close(self, _: Any = None) -> None:
        """Cancel the query that has not begun."""
        if self._next_query is not None:
            self._next_query.cancel()

    async def _log_in(self, authorization: str | None, address: str) -> Found:
        if authorization is None:
            raise Problem(
                ProblemKind.UNAUTHENTICATED,
                f"send Authorization: Bearer TOKEN; {self._kind.hint}",
                {"WWW-Authenticate": REALM},
            )
        scheme, _, secret = authorization.partition(" ")
        secret = secret.strip()
        found: Found | str = f"malformed {self._kind.noun}"
        if scheme.lower() == "bearer" and self._kind.is_well_formed(secret):
            found = f"the {self._kind.noun} is unknown"
            key = digest(secret)
            if not self._is_known(key):
                await self._seek(key, address_key(address))
            if self._is_known(key):
                found = await self._find_token(key, secret)
        if isinstance(found, str):
            self._limits.count_failed_login(address)
            raise Problem(
                ProblemKind.UNAUTHENTICATED,
                f"{found}; {self._kind.hint}",
                {"WWW-Authenticate": f'{REALM}, error="invalid_token"'},
            )
        return found

    def _is_known(self, key: bytes) -> bool:
        known, size = self._prefixes or b"", PREFIX_BYTES

        def prefix(index: int) -> bytes:
            return known[index * size : (index + 1) * size]

        found = bisect_left(range(len(known) // size), key[:size], key=prefix)
        return prefix(found) == key[:size] or key in self._new

    async def _seek(self, key: bytes, address: str) -> None:
        """Wait for a query that begins after now, and makes the token known if it exists."""
        # The first query decides on all tokens, later ones on new tokens and wrong ones.
        is_first = self._prefixes is None
        may_wait = is_first or (
            len(self._sought) < SOUGHT_MAX
            and self._waiting.total() < LOGINS_WAITING_MAX
            and self._waiting[address] < ADDRESS_WAITING_MAX
        )
        if is_first or len(self._sought) < SOUGHT_MAX:
            self._sought.add(key)
        if self._next_query is None:
            self._next_query = asyncio.create_task(self._query())
            self._next_query.add_done_callback(_take_exception)
        if not may_wait:
            reason = f"too many logins with unknown {self._kind.noun}s at a time"
            raise too_many_requests(reason, 1, Refusal.LOGINS)
        self._waiting[address] += 1
        try:
            # A client that leaves cancels its request, not the query of the others.
            await asyncio.shield(self._next_query)
        finally:
            self._waiting[address] -= 1
            self._waiting = +self._waiting

    async def _query(self) -> None:
        async with self._querying:
            await asyncio.sleep(self._query_after - self._clock())
            sought, began_at = list(self._sought), self._clock()
            self._next_query = None
            self._sought.clear()
            try:
                # No request waits longer, and the next query gets another connection.
                async with asyncio.timeout(REQUEST_TIMEOUT_S), self._database.login() as connection:
                    with map_errors(self._database.schema):
                        await self._read(connection, sought)
            finally:
                now = self._clock()
                self._query_after = now + min((now - began_at) * PAUSE, PAUSE_MAX_S)

    async def _read(self, connection: Connection[Any], sought: list[bytes]) -> None:
        table = self._kind.table
        if self._prefixes is None:
            read = READ_PREFIXES.format(PREFIX_BYTES, table)
            self._prefixes = await connection.fetchval(read) or b""
        else:
            self._new.update(await connection.fetchval(FIND_NEW.format(table), sought) or ())

    async def _find_token(self, key: bytes, secret: str) -> Found | str:
        if (found := self._find_kept(key)) is not None:
            return found
        async with self._find_lock:
            # An earlier waiter may have looked the same token up.
            if (found := self._find_kept(key)) is not None:
                return found
            async with self._database.login() as connection:
                found = await self._kind.find(connection, self._database.schema, secret)
            kept_s = KEPT_S if isinstance(found, str) else self._kind.kept_s
            self._kept[key] = found, self._clock() + kept_s
            while len(self._kept) > KEPT_TOKENS_MAX:
                self._kept.popitem(last=False)
        return found

    def _find_kept(self, key: bytes) -> Found | str | None:
        found, until = self._kept.get(key, (None, 0.0))
        if self._clock() < until:
            return found
        self._kept.pop(key, None)
        return None


def _take_exception(query: asyncio.Task[None]) -> None:
    """No request may wait for it; those that do raise it."""
    if not query.cancelled():
        query.exception()
