"""An index of slots by holder that finds the oldest item of the holder with the most."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from itertools import count
from typing import Generic, TypeVar

W = TypeVar("W")
T = TypeVar("T")


class UsageIndex(Generic[W, T]):
    """Items by holder; operations cost O(log n) comparisons in the number of holders."""

    __slots__ = ("_by_amount", "_items", "_len", "_levels", "_ticket")

    def __init__(self) -> None:
        # By holder: items with their tickets, the oldest first.
        self._items: dict[W, OrderedDict[T, int]] = {}
        # By amount, sorted by the ticket of the oldest item.
        self._by_amount: dict[int, list[tuple[int, W]]] = {}
        # The occurring amounts, ascending.
        self._levels: list[int] = []
        self._ticket = count()
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def add(self, who: W, item: T) -> None:
        """Add an item of a holder."""
        items = self._items.get(who)
        if items is None:
            items = self._items[who] = OrderedDict()
        else:
            self._discard(who, items)
        items[item] = next(self._ticket)
        self._len += 1
        self._put(who, items)

    def remove(self, who: W, item: T) -> None:
        """Remove an item of a holder."""
        items = self._items[who]
        self._discard(who, items)
        del items[item]
        self._len -= 1
        if items:
            self._put(who, items)
        else:
            del self._items[who]

    def items_of(self, who: W) -> list[T]:
        """The holder's items, the oldest first."""
        return list(self._items.get(who, ()))

    def heaviest(self) -> tuple[int, T] | None:
        """The largest amount, and the oldest item of the holders that have it."""
        if not self._levels:
            return None
        has = self._levels[-1]
        _, who = self._by_amount[has][0]
        return has, next(iter(self._items[who]))

    def _put(self, who: W, items: OrderedDict[T, int]) -> None:
        has = len(items)
        level = self._by_amount.get(has)
        if level is None:
            level = self._by_amount[has] = []
            insort(self._levels, has)
        # Tickets are unique.
        insort(level, (_oldest(items), who))

    def _discard(self, who: W, items: OrderedDict[T, int]) -> None:
        has = len(items)
        level = self._by_amount[has]
        del level[bisect_left(level, (_oldest(items),))]
        if not level:
            del self._by_amount[has]
            del self._levels[bisect_left(self._levels, has)]


def _oldest(items: OrderedDict[T, int]) -> int:
    return next(iter(items.values()))
