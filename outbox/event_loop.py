"""The event loop of the processes that serve: `outbox relay` and `outbox api`."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """uvloop's event loop if it is installed, for cheaper sockets and timers."""
    try:
        import uvloop
    except ImportError:  # Windows
        return asyncio.new_event_loop
    return uvloop.new_event_loop


def allow_many_sockets() -> None:
    """Raise the limit of open files to the hard limit, because idle connections stay open."""
    try:
        import resource
    except ImportError:  # Not available on Windows.
        return
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
