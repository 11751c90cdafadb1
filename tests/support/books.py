"""A sequencer, and the accounts of its database."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.core.sequencing.gaps import GapTracker
from outbox.relay.sequencing.cursor import BatchResult
from outbox.store.retention.partitions import PartitionStore
from outbox.store.retention.periods import RetentionStore
from outbox.store.sequencing.accounting import AccountingStore
from outbox_doctor.verify.audit import run_checks
from tests.support.doctor import reported_findings
from tests.support.sequencers import Variant, session, settings

if TYPE_CHECKING:
    from outbox.core.sequencing.partition_window import Retention
    from tests.support.postgres import Database

BLOCK = 1 << 20

INSERT = "INSERT INTO outbox (type, key, payload) VALUES ('a.b', 'k', '{}')"
INSERT_WITH_ID = (
    "INSERT INTO outbox (id, type, payload) OVERRIDING SYSTEM VALUE VALUES ({}, 'a.b', '{{}}')"
)
ROLL_BACK = "SELECT nextval('outbox_id_seq')"


class EveryBatchProves(GapTracker):
    """Declares ids dead in each batch, so that a test need not wait."""

    proof_every_s = 0.0


@dataclass
class Books:
    """A sequencer, and the accounts of its database."""

    database: Database
    db: Any
    sequencer: Any
    accounting: AccountingStore

    async def publish(self, events: int) -> None:
        for _ in range(events):
            await self.db.execute(INSERT)

    async def roll_back(self, ids: int) -> None:
        for _ in range(ids):
            await self.db.execute(ROLL_BACK)

    async def leap(self, to: int) -> None:
        """Let the sequence skip ids, and publish one event behind them."""
        await self.db.execute(f"SELECT setval('outbox_id_seq', {to})")
        await self.publish(1)

    async def sequence(self) -> None:
        """Run batches until there are no changes, and all gaps that can be closed are."""
        idle = 0
        async with asyncio.timeout(30):
            while idle < 3:
                idle += await self.sequencer.sequence_batch() is BatchResult.EMPTY
                await asyncio.sleep(0)

    async def end_periods(self, keep: Retention) -> None:
        """Begin and settle periods, which have no length, and drop what is not kept."""
        partitions = PartitionStore(self.db)
        for _ in range(3):
            await partitions.extend()
            await RetentionStore(self.db, keep, period_s=0).advance_periods()
            self.sequencer.cursor.forget()
            await self.sequence()
        await partitions.drop()

    async def differences(self) -> dict[tuple[int, int], int]:
        """Surplus (or, negative, missing) events by block, as the relay counts them."""
        await self.accounting.count_dead_ids()
        for _ in range(8):
            found = await self.accounting.examine(next_blocks=True)
        return {(each.period, each.block): each.present - each.expected for each in found}

    async def verify(self) -> dict[str, tuple[str, ...]]:
        """The violations by the checks of this subject."""
        return {
            each.name: each.examples
            async for each in run_checks(self.db)
            if each.violations and each.name in ("lost", "all there", "assigned")
        }

    async def assert_agree(self) -> None:
        assert await self.differences() == {}
        assert await self.verify() == {}
        assert await reported_findings(self.db, "accounting") == []


async def open_books(database: Database) -> Books:
    """The accounts of a database, with a sequencer that proves in each batch."""
    db = await session(database)
    await db.execute("SET relay.remove = 'on'")
    sequencer, store = Variant(tracker=EveryBatchProves).build(db, settings(database))
    await store.check()
    return Books(database, db, sequencer, AccountingStore(db, "test"))


async def sequence_events(books: Books) -> None:
    """Publish and sequence the events 1, 2, 4, 5 and 2^32 + 1; the id 3 is dead."""
    await books.publish(2)
    await books.roll_back(1)
    await books.publish(2)
    await books.leap(1 << 32)
    await books.sequence()
    await books.assert_agree()
