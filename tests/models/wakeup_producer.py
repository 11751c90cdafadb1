"""The producer in the model of the wake-up protocol: see `tests.models.wakeup`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.models.wakeup_world import (
    ASLEEP,
    AWAKE,
    FLAG_READ,
    HOLDS,
    NEW,
    RELEASED,
    UNSEEN,
    VISIBLE,
    WROTE,
    Producer,
    Rules,
    World,
    put,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.models.explorer import Step


def produce(world: World, n: int, p: Producer, rules: Rules) -> Iterator[Step[World]]:
    """The steps of the n-th transaction; only the end of a commit is certain."""
    flag = world.flag

    def then(name: str, changed: Producer, certain: bool = False) -> Step[World]:
        return f"a producer {name}", certain, put(world, n, changed)

    phase = p.phase
    if phase == NEW:
        if rules.reads_flag_before_allocating:
            yield then("reads the flag", p._replace(phase=FLAG_READ, notifies=flag == ASLEEP))
            return
        yield then("locks the sequence and allocates an id", p._replace(phase=HOLDS))
        if rules.flag_is_a_row and p.saw == UNSEEN:
            yield then("begins under REPEATABLE READ", p._replace(saw=flag))
    elif phase == FLAG_READ:
        yield then("locks the sequence and allocates an id", p._replace(phase=HOLDS))
    elif phase in (HOLDS, WROTE):
        sees = flag if p.saw == UNSEEN else p.saw
        if rules.reads_flag_before_allocating:
            sees = AWAKE
        if phase == HOLDS or (sees == ASLEEP and not p.notifies):
            notifies = p.notifies or sees == ASLEEP
            text = "inserts, and will notify" if notifies else "inserts, and will not notify"
            yield then(text, p._replace(phase=WROTE, notifies=notifies))
        if phase == WROTE:
            notifying = 0
            for r, replica in enumerate(world.replicas):
                if p.notifies and rules.receives_notifications(replica):
                    notifying |= 1 << r
            committed = p._replace(phase=VISIBLE, saw=UNSEEN, notifies=False, notifying=notifying)
            yield then("commits", committed)
        gone = p._replace(phase=RELEASED, saw=UNSEEN, notifies=False, sequenced=True)
        yield then("rolls back", gone)
    elif phase == VISIBLE:
        yield then("releases its lock", p._replace(phase=RELEASED), certain=True)
