"""Explores every state that a model of a protocol can reach.

Breadth first, so that the first thing found wrong is reached on a shortest way.  A
model says where it begins and which steps each state allows; all interleavings follow
from that.  Three things can be wrong:

* a step that must not be possible leads to `Wrong` instead of a state;
* a state breaks an invariant (`wrong`);
* something is owed (`owed`), and the steps that are certain to come cannot pay it.

A step is *certain* if a party takes it as long as it runs: nobody has to be lucky,
or to come by.  A crash, a new producer, a peer that takes over are not certain.  So
the third kind finds the state in which everybody waits for ever although something
is to be done, and also those that only lead around in circles.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeAlias, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

S = TypeVar("S")


class Wrong(str):
    """What a step breaks; stands in for the state that it must not lead to."""

    __slots__ = ()


Step: TypeAlias = "tuple[str, bool, S | Wrong]"
"""What happens, whether it is certain to, and what it leads to."""


class Model(Protocol[S]):
    """A protocol, with the bounds within which it is explored."""

    def first(self) -> S:
        """The state in which everything begins."""

    def steps(self, state: S) -> Iterable[Step[S]]:
        """Everything that can happen next."""

    def wrong(self, state: S) -> str | None:
        """The invariant that a state breaks, if any."""

    def owed(self, state: S) -> str | None:
        """What has to happen still, if anything."""


@dataclass(frozen=True, slots=True)
class Counterexample:
    """How to reach what is wrong, in as few steps as possible."""

    what: str
    steps: tuple[str, ...]
    state: object

    def __str__(self) -> str:
        numbered = "\n".join(f"{n:4}. {step}" for n, step in enumerate(self.steps, 1))
        return f"{self.what}, after\n{numbered}\nin {self.state}"


@dataclass(frozen=True, slots=True)
class Exploration:
    """What was seen."""

    states: int
    steps: int
    depth: int
    """How many steps the farthest state is away from the first one."""
    found: Counterexample | None


class TooMany(Exception):
    """The model has more states than it was given room for."""


def explore(model: Model[S], states_max: int = 10_000_000) -> Exploration:
    """Look at all states, or up to the first one in which something is wrong.

    Raises:
        TooMany: there are more states than `states_max`.
    """
    return _Explorer(model, states_max).run()


class _Explorer(Generic[S]):
    """One exploration; states are known by the order in which they were found."""

    def __init__(self, model: Model[S], states_max: int) -> None:
        self._model = model
        self._states_max = states_max
        first = model.first()
        self._number = {first: 0}
        self._states = [first]
        # By state: where it was first reached from, by which step, how far away.
        self._parents = [-1]
        self._via = [""]
        self._depths = [0]
        self._steps = 0
        # What is owed in which state, and the certain steps into each state from
        # those in which something is.
        self._owing: dict[int, str] = {}
        self._certain_from: dict[int, list[int]] = {}

    def run(self) -> Exploration:
        model = self._model
        here = 0
        while here < len(self._states):
            state = self._states[here]
            if (what := model.wrong(state)) is not None:
                return self._done(self._trace(what, here))
            owed = model.owed(state)
            if owed is not None:
                self._owing[here] = owed
            stuck = owed is not None
            for name, certain, then in model.steps(state):
                self._steps += 1
                if isinstance(then, Wrong):
                    return self._done(self._trace(str(then), here, name))
                there = self._reach(then, here, name)
                if certain and owed is not None and there != here:
                    self._certain_from.setdefault(there, []).append(here)
                    stuck = False
            if stuck:
                return self._done(self._trace(f"{owed}, and everybody waits", here))
            here += 1
        return self._done(self._unpayable())

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

    def _unpayable(self) -> Counterexample | None:
        """The nearest state from which no certain steps lead to one that owes nothing."""
        payable = deque(n for n in self._certain_from if n not in self._owing)
        hopeless = dict(self._owing)
        while payable:
            for before in self._certain_from.get(payable.popleft(), ()):
                if hopeless.pop(before, None) is not None:
                    payable.append(before)
        for number, what in hopeless.items():
            return self._trace(f"{what}, and what is certain to come only leads around", number)
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
    """Nothing is wrong, and enough was looked at for that to mean something."""
    assert exploration.found is None, str(exploration.found)
    assert exploration.states >= states_min, f"only {exploration.states} states"


def assert_caught(exploration: Exploration, what: str) -> Sequence[str]:
    """Something like this was found; returns the way to it."""
    assert exploration.found is not None, f"not caught in {exploration.states} states"
    assert what in exploration.found.what, str(exploration.found)
    return exploration.found.steps
