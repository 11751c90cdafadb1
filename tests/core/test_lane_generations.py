"""Changes of the number of lanes: every key keeps its order, whoever dies when.

`GenerationsMachine` lets Hypothesis choose what happens; `test_random_histories`
does the same with a seeded random generator, and finds every mutant.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from outbox.core.delivery.commands import Gate, Send
from outbox.core.delivery.lane import Lane
from outbox.core.delivery.lane_generations import Generations
from tests.core.generations_model import NO_FAULTS, Faults, World
from tests.core.invariants import Violation
from tests.core.random_walk import STATUSES, hunt_generations

if TYPE_CHECKING:
    from outbox.core.delivery.commands import Command

some = st.integers(0, 7)


class GenerationsMachine(RuleBasedStateMachine):
    """Events, changes, answers, writes and crashes in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(2)

    @rule(keys=st.lists(st.integers(0, 4), min_size=1, max_size=8), told=st.booleans())
    def publish(self, keys: list[int], told: bool) -> None:
        for key in keys:
            self.world.publish(key, told=told)

    @rule(lanes=st.integers(1, 4))
    def change(self, lanes: int) -> None:
        self.world.change(lanes)

    @rule()
    def notice(self) -> None:
        self.world.notice()

    @precondition(lambda self: self.world.home.ready)
    @rule(i=some, gate=st.sampled_from([Gate.OPEN, Gate.OPEN, Gate.PROBE, Gate.SHUT]))
    def proceed(self, i: int, gate: Gate) -> None:
        self.world.proceed(i, gate)

    @rule()
    def release(self) -> None:
        self.world.release()

    @precondition(lambda self: self.world.home.fetching)
    @rule(i=some, rows=st.integers(1, 4))
    def fetched(self, i: int, rows: int) -> None:
        self.world.fetched(i, rows)

    @precondition(lambda self: self.world.home.sending)
    @rule(i=some, status=st.sampled_from(STATUSES), received=st.booleans(), blocks=st.booleans())
    def answer(self, i: int, status: int | None, received: bool, blocks: bool) -> None:
        self.world.answer(i, status, received=received, blocks=blocks)

    @precondition(lambda self: self.world.home.pending)
    @rule(records=st.integers(1, 5))
    def write(self, records: int) -> None:
        self.world.write(records)

    @rule()
    def checkpoint(self) -> None:
        self.world.checkpoint()

    @rule(seconds=st.sampled_from([0.1, 2.0, 20.0]))
    def tick(self, seconds: float) -> None:
        self.world.tick(seconds)

    @rule(i=some)
    def unblock(self, i: int) -> None:
        self.world.unblock(i)

    @rule(written=st.integers(0, 5), received=st.booleans())
    def crash(self, written: int, received: bool) -> None:
        self.world.crash(written, received=received)

    @rule()
    def everything_ends(self) -> None:
        self.world.expect_everything_ends()


TestGenerations = GenerationsMachine.TestCase
# A step is dear here, and random histories find more in the same time.
TestGenerations.settings = settings(max_examples=settings().max_examples // 4)


def test_random_histories(seed: int) -> None:
    hunt_generations(100, first_seed=seed)


# ------------------------------------------------------------- one at a time


def test_the_oldest_generation_that_owes_may_send() -> None:
    generations = Generations([(1, 1), (2, 1), (3, 3)])
    assert [generations.may_send(n) for n in (1, 2, 3, 4)] == [True, False, False, False]


def test_an_endpoint_whose_lanes_never_changed_waits_for_nothing() -> None:
    assert Generations().may_send(1)
    assert not Generations().drained(7, 1)


def test_the_last_lane_of_a_generation_lets_the_next_one_begin() -> None:
    generations = Generations([(1, 1), (2, 1), (3, 2)])
    assert not generations.drained(1, 1)
    assert not generations.drained(1, 1)
    assert not generations.may_send(2)
    assert generations.drained(2, 1)
    assert generations.may_send(2)
    assert not generations.may_send(3)
    assert generations.drained(3, 2)
    assert generations.may_send(3)


def test_a_generation_between_that_drains_lets_nobody_begin() -> None:
    generations = Generations([(1, 1), (3, 2)])
    assert not generations.drained(3, 2)
    assert not generations.may_send(3)
    assert generations.drained(1, 1)
    assert generations.may_send(3)


# ------------------------------------------------------------------- mutants


class WaitsForNobody(Generations):
    """Every generation sends."""

    def may_send(self, generation: int) -> bool:
        return True


class WaitsForTheOneBefore(Generations):
    """Only the newest of the older ones is waited for."""

    def may_send(self, generation: int) -> bool:
        return not self._older or generation <= max(self._older)


class BeginsWithTheFirstLane(Generations):
    """One lane that is drained counts for its whole generation."""

    def drained(self, lane_id: int, generation: int) -> bool:
        self._older.pop(generation, None)
        return True


class TellsNobody(Generations):
    """Newer generations are not told that they may begin."""

    def drained(self, lane_id: int, generation: int) -> bool:
        super().drained(lane_id, generation)
        return False


class ForgetsWhoDrained(Generations):
    """Drained lanes are waited for."""

    def drained(self, lane_id: int, generation: int) -> bool:
        return False


class IsDrainedBeforeItIsWritten(Lane):
    """A lane counts as drained while the end of its last delivery is being written."""

    @property
    def drained(self) -> bool:
        return not self.owed and not self._blocked


class IsDrainedThoughBlocked(Lane):
    """A lane that waits for an operator counts as drained when it owes nothing."""

    @property
    def drained(self) -> bool:
        return not self.owed and not self.in_flight


class NeverEnds(Lane):
    """What an owner had before the change does not end."""

    def end(self) -> None:
        pass


class EndsBeforeItsTime(Lane):
    """Everything that is sent after the change is the last."""

    def next(self, now: float, gate: Gate = Gate.OPEN) -> Command:
        command = super().next(now, gate)
        return command._replace(lane_ends=self._ended) if isinstance(command, Send) else command


def _name(value: Any) -> str | None:
    if isinstance(value, Faults):
        return " ".join(n for n, on in vars(value).items() if on) or "-"
    return None


@pytest.mark.parametrize(
    ("lane", "generations", "faults", "violation"),
    [
        (Lane, WaitsForNobody, NO_FAULTS, "older generation"),
        (Lane, WaitsForTheOneBefore, NO_FAULTS, "older generation"),
        (Lane, BeginsWithTheFirstLane, NO_FAULTS, "older generation"),
        (Lane, TellsNobody, NO_FAULTS, "is forgotten"),
        (Lane, ForgetsWhoDrained, NO_FAULTS, "is forgotten"),
        (IsDrainedBeforeItIsWritten, Generations, NO_FAULTS, "older generation"),
        (IsDrainedThoughBlocked, Generations, NO_FAULTS, "waits for an operator"),
        (NeverEnds, Generations, NO_FAULTS, "wrong about the end"),
        (EndsBeforeItsTime, Generations, NO_FAULTS, "wrong about the end"),
        (Lane, Generations, Faults(counts_before_the_change=True), "older|about the end"),
        (Lane, Generations, Faults(forgets_at_take_over=True), "older generation"),
        (Lane, Generations, Faults(forgets_blocks=True), "waits for an operator"),
    ],
    ids=_name,
)
def test_without_this_rule(
    lane: type[Lane], generations: type[Generations], faults: Faults, violation: str
) -> None:
    with pytest.raises(Violation, match=violation):
        hunt_generations(400, lane, generations, faults)
