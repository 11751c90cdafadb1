from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.core.model.int_ranges import Range, RangeSet
from outbox.receiver import Inbox, MemoryDatabase, Message, lane_order
from outbox.receiver.lane_order import (
    LaneOrder,
    LaneState,
    Observation,
    OrderKind,
    SequenceState,
)

NUMBERS_MAX = 12


def flat(ranges: tuple[Range, ...]) -> list[int]:
    return [n for lo, hi in ranges for n in range(lo, hi + 1)]


def lane(*pairs: tuple[int, int], from_start: bool = False) -> LaneOrder:
    checked = LaneOrder(from_start=from_start)
    for sequence, previous in pairs:
        checked.observe(sequence, previous)
    return checked


# ---------------------------------------------------------------- examples


def test_consecutive_sequences_are_in_order() -> None:
    checked = lane()
    for n in range(1, 5):
        assert checked.observe(n, n - 1) == Observation(OrderKind.IN_ORDER)
    assert checked.high == 4


def test_a_repeated_sequence_is_a_duplicate_at_any_later_time() -> None:
    checked = lane((1, 0), (2, 1), (3, 2))
    assert checked.observe(2, 1) == Observation(OrderKind.DUPLICATE)
    assert checked.observe(3, 2) == Observation(OrderKind.DUPLICATE)
    assert checked.high == 3


def test_a_hole_is_declared_by_the_delivery_after_it() -> None:
    checked = lane((6, 5))
    assert checked.observe(8, 6) == Observation(OrderKind.IN_ORDER, holes=((7, 7),))
    assert checked.ranges(SequenceState.HOLE) == ((7, 7),)
    assert checked.ranges(SequenceState.MISSING) == ()


def test_a_skipped_sequence_that_was_not_dead_lettered_is_missing() -> None:
    checked = lane((6, 5))
    assert checked.observe(9, 8) == Observation(OrderKind.GAP, missing=((7, 8),))
    assert checked.observe(10, 9) == Observation(OrderKind.IN_ORDER)
    assert checked.ranges(SequenceState.MISSING) == ((7, 8),)


def test_a_gap_and_a_hole_in_one_step() -> None:
    checked = lane((4, 3))
    observed = checked.observe(9, 6)
    assert observed == Observation(OrderKind.GAP, missing=((5, 6),), holes=((7, 8),))


def test_a_late_missing_sequence_is_out_of_order() -> None:
    checked = lane((1, 0), (4, 3))
    # It also reports that its predecessor was dead-lettered.
    observed = checked.observe(3, 1)
    assert observed == Observation(OrderKind.OLD, holes=((2, 2),), was=SequenceState.MISSING)
    assert checked.ranges(SequenceState.MISSING) == ()
    assert checked.ranges(SequenceState.HOLE) == ((2, 2),)
    assert checked.observe(3, 1).kind is OrderKind.DUPLICATE


def test_a_dead_lettered_sequence_may_arrive_as_a_late_copy() -> None:
    checked = lane((1, 0), (3, 1))
    assert checked.observe(2, 1) == Observation(OrderKind.OLD, was=SequenceState.HOLE)
    assert checked.ranges(SequenceState.HOLE) == ()


def test_after_a_crash_a_received_sequence_may_be_declared_dead_lettered() -> None:
    # Its acknowledgement was lost, and its copy was refused: the first arrival counts.
    checked = lane((1, 0), (2, 1))
    assert checked.observe(3, 1) == Observation(OrderKind.IN_ORDER)
    assert checked.ranges(SequenceState.HOLE) == ()


def test_joining_a_running_lane_reports_nothing_missing() -> None:
    checked = lane()
    assert checked.observe(7, 5) == Observation(OrderKind.JOINED, holes=((6, 6),))
    assert checked.ranges(SequenceState.UNKNOWN) == ((1, 5),)
    assert checked.observe(8, 7) == Observation(OrderKind.IN_ORDER)
    assert checked.observe(4, 2) == Observation(
        OrderKind.OLD, holes=((3, 3),), was=SequenceState.UNKNOWN
    )


def test_with_from_start_the_first_sequences_are_missing() -> None:
    checked = lane(from_start=True)
    assert checked.observe(3, 2) == Observation(OrderKind.GAP, missing=((1, 2),))


def test_a_lane_that_starts_with_holes_is_in_order() -> None:
    assert lane().observe(3, 0) == Observation(OrderKind.IN_ORDER, holes=((1, 2),))


@pytest.mark.parametrize("pair", [(0, 0), (1, 1), (1, 2), (-1, -2), (3, -1)])
def test_invalid_sequences_raise_value_error(pair: tuple[int, int]) -> None:
    checked = lane((1, 0))
    with pytest.raises(ValueError, match="previous"):
        checked.observe(*pair)
    assert checked.high == 1


# ---------------------------------------------------------- several lanes


class Book:
    """The lanes of an in-memory inbox."""

    def __init__(self) -> None:
        self._inbox = Inbox()
        self._database = MemoryDatabase()

    def observe(
        self,
        lane: str,
        sequence: int,
        previous: int,
        delivery_id: str,
        replay_of: tuple[str, int] | None = None,
        *,
        lane_ends: bool = False,
    ) -> Observation | None:
        message = Message(
            delivery_id=delivery_id,
            event_id="",
            type="order.paid",
            timestamp="2026-01-31T00:00:00Z",
            tenant=None,
            key=None,
            lane=lane,
            sequence=sequence,
            previous_sequence=previous,
            replay_of=replay_of,
            backfill=None,
            lane_ends=lane_ends,
            attempt=1,
        )
        with self._database.transaction() as transaction:
            return self._inbox.receive(transaction, message).observation

    def kind(self, *delivery: object, lane_ends: bool = False) -> OrderKind:
        observed = self.observe(*delivery, lane_ends=lane_ends)  # type: ignore[arg-type]
        assert observed is not None
        return observed.kind

    @property
    def lanes(self) -> dict[str, LaneState]:
        with self._database.transaction() as transaction:
            return {name: each.state for name, each in self._inbox.lanes(transaction).items()}


def test_a_number_with_another_delivery_is_a_conflict_and_changes_nothing() -> None:
    book = Book()
    book.observe("a", 1, 0, "d1")
    book.observe("a", 2, 1, "d2")
    before = book.lanes
    assert book.observe("a", 2, 1, "other") == Observation(OrderKind.CONFLICT)
    assert book.lanes == before
    assert book.kind("a", 2, 1, "d2") is OrderKind.DUPLICATE


def test_a_replay_closes_its_hole_also_in_another_lane() -> None:
    book = Book()
    book.observe("a", 1, 0, "d1")
    book.observe("a", 3, 1, "d3")
    assert book.lanes["a"].holes == ((2, 2),)
    closed = book.observe("b", 1, 0, "d2", ("a", 2))
    assert closed == Observation(OrderKind.IN_ORDER, closed=SequenceState.HOLE)
    assert not book.lanes["a"].holes
    assert book.kind("a", 2, 1, "d2") is OrderKind.DUPLICATE


def test_a_replay_of_the_last_number_names_the_hole_and_closes_it() -> None:
    book = Book()
    book.observe("a", 6, 5, "d6")
    observed = book.observe("a", 8, 6, "d7", ("a", 7))
    assert observed == Observation(OrderKind.IN_ORDER, holes=((7, 7),), closed=SequenceState.HOLE)


def test_a_replay_of_an_unknown_sequence_closes_nothing() -> None:
    book = Book()
    book.observe("a", 1, 0, "d1")
    for replay in ((2, 1, "d9", ("gone", 4)), (3, 2, "d8", ("a", 9)), (4, 3, "d1", ("a", 1))):
        observed = book.observe("a", *replay)
        assert observed is not None
        assert observed.closed is None
    assert list(book.lanes) == ["a"]


def test_late_copies_in_an_ended_lane_are_duplicates() -> None:
    book = Book()
    book.observe("a", 1, 0, "d1")
    assert book.observe("a", 2, 1, "d2", lane_ends=True) == Observation(OrderKind.IN_ORDER)
    # Whether or not they were known to be the last delivery.
    for sequence in (1, 2):
        assert book.observe("a", sequence, 0, f"d{sequence}") == Observation(OrderKind.DUPLICATE)
    assert book.kind("a", 2, 1, "d2", lane_ends=True) is OrderKind.DUPLICATE
    assert book.observe("b", 1, 0, "d1", ("a", 1)) == Observation(OrderKind.IN_ORDER)
    assert book.kind("a", 2, 1, "other") is OrderKind.CONFLICT
    with pytest.raises(ValueError, match="previous"):
        book.observe("a", 2, 2, "d2")
    assert book.lanes["a"] == LaneState(2, ended=True)


def test_a_copy_of_the_last_sequence_may_end_the_lane() -> None:
    book = Book()
    book.observe("a", 1, 0, "d1")
    assert book.observe("a", 1, 0, "d1", lane_ends=True) == Observation(OrderKind.DUPLICATE)
    assert book.lanes["a"] == LaneState(1, ended=True)


@pytest.mark.parametrize("whole", [True, False])
def test_deliveries_after_a_lane_end_are_conflicts_or_lost(whole: bool) -> None:
    """A failover may roll back the sender's last deliveries, and then ends the lane before them."""
    book = Book()
    book.observe("a", 1, 0, "d1")
    book.observe("a", 3, 2 if whole else 1, "d3")
    if whole:
        book.observe("a", 2, 1, "d2")
    ends_early = Observation(OrderKind.DUPLICATE, lost=(2, 3))
    assert book.observe("a", 1, 0, "d1", lane_ends=True) == ends_early
    assert book.lanes["a"].holes == (() if whole else ((2, 2),))
    assert book.observe("a", 3, 1, "d3", lane_ends=True) == Observation(OrderKind.DUPLICATE)
    assert book.kind("a", 4, 3, "d4") is OrderKind.CONFLICT
    assert book.observe("a", 1, 0, "d1", lane_ends=True) == ends_early
    assert book.observe("a", 1, 0, "d1") == Observation(OrderKind.DUPLICATE)
    assert book.kind("a", 3, 1, "other") is OrderKind.CONFLICT


def test_the_holes_of_a_lane_that_ended_are_closed_by_replays_in_others() -> None:
    book = Book()
    book.observe("a", 1, 0, "d1")
    book.observe("a", 4, 1, "d4", lane_ends=True)
    for sequence, left in ((2, ((3, 3),)), (3, ())):
        observed = book.observe("b", sequence - 1, sequence - 2, f"d{sequence}", ("a", sequence))
        assert observed is not None
        assert observed.closed is SequenceState.HOLE
        assert book.lanes["a"].holes == left
    assert book.kind("a", 3, 1, "d3") is OrderKind.DUPLICATE


def test_missing_sequences_of_an_ended_lane_are_kept() -> None:
    book = Book()
    book.observe("a", 1, 0, "d1")
    book.observe("a", 3, 2, "d3", lane_ends=True)
    assert book.lanes["a"].missing == ((2, 2),)
    assert book.observe("a", 2, 1, "d2") == Observation(OrderKind.OLD, was=SequenceState.MISSING)
    assert not book.lanes["a"].missing


def test_progress_declares_dead_letters_of_an_ended_lane_and_none_beyond_its_end() -> None:
    order = LaneOrder(from_start=True)
    order.observe(5, 4, lane_ends=True)
    order.apply_progress(9, [(2, 3), (6, 9)])
    assert order.to_state() == LaneState(5, True, missing=((1, 1), (4, 4)), holes=((2, 3),))


# ------------------------------------------------------------ bounded memory


def test_a_million_deliveries_in_order_use_constant_memory() -> None:
    checked = LaneOrder()
    for n in range(1, 3000):
        checked.observe(n, n - 1)
    checked.observe(10**15, 10**15 - 2)
    state = checked.to_state()
    assert (state.missing, state.holes) == (((3000, 10**15 - 2),), ((10**15 - 1, 10**15 - 1),))


def test_too_many_ranges_make_the_oldest_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_order, "RANGES_MAX", 4)
    checked = LaneOrder(from_start=True)
    for n in range(2, 22, 2):
        checked.observe(n, n - 2 if n % 4 else n - 1)
    assert sum(len(checked.ranges(state)) for state in SequenceState) == 4
    assert checked.ranges(SequenceState.UNKNOWN) == ((1, 13),)
    # Beyond the tracked range, a duplicate cannot be distinguished from a late copy.
    assert checked.observe(13, 12).was is SequenceState.UNKNOWN


# ------------------------------------------------- against a reference model


@dataclass
class Reference:
    """The table in the module docstring, one number at a time."""

    from_start: bool
    states: dict[int, str] = field(default_factory=dict)

    def observe(self, n: int, previous: int) -> OrderKind:
        high = max((m for m, state in self.states.items() if state == "seen"), default=0)
        if self.states.get(n) == "seen":
            return OrderKind.DUPLICATE
        joined = high == 0 and not self.from_start
        was = self.states.get(n)
        kind = OrderKind.IN_ORDER if was is None else OrderKind.OLD
        for m in range(1, n):
            if m not in self.states:
                if m > previous:
                    self.states[m] = "hole"
                else:
                    self.states[m] = "unknown" if joined else "missing"
                    kind = OrderKind.JOINED if joined else OrderKind.GAP
            elif m > previous and self.states[m] in ("missing", "unknown"):
                self.states[m] = "hole"
        self.states[n] = "seen"
        return kind

    def close(self, n: int) -> None:
        if n in self.states:
            self.states[n] = "seen"

    def numbers(self, state: str) -> list[int]:
        return sorted(n for n, s in self.states.items() if s == state)


steps = st.lists(
    st.integers(1, NUMBERS_MAX).flatmap(
        lambda n: st.tuples(
            st.just(n),
            st.integers(0, n - 1) | st.just(n - 1),
            st.none() | st.integers(1, NUMBERS_MAX),
        )
    ),
    max_size=30,
)


@given(steps, st.booleans())
def test_any_sequence_of_deliveries_matches_the_reference_model(
    deliveries: list[tuple[int, int, int | None]], from_start: bool
) -> None:
    checked = LaneOrder(from_start=from_start)
    reference = Reference(from_start)
    for n, previous, replayed in deliveries:
        before = reference.numbers("missing"), reference.numbers("hole")
        kind = reference.observe(n, previous)
        observed = checked.observe(n, previous)
        assert observed.kind is kind
        missing, holes = reference.numbers("missing"), reference.numbers("hole")
        assert flat(observed.missing) == sorted(set(missing) - set(before[0]))
        assert flat(observed.holes) == sorted(set(holes) - set(before[1]))
        if replayed is not None:
            reference.close(replayed)
            checked.close(replayed)
        for state in SequenceState:
            assert flat(checked.ranges(state)) == reference.numbers(state.value)


@given(st.data(), st.integers(1, 20))
def test_a_correct_sender_causes_no_missing_sequences_or_conflicts(
    data: st.DataObject, n: int
) -> None:
    """Retries, dead letters and late copies of sent numbers, from one sender."""
    checked = LaneOrder(from_start=True)
    seen: list[Observation] = []
    delivered = 0
    sent: list[tuple[int, int]] = []
    for seq in range(1, n + 1):
        fate = data.draw(st.sampled_from(["delivered", "given up", "received, then given up"]))
        copies = data.draw(st.integers(1, 3))
        sent.append((seq, delivered))
        if fate != "given up":
            seen += [checked.observe(seq, delivered) for _ in range(copies)]
        if fate == "delivered":
            delivered = seq
        if data.draw(st.booleans()):
            late, previous = data.draw(st.sampled_from(sent))
            # The predecessor was sent before, so it is at most one beyond the received numbers.
            seen.append(checked.observe(late, previous))
        ends = seq == n and data.draw(st.booleans())
        if ends and fate != "given up":
            # The sender marks the lane end when the lane count changed meanwhile.
            seen.append(checked.observe(seq, sent[-1][1], lane_ends=True))
    for late, previous in data.draw(st.lists(st.sampled_from(sent), max_size=3)):
        seen.append(checked.observe(late, previous))
    assert not checked.ranges(SequenceState.MISSING)
    assert not {each.kind for each in seen} & {OrderKind.GAP, OrderKind.CONFLICT}
    assert all(each.was is not SequenceState.MISSING for each in seen)


# ----------------------------------------------------------------- RangeSet

spans = st.tuples(st.booleans(), st.integers(0, 30), st.integers(0, 30))


@given(st.lists(spans, max_size=40))
def test_a_range_set_is_a_set(changes: list[tuple[bool, int, int]]) -> None:
    ranges, plain = RangeSet(), set[int]()
    for adds, lo, hi in changes:
        span = set(range(lo, hi + 1))
        if adds:
            ranges.add(lo, hi)
            plain |= span
        else:
            assert flat(ranges.remove(lo, hi)) == sorted(plain & span)
            plain -= span
        assert flat(tuple(ranges)) == sorted(plain)
        assert bool(ranges) == bool(plain)
        assert all((n in ranges) == (n in plain) for n in range(-1, 32))
        pairs = list(ranges)
        assert len(ranges) == len(pairs)
        assert all(a[1] + 1 < b[0] for a, b in pairwise(pairs))
