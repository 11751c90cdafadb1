"""Tenant isolation: a tenant token reads and changes objects of its tenant only.

A tenant owns:

    an endpoint       for this tenant alone
    a dead letter     of such an endpoint, and of an event of this tenant (or a range,
                      which has no single event)
    a replay job      if the tenant owns all of its endpoints
    a schedule, an event      of this tenant
    an idempotency key        claimed with a token of this tenant (separate key space)

Other objects respond with the same 404 as missing ones.  The rules are here and in
`outbox.operations.tenancy`; `Route.tenants` selects the rule of a route, and the default
denies tenant tokens.

Ownership is checked before a change, in a separate statement.  A change of an endpoint checks it
again: an operator could swap the names of two endpoints meanwhile.  `outbox_api.redaction` redacts
results.

Names of endpoints and schedules are unique in the whole installation, so a conflict would
reveal another tenant's name.  Tenant tokens therefore create only names with the tenant's
prefix (`name_prefix`), which no other tenant has.  Operators may choose any name.
"""

from __future__ import annotations

import re
from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from outbox.core.model.event import ONCE_BYTES_MAX
from outbox.errors import NotFound, UsageError
from outbox.operations import rows, tenancy
from outbox.operations.criteria import Criteria, DeadLetterSelection
from outbox_api.problem import Problem, ProblemKind
from outbox_api.route import TenantAccess

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from asyncpg import Connection

    from outbox_api.route import Caller, Route

_PLAIN = re.compile(r"[A-Za-z0-9_-]{1,60}")
"""Tenant names that can be used as a name prefix."""
NOT_OWNED = "not found, or it does not belong to this token's tenant"


def require_tenant_access(route: Route, caller: Caller) -> None:
    """Reject tenant tokens on routes for system tokens.

    Raises:
        Problem: the route is for system tokens only.
    """
    if caller.tenant is not None and route.tenants is TenantAccess.SYSTEM:
        raise Problem(
            ProblemKind.NOT_FOR_TENANTS,
            f'"{caller.name}" is a token of the tenant "{caller.tenant}"; '
            "this route needs a token without a tenant",
        )


async def require_owned_path(
    connection: Connection[Any], route: Route, tenant: str | None, path: Mapping[str, str]
) -> None:
    """Check that the tenant owns the object in the path.

    Raises:
        NotFound: the tenant does not own it.
    """
    if tenant is None:
        return
    match route.tenants:
        case TenantAccess.ENDPOINT:
            await require_endpoint(connection, tenant, path["name"])
        case TenantAccess.SCHEDULE:
            if not await tenancy.owns_schedule(connection, tenant, path["name"]):
                raise NotFound(NOT_OWNED)
        case TenantAccess.DEAD_LETTER:
            await require_dead_letters(connection, tenant, [parse_id(path["id"])])
        case TenantAccess.JOB:
            if not await tenancy.owns_job(connection, tenant, parse_id(path["id"])):
                raise NotFound(NOT_OWNED)


async def require_endpoint(connection: Connection[Any], tenant: str | None, name: str) -> None:
    """Check that the tenant owns an endpoint.

    Raises:
        NotFound: the tenant does not own it.
    """
    await require_endpoints(connection, tenant, [name])


async def require_endpoints(
    connection: Connection[Any], tenant: str | None, names: Iterable[str]
) -> None:
    """Check that the tenant owns endpoints.

    Raises:
        NotFound: the tenant does not own all of them.
    """
    if tenant is not None and not await tenancy.owns_endpoints(connection, tenant, set(names)):
        raise NotFound(NOT_OWNED)


async def require_dead_letters(
    connection: Connection[Any], tenant: str | None, ids: Iterable[int]
) -> None:
    """Check that the tenant owns dead letters.

    Raises:
        NotFound: the tenant does not own all of them.
    """
    if tenant is not None and not await tenancy.owns_dead_letters(connection, tenant, set(ids)):
        raise NotFound(NOT_OWNED)


def resolve_tenant(tenant: str | None, requested: str | None) -> str | None:
    """Return the tenant of a new object.

    Raises:
        UsageError: the request names another tenant.
    """
    if tenant is not None and requested not in (None, tenant):
        raise UsageError(f'tenant: this token is restricted to "{tenant}"; omit the field')
    return requested if tenant is None else tenant


def name_prefix(tenant: str) -> str:
    """Return the name prefix of a tenant, which is unique up to the first dot."""
    return f"{tenant if _PLAIN.fullmatch(tenant) else _digest(tenant, 16)}."


def require_name(tenant: str | None, name: str) -> None:
    """Check that a new name has the prefix of the tenant.

    Raises:
        UsageError: the prefix is missing.
    """
    if tenant is None or name.startswith(name_prefix(tenant)):
        return
    prefix = name_prefix(tenant)
    raise UsageError(f'name: must begin with "{prefix}", for example "{prefix}{name}"')


def restrict_criteria(tenant: str | None, base: Criteria) -> Criteria:
    """Restrict criteria to dead letters that the tenant may read."""
    return base if tenant is None else replace(base, owner=tenant)


def restrict_selection(tenant: str | None, which: DeadLetterSelection) -> DeadLetterSelection:
    """Restrict a bulk selection to the tenant; ranges have no tenant and are selected by id."""
    if tenant is None or which.ids:
        return which
    requested = resolve_tenant(tenant, which.criteria.tenant)
    return DeadLetterSelection(criteria=replace(which.criteria, tenant=requested, owner=tenant))


def stored_key(tenant: str | None, key: str) -> str:
    """Return the stored form of an idempotency key: tenants have separate key spaces.

    A shared key space would reveal which keys other tenants have claimed.
    """
    return key if tenant is None else _once_prefix(tenant) + key


def once_bytes_max(tenant: str | None) -> int:
    """The maximum size of an idempotency key, whose stored form has one, too."""
    return ONCE_BYTES_MAX if tenant is None else ONCE_BYTES_MAX - len(_once_prefix(tenant))


def public_key(tenant: str | None, key: str) -> str:
    """Return an idempotency key as the tenant gave it."""
    return key if tenant is None else key.removeprefix(_once_prefix(tenant))


def parse_id(text: str) -> int:
    """Parse an id in a path.

    Raises:
        NotFound: the text is not an id.
    """
    if (found := rows.parse_id(text)) is None:
        raise NotFound(f'"{text[:40]}" is not an id')
    return found


def _once_prefix(tenant: str) -> str:
    # "@" and a digest: application keys may begin with a tenant's name, but not with this.
    return f"@{_digest(tenant, 32)}/"


def _digest(tenant: str, chars: int) -> str:
    return sha256(tenant.encode()).hexdigest()[:chars]
