"""Quotas of tenants: show, set and unset; `outbox.store.quotas` counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.core.model.event import TENANT_BYTES_MAX, check_tenant, check_text
from outbox.errors import NotFound, QuotaExceeded, UsageError
from outbox.operations.pages import convert, page_of
from outbox.operations.rows import from_row
from outbox.store.change import make_change
from outbox.store.connection.connect import map_errors
from outbox.store.quotas import ALL_TENANTS, NEXT_STEP, READ_KEYS_OVER, READ_USE, RESOURCES
from outbox.store.sql.message import WriteStatement

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from asyncpg import Connection

    from outbox.operations.rows import RowPage
    from outbox.store.change import Change

QUOTA_MAX = 10**15

# The row of all tenants comes first.
LIST_QUOTAS = """
SELECT * FROM quota WHERE tenant COLLATE "C" > $1 OR $1 IS NULL ORDER BY tenant COLLATE "C" LIMIT $2
"""

ADD_QUOTA = WriteStatement(
    "add_quota",
    f"""
INSERT INTO quota SELECT $1::text, NULL, NULL, NULL, NULL WHERE $1 <> '{ALL_TENANTS}'
    ON CONFLICT DO NOTHING
""",
)
SET_QUOTA = WriteStatement(
    "set_quota",
    f"""
UPDATE quota SET {", ".join(f"{r} = coalesce(${n}, {r})" for n, r in enumerate(RESOURCES, 2))}
 WHERE tenant = $1
""",  # noqa: S608 (constants only)
)

UNSET_QUOTA = WriteStatement(
    "unset_quota",
    """
WITH unset AS (DELETE FROM quota WHERE tenant = $1 RETURNING 1)
SELECT abort_unless(EXISTS (SELECT FROM unset))
""",
)


@dataclass(frozen=True, slots=True)
class Quota:
    """Quotas of a tenant, or those of all tenants without a value of their own."""

    tenant: str | None
    """The tenant; null: all tenants."""
    endpoints: int | None
    """Maximum number of endpoints; null: as all tenants."""
    lanes: int | None
    """Maximum number of lanes of all endpoints together."""
    schedules: int | None
    """Maximum number of schedules."""
    once_keys: int | None
    """Maximum number of idempotency keys of the tenant's tokens."""


@dataclass(frozen=True, slots=True)
class Use:
    """How much of a quota is used."""

    used: int
    max: int


@dataclass(frozen=True, slots=True)
class QuotaUse:
    """What a tenant has of what it may have."""

    tenant: str
    endpoints: Use
    lanes: Use
    older_lanes: int
    """Lanes of older generations and removed endpoints, which go when nothing needs them."""
    schedules: Use
    once_keys: Use
    """Idempotency keys of its tokens, as they were counted last."""


async def list_quotas(
    connection: Connection[Any], schema: str, *, limit: int = 100, after: str | None = None
) -> RowPage[Quota]:
    """List the quotas that are set: those of all tenants first, then those of tenants by name."""
    with map_errors(schema):
        rows = await connection.fetch(LIST_QUOTAS, after, limit + 1)
    return await convert(page_of(rows, limit), _quota)


async def read_quota_use(connection: Connection[Any], schema: str, tenant: str) -> QuotaUse:
    """Read what a tenant has, and what it may have."""
    check_text("tenant", tenant, TENANT_BYTES_MAX)
    with map_errors(schema):
        (row,) = await connection.fetch(READ_USE, [tenant])
    uses = {r: Use(row[r], row[f"{r}_max"]) for r in RESOURCES}
    return QuotaUse(tenant, older_lanes=row["older_lanes"], **uses)


async def set_quota(
    connection: Connection[Any],
    schema: str,
    tenant: str | None,
    values: Mapping[str, int | None],
    *,
    actor: str,
) -> Quota:
    """Set quotas of a tenant, or of all tenants; others keep their values.

    What exists above a quota is kept, and can only be reduced.

    Args:
        tenant: the tenant; None: all tenants without a value of their own.
        values: the quota by resource; None: it is kept.

    Raises:
        UsageError: no value is given, or one is out of range.
    """
    given = {name: value for name, value in values.items() if value is not None}
    if not given:
        raise UsageError(f"set at least one of: {', '.join(RESOURCES)}")
    for name, value in given.items():
        if not 0 <= value <= QUOTA_MAX:
            raise UsageError(f"{name}: must be from 0 to {QUOTA_MAX:,}")
    check_tenant(tenant)
    stored = ALL_TENANTS if tenant is None else tenant

    async def plan(change: Change) -> Quota:
        (row,) = await change.db.fetch(
            "SELECT * FROM quota WHERE tenant IN ($1, '') ORDER BY tenant DESC LIMIT 1", stored
        )
        kept = {r: row[r] if row["tenant"] == stored else None for r in RESOURCES}
        change.write(ADD_QUOTA, stored)
        change.write(SET_QUOTA, stored, *(given.get(r) for r in RESOURCES))
        change.journal("quota_set", None, {"tenant": tenant, **given})
        return Quota(tenant, **{**kept, **given})

    return await make_change(connection, schema, actor, plan, routing=False)


async def unset_quota(
    connection: Connection[Any], schema: str, tenant: str, *, actor: str
) -> QuotaUse:
    """Remove the quotas of a tenant, so that those of all tenants are valid for it.

    Raises:
        NotFound: the tenant has none of its own.
    """
    check_text("tenant", tenant, TENANT_BYTES_MAX)

    async def plan(change: Change) -> None:
        if not await change.db.fetch("SELECT FROM quota WHERE tenant = $1", tenant):
            raise NotFound(f'tenant "{tenant}" has no quotas of its own; see: outbox quota list')
        change.write(UNSET_QUOTA, tenant)
        change.journal("quota_unset", None, {"tenant": tenant})

    await make_change(connection, schema, actor, plan, routing=False)
    return await read_quota_use(connection, schema, tenant)


async def require_once_keys(
    connection: Connection[Any], schema: str, tenant: str, keys: Sequence[str]
) -> None:
    """Require that a tenant may claim idempotency keys; those that it has claimed already pass.

    Args:
        keys: the keys as they are stored.

    Raises:
        QuotaExceeded: it had as many as its quota when maintenance counted them, within an hour.
    """
    with map_errors(schema):
        over = await connection.fetchrow(READ_KEYS_OVER, tenant, keys)
    if over is not None:
        raise QuotaExceeded(
            f'tenant "{tenant}" has {over["keys"]:,} idempotency keys, and its quota is '
            f"{over['keys_max']:,}; nothing is published: publish without one, wait until keys "
            f"expire, {NEXT_STEP}"
        )


def _quota(row: Any) -> Quota:
    return from_row(Quota, row, tenant=row["tenant"] or None)
