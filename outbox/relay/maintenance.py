"""Maintenance: partitions far ahead, statistics for the planner."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import asyncpg
import structlog

if TYPE_CHECKING:
    from outbox.store.partitions import PartitionStore

log = structlog.get_logger("outbox.maintenance")

EVERY_S = 60.0
ANALYZE_EVERY_S = 3600.0


async def maintain(store: PartitionStore) -> None:
    """Maintain until cancelled.

    What the database refuses (a time-out behind a long transaction, a missing
    right) is said and tried again: there are partitions enough for a while.
    """
    clock = asyncio.get_running_loop().time
    analyzed_at = clock()
    while True:
        try:
            made = await store.extend()
            if made:
                log.info("partitions added", partitions=made)
            if made or clock() - analyzed_at > ANALYZE_EVERY_S:
                await store.analyze()
                analyzed_at = clock()
        except asyncpg.PostgresConnectionError:
            raise
        except asyncpg.PostgresError as error:
            log.warning("maintenance was refused", reason=str(error), retry_s=EVERY_S)
        await asyncio.sleep(EVERY_S)
