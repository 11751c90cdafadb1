"""A queue whose next one is who has least, and among equals who was served longest ago.

Served one after the other, and each having more by one when it was served, they end up with
equal shares, whatever each could use (max-min fairness).  Who wants little is served at once.
Nobody starves: who has nothing stands behind those alone that have nothing either, and each of
them passes it at most once.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from itertools import islice
from typing import Generic, TypeVar

T = TypeVar("T")


class LeastFirst(Generic[T]):
    """Items by how much each of them has.

    The cost of a step does not depend on how many items there are, only on how many
    different amounts: those who share `n` have at most about √(2n).
    """

    __slots__ = ("_levels", "_rings", "amounts")

    def __init__(self) -> None:
        # By amount, in the order in which they came to have it; with when each was served.
        self._rings: dict[int, OrderedDict[T, float]] = {}
        # Those of the amounts that somebody has, ascending.
        self._levels: list[int] = []
        self.amounts: dict[T, int] = {}
        """How much each has that waits; it is asked more often than a method would like."""

    def put(self, item: T, has: int, served_at: float) -> None:
        """It waits, and has so much; keeps its place if that is as it was.

        Args:
            served_at: when it last was.  Who was served longer ago than the next one is
                comes before it; apart from that it is who came first.
        """
        had = self.amounts.get(item)
        if had is not None:
            if had == has:
                return
            self.discard(item)
        ring = self._rings.get(has)
        if ring is None:
            ring = self._rings[has] = OrderedDict()
            insort(self._levels, has)
        is_next = bool(ring) and served_at < next(iter(ring.values()))
        ring[item] = served_at
        if is_next:
            ring.move_to_end(item, last=False)
        self.amounts[item] = has

    def served(self, item: T, at: float) -> None:
        """It is there alone, and was served once more; it has as much as before."""
        self._rings[self.amounts[item]][item] = at

    def discard(self, item: T) -> None:
        """It does not wait, or not any more."""
        has = self.amounts.pop(item, None)
        if has is None:
            return
        ring = self._rings[has]
        del ring[item]
        if not ring:
            del self._rings[has]
            del self._levels[bisect_left(self._levels, has)]

    def first(self, but: T | None = None) -> tuple[int, T] | None:
        """How much the next one has, and itself.

        Args:
            but: not this one.
        """
        for has in self._levels[:2]:
            for item in islice(self._rings[has], 2):
                if item is not but:
                    return has, item
        return None
