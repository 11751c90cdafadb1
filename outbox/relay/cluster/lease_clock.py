"""The clock by which a relay believes in its lease.

It must go on while the machine is suspended: a replica that slept through its
lease has to know that when it wakes.  Linux calls such a clock BOOTTIME; on macOS
MONOTONIC is one, and so is Python's own on Windows.  The event loop's clock may
stand still meanwhile, so its timers are late by as much: whoever waits for the
end of a lease looks at this clock whenever anything wakes it.

A machine that is stopped from outside (a virtual one that is paused) may have no
clock that goes on.  Then only the database keeps a replica from writing, and what
it still sends are copies that receivers recognise.
"""

from __future__ import annotations

import time

_NUMBER: int | None = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))


def steady() -> float:
    """Seconds since some moment: nobody sets it, and it goes on in a sleeping machine."""
    return time.monotonic() if _NUMBER is None else time.clock_gettime(_NUMBER)
