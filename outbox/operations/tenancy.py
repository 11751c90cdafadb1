"""Tenant ownership checks of single objects, for tokens of a tenant."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection

    from asyncpg import Connection

# An endpoint for all tenants belongs to no tenant.
COUNT_ENDPOINTS = """
SELECT count(*) FROM endpoint WHERE name = ANY ($2) AND tenant = $1 AND state <> 'removed'
"""

OWNS_SCHEDULE = "SELECT EXISTS (SELECT FROM schedule WHERE name = $2 AND tenant = $1)"

# A range `d` contains events of many transactions.  All of them are the tenant's if the endpoint
# had no subscription of another tenant, or of all tenants, since the first was sequenced, and no
# feed of one has fed it anything since; the last step of a feed is never deleted.
OWNS_RANGE = """
d.outbox_id IS NULL AND NOT EXISTS (
    SELECT FROM subscription s
     WHERE s.endpoint_id = d.endpoint_id AND s.tenant IS DISTINCT FROM {tenant}
       AND coalesce(s.to_batch > d.batch, true))
AND NOT EXISTS (
    SELECT FROM feed f JOIN feed_step t ON t.feed_id = f.id AND t.batch >= d.batch
     WHERE f.endpoint_id = d.endpoint_id AND f.tenant IS DISTINCT FROM {tenant})"""

# Both event and endpoint must be the tenant's: the endpoint may have had another tenant before.
COUNT_DEAD_LETTERS = f"""
SELECT count(*) FROM dead_letter d JOIN endpoint e ON e.id = d.endpoint_id
 WHERE d.id = ANY ($2) AND e.tenant = $1
   AND (d.tenant = $1 OR {OWNS_RANGE.format(tenant="$1")})
"""  # noqa: S608 (constants only)

# A job with a part at another tenant's endpoint belongs to no tenant.
JOB_IS_OWN = """
EXISTS (SELECT FROM replay_job_endpoint p WHERE p.job_id = {job})
AND NOT EXISTS (
    SELECT FROM replay_job_endpoint p JOIN endpoint e ON e.id = p.endpoint_id
     WHERE p.job_id = {job} AND e.tenant IS DISTINCT FROM {tenant})
"""
OWNS_JOB = f"""
SELECT {JOB_IS_OWN.format(job="$2::bigint", tenant="$1")}
"""

# Including revoked tokens, whose journal entries remain.
READ_ACTORS = "SELECT DISTINCT 'token ' || name AS actor FROM token WHERE tenant = $1"


async def owns_endpoints(connection: Connection[Any], tenant: str, names: Collection[str]) -> bool:
    """Whether all of the endpoints of these names are for this tenant alone."""
    owned: int = await connection.fetchval(COUNT_ENDPOINTS, tenant, list(names))
    return owned == len(names)


async def owns_schedule(connection: Connection[Any], tenant: str, name: str) -> bool:
    """Whether the schedule of this name publishes events of this tenant."""
    return bool(await connection.fetchval(OWNS_SCHEDULE, tenant, name))


async def owns_dead_letters(connection: Connection[Any], tenant: str, ids: Collection[int]) -> bool:
    """Whether all of these dead letters are of events and endpoints of this tenant."""
    owned: int = await connection.fetchval(COUNT_DEAD_LETTERS, tenant, list(ids))
    return owned == len(ids)


async def owns_job(connection: Connection[Any], tenant: str, job_id: int) -> bool:
    """Whether a replay job is about endpoints of this tenant alone."""
    return bool(await connection.fetchval(OWNS_JOB, tenant, job_id))


async def list_actors(connection: Connection[Any], tenant: str) -> frozenset[str]:
    """Journal actors of the tenant's tokens."""
    return frozenset(row["actor"] for row in await connection.fetch(READ_ACTORS, tenant))
