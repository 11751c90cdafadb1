"""The checks of the brokers' guarantees find each kind of wrong stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.brokers.guarantees import (
    LaneRecord,
    StreamMessage,
    check_at_most_once,
    check_copies_recognisable,
    check_exact,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.support.brokers.guarantees import Check

CHECKS = (check_exact, check_at_most_once, check_copies_recognisable)
LANE = LaneRecord(
    {1: "d-1", 2: "d-2", 3: "d-3", 5: "d-5", 6: "d-6"},
    {4: "d-4", 7: "d-7"},
)
FOREIGN = StreamMessage(None, None)


def stream(*sequences: int) -> list[StreamMessage]:
    return [StreamMessage(each, f"d-{each}") for each in sequences]


GOOD = stream(1, 2, 3, 5, 6)


@pytest.mark.parametrize("check", CHECKS)
def test_the_delivered_sequences_in_order_are_correct(check: Check) -> None:
    assert check(LANE, GOOD) == []
    assert check(LaneRecord({}, {}), []) == []


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        (stream(1, 3, 5, 6), "sequence 2 is missing"),
        (stream(1, 2, 3, 5), "sequence 6 is missing"),
        ([], "sequence 1 is missing"),
        (stream(1, 3, 2, 5, 6), "sequence 2 follows 3"),
        ([*GOOD, FOREIGN], "is no delivery of the lane"),
        ([FOREIGN, *GOOD], "is no delivery of the lane"),
        ([*GOOD, StreamMessage(8, "d-8")], "is no delivery of the lane"),
        ([*GOOD, StreamMessage(6, "another")], "is no delivery of the lane"),
        ([*GOOD[:-1], StreamMessage(6, "another")], "is no delivery of the lane"),
        ([*GOOD[:-1], StreamMessage(6, None)], "is no delivery of the lane"),
    ],
)
def test_a_wrong_stream_is_found(check: Check, wrong: Sequence[StreamMessage], found: str) -> None:
    assert any(found in each for each in check(LANE, wrong))


@pytest.mark.parametrize("check", [check_exact, check_at_most_once])
@pytest.mark.parametrize("copies", [(1, 2, 3, 3, 5, 6), (1, 2, 3, 5, 6, 2), (1, 2, 3, 5, 6, 6)])
def test_a_copy_is_found(check: Check, copies: tuple[int, ...]) -> None:
    assert any("is stored again" in each for each in check(LANE, stream(*copies)))


@pytest.mark.parametrize("sequence", [4, 7])
def test_a_dead_letter_is_found_in_an_exact_stream(sequence: int) -> None:
    with_dead_letter = stream(*sorted([1, 2, 3, 5, 6, sequence]))
    assert check_exact(LANE, with_dead_letter) == [f"dead letter {sequence} is in the stream"]
    for check in (check_at_most_once, check_copies_recognisable):
        assert check(LANE, with_dead_letter) == []


def test_a_dead_letter_out_of_its_place_is_found() -> None:
    for check in CHECKS:
        assert "sequence 4 follows 6" in check(LANE, stream(1, 2, 3, 5, 6, 4))


def test_copies_after_the_first_ones_are_allowed_where_they_are_recognisable() -> None:
    assert check_copies_recognisable(LANE, stream(1, 2, 3, 2, 3, 5, 5, 1, 6)) == []
    wrong = stream(1, 2, 5, 3, 5, 6)
    assert check_copies_recognisable(LANE, wrong) == ["sequence 3 follows 5"]
