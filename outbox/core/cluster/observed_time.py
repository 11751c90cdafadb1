"""Observed time: seconds in which a relay ran and could try.

A duration that ends something must not be "now minus a stored time": a relay that was off for
four days, a database that was restored from a dump, or a step of its clock would end it before
anybody had tried.  So the database has an odometer.  One replica adds to it, in the renewals of its
lease, and nobody does while all are off, frozen or without a database.

**Exact.**  The odometer never counts more than real time.  The row of the odometer names its
adder; another replica replaces it when its lease has ended, adds nothing then, and counts from the
*response*.  Later it adds the time from the start of one renewal to the start of the next.  The
lock of the row orders the additions of two adders, and the second one's time begins after the last
start of the first one, so no second is counted twice, whatever they believe.  A change of adder
loses at most a lease and two renewal intervals.

**Marks.**  A stored time has no reading of its own.  Every minute the adder stores a mark, the
reading with the database's time, and the reading at a stored time is looked up between two marks.
If the clock is set forward, that is exact.  If it is set back, the times of the repeated hours
count from their second pass: too little, never too much.

**Grace period.**  Observed time is that of the cluster.  The owner of an endpoint may be new, or
have had no network, so before something ends it must have tried itself: see `GracePeriod`.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from outbox.core.model.retry_policy import RetryPolicy

MARK_EVERY_S = 60.0
"""Observed seconds between two marks."""
GRACE_RESPONSES, GRACE_PERIOD_S_MAX = 5, 600.0
"""What a new owner needs before something ends: completed attempts, and at most so many observed
seconds.  With more, a receiver with long back-off steps would never end where relays are replaced
every day."""


class Odometer:
    """Looks up observed time, from the marks and the last reading; times are epoch seconds."""

    __slots__ = ("_readings", "_times", "observed_s")

    def __init__(self) -> None:
        self.observed_s = 0.0
        """The last reading."""
        # Marks with increasing readings and times: of marks whose time is repeated, because the
        # clock was set back, only the later ones.
        self._readings: list[float] = []
        self._times: list[float] = []

    @property
    def marked_s(self) -> float:
        """The reading of the last mark; `update` takes the marks from this one on."""
        return self._readings[-1] if self._readings else 0.0

    def update(self, observed_s: float, marks: Iterable[tuple[float, float]]) -> None:
        """Set the reading, and add marks (reading, time) in the order of their readings."""
        self.observed_s = observed_s
        for reading, at in marks:
            while self._readings and (self._readings[-1] >= reading or self._times[-1] >= at):
                self._readings.pop()
                self._times.pop()
            self._readings.append(reading)
            self._times.append(at)

    def since(self, at: float) -> float:
        """Seconds that were observed since a stored time."""
        return max(self.observed_s - self._reading_at(at), 0.0)

    def between(self, start: float, end: float) -> float:
        """Seconds that were observed between two stored times."""
        return max(self._reading_at(end) - self._reading_at(start), 0.0)

    def _reading_at(self, at: float) -> float:
        """The highest possible reading at a time; before the first mark it is that of this mark."""
        following = bisect_right(self._times, at)
        is_last = following == len(self._times)
        highest = self.observed_s if is_last else self._readings[following]
        if following == 0:
            return highest
        known = following - 1
        return min(self._readings[known] + at - self._times[known], highest)


class OdometerAdder:
    """What a replica adds to the odometer; times are seconds of its steady clock.

    Args:
        addition_s_max: maximum of one addition.
    """

    __slots__ = ("_addition_s_max", "_counted_until")

    def __init__(self, addition_s_max: float) -> None:
        self._addition_s_max = addition_s_max
        # None: another replica adds.
        self._counted_until: float | None = None

    def addition_s(self, started_at: float) -> float | None:
        """What a renewal that starts now adds; None: nothing, and it may become the adder."""
        if self._counted_until is None:
            return None
        return min(max(started_at - self._counted_until, 0.0), self._addition_s_max)

    def renewed(self, started_at: float, responded_at: float, *, adds: bool) -> None:
        """Record a confirmed renewal, and whether this replica is the adder."""
        if not adds:
            self._counted_until = None
        elif self._counted_until is None:
            # What was added by an earlier adder had started before this response.
            self._counted_until = responded_at
        else:
            self._counted_until = started_at


class GracePeriod:
    """What an owner must have tried at an endpoint before something ends there.

    It begins with each claim, and anew while the relay lacks resources for connections, or
    the endpoint's plug-in.  It does not apply to lanes that are not tried (paused, blocked, held):
    it would never be over for them.

    Args:
        observed_s: the odometer's reading at the claim.
    """

    __slots__ = ("_began_s", "responses")

    def __init__(self, observed_s: float) -> None:
        self._began_s = observed_s
        self.responses = 0
        """Completed attempts and probes that did not fail by a fault of the relay."""

    def is_over(
        self, policy: RetryPolicy, limit_s: float, observed_s: float, *, probes: bool = True
    ) -> bool:
        """Whether something may end.

        Args:
            probes: whether the endpoint is probed.  Otherwise its attempts may be hours apart, and
                one response is enough.
            limit_s: the time after which it ends; the grace period is not longer.
            observed_s: the odometer's reading.
        """
        if self.responses < min(GRACE_RESPONSES if probes else 1, policy.attempts_max):
            return False
        period_s = min(policy.longest_delay_s, GRACE_PERIOD_S_MAX, limit_s)
        return observed_s - self._began_s >= period_s
