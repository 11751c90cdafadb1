"""Random schedules of owners, lost responses and faults of a broker, and the mutants they catch."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from outbox.core.brokers.port import Position
from outbox.core.brokers.take_over import Acknowledge, Proceed, decide
from outbox.core.delivery.lane import Lane
from tests.core.broker_world import World
from tests.core.invariants import Violation
from tests.support.brokers.model import (
    ModelBroker,
    Pipelined,
    ReadsFence,
    WithoutCompare,
    WithoutEpochs,
    WithoutOpenings,
)

if TYPE_CHECKING:
    from outbox.core.brokers.port import Standing
    from outbox.core.brokers.take_over import LaneBooks
    from outbox.core.delivery.commands import Command, Gate

SCHEDULES = 1500


def run(seeds: range, **parts: Any) -> Counter[str]:
    """Run schedules, and count what was seen in them."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        make_broker = parts.get("broker", ModelBroker)
        others = {name: part for name, part in parts.items() if name != "broker"}
        world = World(Random(seed), make_broker(), **others)
        try:
            world.run()
        except Violation as violation:
            violation.add_note(f"seed {seed}, {dict(world.seen)}")
            raise
        seen += world.seen
    return seen


def test_the_stream_is_the_lane_or_the_lane_is_held(seed: int) -> None:
    seen = run(range(seed, seed + SCHEDULES))
    for each in (
        "late", "lost", "found", "deleted", "trimmed", "foreign", "restored", "forgot", "ahead",
    ):  # fmt: skip
        assert seen[each] > 0, f"the schedules have no {each}"


class BlindLane(Lane):
    """A mutant: it dead-letters without opening the lane after a lost response."""

    def next(self, now: float, gate: Gate = Lane.next.__defaults__[0]) -> Command:  # type: ignore[index]
        queue = self._buffer.queue
        if self._position is None and self._busy is None and queue:
            first = queue[0]
            if first.seq == self._skip_seq:
                return self._dead_letter(first, "skipped", None)
        return super().next(now, gate)


def trusting(standing: Standing, books: LaneBooks, expected: str | None) -> Any:
    """A mutant: it acknowledges without comparing the X-Delivery."""
    if isinstance(standing, Position) and books.acked_seq < standing.sequence <= books.last_seq:
        return Acknowledge(standing.sequence)
    return decide(standing, books, expected)


def by_acknowledged(standing: Standing, books: LaneBooks, expected: str | None) -> Any:
    """A mutant: it compares with the last acknowledged sequence."""
    return decide(standing, books._replace(delivered_seq=books.acked_seq), expected)


def forgiving(standing: Standing, books: LaneBooks, expected: str | None) -> Any:
    """A mutant: it goes on after the stream has lost messages."""
    if isinstance(standing, Position) and standing.sequence < books.delivered_seq:
        return Proceed(standing.sequence)
    return decide(standing, books, expected)


def never(_: Lane) -> bool:
    """A mutant: a lane is not opened again after a lost response."""
    return False


@pytest.mark.parametrize(
    "mutant",
    [
        {"broker": WithoutEpochs},
        {"broker": WithoutOpenings},
        {"broker": WithoutCompare},
        {"broker": Pipelined},
        {"broker": ReadsFence},
        {"lane": BlindLane},
        {"decide": trusting},
        {"decide": by_acknowledged},
        {"decide": forgiving},
        {"reopen": never},
    ],
    ids=lambda mutant: next(iter(mutant.values())).__name__,
)
def test_a_mutant_is_caught(mutant: dict[str, Any]) -> None:
    with pytest.raises(Violation):
        run(range(SCHEDULES), **mutant)
