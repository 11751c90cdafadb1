"""What the threads of clients need from the event loop and from logging."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeVarTuple

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

Args = TypeVarTuple("Args")

SILENT = logging.getLogger("outbox.destinations.kafka.librdkafka")
"""Takes librdkafka's log, which goes to standard error otherwise; errors have other ways."""
SILENT.addHandler(logging.NullHandler())
SILENT.propagate = False
SILENT.setLevel(logging.CRITICAL)


def call_in_loop(
    loop: asyncio.AbstractEventLoop, callback: Callable[[*Args], object], *args: *Args
) -> bool:
    """Call back in the loop's thread; False: the loop is closed."""
    try:
        loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:
        return False
    return True
