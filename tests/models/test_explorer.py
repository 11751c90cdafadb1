"""The explorer finds what is wrong, on a shortest way, and says when it did not look."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.models.explorer import TooMany, Wrong, assert_caught, assert_good, explore

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.models.explorer import Step


class Graph:
    """States are letters; a step is `a>b`, or `a~b` if it is not certain.

    Capital letters owe something, `x` breaks an invariant, and `!` must not be reached.
    """

    def __init__(self, *steps: str) -> None:
        self._steps = steps

    def first(self) -> str:
        return self._steps[0][0]

    def steps(self, state: str) -> Iterable[Step[str]]:
        for step in self._steps:
            if step[0] == state:
                there = Wrong("must not be") if step[2] == "!" else step[2]
                yield step, step[1] == ">", there

    def wrong(self, state: str) -> str | None:
        return "x is wrong" if state == "x" else None

    def owed(self, state: str) -> str | None:
        return f"{state} owes" if state.isupper() else None


def test_everything_is_looked_at_once() -> None:
    exploration = explore(Graph("a>b", "a>c", "b>d", "c~d", "d>a"))
    assert_good(exploration, states_min=4)
    assert (exploration.states, exploration.steps, exploration.depth) == (4, 5, 2)


def test_too_little_to_look_at_is_no_proof() -> None:
    with pytest.raises(AssertionError, match="only 2 states"):
        assert_good(explore(Graph("a>b")), states_min=3)


def test_an_exploration_has_its_bound() -> None:
    with pytest.raises(TooMany):
        explore(Graph("a>b", "b>c"), states_max=2)


@pytest.mark.parametrize(
    ("steps", "what", "way"),
    [
        pytest.param(("a>b", "b>x", "a>x"), "x is wrong", ["a>x"], id="the shortest way"),
        pytest.param(("a>b", "b>!", "a>c"), "must not be", ["a>b", "b>!"], id="a step"),
        pytest.param(("a>B", "B~a"), "everybody waits", ["a>B"], id="only luck helps"),
        pytest.param(("a>B", "B>B"), "everybody waits", ["a>B"], id="a step on the spot"),
        pytest.param(("a>B", "B>C", "C>B", "C~a"), "leads around", ["a>B"], id="a circle"),
    ],
)
def test_what_is_wrong_is_found(steps: tuple[str, ...], what: str, way: list[str]) -> None:
    assert list(assert_caught(explore(Graph(*steps)), what)) == way


def test_what_is_owed_may_be_paid_by_a_detour() -> None:
    assert_good(explore(Graph("a~B", "B>C", "C>B", "C>d", "d>d")), states_min=4)


def test_a_counterexample_is_a_numbered_list() -> None:
    found = explore(Graph("a>b", "b>x")).found
    assert str(found) == "x is wrong, after\n   1. a>b\n   2. b>x\nin x"
