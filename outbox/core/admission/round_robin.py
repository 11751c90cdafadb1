"""A queue that serves its holders in turn: who has put much into it waits behind its own."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable

T = TypeVar("T")


class RoundRobin(Generic[T]):
    """Items by whose they are.

    A step costs the same however many items and holders there are.  Of one holder the items
    come in the order in which they were put; who had nothing there comes after as many items
    of others as there are holders, however many items these have.
    """

    def __init__(self) -> None:
        # In the order of their turns, each with its weight; none is empty.
        self._items: OrderedDict[Hashable, deque[tuple[T, int]]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._items)

    def put(self, holder: Hashable, item: T, weight: int) -> None:
        """Another item of a holder."""
        items = self._items.get(holder)
        if items is None:
            items = self._items[holder] = deque()
        items.append((item, weight))

    def take(self, enough: int) -> list[T]:
        """The next ones, until what they weigh is enough."""
        taken: list[T] = []
        weighs = 0
        while self._items and weighs < enough:
            holder, items = self._items.popitem(last=False)
            item, weight = items.popleft()
            taken.append(item)
            weighs += weight
            if items:
                self._items[holder] = items
        return taken
