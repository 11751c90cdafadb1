"""Lane generations: changing an endpoint's lane count without breaking the order of a key.

A key's lane is its hash modulo the lane count.  After a change the next event of a key goes
to another lane, which must not send it before the key's pending deliveries in the old lane.
A change therefore starts a new *generation* of lanes.  The sequencer assigns new events to it
from the next batch on.  The owner sends them once every lane of older generations is drained
and none of those is blocked.

    generation 1   ██████░      pending: sends
    generation 2        ░░░░    waits for generation 1
    generation 3            ░   waits for both

A failover and a restored dump start new generations as well, see `outbox.store.cluster.timeline`.

Only lanes of older generations are tracked, and their number only falls, so an endpoint whose
lane count never changed has no cost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class LaneGenerations:
    """Decides which generations of an endpoint's lanes may send."""

    __slots__ = ("_older",)

    def __init__(self, older: Iterable[tuple[int, int]] = ()) -> None:
        """`older`: (lane, generation) of lanes of older generations that are not drained."""
        self._older: dict[int, set[int]] = {}
        for lane_id, generation in older:
            self._older.setdefault(generation, set()).add(lane_id)

    def may_send(self, generation: int) -> bool:
        """Whether all lanes of older generations are drained."""
        return not self._older or generation <= min(self._older)

    def remove_drained(self, lane_id: int, generation: int) -> bool:
        """Remove a drained lane; returns whether a newer generation may send now."""
        lanes = self._older.get(generation)
        if lanes is None:
            return False
        lanes.discard(lane_id)
        if lanes:
            return False
        was_first = generation == min(self._older)
        del self._older[generation]
        return was_first
