"""Accounting of events: a count that does not depend on what the cursor concluded.

In every block of ids up to the cursor's position, the number of rows is the number of ids without
the dead ones (schema/0014_absence.sql).  Fewer rows: events are gone without a record, or a read
does not return them.  More rows: events were skipped, or have ids that the sequence did not assign.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from outbox.store.sql.message import WriteStatement

if TYPE_CHECKING:
    from outbox.store.connection.store_connection import StoreConnection

BATCHES_PER_STEP = 10_000
"""Batches with dead ids that are counted in one message."""
ACCOUNT_STEPS_MAX = 20
"""Messages at a time; more than a busy relay writes in a minute."""
EXAMINED_BLOCKS_MAX = 4
"""Blocks of 2^20 ids that are counted at a time, each in less than a second."""

# One row if there may be more.
ACCOUNT_BATCHES = WriteStatement(
    "account_batches", "SELECT FROM account_batches($1) AS more WHERE more"
)

BLOCKS_TO_EXAMINE = "SELECT period, block FROM blocks_to_examine($1)"

# The blocks with a difference, the one that was examined longest ago first.
READ_DIFFERENCES = """
SELECT period, block, present, expected, lower(ids.ids) AS first_id, upper(ids.ids) - 1 AS last_id
  FROM event_block, block_ids(period, block) AS ids(ids)
 WHERE present <> expected ORDER BY examined_at LIMIT $1
"""

EXAMINE_BLOCK = WriteStatement("examine_block", "SELECT examine_block($1, $2, $3)")


@dataclass(frozen=True, slots=True)
class UnaccountedEvents:
    """A block of ids with another number of events than expected."""

    period: int
    block: int
    present: int
    expected: int
    first_id: int
    last_id: int


class AccountingStore:
    """Accounting of events, on the maintenance connection; asyncpg's errors propagate.

    Args:
        actor: author of the journal entries.
    """

    def __init__(self, connection: StoreConnection, actor: str) -> None:
        self._db = connection
        self._actor = actor

    async def count_dead_ids(self) -> None:
        """Count the dead ids of the batches since the last call."""
        for _ in range(ACCOUNT_STEPS_MAX):
            if not await self._db.write(ACCOUNT_BATCHES, BATCHES_PER_STEP):
                return

    async def examine(self, *, next_blocks: bool) -> list[UnaccountedEvents]:
        """Count blocks that differ again, and the next ones if `next_blocks`.

        Returns:
            The blocks that differ.
        """
        blocks = [(found.period, found.block) for found in await self._differences()]
        if next_blocks:
            rows = await self._db.fetch(BLOCKS_TO_EXAMINE, EXAMINED_BLOCKS_MAX)
            blocks += [(row["period"], row["block"]) for row in rows]
        for period, block in dict.fromkeys(blocks):
            await self._db.write(EXAMINE_BLOCK, period, block, self._actor)
        return await self._differences()

    async def _differences(self) -> list[UnaccountedEvents]:
        rows = await self._db.fetch(READ_DIFFERENCES, EXAMINED_BLOCKS_MAX)
        return [UnaccountedEvents(**dict(row)) for row in rows]
