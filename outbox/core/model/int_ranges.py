"""Integer sets as ranges: consecutive integers take the space of one range."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Range: TypeAlias = tuple[int, int]
"""An inclusive range: first and last integer."""


class RangeSet:
    """A set of integers as sorted ranges that neither overlap nor touch.

    Args:
        ranges: what it has at first, in any order; these may overlap.
    """

    __slots__ = ("_his", "_los")

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self._los: list[int] = []
        self._his: list[int] = []
        for lo, hi in ranges:
            self.add(lo, hi)

    def __iter__(self) -> Iterator[Range]:
        return zip(self._los, self._his, strict=True)

    def __len__(self) -> int:
        """The number of ranges, which determines the memory."""
        return len(self._los)

    def __bool__(self) -> bool:
        return bool(self._los)

    def __contains__(self, number: int) -> bool:
        i = bisect_right(self._los, number) - 1
        return i >= 0 and number <= self._his[i]

    def add(self, lo: int, hi: int) -> None:
        """Add the integers from `lo` to `hi`; none if `hi < lo`."""
        if hi < lo:
            return
        # Merge with the ranges that overlap or touch.
        i = bisect_left(self._his, lo - 1)
        j = bisect_right(self._los, hi + 1)
        if i < j:
            lo = min(lo, self._los[i])
            hi = max(hi, self._his[j - 1])
        self._replace(i, j, [(lo, hi)])

    def remove(self, lo: int, hi: int) -> tuple[Range, ...]:
        """Remove the integers from `lo` to `hi`; returns the ranges that were in the set."""
        i = bisect_left(self._his, lo)
        j = bisect_right(self._los, hi)
        if i >= j or hi < lo:
            return ()
        taken = [
            (max(lo, a), min(hi, b)) for a, b in zip(self._los[i:j], self._his[i:j], strict=True)
        ]
        left: list[Range] = []
        if self._los[i] < lo:
            left.append((self._los[i], lo - 1))
        if self._his[j - 1] > hi:
            left.append((hi + 1, self._his[j - 1]))
        self._replace(i, j, left)
        return tuple(taken)

    def _replace(self, i: int, j: int, ranges: list[Range]) -> None:
        self._los[i:j] = [lo for lo, _ in ranges]
        self._his[i:j] = [hi for _, hi in ranges]
