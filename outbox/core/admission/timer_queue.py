"""A timer queue: a heap of wake-up times with lazy deletion."""

from __future__ import annotations

import heapq
from itertools import count
from typing import Generic, Protocol, TypeVar

SPARE = 64
"""Stale entries are removed when there are more of them than this, and than valid ones."""


class Sleeper(Protocol):
    """An object with at most one wake-up time."""

    wake_at: float | None


S = TypeVar("S", bound=Sleeper)


class TimerQueue(Generic[S]):
    """Wake-up times by object; times are seconds of any monotonic clock."""

    __slots__ = ("_heap", "_sleepers", "_ticket")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, S]] = []
        self._sleepers = 0
        self._ticket = count()

    def __len__(self) -> int:
        return len(self._heap)

    def set(self, who: S, at: float) -> None:
        """Set a wake-up time, unless an earlier one is set."""
        if who.wake_at is not None and who.wake_at <= at:
            return
        self._sleepers += who.wake_at is None
        who.wake_at = at
        heap = self._heap
        heapq.heappush(heap, (at, next(self._ticket), who))
        if len(heap) > 2 * self._sleepers + SPARE:
            # Stale entries are those of times that were moved forward; keep one per object.
            valid = (each for each in heap if each[0] == each[2].wake_at)
            heap[:] = {each[2]: each for each in valid}.values()
            heapq.heapify(heap)

    def next_at(self) -> float | None:
        """The earliest wake-up time."""
        heap = self._heap
        while heap and heap[0][2].wake_at != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def pop_due(self, until: float) -> list[S]:
        """Remove and return the objects whose times are at most `until`."""
        due: list[S] = []
        heap = self._heap
        while heap and heap[0][0] <= until:
            at, _, who = heapq.heappop(heap)
            if who.wake_at == at:
                who.wake_at = None
                self._sleepers -= 1
                due.append(who)
        return due
