"""A large transaction whose ids interleave with those of other transactions.

While it is open, each of its ids is a gap; when it commits, all of them are due at once.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from outbox.relay.sequencing.cursor import BatchResult
from tests.support.cursor_checks import NO_VIOLATIONS, check_cursor
from tests.support.sequencers import REAL, Slow, Variant, add_endpoints, session, settings
from tests.support.tiers import sampled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncpg import Connection

    from outbox.core.sequencing.gaps import Range
    from outbox.core.sequencing.router import RoutableEvent
    from outbox.relay.sequencing.sequencer import Sequencer
    from tests.support.postgres import Database

pytestmark = pytest.mark.system

IDS = 3000
GAPS_MAX = EVENTS_MAX = 250
OTHER_TRANSACTIONS = 20

# Events with `v` belong to one key and must be delivered in the order of `v`.
INSERT = """
INSERT INTO relay.outbox (type, key, payload)
VALUES ('app.row', $1, jsonb_build_object('v', $2::bigint)) RETURNING id
"""
ORDER = "SELECT outbox_id FROM relay.delivery ORDER BY seq"
OLD_GAPS = "SELECT count(*) FROM relay.gap"


class CountsGaps(Slow):
    """Records how many gaps each read takes."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self.gaps_read: list[int] = []

    async def events(
        self, high: int | None, gaps: Sequence[Range], limit: int
    ) -> list[RoutableEvent]:
        self.gaps_read.append(len(gaps))
        return await super().events(high, gaps, limit)


class CommitsDuringRead(CountsGaps):
    """Commits a transaction between the holders and the read of a batch."""

    large: Connection | None = None

    async def events(
        self, high: int | None, gaps: Sequence[Range], limit: int
    ) -> list[RoutableEvent]:
        if self.large is not None:
            large, self.large = self.large, None
            await large.execute("COMMIT")
        return await super().events(high, gaps, limit)


async def _interleave(database: Database, large: Connection, sequencer: Sequencer) -> None:
    """Insert by a transaction that stays open, and by others in between."""
    other = await database.connect()
    await large.execute("BEGIN")
    for n in range(IDS // 2):
        await large.execute(INSERT, "large", n)
        await other.execute(INSERT, f"other {n % 7}", n)
        if n % (IDS // 2 // OTHER_TRANSACTIONS) == 0:
            await sequencer.sequence_batch()


async def _sequence_all(sequencer: Sequencer) -> int:
    """Run batches until there is nothing to read; returns their number."""
    idle, batches = 0, 0
    while idle < 2:
        batches += 1
        assert batches < 200, "the sequencer does not come to rest"
        result = await sequencer.sequence_batch()
        idle = idle + 1 if result is BatchResult.EMPTY and not sequencer.cursor.reader.more else 0
    return batches


@pytest.mark.slow
@pytest.mark.parametrize("store", [CountsGaps, CommitsDuringRead])
@pytest.mark.parametrize("new_leader", sampled([False, True]), ids=["", "a new leader"])
async def test_its_events_are_sequenced_in_portions_before_later_ones(
    store: type[CountsGaps], new_leader: bool, database: Database
) -> None:
    await add_endpoints(database, 1)
    limits = settings(database, batch_events_max=EVENTS_MAX)
    sequencer, counts = Variant(store=store).build(await session(database), limits)
    await counts.check()
    large, producer = await database.connect(), await database.connect()
    await _interleave(database, large, sequencer)
    await _sequence_all(sequencer)
    open_gaps = await producer.fetchval(OLD_GAPS)
    assert open_gaps > IDS // 2 - GAPS_MAX
    if new_leader:
        sequencer, counts = Variant(store=store).build(await session(database), limits)
        await counts.check()
    if store is CommitsDuringRead:
        counts.large = large
        # Live events are in the snapshot of the same read; they must not pass its gaps.
        for n in range(10):
            await producer.execute(INSERT, "other 0", IDS + n)
    else:
        await large.execute("COMMIT")
    counts.gaps_read.clear()
    await sequencer.sequence_batch()
    later = await producer.fetchval(INSERT, "large", IDS)
    batches = await _sequence_all(sequencer)
    assert await check_cursor(producer) == NO_VIOLATIONS
    delivered = [row["outbox_id"] for row in await producer.fetch(ORDER)]
    assert delivered[-1] == later
    assert len(delivered) == IDS + 1 + (10 if store is CommitsDuringRead else 0)
    assert max(counts.gaps_read) <= GAPS_MAX
    # Each gap is read for its events; by a new leader for its holders, too.
    assert sum(counts.gaps_read) < 4 * IDS
    assert batches < 4 * (IDS // 2) / EVENTS_MAX + 10
    assert await producer.fetchval(OLD_GAPS) == 0


async def test_its_gaps_are_declared_dead_in_portions_after_a_rollback(
    database: Database,
) -> None:
    await add_endpoints(database, 1)
    limits = settings(database, batch_events_max=EVENTS_MAX)
    sequencer, counts = Variant(store=CountsGaps).build(await session(database), limits)
    await counts.check()
    large, producer = await database.connect(), await database.connect()
    await _interleave(database, large, sequencer)
    await _sequence_all(sequencer)
    await large.execute("ROLLBACK")
    counts.gaps_read.clear()
    later = await producer.fetchval(INSERT, "other 0", IDS)
    await _sequence_all(sequencer)
    assert await check_cursor(producer) == NO_VIOLATIONS
    assert (await producer.fetch(ORDER))[-1]["outbox_id"] == later
    assert max(counts.gaps_read) <= GAPS_MAX
    # The last portion waits for the next proof.
    async with asyncio.timeout(20):
        while await producer.fetchval(OLD_GAPS):
            await _sequence_all(sequencer)


async def test_the_product_reads_portions_in_one_statement(database: Database) -> None:
    """The tests above read the events and the holders in two statements."""
    await add_endpoints(database, 1)
    limits = settings(database, batch_events_max=20)
    sequencer, store = REAL.build(await session(database), limits)
    await store.check()
    large, producer = await database.connect(), await database.connect()
    await large.execute("BEGIN")
    for n in range(100):
        await large.execute(INSERT, "large", n)
        await producer.execute(INSERT, "other", n)
    await _sequence_all(sequencer)
    await large.execute("COMMIT")
    later = await producer.fetchval(INSERT, "large", 100)
    await _sequence_all(sequencer)
    assert await check_cursor(producer) == NO_VIOLATIONS
    assert (await producer.fetch(ORDER))[-1]["outbox_id"] == later
