"""Rules for a child process: when it counts as stuck, and when it is started again.

Silence is counted in ticks of the parent, not in seconds: while the parent itself stood still, it
could hear nothing.  A silent child that uses the CPU or waits for it is busy, such as with a large
page on a machine without a free core; one that does neither is frozen.
"""

from __future__ import annotations

from pathlib import Path

HEARTBEAT_S = 0.5
"""Interval of heartbeats, and of looking for them."""
FROZEN_TICKS = 4
"""Ticks without a heartbeat, without CPU time and without waiting for it after which a child is
stuck."""
BUSY_TICKS = 60
"""Ticks without a heartbeat after which it is stuck in any case; also while it starts."""
CHILD_RESTART_MIN_S, CHILD_RESTART_MAX_S = 0.5, 60.0
"""Pause before a child is started again, doubled by each end in a row."""
STEADY_TICKS = 120
"""Ticks with a heartbeat after which an end is not in a row with the one before."""


class ChildWatch:
    """The state of one child after the other."""

    def __init__(self) -> None:
        self._pause_s = CHILD_RESTART_MIN_S
        self.begin()

    def begin(self) -> None:
        """A child was started."""
        self._silent = self._idle = self._received = 0
        self._cpu: int | None = None

    def receive(self) -> None:
        """It sent a heartbeat."""
        self._silent = self._idle = 0
        self._received += 1
        if self._received == STEADY_TICKS:
            self._pause_s = CHILD_RESTART_MIN_S

    def tick(self, cpu: int | None) -> str | None:
        """Count a tick; returns why the child is stuck, or None.

        Args:
            cpu: the CPU time that it has used, in any unit; None: unknown, or it waits for more.
        """
        self._silent += 1
        is_idle = cpu is not None and cpu == self._cpu
        self._cpu = cpu
        self._idle = self._idle + 1 if is_idle else 0
        if self._received and self._idle >= FROZEN_TICKS:
            return f"it was frozen for {FROZEN_TICKS * HEARTBEAT_S:g} s"
        if self._silent >= BUSY_TICKS:
            return f"it did not respond for {BUSY_TICKS * HEARTBEAT_S:g} s"
        return None

    def end(self) -> float:
        """The child has ended; returns the seconds until it is started again."""
        pause_s = self._pause_s
        self._pause_s = min(pause_s * 2, CHILD_RESTART_MAX_S)
        return pause_s


def cpu_time(pid: int) -> int | None:
    """The CPU time of a process in clock ticks; None: unknown, or it waits for a processor or disk.

    A process that waits so is not frozen, although it may use no time for seconds.

    Source: proc_pid_stat(5): state, utime and stime.
    """
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2]
    except OSError:
        return None
    fields = after_name.split()
    if fields[0] in "RD":
        return None
    return int(fields[11]) + int(fields[12])
