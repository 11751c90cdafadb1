"""Maintenance without a clock: each call does at once what takes a month in production."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.core.sequencing.partition_window import WIDTH, Retention
from outbox.store.retention.partitions import PartitionStore
from outbox.store.retention.periods import RetentionStore
from tests.support.relay import all_ended, fetchval
from tests.support.waiting import until

if TYPE_CHECKING:
    from asyncpg import Connection

    from outbox.core.sequencing.partition_window import PartitionWindow
    from tests.support.postgres import Database

NOTHING = Retention(0, 0, 0)
ROUNDS = 6
"""Rounds of maintenance in which a period begins, settles and is dropped several times."""

_EXPIRE_LEASE = """
UPDATE lock SET expires_at = clock_timestamp()
 WHERE name = 'maintenance'
   AND holder NOT IN (SELECT application_name FROM pg_stat_activity
                       WHERE datname = current_database() AND pid <> pg_backend_pid())
"""


class Maintainer:
    """Runs maintenance on its own connection."""

    def __init__(self, connection: Connection[Any], keep: Retention = NOTHING) -> None:
        self.db = connection
        self.partitions = PartitionStore(connection)
        self.retention = RetentionStore(connection, keep, period_s=0)

    async def maintain(self) -> list[PartitionWindow]:
        """Run each maintenance step once, except those that wait for long transactions."""
        await self.partitions.extend()
        return await self.retention.advance_periods()

    async def maintain_until_idle(self) -> None:
        """Run maintenance until it changes nothing without new events."""
        # A running relay maintains at its start, and of two that drop a partition one fails.
        await until(self._take_lease, what="the maintenance lease")
        for _ in range(ROUNDS):
            await self.maintain()
        await self.partitions.drop()

    async def _take_lease(self) -> bool:
        """Take the lease, also of a relay that was stopped while it maintained: it expires."""
        await self.db.execute(_EXPIRE_LEASE)
        return await self.partitions.renew_lease()

    async def has_dropped(self) -> bool:
        """Whether a period of events was dropped. A reading relay delays the drop for a moment."""
        await self.maintain_until_idle()
        return await self.first("events") > 0

    async def first(self, kind: str) -> int:
        """The lowest sequence number that is kept."""
        number = await self.db.fetchval(
            "SELECT min(number) FROM period WHERE kind = $1 AND dropped_at IS NULL", kind
        )
        return int(number * WIDTH)

    async def tables(self, parent: str) -> list[int]:
        return [p.lo // WIDTH for p in await self.partitions.partitions(parent)]


async def checkpointed(database: Database) -> None:
    """Whether everything is delivered and checkpointed."""
    await all_ended(database)
    uncheckpointed = """
        SELECT NOT EXISTS (SELECT FROM lane_progress p JOIN lane_counter c USING (lane_id)
                            WHERE c.last_seq > p.acked_seq)
    """
    await until(lambda: fetchval(database, uncheckpointed), what="the checkpoints")
