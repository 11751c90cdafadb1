"""Partition windows: ids and batches of a stretch of time share a range of numbers.

The range of window n starts at n times `WIDTH`, independent of the amount of data, and
each window has a partition.  When a window has lasted long enough, numbering jumps to
the next one; when all of it is old enough and has no pending deliveries, its partition
is dropped.  So rows are never deleted one by one, and the bounds of a partition in use
never change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable

WindowKind: TypeAlias = Literal["events", "log"]
"""Windows of outbox ids, or of batches."""

WIDTH = 100_000_000_000
"""Numbers per window: a year at 3,000 per second, so that producers do not run out even
if no relay runs for a year."""

AHEAD = 2
"""Windows whose partitions are created in advance."""

PER_RETENTION = 15
"""Windows per retention time; data is kept for at most one window longer."""

LENGTH_MIN_S, LENGTH_MAX_S = 3600.0, 30 * 86400.0
"""Bounds of a window's length: shorter ones are not worth a partition; monthly partitions
are few enough for any retention time."""


def count_arrived(before: int, high: int) -> int:
    """How many ids were assigned after one and up to another; of several windows, of the newest.

    The beginning of a window leaves out the rest of the one before.
    """
    return high - max(before, high // WIDTH * WIDTH)


@dataclass(frozen=True, slots=True)
class Retention:
    """Retention times, in seconds; None: for ever."""

    events_s: float | None = 30 * 86400.0
    log_s: float | None = 30 * 86400.0
    dead_letters_s: float | None = 30 * 86400.0

    def retention_s(self, kind: WindowKind) -> float | None:
        """Retention time of windows of this kind."""
        return self.events_s if kind == "events" else self.log_s


@dataclass(frozen=True, slots=True)
class PartitionWindow:
    """A partition window that has not been dropped."""

    kind: WindowKind
    number: int
    age_s: float
    """Seconds since its start."""
    ended_s: float | None
    """Seconds since its end; None: it is the current one."""
    last_batch: int | None
    """The last batch that can contain any of it; None: not known yet."""

    @property
    def first(self) -> int:
        """Its lowest number."""
        return self.number * WIDTH

    @property
    def end(self) -> int:
        """The first number after it."""
        return (self.number + 1) * WIDTH


@dataclass(frozen=True, slots=True)
class DueWindows:
    """Work that is due for the windows of one kind."""

    ends: PartitionWindow | None = None
    """The current window, if it may end; it does so only if anything was written to it."""
    unsettled: tuple[PartitionWindow, ...] = ()
    """Ended windows of which `last_batch` is unknown."""
    oldest: PartitionWindow | None = None
    """The oldest window, if its retention is over; it may be dropped without pending data."""


def window_length_s(keep_s: float | None) -> float:
    """Length of a window in seconds, from the retention time."""
    if keep_s is None:
        return LENGTH_MAX_S
    return min(max(keep_s / PER_RETENTION, LENGTH_MIN_S), LENGTH_MAX_S)


def due_windows(
    kind: WindowKind, periods: Iterable[PartitionWindow], keep_s: float | None, period_s: float
) -> DueWindows:
    """Determine the due work of the windows that have not been dropped.

    Args:
        keep_s: retention time after a window's end, in seconds.
        period_s: length of a window, in seconds.
    """
    ours = sorted((p for p in periods if p.kind == kind), key=lambda p: p.number)
    written, oldest = ours[-1], ours[0]
    return DueWindows(
        ends=written if written.age_s >= period_s else None,
        unsettled=tuple(p for p in ours[:-1] if kind == "events" and p.last_batch is None),
        oldest=oldest if oldest is not written and _old_enough(oldest, keep_s) else None,
    )


def _old_enough(period: PartitionWindow, keep_s: float | None) -> bool:
    if keep_s is None or period.ended_s is None or period.ended_s < keep_s:
        return False
    return period.kind == "log" or period.last_batch is not None


def unsequenced_ids(high: int, last: int) -> int:
    """Number of assigned ids above `high` in the current window.

    The unused rest of an ended window was never assigned.
    """
    return max(last - max(high, (last + 1) // WIDTH * WIDTH - 1), 0)
