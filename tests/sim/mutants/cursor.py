"""Mistakes with gaps, wake-up and batches."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from outbox.core.sequencing import gaps
from outbox.core.sequencing import router as sequencing
from outbox.relay.sequencing import cursor, sequencer
from outbox.store import cursor as cursor_store
from outbox.store import routing_change
from tests.sim.database.statements import sequencing as sequencing_answers
from tests.sim.mutants.catalogue import mutant, swap

if TYPE_CHECKING:
    from tests.sim.database.engine import Steps, Transaction
    from tests.sim.database.tables import Database
    from tests.sim.simulation import Simulation


@mutant
def gap_given_up_after_a_time(sim: Simulation) -> None:
    """Who has not appeared for two seconds never will."""
    settle = gaps.GapTracker._settle

    def patched(self: Any, gap: Any, limit: Any, now: float, kept: Any, dead: Any) -> None:
        if (limit is None or gap.lo <= limit) and now - gap.seen_at > 2.0:
            dead.append(gap.range)
        else:
            settle(self, gap, limit, now, kept, dead)

    swap(gaps.GapTracker, "_settle", patched)


@mutant
def gap_list_not_stored(sim: Simulation) -> None:
    """The gaps are in the memory of who found them, and nowhere else."""
    answer = sequencing_answers.write_batch

    def write_batch(db: Database, tx: Transaction, *arguments: Any) -> Steps:
        batch, high, _, *rest = arguments
        return (yield from answer(db, tx, batch, high, [], *rest))

    sim.database.changed[cursor_store.WRITE_BATCH] = write_batch
    sim.database.changed[cursor_store.OPEN_OLD_GAPS] = lambda db, tx, *_: "INSERT 0 0"


@mutant
def holders_not_captured_anew_after_a_reconnect(sim: Simulation) -> None:
    """Who starts from the tables takes the gaps there for nobody's."""
    begin = gaps.GapTracker.begin

    def patched(self: Any, state: Any, before: Any, now: float) -> None:
        known = self._known
        begin(self, state, before, now)
        if not known:
            self._young = {r: replace(g, holders=frozenset()) for r, g in self._young.items()}

    swap(gaps.GapTracker, "begin", patched)


@mutant
def a_full_batch_that_declares_gaps_dead(sim: Simulation) -> None:
    """What a cut read did not reach counts as looked for."""
    close = gaps.GapTracker.close

    def patched(self: Any, ids: Any, cut: bool, after: Any, now: float) -> Any:
        return close(self, ids, False, after, now)

    swap(gaps.GapTracker, "close", patched)


@mutant
def wake_up_flag_as_a_row(sim: Simulation) -> None:
    """Under REPEATABLE READ a producer sees what the flag was when it began."""
    seen = sim.database.flag_seen_by

    def flag_seen_by(tx: Transaction) -> int:
        return int(tx.snapshot["wakeup"]) if tx.snapshot is not None else seen(tx)

    swap(sim.database, "flag_seen_by", flag_seen_by)


@mutant
def no_re_check_before_sleep(sim: Simulation) -> None:
    """The flag is set, and it sleeps."""

    async def fall_asleep(self: Any) -> cursor.Turn:
        self._bell.clear()
        async with self._store.transaction():
            lock = await self._store.lock()
            if lock is None or lock.writer != self._me:
                return cursor.Turn.TAKEN
            await self._store.set_asleep(sequencer.ASLEEP_S)
            self.cursor.awake = False
        self._asleep_until = asyncio.get_running_loop().time() + sequencer.ASLEEP_S
        return cursor.Turn.IDLE

    swap(sequencer.Sequencer, "_fall_asleep", fall_asleep)


@mutant
def disabling_an_endpoint_without_the_cursor_row(sim: Simulation) -> None:
    """A change does not wait for the batch in flight, nor refuse it."""
    nothing: Any = lambda db, tx: "SELECT 1"  # noqa: E731
    sim.database.changed[routing_change.LOCK_CURSOR] = nothing
    sim.database.changed[routing_change.RAISE_VERSION] = nothing


@mutant
def a_replay_that_reuses_the_old_number(sim: Simulation) -> None:
    """A dead letter is sent again under the number that it had."""
    original = sequencing.number

    def number(router: Any, events: Any, again: Any, counters: Any, refused: Any) -> Any:
        out = original(router, events, again, counters, refused)
        for n, seq in enumerate(out.replay_seqs):
            if seq is not None:
                out.seqs[n] = seq
        return out

    swap(cursor, "number", number)


@mutant
def a_batch_written_without_the_fence(sim: Simulation) -> None:
    """Whoever has worked out a batch writes it."""
    answer = sequencing_answers.write_batch

    def write_batch(db: Database, tx: Transaction, *arguments: Any) -> Steps:
        row = tx.get(db.cursor, 1)
        assert row is not None
        known = list(arguments)
        known[11], known[14] = row["writer"], row["version"]
        return (yield from answer(db, tx, *known))

    sim.database.changed[cursor_store.WRITE_BATCH] = write_batch
