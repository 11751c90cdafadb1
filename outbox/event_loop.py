"""The event loop of the processes that serve, `outbox relay` and `outbox api`, and their memory."""

from __future__ import annotations

import asyncio
import gc
import signal
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
OPEN_FILES_MAX = 65_536
"""A higher limit is of no use: idle connections are bounded by their memory, too.  Some systems say
that there is no limit, and refuse a high one."""
YOUNG_OBJECTS_MAX = 10_000
"""Allocations that trigger a collection of the youngest generation."""


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """uvloop's event loop if it is installed, for cheaper sockets and timers."""
    try:
        import uvloop
    except ImportError:  # Windows
        return asyncio.new_event_loop
    return uvloop.new_event_loop


def allow_many_sockets() -> None:
    """Raise the limit of open files as far as it may be, because idle connections stay open."""
    try:
        import resource
    except ImportError:  # Not available on Windows.
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def collect_rarely() -> None:
    """Collect cycles rarely; call it when everything is imported."""
    # Imported modules are permanent: freeze them, so that collections do not scan them.
    gc.collect()
    gc.freeze()
    # A delivery allocates hundreds of objects and no cycles; with the default threshold,
    # the cycle collector took 4 % of the CPU time.
    gc.set_threshold(YOUNG_OBJECTS_MAX, *gc.get_threshold()[1:])
