"""A round-robin queue by holder, in which a large backlog delays only its own holder."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable

T = TypeVar("T")


class RoundRobin(Generic[T]):
    """Items by holder.

    Operations take O(1).  A holder's items keep their order; a new holder waits for at most one
    item of each other holder.
    """

    def __init__(self) -> None:
        # Holders in order of service, with (item, weight) pairs; none is empty.
        self._items: OrderedDict[Hashable, deque[tuple[T, int]]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._items)

    def put(self, holder: Hashable, item: T, weight: int) -> None:
        """Append an item of a holder."""
        items = self._items.get(holder)
        if items is None:
            items = self._items[holder] = deque()
        items.append((item, weight))

    def pop_until(self, enough: int) -> list[T]:
        """Remove and return the next items until their total weight is at least `enough`."""
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
