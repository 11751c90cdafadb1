"""The gap tracker against a reference model of transactions.

`CursorMachine` lets Hypothesis choose the events between any two steps of a batch;
`test_random_histories` does the same with a seeded random generator, which finds violations that
need many steps sooner.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from outbox.core.sequencing.gaps import PROOF_EVERY_S, CursorChange, CursorState, GapTracker
from tests.core.cursor_model import Cursor
from tests.core.database_model import Database
from tests.core.random_walk import hunt_cursor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.core.sequencing.gaps import CursorChange, LockHolders

choices = st.integers(0, 15)
which = st.integers(0, 7)
keys = st.integers(0, 1)


class CursorMachine(RuleBasedStateMachine):
    """Producers and replicas in any order of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.database = Database()
        self.cursor = Cursor(self.database)

    @initialize(
        transactions_max=st.integers(2, 6),
        last_key=keys,
        prepare_renames=st.booleans(),
        limit_max=st.integers(1, 5),
        gaps_max=st.sampled_from([1, 2, 3, 1000]),
    )
    def choose_world(
        self,
        transactions_max: int,
        last_key: int,
        prepare_renames: bool,
        limit_max: int,
        gaps_max: int,
    ) -> None:
        self.database = Database(
            transactions_max=transactions_max,
            keys=1 + last_key,
            prepare_renames=prepare_renames,
        )
        self.cursor = Cursor(self.database, limit_max=limit_max, gaps_max=gaps_max)

    # Producers.

    @rule()
    def begin(self) -> None:
        self.database.begin()

    @rule(i=which, key=keys)
    def insert(self, i: int, key: int) -> None:
        self.database.insert(i, key)

    @rule(i=which, ids=st.integers(1, 3))
    def allocate(self, i: int, ids: int) -> None:
        self.database.allocate(i, ids)

    @rule(key=keys, ids=st.integers(1, 3))
    def start(self, key: int, ids: int) -> None:
        self.database.start(key, ids)

    @rule(i=which)
    def finish(self, i: int) -> None:
        self.database.finish(i)

    @rule(key=keys)
    def publish(self, key: int) -> None:
        self.database.publish(key)

    @rule(i=which)
    def savepoint(self, i: int) -> None:
        self.database.savepoint(i)

    @rule(i=which)
    def rollback_to_savepoint(self, i: int) -> None:
        self.database.rollback_to_savepoint(i)

    @rule(i=which)
    def prepare(self, i: int) -> None:
        self.database.prepare(i)

    @rule(i=which)
    def commit(self, i: int) -> None:
        self.database.commit(i)

    @rule(i=which)
    def release(self, i: int) -> None:
        self.database.release(i)

    @rule(i=which)
    def rollback(self, i: int) -> None:
        self.database.rollback(i)

    @rule(ids=st.sampled_from([1, 32, 1_000_000]))
    def setval(self, ids: int) -> None:
        self.database.skip_ids(ids)

    # The relay.

    @rule(choice=choices)
    def advance(self, choice: int) -> None:
        self.cursor.advance(choice)

    @rule()
    def whole_batch(self) -> None:
        self.cursor.whole_batch()

    @precondition(lambda self: self.cursor.batch is not None)
    @rule(applied=st.booleans())
    def lose_batch(self, applied: bool) -> None:
        self.cursor.lose_batch(applied=applied)

    @rule(tenths=st.sampled_from([1, 11]))
    def tick(self, tenths: int) -> None:
        self.cursor.tick(tenths)

    @rule(skipped=st.sampled_from([0, 1, 32]), hidden=st.booleans(), applied=st.booleans())
    def crash(self, skipped: int, hidden: bool, applied: bool) -> None:
        self.cursor.crash(skipped, hidden=hidden, applied=applied)

    @rule(commits=choices)
    def everything_ends(self, commits: int) -> None:
        self.cursor.expect_everything_ends(commits)


TestCursor = CursorMachine.TestCase


@pytest.mark.slow
def test_random_histories(seed: int) -> None:
    hunt_cursor(5 * settings().max_examples, first_seed=seed)


# -------------------------------------------------------------- single cases


class CountsOldReads(GapTracker):
    """Counts the reads of old gaps."""

    old_reads = 0

    def close_batch(
        self, ids: Sequence[int], cut: bool, after: LockHolders, now: float
    ) -> CursorChange:
        self.old_reads += sum(gap.old for gap in self._portion or ())
        return super().close_batch(ids, cut, after, now)


def test_a_transaction_open_for_hours_costs_nothing() -> None:
    database = Database()
    cursor = Cursor(database, CountsOldReads)
    tracker = cursor.replicas[0].tracker
    assert isinstance(tracker, CountsOldReads)
    database.start(key=0, ids=3)  # The transaction that stays open.
    database.start(key=0, ids=1)
    database.publish(key=0)
    cursor.whole_batch()
    cursor.tick(11)
    cursor.whole_batch()
    assert cursor.tables.old == ((1, 4),)
    for _ in range(100):
        database.publish(key=0)
        cursor.whole_batch()
    assert tracker.old_reads == 0
    database.finish(1)
    for _ in range(100):
        database.publish(key=0)
        cursor.whole_batch()
    assert tracker.old_reads == 1
    assert cursor.tables.old == ((1, 3),)
    database.rollback(0)
    cursor.whole_batch()
    assert tracker.old_reads == 2
    assert cursor.tables.old == ()


def test_thousands_of_old_gaps_are_compared_by_holders() -> None:
    comparisons = 0

    class Counts(GapTracker):
        @staticmethod
        def _one_ended(holders: LockHolders, present: LockHolders) -> bool:
            nonlocal comparisons
            comparisons += 1
            return GapTracker._one_ended(holders, present)

    tracker, holders = Counts(), frozenset({"3/1"})
    state = CursorState(batch=1, high=20_000, old=tuple((n, n) for n in range(1, 20_000, 2)))
    for batch in range(4):
        tracker.begin_batch(state, holders, 0.0)
        assert len(tracker.ranges(10_000)) == (10_000 if batch == 0 else 0)
        assert tracker.left_out == (batch > 0)
        assert tracker.complete(holders)
        tracker.committed(tracker.close_batch([], False, holders, 0.0))
    assert comparisons < 10


def test_ids_are_declared_dead_at_most_twice_a_second() -> None:
    """Each batch that does proves it, which costs the server nearly as much as a batch."""
    tracker, high, dead_at = GapTracker(), 1, []
    dead: list[int] = []
    for step in range(40):
        now = step / 20
        tracker.begin_batch(CursorState(batch=step + 1, high=high), frozenset(), now)
        assert len(tracker.ranges(1000)) <= 2  # Not those that only await the proof.
        high += 2  # One id in between is rolled back.
        change = tracker.close_batch([high], False, frozenset(), now)
        if change.dead:
            dead_at.append(now)
        tracker.committed(change)
        dead += [lo for lo, _ in change.dead]
    assert 3 <= len(dead_at) <= 4
    assert dead == list(range(2, dead[-1] + 1, 2))
    assert all(later - at >= PROOF_EVERY_S for at, later in pairwise(dead_at))


def test_a_row_that_the_proof_found_is_read_by_the_next_batch() -> None:
    """It was hidden from the read before; as young gap, and as old one."""
    tracker = GapTracker()
    state = CursorState(batch=1, high=9, young=((2, 4),), old=((6, 6),))

    def batch(now: float, ids: tuple[int, ...] = ()) -> CursorChange:
        tracker.begin_batch(state, frozenset(), now)
        ranges = tracker.ranges(1000)
        read = [i for i in ids if any(lo <= i <= hi for lo, hi in ranges)]
        return tracker.close_batch(read, False, frozenset(), now)

    now = 10.0
    tracker.committed(batch(now))
    dead = batch(now)
    assert dead.dead == ((2, 4), (6, 6))
    # The message was aborted; until the proof is due again, the gaps only await it.
    assert tracker.reads_gaps(state)
    tracker.committed(batch(now + 0.1))
    # Reading the locks costs as much as everything else in a read.
    assert not tracker.reads_gaps(state)
    # And once more: now the proof reads gaps that the batch does not.
    assert set(batch(now + PROOF_EVERY_S).dead) == {(2, 4), (6, 6)}
    assert tracker.reads_gaps(state)
    change = batch(now + PROOF_EVERY_S, (3, 6))
    assert change.found == ((3, 3), (6, 6))
    assert change.old_closed == ((6, 6),)
    tracker.committed(change)
    assert set(batch(now + 2 * PROOF_EVERY_S).dead) == {(2, 2), (4, 4)}


def test_lock_holders_are_read_only_while_they_decide_about_a_gap() -> None:
    """Reading them costs as much as everything else in a read."""
    tracker, held = GapTracker(), frozenset({"3/1"})
    state = CursorState(batch=1, high=9, young=((2, 4),))

    def batch(before: LockHolders, now: float) -> bool:
        tracker.begin_batch(state, before, now)
        tracker.ranges(1000)
        needed = tracker.needs_holders
        tracker.committed(tracker.close_batch([], False, before, now))
        return needed

    assert batch(held, 0.0)  # They are not captured yet.
    assert batch(held, 0.1)
    assert batch(held, 2.0)
    assert batch(held, 2.1)  # Left out, as an old gap.
    assert not batch(frozenset(), 2.2)
    assert not batch(frozenset(), 2.3)


def test_stored_young_gaps_are_copied_until_they_change() -> None:
    tracker = GapTracker()
    tables = CursorState(batch=1, high=9, young=((2, 4), (6, 6)))
    changed = []
    for number in range(12):
        tracker.begin_batch(tables, frozenset(), number / 4)
        high = 10 + 2 * number  # Each leaves a gap until then, the others do not.
        ids = [high + 1] if number in (1, 2) else [*range(tables.high + 1, high + 2)]
        tracker.ranges(1000)
        step = tracker.close_batch(ids, False, frozenset(), number / 4)
        changed.append(step.young_changed)
        assert step.young_changed or step.young == tables.young
        assert step.young == tuple(sorted({*step.young}))
        tracker.committed(step)
        tables = CursorState(tables.batch + 1, step.high, step.young)
    assert changed[1:3] == [True, True]
    assert changed.count(True) < 6
    assert tables.young == ()


def test_due_gaps_are_read_in_portions_the_lowest_first() -> None:
    """The cost of a batch does not depend on the number of all gaps."""
    gaps = [(n, n) for n in range(1, 20_000, 2)]
    tracker, sequenced = GapTracker(), []
    state = CursorState(batch=1, high=20_000, old=tuple(gaps))
    for _ in range(1000):
        tracker.begin_batch(state, frozenset(), 0.0)
        ranges = tracker.ranges(300)
        assert len(ranges) <= 300
        assert ranges == sorted(ranges)
        ids = [lo for lo, _ in ranges[:200]]
        step = tracker.close_batch(ids, len(ids) < len(ranges), frozenset(), 0.0)
        assert len(step.memory) <= 300
        assert not step.dead
        tracker.committed(step)
        sequenced += ids
        state = CursorState(state.batch + 1, step.high)
        if not tracker.reads_gaps(state):
            break
    assert sequenced == [lo for lo, _ in gaps]


def test_nothing_above_a_portion_is_sequenced() -> None:
    tracker = GapTracker()
    state = CursorState(batch=1, high=9, old=((2, 2), (4, 4), (6, 8)))
    tracker.begin_batch(state, frozenset(), 0.0)
    assert tracker.ranges(2) == [(2, 2), (4, 4)]
    assert tracker.is_partial
    step = tracker.close_batch([2, 4], False, frozenset(), 0.0)
    assert (step.found, step.dead, step.high) == (((2, 2), (4, 4)), (), 9)
    tracker.committed(step)
    tracker.begin_batch(CursorState(2, 9), frozenset(), 0.0)
    assert tracker.ranges(2) == [(6, 8)]
    assert not tracker.is_partial


def test_a_batch_that_was_not_written_reads_its_portion_again() -> None:
    tracker, holders = GapTracker(), frozenset({"3/1"})
    state = CursorState(batch=1, high=9, young=((8, 8),), old=((2, 2), (4, 4), (6, 6)))
    for _ in range(3):
        tracker.begin_batch(state, holders, 0.0)
        assert tracker.ranges(2) == [(2, 2), (4, 4)]
        tracker.close_batch([4], False, holders, 0.0)


def test_many_young_gaps_become_old_at_once() -> None:
    """Otherwise each batch would read and write all gaps of the last second."""
    tracker, holders = GapTracker(), frozenset({"3/1"})
    state = CursorState()
    for batch in range(1, 50):
        tracker.begin_batch(state, holders, 0.0)
        assert len(tracker.ranges(100)) <= 60
        assert not tracker.is_partial
        high = 100 * batch
        ids = range(high - 98, high + 1, 2)  # 50 of them, and as many gaps.
        step = tracker.close_batch(ids, False, holders, 0.0)
        assert len(step.young) <= 100
        tracker.committed(step)
        state = CursorState(batch, step.high)


def test_a_holder_that_never_writes_does_not_keep_the_cursor_reading_portions() -> None:
    """It has allocated an id and holds the lock, but no snapshot shows it as running."""
    tracker, holders = GapTracker(), frozenset({"3/1", "4/1"})
    gaps = tuple((n, n) for n in range(1, 1000, 2))
    state, reads = CursorState(batch=1, high=1000, old=gaps), 0
    for _ in range(40):
        tracker.begin_batch(state, holders, 0.0)
        while True:
            tracker.ranges(100)
            reads += 1
            if not tracker.left_out or tracker.complete(frozenset({"3/1"})):
                break
        if not tracker.is_partial:
            break
        tracker.committed(tracker.close_batch([], False, holders, 0.0))
    assert not tracker.is_partial, "events above the cursor are never read"
    assert tracker.ranges(100) == list(gaps)
    step = tracker.close_batch([1001], False, holders, 0.0)
    assert (step.high, step.found, step.dead) == (1001, (), ())
    assert reads < 20


def test_events_of_a_transaction_do_not_overtake_each_other_while_portions_are_read() -> None:
    """Not even those in gaps that are read in whole, because a holder never writes.

    A large transaction (1/1) interleaves with another open one (2/1); 3/1 never writes, and
    has begun in the meantime.
    """
    tracker, state = GapTracker(), CursorState()
    visible = set(range(2, 802, 2))
    sequenced: list[int] = []
    now = 0.0

    def run_batch(before: set[str], after: set[str], running: set[str]) -> None:
        nonlocal state, now
        now += 2.0
        tracker.begin_batch(state, frozenset(before), now)
        while True:
            ranges = tracker.ranges(100)
            above = None if tracker.is_partial else tracker.high
            ids = sorted(
                i
                for i in visible
                if any(lo <= i <= hi for lo, hi in ranges) or (above is not None and i > above)
            )
            if not tracker.left_out or tracker.complete(frozenset(running)):
                break
        step = tracker.close_batch(ids[:100], len(ids) > 100, frozenset(after), now)
        tracker.committed(step)
        sequenced.extend(ids[:100])
        state = CursorState(state.batch + 1, step.high)

    for _ in range(14):
        run_batch({"1/1", "2/1"}, {"1/1", "2/1"}, {"1/1", "2/1"})
    visible |= set(range(802, 822, 2))
    for _ in range(6):
        run_batch({"1/1", "2/1", "3/1"}, {"1/1", "2/1", "3/1"}, {"1/1", "2/1"})
    large = set(range(1, 822, 4))
    # It commits after the holders of the last read were captured.
    visible |= large
    run_batch({"1/1", "2/1", "3/1"}, {"2/1", "3/1"}, {"2/1"})
    for _ in range(12):
        run_batch({"2/1", "3/1"}, {"2/1", "3/1"}, {"2/1"})
    assert [i for i in sequenced if i in large] == sorted(large)
    # And events above the cursor are read again.
    visible.add(900)
    for _ in range(12):
        run_batch({"2/1", "3/1"}, {"2/1", "3/1"}, {"2/1"})
    assert sequenced[-1] == 900


def test_a_new_replica_closes_the_old_gaps() -> None:
    """Old gaps without holders must not wait for a transaction to end."""
    cursor = Cursor(Database())
    cursor.tables = CursorState(batch=7, high=9, old=((2, 5), (8, 8)))
    cursor.whole_batch()
    cursor.whole_batch()
    assert cursor.tables == CursorState(batch=8, high=9)


def test_a_gap_of_a_million_ids_is_one_range() -> None:
    tracker = GapTracker()
    tracker.begin_batch(CursorState(batch=1, high=3), frozenset(), 0.0)
    assert tracker.ranges(1000) == []
    assert tracker.complete(frozenset())
    step = tracker.close_batch([4, 5_000_000, 5_000_001], False, frozenset({"3/1"}), 0.0)
    assert step.young == ((5, 4_999_999),)
    tracker.committed(step)

    # An id in the middle of the gap appears late, and its holder has ended.
    state = CursorState(2, step.high, step.young)
    tracker.begin_batch(state, frozenset({"3/1"}), 2.0)
    assert tracker.ranges(1000) == [(5, 4_999_999)]
    step = tracker.close_batch([777], False, frozenset(), 2.0)
    assert (step.found, step.dead, step.young) == (((777, 777),), (), ())
    assert step.old_opened == ((5, 776), (778, 4_999_999))
    tracker.committed(step)

    tracker.begin_batch(CursorState(3, step.high, (), step.old_opened), frozenset(), 3.0)
    assert tracker.ranges(1000) == list(step.old_opened)
    step = tracker.close_batch([], False, frozenset(), 3.0)
    assert step.dead == step.old_closed == ((5, 776), (778, 4_999_999))
    assert step.high == 5_000_001


def test_an_empty_batch_is_not_written() -> None:
    tracker = GapTracker()
    state = CursorState(batch=4, high=9, young=((3, 3),), old=((1, 1),))
    for _ in range(3):
        tracker.begin_batch(state, frozenset({"3/1"}), 0.0)
        tracker.ranges(1000)
        assert tracker.complete(frozenset({"3/1"}))
        step = tracker.close_batch([], False, frozenset({"3/1"}), 0.0)
        assert not step.changed
        tracker.committed(step)
    assert tracker.ranges(1000) == [(3, 3)]
    tracker.forget()
    tracker.begin_batch(state, frozenset({"3/1"}), 0.0)
    assert tracker.ranges(1000) == [(1, 1), (3, 3)]
