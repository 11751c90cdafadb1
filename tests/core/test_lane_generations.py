"""Changes of the lane count: every key keeps its order, even when owners crash.

`GenerationsMachine` lets Hypothesis choose the events; `test_random_histories` does the same with a
seeded random generator, and finds every mutant.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from outbox.core.delivery.commands import Gate, Send
from outbox.core.delivery.lane import Lane
from outbox.core.delivery.lane_generations import LaneGenerations
from tests.core.generations_model import NO_FAULTS, Faults, World
from tests.core.invariants import Violation
from tests.core.random_walk import STATUSES, hunt_generations

if TYPE_CHECKING:
    from outbox.core.delivery.commands import Command

some = st.integers(0, 7)


class GenerationsMachine(RuleBasedStateMachine):
    """Events, lane count changes, responses, writes and crashes in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(2)

    @rule(keys=st.lists(st.integers(0, 4), min_size=1, max_size=8), announced=st.booleans())
    def publish(self, keys: list[int], announced: bool) -> None:
        for key in keys:
            self.world.publish(key, announced=announced)

    @rule(lanes=st.integers(1, 4))
    def change(self, lanes: int) -> None:
        self.world.change(lanes)

    @rule()
    def notice(self) -> None:
        self.world.notice()

    @precondition(lambda self: self.world.owner_state.ready)
    @rule(i=some, gate=st.sampled_from([Gate.OPEN, Gate.OPEN, Gate.PROBE, Gate.SHUT]))
    def proceed(self, i: int, gate: Gate) -> None:
        self.world.proceed(i, gate)

    @rule()
    def release(self) -> None:
        self.world.release()

    @precondition(lambda self: self.world.owner_state.fetching)
    @rule(i=some, rows=st.integers(1, 4))
    def fetched(self, i: int, rows: int) -> None:
        self.world.fetched(i, rows)

    @precondition(lambda self: self.world.owner_state.sending)
    @rule(i=some, status=st.sampled_from(STATUSES), received=st.booleans(), blocks=st.booleans())
    def response(self, i: int, status: int | None, received: bool, blocks: bool) -> None:
        self.world.response(i, status, received=received, blocks=blocks)

    @precondition(lambda self: self.world.owner_state.pending)
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
# Steps are expensive here; random histories cover more in the same time.
TestGenerations.settings = settings(max_examples=settings().max_examples // 4)


def test_random_histories(seed: int) -> None:
    hunt_generations(settings().max_examples, first_seed=seed)


# -------------------------------------------------------------- single cases


def test_the_oldest_generation_with_pending_deliveries_may_send() -> None:
    generations = LaneGenerations([(1, 1), (2, 1), (3, 3)])
    assert [generations.may_send(n) for n in (1, 2, 3, 4)] == [True, False, False, False]


def test_an_endpoint_with_unchanged_lanes_never_waits() -> None:
    assert LaneGenerations().may_send(1)
    assert not LaneGenerations().remove_drained(7, 1)


def test_the_last_drained_lane_of_a_generation_releases_the_next_one() -> None:
    generations = LaneGenerations([(1, 1), (2, 1), (3, 2)])
    assert not generations.remove_drained(1, 1)
    assert not generations.remove_drained(1, 1)
    assert not generations.may_send(2)
    assert generations.remove_drained(2, 1)
    assert generations.may_send(2)
    assert not generations.may_send(3)
    assert generations.remove_drained(3, 2)
    assert generations.may_send(3)


def test_draining_a_middle_generation_releases_none() -> None:
    generations = LaneGenerations([(1, 1), (3, 2)])
    assert not generations.remove_drained(3, 2)
    assert not generations.may_send(3)
    assert generations.remove_drained(1, 1)
    assert generations.may_send(3)


# ------------------------------------------------------------------- mutants


class NeverWaitsForOlderGenerations(LaneGenerations):
    """Lets every generation send."""

    def may_send(self, generation: int) -> bool:
        return True


class WaitsForPreviousGenerationOnly(LaneGenerations):
    """Waits only for the newest of the older generations."""

    def may_send(self, generation: int) -> bool:
        return not self._older or generation <= max(self._older)


class BeginsAfterFirstDrainedLane(LaneGenerations):
    """Treats a generation as drained when one of its lanes is."""

    def remove_drained(self, lane_id: int, generation: int) -> bool:
        self._older.pop(generation, None)
        return True


class DoesNotReportDrained(LaneGenerations):
    """Does not report to newer generations that they may begin."""

    def remove_drained(self, lane_id: int, generation: int) -> bool:
        super().remove_drained(lane_id, generation)
        return False


class WaitsForDrainedLanes(LaneGenerations):
    """Waits for drained lanes."""

    def remove_drained(self, lane_id: int, generation: int) -> bool:
        return False


class ReportsDrainedBeforeWrite(Lane):
    """Reports drained while the outcome of the last delivery is being written."""

    @property
    def drained(self) -> bool:
        return not self.pending and not self.blocked


class ReportsDrainedWhileBlocked(Lane):
    """Reports a blocked lane without pending deliveries as drained."""

    @property
    def drained(self) -> bool:
        return not self.pending and not self.in_flight


class NeverEndsOldLanes(Lane):
    """Does not end lanes that the owner had before the change."""

    def mark_ended(self) -> None:
        pass


class MarksLaneEndTooEarly(Lane):
    """Marks every delivery after the change as the last."""

    def next(self, now: float, gate: Gate = Gate.OPEN) -> Command:
        command = super().next(now, gate)
        return command._replace(lane_ends=self.ended) if isinstance(command, Send) else command


def _name(value: Any) -> str | None:
    if isinstance(value, Faults):
        return " ".join(n for n, on in vars(value).items() if on) or "-"
    return None


@pytest.mark.parametrize(
    ("lane", "generations", "faults", "violation"),
    [
        (Lane, NeverWaitsForOlderGenerations, NO_FAULTS, "older generation"),
        (Lane, WaitsForPreviousGenerationOnly, NO_FAULTS, "older generation"),
        (Lane, BeginsAfterFirstDrainedLane, NO_FAULTS, "older generation"),
        (Lane, DoesNotReportDrained, NO_FAULTS, "is forgotten"),
        (Lane, WaitsForDrainedLanes, NO_FAULTS, "is forgotten"),
        (ReportsDrainedBeforeWrite, LaneGenerations, NO_FAULTS, "older generation"),
        (ReportsDrainedWhileBlocked, LaneGenerations, NO_FAULTS, "waits for an operator"),
        (NeverEndsOldLanes, LaneGenerations, NO_FAULTS, "wrong about the end"),
        (MarksLaneEndTooEarly, LaneGenerations, NO_FAULTS, "wrong about the end"),
        (Lane, LaneGenerations, Faults(skips_final_read=True), "older|about the end"),
        (Lane, LaneGenerations, Faults(loads_newest_lanes_only=True), "older generation"),
        (Lane, LaneGenerations, Faults(forgets_blocks=True), "waits for an operator"),
    ],
    ids=_name,
)
def test_generations_without_this_rule_violate_the_model(
    lane: type[Lane], generations: type[LaneGenerations], faults: Faults, violation: str
) -> None:
    with pytest.raises(Violation, match=violation):
        hunt_generations(400, lane, generations, faults)
