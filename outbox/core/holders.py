"""Who holds how much of something, and what whoever holds most of it took first."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

from outbox.core.least_first import LeastFirst

W = TypeVar("W")
T = TypeVar("T")


class Holders(Generic[W, T]):
    """Items by who holds them; the cost of a step does not depend on how many hold some."""

    __slots__ = ("_by_amount", "_items", "_len")

    def __init__(self) -> None:
        self._items: dict[W, OrderedDict[T, None]] = {}
        self._by_amount = LeastFirst[W]()
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def add(self, who: W, item: T) -> None:
        """It takes one more."""
        items = self._items.setdefault(who, OrderedDict())
        items[item] = None
        self._len += 1
        self._by_amount.put(who, len(items), 0.0)

    def remove(self, who: W, item: T) -> None:
        """It gives one back."""
        items = self._items[who]
        del items[item]
        self._len -= 1
        if items:
            self._by_amount.put(who, len(items), 0.0)
        else:
            del self._items[who]
            self._by_amount.discard(who)

    def of(self, who: W) -> list[T]:
        """What it has, the oldest first."""
        return list(self._items.get(who, ()))

    def most(self) -> tuple[int, T] | None:
        """The largest amount, and the oldest item of who has it (of several: had it first)."""
        last = self._by_amount.last()
        if last is None:
            return None
        has, who = last
        return has, next(iter(self._items[who]))
