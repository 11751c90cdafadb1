"""Lane generations: a change of the number of lanes that keeps every key's order.

A key has its lane by its hash modulo the number of lanes.  With another number
its next event goes to another lane, which must not be sent before what the key
is owed in its old one.  So a change begins a new *generation* of lanes: the
sequencer gives numbers in the new ones from the next batch on, and the owner
sends them when nothing is owed in any lane of an older generation, and none of
those waits for an operator.

    generation 1   ██████░      owes: sent
    generation 2        ░░░░    waits for generation 1
    generation 3            ░   waits for both

Only lanes of older generations are counted here, and those only get fewer, so
an endpoint whose lanes never changed pays nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class Generations:
    """Which generation of an endpoint's lanes may be sent."""

    __slots__ = ("_older",)

    def __init__(self, older: Iterable[tuple[int, int]] = ()) -> None:
        """`older`: (lane, generation) of older lanes that are not drained."""
        self._older: dict[int, set[int]] = {}
        for lane_id, generation in older:
            self._older.setdefault(generation, set()).add(lane_id)

    def may_send(self, generation: int) -> bool:
        """Whether everything older than this generation is drained."""
        return not self._older or generation <= min(self._older)

    def drained(self, lane_id: int, generation: int) -> bool:
        """A lane owes nothing any more; whether that lets a newer generation begin."""
        lanes = self._older.get(generation)
        if lanes is None:
            return False
        lanes.discard(lane_id)
        if lanes:
            return False
        was_first = generation == min(self._older)
        del self._older[generation]
        return was_first
