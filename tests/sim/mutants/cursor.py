"""Mistakes with gaps, wake-up and batches."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from outbox.core.sequencing import gaps, router
from outbox.relay.sequencing import cursor, sequencer
from tests.sim.mutants.catalogue import mutant, swap
from tests.sim.stores import batches as sequencing_store
from tests.sim.stores import routing_change

if TYPE_CHECKING:
    from outbox.core.sequencing.gaps import CursorChange
    from tests.sim.database.engine import Steps, Transaction
    from tests.sim.database.tables import Database
    from tests.sim.simulation import Simulation


@mutant
def gap_declared_dead_after_timeout(sim: Simulation) -> None:
    """An id that is missing for two seconds is declared dead."""
    settle = gaps.GapTracker._resolve_gap

    def patched(self: Any, gap: Any, limit: Any, now: float, kept: Any, dead: Any) -> None:
        if (limit is None or gap.lo <= limit) and now - gap.seen_at > 2.0:
            dead.append(gap.range)
        else:
            settle(self, gap, limit, now, kept, dead)

    swap(gaps.GapTracker, "_resolve_gap", patched)


@mutant
def gaps_not_stored(sim: Simulation) -> None:
    """The gaps are only in the memory of the replica that found them."""
    write = sequencing_store.write_batch

    def write_batch(
        db: Database, tx: Transaction, batch: int, step: CursorChange, *args: Any, **rest: Any
    ) -> Steps[Any]:
        return write(db, tx, batch, replace(step, young=(), old_opened=()), *args, **rest)

    swap(sequencing_store, "write_batch", write_batch)


@mutant
def share_of_a_batch_leaves_an_event_below_high(sim: Simulation) -> None:
    """A batch takes a share of what was read: of four events one stays for a later batch."""
    read = sequencing_store.read_events

    def read_events(
        db: Database, tx: Transaction, high: int | None, *args: Any, **rest: Any
    ) -> Any:
        reading = yield from read(db, tx, high, *args, **rest)
        events = [e for e in reading.events if high is None or e.id <= high or e.id % 4]
        return replace(reading, events=events)

    swap(sequencing_store, "read_events", read_events)


@mutant
def lock_holders_not_captured_after_reconnect(sim: Simulation) -> None:
    """A new leader assumes that the stored gaps have no lock holders."""
    begin_batch = gaps.GapTracker.begin_batch

    def patched(self: Any, state: Any, before: Any, now: float) -> None:
        known = self._known
        begin_batch(self, state, before, now)
        if not known:
            self._young = {r: replace(g, holders=frozenset()) for r, g in self._young.items()}

    swap(gaps.GapTracker, "begin_batch", patched)


@mutant
def full_batch_declares_gaps_dead(sim: Simulation) -> None:
    """Ids that a full read did not reach count as read."""
    close_batch = gaps.GapTracker.close_batch

    def patched(self: Any, ids: Any, cut: bool, after: Any, now: float) -> Any:
        return close_batch(self, ids, False, after, now)

    swap(gaps.GapTracker, "close_batch", patched)


@mutant
def wakeup_flag_as_row(sim: Simulation) -> None:
    """Under REPEATABLE READ a producer sees the flag of its snapshot."""
    seen = sim.database.flag_seen_by

    def flag_seen_by(tx: Transaction) -> int:
        return int(tx.snapshot["wakeup"]) if tx.snapshot is not None else seen(tx)

    swap(sim.database, "flag_seen_by", flag_seen_by)


@mutant
def no_recheck_before_sleep(sim: Simulation) -> None:
    """The sequencer sets the flag and sleeps without another read."""

    async def fall_asleep(self: Any) -> cursor.BatchResult:
        self._wake_event.clear()
        if not await self._store.fall_asleep(self._me, sequencer.ASLEEP_S):
            return cursor.BatchResult.LOCKED
        self.cursor.reader.awake = False
        self._asleep_until = asyncio.get_running_loop().time() + sequencer.ASLEEP_S
        return cursor.BatchResult.EMPTY

    swap(sequencer.Sequencer, "_fall_asleep", fall_asleep)


@mutant
def routing_change_without_cursor_lock(sim: Simulation) -> None:
    """A routing change neither waits for the current batch nor rejects it."""
    swap(routing_change, "lock_cursor", lambda db, tx: None)
    swap(routing_change, "raise_version", lambda db, tx: None)


@mutant
def replay_reuses_sequence_number(sim: Simulation) -> None:
    """A dead letter is sent again with its old sequence number."""
    original = router.assign_sequences

    def assign(placements: Any, again: Any, counters: Any) -> Any:
        out = original(placements, again, counters)
        for n, each in enumerate(reversed(out.repeats), 1):
            if each.seq is not None:
                out.seqs[-n] = each.seq
        return out

    swap(cursor, "assign_sequences", assign)


@mutant
def batch_written_without_fence(sim: Simulation) -> None:
    """A batch is written without a check of the leader and the version."""
    write = sequencing_store.write_batch

    def write_batch(
        db: Database,
        tx: Transaction,
        batch: int,
        step: CursorChange,
        deliveries: Any,
        writer: int,
        version: int,
        **rest: Any,
    ) -> Steps[Any]:
        row = tx.get(db.cursor, 1)
        assert row is not None
        return write(db, tx, batch, step, deliveries, row["writer"], row["version"], **rest)

    swap(sequencing_store, "write_batch", write_batch)


@mutant
def batch_written_in_two_messages(sim: Simulation) -> None:
    """The cursor row is locked in a message of its own before a batch is written."""
    write = sequencing_store.SequencingStore.write

    async def patched(
        self: Any,
        batch: int,
        step: CursorChange,
        events: int,
        deliveries: Any,
        writer: int,
        *args: Any,
        **rest: Any,
    ) -> bool:
        async with self._db.transaction():
            if not await self._db.call(sequencing_store._try_lock_as_leader, writer):
                return False
            return await write(self, batch, step, events, deliveries, writer, *args, **rest)

    swap(sequencing_store.SequencingStore, "write", patched)
