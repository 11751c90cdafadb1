"""What belongs to a tenant, asked of single things: for tokens that are a tenant's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection

    from asyncpg import Connection

# An endpoint for all tenants has none of its own.
OWNS_ENDPOINT = """
SELECT EXISTS (SELECT FROM endpoint WHERE name = $2 AND tenant = $1 AND state <> 'removed')
"""

OWNS_SCHEDULE = "SELECT EXISTS (SELECT FROM schedule WHERE name = $2 AND tenant = $1)"

# A range `d` has events of many transactions.  All of them are the tenant's if its endpoint
# was of no other tenant, nor for all, since the first of them was numbered.
OWNS_RANGE = """
d.outbox_id IS NULL AND NOT EXISTS (
    SELECT FROM subscription s
     WHERE s.endpoint_id = d.endpoint_id AND s.tenant IS DISTINCT FROM {tenant}
       AND coalesce(s.to_batch > d.batch, true))"""

# Both have to be the tenant's: its endpoint may have been somebody else's before.
COUNT_DEAD_LETTERS = f"""
SELECT count(*) FROM dead_letter d JOIN endpoint e ON e.id = d.endpoint_id
 WHERE d.id = ANY ($2) AND e.tenant = $1
   AND (d.tenant = $1 OR {OWNS_RANGE.format(tenant="$1")})
"""  # noqa: S608 (constants only)

# A job with a part at an endpoint of somebody else is nobody's but the system's.
JOB_IS_OWN = """
EXISTS (SELECT FROM replay_part p WHERE p.job_id = {job})
AND NOT EXISTS (
    SELECT FROM replay_part p JOIN endpoint e ON e.id = p.endpoint_id
     WHERE p.job_id = {job} AND e.tenant IS DISTINCT FROM {tenant})
"""
OWNS_JOB = f"""
SELECT {JOB_IS_OWN.format(job="$2::bigint", tenant="$1")}
"""

# Those that have ended, too: what they did is still told.
READ_ACTORS = "SELECT DISTINCT 'token ' || name AS actor FROM token WHERE tenant = $1"


async def owns_endpoint(connection: Connection[Any], tenant: str, name: str) -> bool:
    """Whether the endpoint of this name is for this tenant alone."""
    return bool(await connection.fetchval(OWNS_ENDPOINT, tenant, name))


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


async def actors(connection: Connection[Any], tenant: str) -> frozenset[str]:
    """How those who acted with the tenant's tokens are called in what they did."""
    return frozenset(row["actor"] for row in await connection.fetch(READ_ACTORS, tenant))
