"""The explorer finds violations on a shortest path and reports incomplete explorations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.models.explorer import TooMany, Wrong, assert_caught, assert_good, explore

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.models.explorer import Step

pytestmark = pytest.mark.full


class Graph:
    """States are letters; a step is `a>b`, or `a~b` if it is not certain.

    Capital letters have an obligation, `x` violates an invariant, and `!` must not be reached.
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

    def pending(self, state: str) -> str | None:
        return f"{state} is pending" if state.isupper() else None


def test_every_state_is_visited_once() -> None:
    exploration = explore(Graph("a>b", "a>c", "b>d", "c~d", "d>a"))
    assert_good(exploration, states_min=4)
    assert (exploration.states, exploration.steps, exploration.depth) == (4, 5, 2)


def test_too_few_states_fail_the_exploration() -> None:
    with pytest.raises(AssertionError, match="only 2 states"):
        assert_good(explore(Graph("a>b")), states_min=3)


def test_an_exploration_is_bounded() -> None:
    with pytest.raises(TooMany):
        explore(Graph("a>b", "b>c"), states_max=2)


@pytest.mark.parametrize(
    ("steps", "what", "way"),
    [
        pytest.param(("a>b", "b>x", "a>x"), "x is wrong", ["a>x"], id="the shortest way"),
        pytest.param(("a>b", "b>!", "a>c"), "must not be", ["a>b", "b>!"], id="a step"),
        pytest.param(
            ("a>B", "B~a"), "no process can progress", ["a>B"], id="only uncertain steps remain"
        ),
        pytest.param(("a>B", "B>B"), "no process can progress", ["a>B"], id="a step on the spot"),
        pytest.param(("a>B", "B>C", "C>B", "C~a"), "form a cycle", ["a>B"], id="a circle"),
    ],
)
def test_a_violation_is_found(steps: tuple[str, ...], what: str, way: list[str]) -> None:
    assert list(assert_caught(explore(Graph(*steps)), what)) == way


def test_a_liveness_obligation_may_be_met_by_a_detour() -> None:
    assert_good(explore(Graph("a~B", "B>C", "C>B", "C>d", "d>d")), states_min=4)


def test_a_counterexample_is_a_numbered_list() -> None:
    found = explore(Graph("a>b", "b>x")).found
    assert str(found) == "x is wrong, after\n   1. a>b\n   2. b>x\nin x"
