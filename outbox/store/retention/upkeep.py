"""What the quotas of tenants need from maintenance: old lanes are removed, and keys are counted.

Both are functions of the schema: a relay has no privilege to delete lanes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.store.sql.message import WriteStatement

if TYPE_CHECKING:
    from outbox.store.connection.store_connection import StoreConnection

LANES_PER_STEP = 1000
"""Lanes per message, which locks their endpoints' ownership: a relay acquires those later."""

# The number of rows is that of the lanes.  There are none unless an endpoint is removed or has had
# other lanes: the function, which takes a new session 10 ms to plan, is not called then.
REMOVE_LANES = WriteStatement(
    "remove_lanes",
    """
SELECT FROM generate_series(1, CASE WHEN EXISTS (
                SELECT FROM endpoint WHERE state = 'removed' OR generation > 1)
            THEN remove_lanes($1) END)
""",
)
COUNT_KEYS = WriteStatement("count_idempotency_keys", "SELECT count_idempotency_keys()")


class UpkeepStore:
    """Removes lanes and counts idempotency keys; asyncpg's errors propagate."""

    def __init__(self, connection: StoreConnection) -> None:
        self._db = connection

    async def remove_lanes(self) -> int:
        """Remove the lanes that nothing refers to any more; returns how many."""
        removed = 0
        while step := await self._db.write(REMOVE_LANES, LANES_PER_STEP):
            removed += step
            if step < LANES_PER_STEP:
                break
        return removed

    async def count_keys(self) -> None:
        """Count the idempotency keys of tenants' tokens."""
        await self._db.write(COUNT_KEYS)
