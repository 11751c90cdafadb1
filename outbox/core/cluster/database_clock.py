"""An estimate of the database's clock from the local steady clock.

All stored times (due retries, expiry of events, hold-offs of receivers) are read by
other replicas later, and many are written by the database itself.  So all of them use
one clock, the database's.  A wrong local clock, or one that is set while the relay
runs, has no effect.

A reported database time lies between the request and its response.  That bounds the
offset between the database's clock and the local steady one; each response narrows the
interval or, if a clock drifts, moves it.
"""

from __future__ import annotations


class DatabaseClock:
    """Converts steady seconds to epoch seconds of the database.

    Args:
        server_time: the database's time, in epoch seconds.
        requested_at: when the request was sent, in steady seconds.
        responded_at: when the response arrived, in steady seconds.
    """

    __slots__ = ("_offset_s",)

    def __init__(self, server_time: float, requested_at: float, responded_at: float) -> None:
        self._offset_s = server_time - (requested_at + responded_at) / 2

    def now(self, steady: float) -> float:
        """The database's time at a time of the steady clock."""
        return steady + self._offset_s

    def adjust(self, server_time: float, requested_at: float, responded_at: float) -> float:
        """Adjust the offset by another response; return the change in seconds.

        A slow response bounds the offset less, and so changes it less.
        """
        was = self._offset_s
        self._offset_s = min(max(was, server_time - responded_at), server_time - requested_at)
        return self._offset_s - was
