from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.core.model.int_ranges import Range, RangeSet
from outbox.receiver import lane_order
from outbox.receiver.lane_order import Kind, LaneOrder, Observation, OrderBook, State

NUMBERS_MAX = 12


def flat(ranges: tuple[Range, ...]) -> list[int]:
    return [n for lo, hi in ranges for n in range(lo, hi + 1)]


def lane(*pairs: tuple[int, int], from_start: bool = False) -> LaneOrder:
    checked = LaneOrder(from_start=from_start)
    for sequence, previous in pairs:
        checked.observe(sequence, previous, f"d{sequence}")
    return checked


# ---------------------------------------------------------------- in words


def test_numbers_one_after_the_other_are_in_order() -> None:
    checked = lane()
    for n in range(1, 5):
        assert checked.observe(n, n - 1, f"d{n}") == Observation(Kind.IN_ORDER)
    assert checked.high == 4


def test_the_same_number_again_is_a_duplicate_also_long_after() -> None:
    checked = lane((1, 0), (2, 1), (3, 2))
    assert checked.observe(2, 1, "d2") == Observation(Kind.DUPLICATE)
    assert checked.observe(3, 2, "d3") == Observation(Kind.DUPLICATE)
    assert checked.high == 3


def test_a_hole_is_named_by_the_delivery_after_it() -> None:
    checked = lane((6, 5))
    assert checked.observe(8, 6, "d8") == Observation(Kind.IN_ORDER, holes=((7, 7),))
    assert checked.ranges(State.HOLE) == ((7, 7),)
    assert checked.ranges(State.MISSING) == ()


def test_a_skipped_number_that_nobody_gave_up_is_missing() -> None:
    checked = lane((6, 5))
    assert checked.observe(9, 8, "d9") == Observation(Kind.GAP, missing=((7, 8),))
    assert checked.observe(10, 9, "d10") == Observation(Kind.IN_ORDER)
    assert checked.ranges(State.MISSING) == ((7, 8),)


def test_a_gap_and_a_hole_in_one_step() -> None:
    checked = lane((4, 3))
    observed = checked.observe(9, 6, "d9")
    assert observed == Observation(Kind.GAP, missing=((5, 6),), holes=((7, 8),))


def test_a_missing_number_that_comes_late_is_out_of_order() -> None:
    checked = lane((1, 0), (4, 3))
    # It also tells that the one before it had been given up.
    observed = checked.observe(3, 1, "d3")
    assert observed == Observation(Kind.OLD, holes=((2, 2),), was=State.MISSING)
    assert checked.ranges(State.MISSING) == ()
    assert checked.ranges(State.HOLE) == ((2, 2),)
    assert checked.observe(3, 1, "d3").kind is Kind.DUPLICATE


def test_a_given_up_number_may_still_come_as_a_late_copy() -> None:
    checked = lane((1, 0), (3, 1))
    assert checked.observe(2, 1, "d2") == Observation(Kind.OLD, was=State.HOLE)
    assert checked.ranges(State.HOLE) == ()


def test_a_number_with_another_delivery_is_a_conflict_and_changes_nothing() -> None:
    checked = lane((1, 0), (2, 1))
    assert checked.observe(2, 1, "other") == Observation(Kind.CONFLICT)
    assert checked.observe(2, 1, "d2").kind is Kind.DUPLICATE


def test_after_a_crash_a_received_number_may_be_named_as_given_up() -> None:
    # Its acknowledgement was lost, and its copy refused: what came first counts.
    checked = lane((1, 0), (2, 1))
    assert checked.observe(3, 1, "d3") == Observation(Kind.IN_ORDER)
    assert checked.ranges(State.HOLE) == ()


def test_a_receiver_that_joins_in_the_middle_accuses_nobody() -> None:
    checked = lane()
    assert checked.observe(7, 5, "d7") == Observation(Kind.JOINED, holes=((6, 6),))
    assert checked.ranges(State.UNKNOWN) == ((1, 5),)
    assert checked.observe(8, 7, "d8") == Observation(Kind.IN_ORDER)
    assert checked.observe(4, 2, "d4") == Observation(Kind.OLD, holes=((3, 3),), was=State.UNKNOWN)


def test_a_receiver_that_is_there_from_the_start_misses_the_first_ones() -> None:
    checked = lane(from_start=True)
    assert checked.observe(3, 2, "d3") == Observation(Kind.GAP, missing=((1, 2),))


def test_a_lane_that_starts_with_holes_is_in_order() -> None:
    assert lane().observe(3, 0, "d3") == Observation(Kind.IN_ORDER, holes=((1, 2),))


@pytest.mark.parametrize("pair", [(0, 0), (1, 1), (1, 2), (-1, -2), (3, -1)])
def test_impossible_numbers_are_an_error(pair: tuple[int, int]) -> None:
    checked = lane((1, 0))
    with pytest.raises(ValueError, match="previous"):
        checked.observe(*pair, "d")
    assert checked.high == 1


def test_a_replay_closes_its_hole_also_in_another_lane() -> None:
    book = OrderBook()
    book.observe("a", 1, 0, "d1")
    book.observe("a", 3, 1, "d3")
    assert book.totals().holes == 1
    closed = book.observe("b", 1, 0, "d2", replay_of=("a", 2))
    assert closed == Observation(Kind.IN_ORDER, closed=State.HOLE)
    assert book.totals().holes == 0
    assert book.observe("a", 2, 1, "d2").kind is Kind.DUPLICATE


def test_a_replay_of_the_last_number_names_the_hole_and_closes_it() -> None:
    book = OrderBook()
    book.observe("a", 6, 5, "d6")
    observed = book.observe("a", 8, 6, "d7", replay_of=("a", 7))
    assert observed == Observation(Kind.IN_ORDER, holes=((7, 7),), closed=State.HOLE)


def test_a_replay_of_what_is_not_known_closes_nothing() -> None:
    book = OrderBook()
    book.observe("a", 1, 0, "d1")
    assert book.observe("a", 2, 1, "d9", replay_of=("gone", 4)).closed is None
    assert book.observe("a", 3, 2, "d8", replay_of=("a", 9)).closed is None
    assert book.observe("a", 4, 3, "d1", replay_of=("a", 1)).closed is None
    assert list(book.lanes) == ["a"]


def test_of_a_lane_that_ended_whole_only_its_last_number_is_kept() -> None:
    book = OrderBook(from_start=True)
    book.observe("a", 1, 0, "d1")
    assert book.observe("a", 2, 1, "d2", lane_ends=True) == Observation(Kind.IN_ORDER)
    assert list(book.lanes) == []
    # Late copies are nothing new, whether or not it was known yet that they were the last.
    for sequence in (1, 2):
        assert book.observe("a", sequence, 0, f"d{sequence}") == Observation(Kind.DUPLICATE)
    assert book.observe("a", 2, 1, "d2", lane_ends=True).kind is Kind.DUPLICATE
    assert book.observe("b", 1, 0, "d1", ("a", 1)) == Observation(Kind.IN_ORDER)
    assert book.observe("a", 2, 1, "other").kind is Kind.CONFLICT
    with pytest.raises(ValueError, match="previous"):
        book.observe("a", 2, 2, "d2")
    assert list(book.lanes) == ["b"]
    totals = book.totals()
    assert (totals.missing, totals.gaps, totals.duplicates, totals.conflicts) == (0, 0, 3, 1)


def test_a_copy_of_the_last_number_may_tell_that_it_is_the_last() -> None:
    book = OrderBook()
    book.observe("a", 1, 0, "d1")
    assert book.observe("a", 1, 0, "d1", lane_ends=True) == Observation(Kind.DUPLICATE)
    assert list(book.lanes) == []


@pytest.mark.parametrize("whole", [True, False])
def test_nothing_new_follows_an_end_and_what_was_received_beyond_it_is_lost(whole: bool) -> None:
    """A fail-over may take back what the sender sent last, and then ends the lane before that."""
    book = OrderBook()
    book.observe("a", 1, 0, "d1")
    book.observe("a", 3, 2 if whole else 1, "d3")
    if whole:
        book.observe("a", 2, 1, "d2")
    ends_early = Observation(Kind.DUPLICATE, lost=(2, 3))
    assert book.observe("a", 1, 0, "d1", lane_ends=True) == ends_early
    assert ("a" in book.lanes) is not whole
    assert book.observe("a", 3, 1, "d3", lane_ends=True) == Observation(Kind.DUPLICATE)
    assert book.observe("a", 4, 3, "d4").kind is Kind.CONFLICT
    assert book.observe("a", 1, 0, "d1", lane_ends=True) == ends_early
    assert book.observe("a", 1, 0, "d1") == Observation(Kind.DUPLICATE)
    assert book.observe("a", 3, 1, "other").kind is Kind.CONFLICT
    assert book.totals().conflicts == 2


def test_the_holes_of_a_lane_that_ended_are_closed_by_replays_in_others() -> None:
    book = OrderBook()
    book.observe("a", 1, 0, "d1")
    book.observe("a", 4, 1, "d4", lane_ends=True)
    assert book.observe("b", 1, 0, "d2", ("a", 2)).closed is State.HOLE
    assert list(book.lanes) == ["a", "b"]
    assert book.totals().holes == 1
    assert book.observe("b", 2, 1, "d3", ("a", 3)).closed is State.HOLE
    assert list(book.lanes) == ["b"]
    assert book.totals().holes == 0
    assert book.observe("a", 3, 1, "d3").kind is Kind.DUPLICATE


def test_what_a_lane_that_ended_misses_is_not_forgotten_with_it() -> None:
    book = OrderBook()
    book.observe("a", 1, 0, "d1")
    book.observe("a", 3, 2, "d3", lane_ends=True)
    assert book.totals().missing == 1
    assert book.observe("a", 2, 1, "d2") == Observation(Kind.OLD, was=State.MISSING)
    assert (list(book.lanes), book.totals().missing) == ([], 0)


def test_totals() -> None:
    book = OrderBook()
    for sequence, previous in [(1, 0), (2, 1), (2, 1), (5, 4), (4, 3), (7, 5), (6, 5), (9, 7)]:
        book.observe("a", sequence, previous, f"d{sequence}")
    book.observe("a", 9, 7, "other")
    book.observe("b", 50, 49, "e50")
    totals = book.totals()
    assert totals.received == 10
    assert totals.duplicates == 1
    assert totals.gaps == 1
    assert totals.out_of_order == 1
    assert totals.late == 1
    assert totals.conflicts == 1
    assert totals.missing == 1
    assert totals.holes == 1


# ------------------------------------------------------------ bounded memory


def test_a_million_in_order_take_no_room() -> None:
    checked = LaneOrder()
    for n in range(1, 3000):
        checked.observe(n, n - 1, f"d{n}")
    checked.observe(10**15, 10**15 - 2, "far")
    assert len(checked.ranges(State.MISSING)) == 1
    assert len(checked._ids) == lane_order.IDS_MAX


def test_too_many_holes_make_the_oldest_unknown_but_stay_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lane_order, "RANGES_MAX", 4)
    book = OrderBook(from_start=True)
    for n in range(2, 22, 2):
        book.observe("a", n, n - 2 if n % 4 else n - 1, f"d{n}")
    checked = book.lanes["a"]
    assert sum(len(checked.ranges(state)) for state in State) == 4
    assert checked.ranges(State.UNKNOWN) == ((1, 13),)
    totals = book.totals()
    assert totals.missing + totals.holes == 10
    # Beyond what is kept, a duplicate cannot be told from a late copy.
    assert book.observe("a", 13, 12, "d13").was is State.UNKNOWN


def test_the_lane_not_heard_of_for_longest_is_forgotten_but_stays_counted() -> None:
    book = OrderBook(from_start=True, lanes_max=2)
    book.observe("a", 3, 1, "a3")
    book.observe("b", 1, 0, "b1")
    book.observe("a", 4, 3, "a4")
    book.observe("c", 1, 0, "c1")
    assert list(book.lanes) == ["a", "c"]
    book.observe("d", 1, 0, "d1")
    assert list(book.lanes) == ["c", "d"]
    assert (book.totals().missing, book.totals().holes) == (1, 1)


def test_lanes_that_come_and_go_take_no_room() -> None:
    book = OrderBook(from_start=True, lanes_max=3)
    book.observe("busy", 1, 0, "d")
    for n in range(100):
        book.observe(f"a-{n}", 1, 0, f"d{n}", lane_ends=True)
    assert list(book.lanes) == ["busy"]
    assert len(book._over) == 3
    assert (book.totals().received, book.totals().missing) == (101, 0)


def test_what_was_forgotten_of_a_lane_stays_counted_when_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lane_order, "RANGES_MAX", 2)
    book = OrderBook(from_start=True)
    for n in (2, 4, 6, 8):
        book.observe("a", n, n - 1, f"d{n}")
    checked = book.lanes["a"]
    lost = checked.forgotten[State.MISSING]
    assert (lost, book.totals().missing) == (3, 4)
    book.observe("a", 8, 7, "d8", lane_ends=True)
    book.observe("a", 7, 6, "d7")
    assert (list(book.lanes), book.totals().missing) == ([], lost)


# ------------------------------------------------- against a reference model


@dataclass
class Reference:
    """The table at the top of the module, one number at a time."""

    from_start: bool
    states: dict[int, str] = field(default_factory=dict)
    ids: dict[int, str] = field(default_factory=dict)

    def observe(self, n: int, previous: int, delivery_id: str) -> Kind:
        high = max((m for m, state in self.states.items() if state == "seen"), default=0)
        if self.states.get(n) == "seen":
            known = self.ids.get(n, delivery_id)
            return Kind.DUPLICATE if known == delivery_id else Kind.CONFLICT
        joined = high == 0 and not self.from_start
        was = self.states.get(n)
        kind = Kind.IN_ORDER if was is None else Kind.OLD
        for m in range(1, n):
            if m not in self.states:
                if m > previous:
                    self.states[m] = "hole"
                else:
                    self.states[m] = "unknown" if joined else "missing"
                    kind = Kind.JOINED if joined else Kind.GAP
            elif m > previous and self.states[m] in ("missing", "unknown"):
                self.states[m] = "hole"
        self.states[n] = "seen"
        self.ids[n] = delivery_id
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
            st.sampled_from(["d", "d", "d", "x"]).map(lambda prefix: f"{prefix}{n}"),
            st.none() | st.integers(1, NUMBERS_MAX),
        )
    ),
    max_size=30,
)


@given(steps, st.booleans())
def test_any_sequence_of_deliveries_is_judged_like_the_reference(
    deliveries: list[tuple[int, int, str, int | None]], from_start: bool
) -> None:
    book = OrderBook(from_start=from_start)
    reference = Reference(from_start)
    for n, previous, delivery_id, replayed in deliveries:
        replay_of = None if replayed is None else ("a", replayed)
        before = reference.numbers("missing"), reference.numbers("hole")
        kind = reference.observe(n, previous, delivery_id)
        observed = book.observe("a", n, previous, delivery_id, replay_of)
        assert observed.kind is kind
        missing, holes = reference.numbers("missing"), reference.numbers("hole")
        assert flat(observed.missing) == sorted(set(missing) - set(before[0]))
        assert flat(observed.holes) == sorted(set(holes) - set(before[1]))
        if replayed is not None and kind is not Kind.CONFLICT:
            reference.close(replayed)
        checked = book.lanes["a"]
        for state in State:
            assert flat(checked.ranges(state)) == reference.numbers(state.value)
    assert book.totals().missing == len(reference.numbers("missing"))
    assert book.totals().holes == len(reference.numbers("hole"))


@given(st.data(), st.integers(1, 20))
def test_a_sender_that_keeps_the_contract_is_never_accused(data: st.DataObject, n: int) -> None:
    """Retries, give-ups and late copies of sent numbers, from one sender."""
    book = OrderBook(from_start=True)
    delivered = 0
    sent: list[tuple[int, int]] = []
    for seq in range(1, n + 1):
        fate = data.draw(st.sampled_from(["delivered", "given up", "received, then given up"]))
        copies = data.draw(st.integers(1, 3))
        sent.append((seq, delivered))
        if fate != "given up":
            for _ in range(copies):
                book.observe("a", seq, delivered, f"d{seq}")
        if fate == "delivered":
            delivered = seq
        if data.draw(st.booleans()):
            late, previous = data.draw(st.sampled_from(sent))
            # Sent before, and so at most one beyond what was received.
            book.observe("a", late, previous, f"d{late}")
        ends = seq == n and data.draw(st.booleans())
        if ends and fate != "given up":
            # The sender tells when the number of lanes was changed meanwhile.
            book.observe("a", seq, sent[-1][1], f"d{seq}", lane_ends=True)
    for late, previous in data.draw(st.lists(st.sampled_from(sent), max_size=3)):
        book.observe("a", late, previous, f"d{late}")
    totals = book.totals()
    assert (totals.missing, totals.gaps, totals.out_of_order, totals.conflicts) == (0, 0, 0, 0)


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
        assert ranges.count == len(plain)
        assert bool(ranges) == bool(plain)
        assert all((n in ranges) == (n in plain) for n in range(-1, 32))
        pairs = list(ranges)
        assert len(ranges) == len(pairs)
        assert all(a[1] + 1 < b[0] for a, b in pairwise(pairs))
