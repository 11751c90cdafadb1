"""Maintenance: partitions, retention, old lanes, statistics for the planner, skipped events."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING

import asyncpg
import structlog

from outbox.errors import CursorBroken
from outbox.store.connection.connect import in_one_line
from outbox.store.errors import ResponseLost

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outbox.store.retention.partitions import PartitionStore
    from outbox.store.retention.periods import RetentionStore
    from outbox.store.retention.upkeep import UpkeepStore
    from outbox.store.sequencing.accounting import AccountingStore
    from outbox.store.sequencing.skipped_events import SkippedEventStore

log = structlog.get_logger("outbox.maintenance")

EVERY_S = 60.0
HOURLY_S = 3600.0


async def maintain(
    partitions: PartitionStore,
    retention: RetentionStore,
    skipped_events: SkippedEventStore,
    accounting: AccountingStore,
    upkeep: UpkeepStore,
) -> None:
    """Maintain until cancelled.

    Errors of the database (a time-out behind a long transaction, a missing
    privilege) are logged and retried: partitions are created well ahead.
    """
    clock = asyncio.get_running_loop().time
    hourly_at = clock()
    while True:
        with _step("taking the lease"):
            async with partitions.maintenance_lease() as has_lease:
                if has_lease:
                    hourly = clock() >= hourly_at
                    with _step("searching for skipped events"):
                        await _report_skipped_events(skipped_events)
                    with _step("accounting for events"):
                        await _account(accounting, hourly=hourly)
                    with _step("removing lanes"):
                        if lanes := await upkeep.remove_lanes():
                            log.info("lanes of older generations removed", lanes=lanes)
                    if hourly:
                        with _step("counting idempotency keys"):
                            await upkeep.count_keys()
                    if await _once(partitions, retention, hourly=hourly):
                        hourly_at = clock() + HOURLY_S
        await asyncio.sleep(EVERY_S)


@contextmanager
def _step(name: str) -> Iterator[None]:
    """Log an error of the database, so that the steps after this one still run.

    While the disk is full, for instance, no partition can be created, but others must be dropped.
    """
    try:
        yield
    except asyncpg.PostgresConnectionError:
        raise
    except (asyncpg.PostgresError, CursorBroken, ResponseLost) as error:
        log.warning("maintenance failed", step=name, reason=in_one_line(error), retry_s=EVERY_S)


async def _report_skipped_events(skipped_events: SkippedEventStore) -> None:
    if skipped := await skipped_events.find():
        log.error(
            "committed events were not sequenced; run outbox resequence",
            events=skipped.events,
            first_ids=list(skipped.first_ids),
        )


async def _account(accounting: AccountingStore, *, hourly: bool) -> None:
    await accounting.count_dead_ids()
    for found in await accounting.examine(next_blocks=hourly):
        log.error(
            "events and their ids do not agree; run outbox doctor and outbox verify",
            first_id=found.first_id,
            last_id=found.last_id,
            events=found.present,
            expected=found.expected,
        )


async def _once(partitions: PartitionStore, retention: RetentionStore, *, hourly: bool) -> bool:
    """Run the due work; statements that may wait for the longest transaction come last.

    It ends early if another session has taken the lease meanwhile, and does the rest.

    Returns:
        Whether the hourly work was done.
    """
    created, done = 0, False
    with _step("creating partitions"):
        created = await partitions.extend()
        if created:
            log.info("partitions added", partitions=created)
    with _step("creating partitions for the last id"):
        if (last_id := await partitions.last_id_beyond()) is not None:
            log.error(
                "the sequence of event ids is beyond the last partition, so producers fail; see "
                "outbox doctor",
                last_id=last_id,
            )
    with _step("guarding events"):
        if await partitions.guard():
            log.warning("triggers that refuse the removal of events were missing or disabled")
    with _step("summarizing"):
        await partitions.summarize()
    with _step("ending and dropping periods"):
        for period in await retention.advance_periods():
            log.info("partition window dropped", kind=period.kind, number=period.number)
    if hourly and await partitions.renew_lease():
        with _step("deleting expired rows"):
            if deleted := await retention.delete_expired():
                log.info("old dead letters and idempotency keys deleted", rows=deleted)
            done = True
    if (created or hourly) and await partitions.renew_lease():
        with _step("analyzing"):
            await partitions.analyze()
    if not await partitions.renew_lease():
        log.warning("maintenance took too long, and another session continues it")
        return done
    with _step("dropping partitions"):
        await _drop(partitions)
    return done


async def _drop(partitions: PartitionStore) -> None:
    try:
        gone, emptied, kept = await partitions.drop()
    except asyncpg.LockNotAvailableError as error:
        # A dump holds its locks for hours, in which expired rows must not wait.
        log.info("partitions are dropped later", reason=in_one_line(error), retry_s=EVERY_S)
        return
    if gone:
        log.info("partitions dropped", partitions=gone)
    if kept:
        log.warning(
            "tables of dropped periods are kept, because they were detached by hand; attach them "
            "(ALTER TABLE … ATTACH PARTITION), or drop them",
            tables=kept,
        )
    if emptied:
        log.info(
            "partitions emptied; run outbox migrate as their owner to drop them", partitions=emptied
        )
