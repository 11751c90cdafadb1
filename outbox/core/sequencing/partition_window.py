"""Periods: the ids and the batches of a stretch of time have a range of numbers of their own.

Those of period n are n times `WIDTH` and above, whoever writes how much, and each
period has a partition.  When a period has lasted long enough the numbers are moved
on to the next one, and when all of it is old enough, and nothing in it is owed, its
partition is dropped.  So nothing is ever deleted row by row, and the bounds of a
partition that somebody writes to never change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable

Kind: TypeAlias = Literal["events", "log"]
"""Of outbox ids, or of batches."""

WIDTH = 100_000_000_000
"""Numbers in a period: more than are given out in a year at 3,000 in a second, so that
a producer meets no end even if no relay runs for years."""

AHEAD = 2
"""Periods that have a partition before they begin."""

PER_RETENTION = 15
"""Periods in the time that something is kept: it is kept at most this much longer."""

LENGTH_MIN_S, LENGTH_MAX_S = 3600.0, 30 * 86400.0
"""A partition for less is not worth it; and however long something is kept, one for each
month is not too many."""


@dataclass(frozen=True, slots=True)
class Keep:
    """How long things are kept, in seconds; None: for ever."""

    events_s: float | None = 30 * 86400.0
    log_s: float | None = 30 * 86400.0
    dead_letters_s: float | None = 30 * 86400.0

    def of(self, kind: Kind) -> float | None:
        """How long periods of this kind are kept."""
        return self.events_s if kind == "events" else self.log_s


@dataclass(frozen=True, slots=True)
class Period:
    """A period that is not dropped."""

    kind: Kind
    number: int
    age_s: float
    """Since it began."""
    ended_s: float | None
    """Since it ended; None: it is the one that is written."""
    last_batch: int | None
    """The last batch that can hold anything of it; None: that is not known yet."""

    @property
    def first(self) -> int:
        """The lowest number of it."""
        return self.number * WIDTH

    @property
    def end(self) -> int:
        """The first number behind it."""
        return (self.number + 1) * WIDTH


@dataclass(frozen=True, slots=True)
class Due:
    """What time says about the periods of one kind."""

    ends: Period | None = None
    """Lasted long enough: the next one may begin, if anything was written in it."""
    unsettled: tuple[Period, ...] = ()
    """Ended, and it is not known whether all of it is sequenced."""
    oldest: Period | None = None
    """Kept long enough: it may be dropped, if nothing in it is owed."""


def length_s(keep_s: float | None) -> float:
    """How long a period lasts."""
    if keep_s is None:
        return LENGTH_MAX_S
    return min(max(keep_s / PER_RETENTION, LENGTH_MIN_S), LENGTH_MAX_S)


def due(kind: Kind, periods: Iterable[Period], keep_s: float | None, period_s: float) -> Due:
    """What is due among the periods that are not dropped.

    Args:
        keep_s: since its end, a period is kept for so long.
        period_s: so long a period lasts.
    """
    ours = sorted((p for p in periods if p.kind == kind), key=lambda p: p.number)
    written, oldest = ours[-1], ours[0]
    return Due(
        ends=written if written.age_s >= period_s else None,
        unsettled=tuple(p for p in ours[:-1] if kind == "events" and p.last_batch is None),
        oldest=oldest if oldest is not written and _old_enough(oldest, keep_s) else None,
    )


def _old_enough(period: Period, keep_s: float | None) -> bool:
    if keep_s is None or period.ended_s is None or period.ended_s < keep_s:
        return False
    return period.kind == "log" or period.last_batch is not None


def waiting(high: int, last: int) -> int:
    """Ids above `high` that were given out, of the period that is written.

    What is left of a period that ended was given to nobody.
    """
    return max(last - max(high, (last + 1) // WIDTH * WIDTH - 1), 0)
