"""Who waits for which time, the earliest first."""

from __future__ import annotations

import heapq
from itertools import count
from typing import Generic, Protocol, TypeVar

SPARE = 64
"""Times that nobody waits for any more are put away when there are so many, and most are."""


class Sleeper(Protocol):
    """Somebody who waits for one time at most."""

    wake_at: float | None


S = TypeVar("S", bound=Sleeper)


class Timers(Generic[S]):
    """Times are seconds of any steady clock."""

    __slots__ = ("_heap", "_sleepers", "_ticket")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, S]] = []
        self._sleepers = 0
        self._ticket = count()

    def __len__(self) -> int:
        return len(self._heap)

    def set(self, who: S, at: float) -> None:
        """It waits for this time, unless for an earlier one."""
        if who.wake_at is not None and who.wake_at <= at:
            return
        self._sleepers += who.wake_at is None
        who.wake_at = at
        heap = self._heap
        heapq.heappush(heap, (at, next(self._ticket), who))
        if len(heap) > 2 * self._sleepers + SPARE:
            # Most are of times that were brought forward; one of each is enough.
            valid = (each for each in heap if each[0] == each[2].wake_at)
            heap[:] = {each[2]: each for each in valid}.values()
            heapq.heapify(heap)

    def first(self) -> float | None:
        """The earliest time that somebody waits for."""
        heap = self._heap
        while heap and heap[0][2].wake_at != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def take(self, until: float) -> list[S]:
        """Whose times have come by then; they do not wait any more."""
        due: list[S] = []
        heap = self._heap
        while heap and heap[0][0] <= until:
            at, _, who = heapq.heappop(heap)
            if who.wake_at == at:
                who.wake_at = None
                self._sleepers -= 1
                due.append(who)
        return due
