"""Detects that events cannot be sequenced, whichever replica leads.

A leader cannot write while another session holds the cursor row, and a standby cannot take the
leadership then, either.  A standby also sees that events wait while the leader writes no batch.
"""

from __future__ import annotations


class StallDetector:
    """Since when nothing could be sequenced; times are seconds of a monotonic clock."""

    __slots__ = ("_batch", "since")

    def __init__(self) -> None:
        self.since: float | None = None
        """The time since which sequencing has failed; None: the last attempt succeeded, or nothing
        waits."""
        # The newest batch at the last poll of a leader.
        self._batch: int | None = None

    def record_success(self) -> None:
        """Record that this replica wrote a batch, or that no event waits."""
        self.since = None

    def record_locked(self, now: float) -> None:
        """Record that another session held the cursor row."""
        if self.since is None:
            self.since = now

    def record_leader(self, batch: int, now: float, *, behind: bool) -> None:
        """Record a poll of the leader.

        Args:
            batch: the newest batch.
            behind: events wait to be sequenced.
        """
        if not behind or batch != self._batch:
            self.since = None
        if behind and self.since is None:
            self.since = now
        self._batch = batch

    def stalled_s(self, now: float) -> float:
        """How long sequencing has been impossible; 0: it works, or nothing waits."""
        return 0.0 if self.since is None else now - self.since
