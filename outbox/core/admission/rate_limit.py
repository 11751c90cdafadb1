"""Rate limit: how many requests may start per second.

A token bucket stored as one time (the generic cell rate algorithm): in any `t` seconds at most
`rate · (t + RATE_SLACK_S) + 1` requests start.  So a limit of 100 per second admits 11 at once, and
one of 0.5 admits a single request every two seconds.
"""

from __future__ import annotations

RATE_SLACK_S = 0.1
"""The burst, as seconds of unused rate."""
RESOLUTION_S = 1e-6
"""Tolerance for timers that fire early; waiting again for less than a clock's resolution would
loop for ever."""


class RateLimit:
    """A limit of requests per second; times are seconds of any monotonic clock."""

    __slots__ = ("_full_at", "_interval_s")

    def __init__(self, per_s: float) -> None:
        self._interval_s = 1.0 / per_s
        # When the bucket is full again.
        self._full_at = 0.0

    @property
    def ready_at(self) -> float:
        """When the next request may start."""
        return self._full_at - RATE_SLACK_S

    def ready(self, now: float) -> bool:
        """Whether a request may start now."""
        return now + RESOLUTION_S >= self._full_at - RATE_SLACK_S

    def consume(self, now: float) -> None:
        """Take a token for a request that starts."""
        self._full_at = max(self._full_at, now) + self._interval_s

    def change_rate(self, per_s: float, now: float) -> None:
        """Change the limit; the number of used tokens stays."""
        interval_s = 1.0 / per_s
        left = max(self._full_at - now, 0.0) / self._interval_s
        self._interval_s = interval_s
        self._full_at = now + left * interval_s
