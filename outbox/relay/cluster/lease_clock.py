"""The clocks of a relay's machine; first of all the monotonic clock of a lease.

It must advance while the machine is suspended, so that a replica notices on resume
that its lease has expired.  On Linux that is CLOCK_BOOTTIME; on macOS CLOCK_MONOTONIC
does so, and so does Python's own clock on Windows.  The event loop's clock may stop
during a suspend, which delays its timers: a task that waits for the end of a lease
reads this clock at every wake-up.

A paused virtual machine may have no clock that advances.  Then only the fence in the
database stops the replica from writing, and requests that it still sends are
duplicates that receivers recognise.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_NUMBER: int | None = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))

# A partial, because it is read several times per delivery, and a function takes half as long again.
steady: Callable[[], float] = (
    time.monotonic if _NUMBER is None else partial(time.clock_gettime, _NUMBER)
)
"""Monotonic seconds that include the time in which the machine is suspended."""


def wall() -> float:
    """This machine's clock in epoch seconds, which may be wrong and may be set."""
    return time.time()
