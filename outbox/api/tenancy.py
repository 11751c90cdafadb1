"""A tenant's token sees and touches what belongs to that tenant, and nothing else.

What is its own:

    an endpoint       that is for this tenant alone
    a dead letter     of such an endpoint, and of an event of this tenant (or a range,
                      which has no event of its own)
    a replay job      all of whose endpoints are its own
    a schedule, an event      of this tenant
    a once key        that was claimed with a token of this tenant: they are kept apart

All the rest is as if it did not exist: 404, in the same words whether it is somebody
else's or nobody's.  The rules are here and in `outbox.operations.tenancy`; which of them
holds for a route stands in its row of the table, and a route that says nothing is not
for such tokens at all.

An object is looked at before it is changed, by a statement of its own.  What it is told
of its own is in `outbox.api.redaction`.

Names of endpoints and schedules are unique in the whole installation, so a name that is
taken would tell that somebody else has it.  Therefore such a token gives only names that
begin with its tenant's own first part (`name_prefix`), which no other tenant's begin
with; what an operator named is not held to that, and may be called as it likes.
"""

from __future__ import annotations

import re
from contextlib import asynccontextmanager
from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from outbox.api.problem import Kind, Problem
from outbox.api.route import ID_MAX, For
from outbox.errors import NotFound, UsageError
from outbox.operations import tenancy
from outbox.operations.dead_letter_filter import Filter, Selection
from outbox.store.routing_change import LOCK_CURSOR

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping

    from asyncpg import Connection

    from outbox.api.route import Caller, Route

_PLAIN = re.compile(r"[A-Za-z0-9_-]{1,60}")
"""A tenant that can be the first part of a name."""
NOT_YOURS = "there is nothing of this name or number that belongs to this token's tenant"


def let_in(route: Route, caller: Caller) -> None:
    """Refuse a tenant's token what is not for tenants.

    Raises:
        Problem: the route is about the system as a whole.
    """
    if caller.tenant is not None and route.tenants is For.SYSTEM:
        raise Problem(
            Kind.NOT_FOR_TENANTS,
            f'"{caller.name}" is a token of the tenant "{caller.tenant}"; '
            "this is about the system as a whole",
        )


@asynccontextmanager
async def steady(
    connection: Connection[Any], route: Route, tenant: str | None
) -> AsyncIterator[None]:
    """While it lasts, the name in the path is the same endpoint's.

    Otherwise an operator who swaps the names of two endpoints, after the tenant's was looked
    up and before it is changed, would have the tenant change the other one.
    """
    if tenant is None or route.method == "GET" or route.tenants is not For.ENDPOINT:
        yield
        return
    async with connection.transaction(isolation="read_committed"):
        await connection.execute(LOCK_CURSOR)
        yield


async def require_own(
    connection: Connection[Any], route: Route, tenant: str | None, path: Mapping[str, str]
) -> None:
    """Hold what the path names to be the tenant's own, before the handler sees it.

    Raises:
        NotFound: it is not.
    """
    if tenant is None:
        return
    match route.tenants:
        case For.ENDPOINT:
            await require_endpoint(connection, tenant, path["name"])
        case For.SCHEDULE:
            if not await tenancy.owns_schedule(connection, tenant, path["name"]):
                raise NotFound(NOT_YOURS)
        case For.DEAD_LETTER:
            await require_dead_letters(connection, tenant, [number(path["id"])])
        case For.JOB:
            if not await tenancy.owns_job(connection, tenant, number(path["id"])):
                raise NotFound(NOT_YOURS)


async def require_endpoint(connection: Connection[Any], tenant: str | None, name: str) -> None:
    """The same for an endpoint that stands somewhere else.

    Raises:
        NotFound: it is not the tenant's own.
    """
    if tenant is not None and not await tenancy.owns_endpoint(connection, tenant, name):
        raise NotFound(NOT_YOURS)


async def require_dead_letters(
    connection: Connection[Any], tenant: str | None, ids: Iterable[int]
) -> None:
    """The same for dead letters.

    Raises:
        NotFound: one of them is not the tenant's own.
    """
    if tenant is not None and not await tenancy.owns_dead_letters(connection, tenant, set(ids)):
        raise NotFound(NOT_YOURS)


def forced(tenant: str | None, said: str | None) -> str | None:
    """The tenant that something new is of.

    Raises:
        UsageError: somebody else's was said.
    """
    if tenant is not None and said not in (None, tenant):
        raise UsageError(f'tenant: this token is for "{tenant}" alone; leave it out')
    return said if tenant is None else tenant


def name_prefix(tenant: str) -> str:
    """What the names begin with that this tenant's tokens give.

    Up to the first dot it is of one tenant alone.
    """
    return f"{tenant if _PLAIN.fullmatch(tenant) else _digest(tenant, 16)}."


def require_name(tenant: str | None, name: str) -> None:
    """Hold a new name to those that the tenant may give.

    Raises:
        UsageError: it is none of them, whether somebody has it or not.
    """
    if tenant is None or name.startswith(name_prefix(tenant)):
        return
    prefix = name_prefix(tenant)
    raise UsageError(f'name: this token gives names that begin with "{prefix}": "{prefix}{name}"')


def listed(tenant: str | None, which: Filter) -> Filter:
    """Dead letters that may be looked at, of those that are meant."""
    return which if tenant is None else replace(which, owner=tenant)


def swept(tenant: str | None, which: Selection) -> Selection:
    """Dead letters that may be swept; ranges, which have no tenant, are named one by one."""
    if tenant is None or which.ids:
        return which
    own = replace(which.filter, tenant=forced(tenant, which.filter.tenant), owner=tenant)
    return Selection(filter=own)


def once_key(tenant: str | None, key: str) -> str:
    """A once key as the table has it: what a tenant's token claims is apart from the rest.

    Otherwise it would be told whether somebody else has claimed it.
    """
    return key if tenant is None else _once_prefix(tenant) + key


def told_once_key(tenant: str | None, key: str) -> str:
    """And as whoever claimed it knows it."""
    return key if tenant is None else key.removeprefix(_once_prefix(tenant))


def number(text: str) -> int:
    """The number that stands in a path.

    Raises:
        NotFound: it is none, so nothing is called so.
    """
    if not (text.isascii() and text.isdigit() and len(text) < 20 and 1 <= int(text) <= ID_MAX):
        raise NotFound(f'"{text[:40]}" is not a number')
    return int(text)


def _once_prefix(tenant: str) -> str:
    # An application's own keys may well begin with a tenant's name, and none begins so.
    return f"@{_digest(tenant, 32)}/"


def _digest(tenant: str, chars: int) -> str:
    return sha256(tenant.encode()).hexdigest()[:chars]
