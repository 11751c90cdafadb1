"""The contexts for TLS of a transport: made once, aside, and so many.

An endpoint's lanes all ask at the same moment, so whoever comes while a context
is being made waits for that one.  The threads are the transport's own: making
one takes its time, and a hundred of them must not be in the way of whatever else
this process does in threads.

What cannot be made is tried again when it is asked for next; saying so takes
milliseconds.  What comes too late for who asked is there for the next attempt.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from outbox.destinations.http.responses import CLOSED
from outbox.destinations.http.tls import context_for, system_context

if TYPE_CHECKING:
    import ssl

    from outbox.destinations.interface import Tls

THREADS = 2
SYSTEM_MAX = 128
"""So many are kept that trust whom the system trusts.  Each has that store for itself,
most of a megabyte: the ssl module knows no way to share one."""
OWN_MAX = 1024
"""So many are kept that trust whom the endpoint says, in a few dozen kilobytes each."""


class Contexts:
    """The contexts of a transport.

    Args:
        system: for whoever has nothing of its own; None: what the system trusts.
        system_max: instead of `SYSTEM_MAX`.
    """

    def __init__(
        self, system: ssl.SSLContext | None = None, *, system_max: int = SYSTEM_MAX
    ) -> None:
        self._system = system or system_context()
        self._kept: dict[bool, OrderedDict[Tls, ssl.SSLContext]] = {
            True: OrderedDict(),
            False: OrderedDict(),
        }
        """By whether they trust whom the system trusts; used longest ago first."""
        self._kept_max = {True: system_max, False: OWN_MAX}
        self._coming: dict[Tls, asyncio.Future[ssl.SSLContext]] = {}
        self._threads = ThreadPoolExecutor(THREADS, "outbox-tls")

    async def get(self, tls: Tls | None) -> ssl.SSLContext:
        """The context for an endpoint.

        Raises:
            UsageError, ssl.SSLError: it cannot be made.
            ConnectionAbortedError: it was closed before.
        """
        if tls is None:
            return self._system
        kept = self._kept[tls.ca is None]
        context = kept.get(tls)
        if context is not None:
            kept.move_to_end(tls)
            return context
        coming = self._coming.get(tls)
        if coming is None:
            loop = asyncio.get_running_loop()
            coming = loop.run_in_executor(self._threads, context_for, tls)
            self._coming[tls] = coming
            coming.add_done_callback(partial(self._made, tls))
        try:
            # Shielded, because whoever's time is up is not the only one who waits.
            return await asyncio.shield(coming)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if coming.cancelled() and task is not None and not task.cancelling():
                raise ConnectionAbortedError(CLOSED) from None
            raise

    def close(self) -> None:
        """Make none of those that nobody has begun to make."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _made(self, tls: Tls, coming: asyncio.Future[ssl.SSLContext]) -> None:
        del self._coming[tls]
        if coming.cancelled() or coming.exception() is not None:
            return
        trusts_system = tls.ca is None
        kept = self._kept[trusts_system]
        kept[tls] = coming.result()
        if len(kept) > self._kept_max[trusts_system]:
            kept.popitem(last=False)
