"""How many requests may be begun in a second.

A token bucket, kept as one time (the generic cell rate algorithm): in any `t` seconds at
most `rate · (t + SLACK_S) + 1` are begun.  So a limit of 100 in a second lets 11 go at once,
and one of 0.5 lets a single one go every two seconds.
"""

from __future__ import annotations

SLACK_S = 0.1
"""So much of what was not used may be made up for at once."""
RESOLUTION_S = 1e-6
"""A timer may fire so much too soon; waiting once more for that would go on for ever where
a clock cannot tell the difference."""


class Rate:
    """A limit of so many a second; times are seconds of any steady clock."""

    __slots__ = ("_full_at", "_interval_s")

    def __init__(self, per_s: float) -> None:
        self._interval_s = 1.0 / per_s
        # When nothing that was begun weighs on it any more.
        self._full_at = 0.0

    @property
    def ready_at(self) -> float:
        """When the next one may be begun."""
        return self._full_at - SLACK_S

    def ready(self, now: float) -> bool:
        """Whether one may be begun now."""
        return now + RESOLUTION_S >= self._full_at - SLACK_S

    def take(self, now: float) -> None:
        """One is begun."""
        self._full_at = max(self._full_at, now) + self._interval_s

    def change(self, per_s: float, now: float) -> None:
        """The limit is another one from now on; what was begun weighs as much as it would have."""
        interval_s = 1.0 / per_s
        left = max(self._full_at - now, 0.0) / self._interval_s
        self._interval_s = interval_s
        self._full_at = now + left * interval_s
