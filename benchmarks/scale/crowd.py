"""Tens of thousands of endpoints, written by SQL as copies of the first one.

`endpoints.changes.add` locks the cursor row for each endpoint, and would take a minute.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.stage import add_endpoint

if TYPE_CHECKING:
    from asyncpg import Connection

TO_ALL = "all.paid"
"""The type that every endpoint of a crowd gets; each also has its own, `order.n<n>`."""

# All columns are copied from the first endpoint.
ENDPOINTS = """
INSERT INTO endpoint
SELECT (jsonb_populate_record(first, jsonb_build_object(
            'id', gen_random_uuid(), 'name', 'n' || n,
            'types', jsonb_build_array('order.n' || n, $2::text)))).*
  FROM endpoint first, generate_series(1, $1::int - 1) n
"""
REST = (
    """
    INSERT INTO endpoint_secret (endpoint_id, id, secret, public_key)
    SELECT e.id, s.id, s.secret, s.public_key
      FROM endpoint e, endpoint_secret s
     WHERE NOT EXISTS (SELECT FROM endpoint_secret WHERE endpoint_id = e.id)
    """,
    """
    INSERT INTO subscription (endpoint_id, from_batch, types, tenant, all_tenants, filter)
    SELECT e.id, s.from_batch, e.types, e.tenant, e.all_tenants, e.filter
      FROM endpoint e, subscription s
     WHERE NOT EXISTS (SELECT FROM subscription WHERE endpoint_id = e.id)
    """,
    """
    INSERT INTO endpoint_health (endpoint_id) SELECT id FROM endpoint e
     WHERE NOT EXISTS (SELECT FROM endpoint_health WHERE endpoint_id = e.id)
    """,
    """
    INSERT INTO lane (endpoint_id, generation, slot)
    SELECT e.id, e.generation, slot FROM endpoint e, generate_series(0, e.lanes - 1) slot
     WHERE NOT EXISTS (SELECT FROM lane WHERE endpoint_id = e.id)
     ORDER BY e.id, slot
    """,
    """
    INSERT INTO lane_counter (lane_id, by_xid) SELECT id, txid_current() FROM lane l
     WHERE NOT EXISTS (SELECT FROM lane_counter WHERE lane_id = l.id)
    """,
    """
    INSERT INTO lane_progress (lane_id, endpoint_id, floor_batch)
    SELECT l.id, l.endpoint_id, 0 FROM lane l
     WHERE NOT EXISTS (SELECT FROM lane_progress WHERE lane_id = l.id)
    """,
    """
    INSERT INTO ownership (endpoint_id) SELECT id FROM endpoint e
     WHERE NOT EXISTS (SELECT FROM ownership WHERE endpoint_id = e.id)
    """,
)


@dataclass(frozen=True, slots=True)
class Crowd:
    """A number of endpoints, with a number of lanes each."""

    endpoints: int
    lanes: int = 1

    @property
    def lanes_total(self) -> int:
        return self.endpoints * self.lanes


async def write(connection: Connection[Any], url: str, crowd: Crowd) -> None:
    """Fill a new database before a relay works on it."""
    await add_endpoint(connection, url, name="n0", lanes=crowd.lanes, types=("order.n0", TO_ALL))
    await connection.execute(ENDPOINTS, crowd.endpoints, TO_ALL, timeout=600)
    for sql in REST:
        await connection.execute(sql, timeout=600)
    await connection.execute("VACUUM ANALYZE", timeout=600)
