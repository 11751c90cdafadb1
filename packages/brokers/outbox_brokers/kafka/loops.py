"""What the threads of clients need from the event loop and from logging."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Protocol, TypeVar, TypeVarTuple

if TYPE_CHECKING:
    from collections.abc import Callable

Args = TypeVarTuple("Args")


class Client(Protocol):
    """A client of the library, which has threads of its own."""

    def discard(self) -> None: ...


C = TypeVar("C", bound=Client)

SILENT = logging.getLogger("outbox_brokers.kafka.librdkafka")
"""Takes librdkafka's log, which goes to standard error otherwise; callbacks report its errors."""
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


async def build_client(factory: Callable[[], C]) -> C:
    """Make a client in a thread; if this is cancelled, the client is discarded."""
    making = asyncio.ensure_future(asyncio.to_thread(factory))
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        making.add_done_callback(_discard_result)
        raise


def _discard_result(making: asyncio.Future[C]) -> None:
    if not making.cancelled() and making.exception() is None:
        making.result().discard()
