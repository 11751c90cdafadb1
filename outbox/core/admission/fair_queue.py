"""A fair queue: the item with the least usage is next; ties go to the one served longest ago.

Each service raises the item's usage by one, so that shares converge to max-min fairness; an
item with low demand is served at once.  No item starves: one without usage waits only behind
others without usage, each of which overtakes it at most once.

The request scheduler has one of the tenants that wait, and one of each tenant's endpoints.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from itertools import islice
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Waiting items ordered by usage.

    The cost of an operation depends not on the number of items but on that of distinct usage
    levels: at most about √(2n) for a total usage of `n`.
    """

    __slots__ = ("_by_usage", "_levels", "usage")

    def __init__(self) -> None:
        # By usage: items in order of arrival at that level, with the time of their last service.
        self._by_usage: dict[int, OrderedDict[T, float]] = {}
        # The occurring usage levels, ascending.
        self._levels: list[int] = []
        self.usage: dict[T, int] = {}
        """Usage of each waiting item; an attribute, since it is read in the hot path."""

    def put(self, item: T, has: int, served_at: float) -> None:
        """Add an item, or change its usage; an item with unchanged usage keeps its place.

        Args:
            served_at: the time of its last service.  An item that was served before the next one
                goes in front of it; otherwise the order is that of arrival.
        """
        had = self.usage.get(item)
        if had is not None:
            if had == has:
                return
            self.discard(item)
        ring = self._by_usage.get(has)
        if ring is None:
            ring = self._by_usage[has] = OrderedDict()
            insort(self._levels, has)
        is_next = bool(ring) and served_at < next(iter(ring.values()))
        ring[item] = served_at
        if is_next:
            ring.move_to_end(item, last=False)
        self.usage[item] = has

    def served(self, item: T, at: float) -> None:
        """Record a service of the only item at its level, with unchanged usage."""
        self._by_usage[self.usage[item]][item] = at

    def discard(self, item: T) -> None:
        """Remove an item, if it waits."""
        has = self.usage.pop(item, None)
        if has is None:
            return
        ring = self._by_usage[has]
        del ring[item]
        if not ring:
            del self._by_usage[has]
            del self._levels[bisect_left(self._levels, has)]

    def peek(self, but: T | None = None) -> tuple[int, T] | None:
        """The usage of the next item, and the item.

        Args:
            but: an item to skip.
        """
        for has in self._levels[:2]:
            for item in islice(self._by_usage[has], 2):
                if item is not but:
                    return has, item
        return None
