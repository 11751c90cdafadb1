"""Cache of TLS contexts, created once each in a thread pool.

All lanes of an endpoint need its context at the same time, so concurrent requests share one
creation (single flight).  The thread pool is separate, because creating many contexts must
not delay other work of the process in threads.

Failures are not cached: the next request tries again, which takes milliseconds.  A context
that is ready after its request timed out is cached for the next attempt.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from outbox.network.errors import TRANSPORT_CLOSED
from outbox.network.tls import endpoint_context, system_context

if TYPE_CHECKING:
    import ssl

    from outbox.network.tls import Tls

TLS_CONTEXT_THREADS = 2
SYSTEM_MAX = 128
"""Maximum number of cached contexts with the system trust store.  Each has a copy of it, most of
a megabyte, because the ssl module cannot share one."""
OWN_MAX = 1024
"""Maximum number of cached contexts with CA certificates of the endpoint (some dozen KB each)."""


class ContextCache:
    """TLS contexts of a transport.

    Args:
        system: context for endpoints without TLS settings; None: the system trust store.
        system_max: replaces `SYSTEM_MAX`.
    """

    def __init__(
        self, system: ssl.SSLContext | None = None, *, system_max: int = SYSTEM_MAX
    ) -> None:
        self._system = system or system_context()
        self._cache: dict[bool, OrderedDict[Tls, ssl.SSLContext]] = {
            True: OrderedDict(),
            False: OrderedDict(),
        }
        """Contexts by whether they use the system trust store, the least recently used first."""
        self._size_max = {True: system_max, False: OWN_MAX}
        self._pending: dict[Tls, asyncio.Future[ssl.SSLContext]] = {}
        self._threads = ThreadPoolExecutor(TLS_CONTEXT_THREADS, "outbox-tls")

    async def get(self, tls: Tls | None) -> ssl.SSLContext:
        """Return the context for an endpoint.

        Raises:
            UsageError, ssl.SSLError: the TLS settings are not usable.
            ConnectionAbortedError: the transport was closed.
        """
        if tls is None:
            return self._system
        cached = self._cache[tls.ca is None]
        context = cached.get(tls)
        if context is not None:
            cached.move_to_end(tls)
            return context
        pending = self._pending.get(tls)
        if pending is None:
            loop = asyncio.get_running_loop()
            pending = loop.run_in_executor(self._threads, endpoint_context, tls)
            self._pending[tls] = pending
            pending.add_done_callback(partial(self._store, tls))
        try:
            # Shielded: the time-out of one waiter must not cancel the others.
            return await asyncio.shield(pending)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if pending.cancelled() and task is not None and not task.cancelling():
                raise ConnectionAbortedError(TRANSPORT_CLOSED) from None
            raise

    def close(self) -> None:
        """Cancel creations that have not started."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _store(self, tls: Tls, pending: asyncio.Future[ssl.SSLContext]) -> None:
        del self._pending[tls]
        if pending.cancelled() or pending.exception() is not None:
            return
        trusts_system = tls.ca is None
        cached = self._cache[trusts_system]
        cached[tls] = pending.result()
        if len(cached) > self._size_max[trusts_system]:
            cached.popitem(last=False)
