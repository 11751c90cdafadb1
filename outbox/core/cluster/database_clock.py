"""The database's clock, told without asking it.

Everything that has a time and is kept (when a retry is due, when an event
expires, until when a receiver wants to be left alone) is read by other replicas
later, and much of it was written by the database itself.  So all of it is told
by one clock, the database's.  A machine whose own clock is wrong, or is set
while the relay runs, then changes nothing.

What the database says is known to be from between the question and the answer.
That leaves an interval for the difference between its clock and our steady one,
and each answer narrows it or, when one of them drifts, moves it.
"""

from __future__ import annotations


class DatabaseClock:
    """Epoch seconds, from steady seconds.

    Args:
        said: what the database said, in epoch seconds;
        asked_at: when it was asked, in steady seconds;
        answered_at: when the answer was there.
    """

    __slots__ = ("_offset_s",)

    def __init__(self, said: float, asked_at: float, answered_at: float) -> None:
        self._offset_s = said - (asked_at + answered_at) / 2

    def now(self, steady: float) -> float:
        """The database's time at this moment of our clock."""
        return steady + self._offset_s

    def heard(self, said: float, asked_at: float, answered_at: float) -> float:
        """Set it by another answer; returns the seconds by which that moved it.

        An answer that took long says little, and moves it little.
        """
        was = self._offset_s
        self._offset_s = min(max(was, said - answered_at), said - asked_at)
        return self._offset_s - was
