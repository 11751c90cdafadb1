"""Explicit-state model checker: explores every reachable state of a protocol model.

The search is breadth first, so the first counterexample is a shortest one. A model gives its
initial state and the steps that each state allows; the explorer tries all interleavings. It finds
three kinds of errors: a step that must be impossible leads to `Wrong` instead of a state; a state
violates an invariant (`wrong`); or an obligation is pending (`pending`) and the certain steps
cannot meet it.

A step is *certain* (weakly fair) if a process takes it as long as it runs, without luck and without
help of another process. A crash, a new producer and a takeover are not certain. So the third kind
is a liveness check: it finds the states in which no process can progress although an obligation is
pending, and the cycles of certain steps that never meet it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeAlias, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

S = TypeVar("S")


class Wrong(str):
    """The violation of a step, in place of the state that it must not reach."""

    __slots__ = ()


Step: TypeAlias = "tuple[str, bool, S | Wrong]"
"""A step: its description, whether it is certain, and its result."""


class Model(Protocol[S]):
    """A protocol model with the bounds of its exploration."""

    def first(self) -> S:
        """The initial state."""

    def steps(self, state: S) -> Iterable[Step[S]]:
        """All steps that the state allows."""

    def wrong(self, state: S) -> str | None:
        """The invariant that a state violates, if any."""

    def pending(self, state: S) -> str | None:
        """The pending obligation of a state, if any."""


@dataclass(frozen=True, slots=True)
class Counterexample:
    """A shortest path to a violation."""

    what: str
    steps: tuple[str, ...]
    state: object

    def __str__(self) -> str:
        numbered = "\n".join(f"{n:4}. {step}" for n, step in enumerate(self.steps, 1))
        return f"{self.what}, after\n{numbered}\nin {self.state}"


@dataclass(frozen=True, slots=True)
class Exploration:
    """The result of an exploration."""

    states: int
    steps: int
    depth: int
    """The largest distance of a state from the initial one, in steps."""
    found: Counterexample | None


class TooMany(Exception):
    """The model has more states than `states_max`."""


def explore(model: Model[S], states_max: int = 10_000_000) -> Exploration:
    """Explore all states, or up to the first violation.

    Raises:
        TooMany: there are more than `states_max` states.
    """
    return _Explorer(model, states_max).run()


class _Explorer(Generic[S]):
    """One exploration; states are numbered in the order of discovery."""

    def __init__(self, model: Model[S], states_max: int) -> None:
        self._model = model
        self._states_max = states_max
        first = model.first()
        self._number = {first: 0}
        self._states = [first]
        # By state: its parent, the step from it, and its depth.
        self._parents = [-1]
        self._via = [""]
        self._depths = [0]
        self._steps = 0
        # The pending obligation of each state, and the certain steps into each state from states
        # with an obligation.
        self._unmet: dict[int, str] = {}
        self._certain_from: dict[int, list[int]] = {}

    def run(self) -> Exploration:
        model = self._model
        here = 0
        while here < len(self._states):
            state = self._states[here]
            if (what := model.wrong(state)) is not None:
                return self._done(self._trace(what, here))
            pending = model.pending(state)
            if pending is not None:
                self._unmet[here] = pending
            stuck = pending is not None
            for name, certain, then in model.steps(state):
                self._steps += 1
                if isinstance(then, Wrong):
                    return self._done(self._trace(str(then), here, name))
                there = self._reach(then, here, name)
                if certain and pending is not None and there != here:
                    self._certain_from.setdefault(there, []).append(here)
                    stuck = False
            if stuck:
                return self._done(self._trace(f"{pending}, and no process can progress", here))
            here += 1
        return self._done(self._find_unmet())

    def _reach(self, state: S, parent: int, via: str) -> int:
        number = self._number.setdefault(state, len(self._states))
        if number == len(self._states):
            if number >= self._states_max:
                raise TooMany(f"more than {self._states_max} states")
            self._states.append(state)
            self._parents.append(parent)
            self._via.append(via)
            self._depths.append(self._depths[parent] + 1)
        return number

    def _find_unmet(self) -> Counterexample | None:
        """The nearest state from which no certain steps lead to a state without obligations."""
        satisfiable = deque(n for n in self._certain_from if n not in self._unmet)
        unsatisfiable = dict(self._unmet)
        while satisfiable:
            for before in self._certain_from.get(satisfiable.popleft(), ()):
                if unsatisfiable.pop(before, None) is not None:
                    satisfiable.append(before)
        for number, what in unsatisfiable.items():
            return self._trace(f"{what}, and the certain steps only form a cycle", number)
        return None

    def _trace(self, what: str, number: int, last: str | None = None) -> Counterexample:
        steps = [] if last is None else [last]
        state = self._states[number]
        while number:
            steps.append(self._via[number])
            number = self._parents[number]
        return Counterexample(what, tuple(reversed(steps)), state)

    def _done(self, found: Counterexample | None) -> Exploration:
        return Exploration(len(self._states), self._steps, self._depths[-1], found)


def assert_good(exploration: Exploration, states_min: int) -> None:
    """Assert that there is no violation, and that enough states were explored to be meaningful."""
    assert exploration.found is None, str(exploration.found)
    assert exploration.states >= states_min, f"only {exploration.states} states"


def assert_caught(exploration: Exploration, what: str) -> Sequence[str]:
    """Assert that a violation contains this text; returns the path to it."""
    assert exploration.found is not None, f"not caught in {exploration.states} states"
    assert what in exploration.found.what, str(exploration.found)
    return exploration.found.steps
