"""Lanes of a new generation are read after those of the old one, in any schedule."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from outbox.receiver.streams.generations import (
    LaneProgress,
    counting_order,
    is_new_to_inbox,
    relevant_lanes,
    schedule,
)
from tests.receiver.streams.rigs import lane

if TYPE_CHECKING:
    from collections.abc import Mapping

WALKS = 200
BEGUN = LaneProgress(has_begun=True, has_ended=False, has_entries=False)
ENDED = LaneProgress(has_begun=True, has_ended=True, has_entries=False)
FOUND = LaneProgress(has_begun=False, has_ended=False, has_entries=True)
ABSENT = LaneProgress(has_begun=False, has_ended=False, has_entries=False)


@pytest.mark.parametrize(
    ("lanes", "ready"),
    [
        ({}, set()),
        ({"1-0": FOUND, "1-1": ABSENT}, {"1-0", "1-1"}),
        ({"1-0": BEGUN, "2-0": FOUND}, {"1-0"}),
        ({"1-0": FOUND, "2-0": FOUND}, {"1-0"}),
        ({"1-0": ENDED, "1-1": BEGUN, "2-0": FOUND}, {"1-1"}),
        ({"1-0": ENDED, "1-1": ENDED, "2-0": FOUND, "2-1": ABSENT}, {"2-0", "2-1"}),
        # Nothing is still to come from what is absent; but it is read if something does come.
        ({"1-0": ENDED, "1-1": ABSENT, "2-0": FOUND}, {"1-1", "2-0"}),
        # Without any message the first may come to the oldest generation.
        ({"1-0": ABSENT, "2-0": ABSENT}, {"1-0"}),
        ({"1-0": BEGUN, "2-0": BEGUN, "3-0": FOUND}, {"1-0"}),
    ],
)
def test_the_oldest_generation_that_has_not_ended_is_read(
    lanes: Mapping[str, LaneProgress], ready: set[str]
) -> None:
    named = {f"6f1c2a349d55-{name}": progress for name, progress in lanes.items()}
    plan = schedule(named)
    assert plan.ready == {f"6f1c2a349d55-{name}" for name in ready}
    waiting = {name for name, each in named.items() if not each.has_ended} - plan.ready
    assert plan.waiting.keys() == waiting
    assert all(named[blocker] != ENDED for blocker in plan.waiting.values())


def test_endpoints_do_not_wait_for_each_other() -> None:
    plan = schedule({"6f1c2a349d55-1-0": FOUND, "7f1c2a349d55-2-0": FOUND, "another": FOUND})
    assert plan.ready == {"6f1c2a349d55-1-0", "7f1c2a349d55-2-0", "another"}
    lanes = relevant_lanes(["6f1c2a349d55-2-0"], ["6f1c2a349d55-1-0", "7f1c2a349d55-1-0"])
    assert lanes == {"6f1c2a349d55-2-0", "6f1c2a349d55-1-0"}


def test_an_inbox_is_older_than_the_lanes_after_those_that_it_knows() -> None:
    known = [lane(0, 2)]
    assert is_new_to_inbox(lane(0, 3), known)
    assert not is_new_to_inbox(lane(1, 2), known)
    assert not is_new_to_inbox(lane(0, 1), known)
    assert not is_new_to_inbox("7f1c2a349d55-3-0", known)


class World:
    """A relay, a broker and a reader, each of which does one thing at a time."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.widths = [rng.randrange(1, 4) for _ in range(rng.randrange(2, 5))]
        self.pending: list[tuple[str, int | None]] = []
        """What the relay writes: lane, and generation of an event; None: an end entry."""
        for generation, width in enumerate(self.widths, 1):
            lanes = [lane(slot, generation) for slot in range(width)]
            self.pending += [(rng.choice(lanes), generation) for _ in range(rng.randrange(6))]
            if generation < len(self.widths):
                ends: list[tuple[str, int | None]] = [(name, None) for name in lanes]
                rng.shuffle(ends)
                self.pending += ends
        self.broker: dict[str, list[int | None]] = {}
        if rng.random() < 0.5:
            # The relay registers lanes before it writes to them.
            self.broker = {
                lane(slot, generation): []
                for generation, width in enumerate(self.widths, 1)
                for slot in range(width)
            }
        self.read: dict[str, int] = {}
        self.known: set[str] = set()
        self.ended: set[str] = set()
        self.processed: list[int] = []

    def write(self) -> None:
        if self.pending:
            name, entry = self.pending.pop(0)
            self.broker.setdefault(name, []).append(entry)

    def retain(self) -> None:
        """Retention removes lanes of generations that a newer one follows, before the reader."""
        newest = max(
            (int(name.split("-")[1]) for name, entries in self.broker.items() if entries),
            default=0,
        )
        for name in list(self.broker):
            if int(name.split("-")[1]) < newest and self.rng.random() < 0.5:
                self.broker[name] = []

    def process(self) -> bool:
        """Process one message of a lane that may be read; returns whether there was one."""
        found = set(self.broker)
        lanes = relevant_lanes(found, self.known)
        counted = {}
        for name in counting_order(lanes):
            counted[name] = bool(self.broker.get(name))
            # The relay writes on while the messages are counted.
            while self.rng.random() < 0.7 and self.pending:
                self.write()
        plan = schedule(
            {
                name: LaneProgress(
                    self.read.get(name, 0) > 0, name in self.ended, counted.get(name, False)
                )
                for name in lanes
            }
        )
        ready = [
            name for name in sorted(plan.ready)
            if len(self.broker.get(name, ())) > self.read.get(name, 0)
        ]  # fmt: skip
        if not ready:
            return False
        name = self.rng.choice(ready)
        entry = self.broker[name][self.read.get(name, 0)]
        self.read[name] = self.read.get(name, 0) + 1
        self.known.add(name)
        if entry is None:
            self.ended.add(name)
            generation = int(name.split("-")[1])
            self.known |= {lane(slot, generation) for slot in range(self.widths[generation - 1])}
        else:
            self.processed.append(entry)
        return True


@pytest.mark.slow
def test_generations_are_processed_one_after_the_other_in_any_schedule(seed: int) -> None:
    for n in range(WALKS):
        world = World(random.Random(f"{seed}/{n}"))
        steps = len(world.pending) * 20
        if world.rng.random() < 0.5:
            for _ in range(world.rng.randrange(len(world.pending))):
                world.write()
            world.retain()
        for _ in range(steps):
            if world.rng.random() < 0.5:
                world.write()
            else:
                world.process()
        while world.pending or world.process():
            world.write()
        context = f"seed {seed}, walk {n}: {world.processed}"
        # Safety: no event is processed before one of an older generation.
        assert world.processed == sorted(world.processed), context
        # Liveness: everything is processed in the end.
        entries = [entry for lane_ in world.broker.values() for entry in lane_]
        assert len(world.processed) == len([each for each in entries if each is not None]), context
