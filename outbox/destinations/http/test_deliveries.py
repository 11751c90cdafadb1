"""Trials for whoever asks the API for them: a few at once, beside the deliveries.

They run in the relay's process, so they are bounded in number and time, and have
one transport for all, which is not the deliveries': it keeps no connections,
since a trial is about the whole way, and few contexts.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

from outbox.destinations.http import test_delivery
from outbox.destinations.http.router import Outbound
from outbox.destinations.http.tls import system_context

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outbox.destinations.http.egress import EgressPolicy
    from outbox.destinations.http.test_delivery import Tried
    from outbox.destinations.interface import Transport
    from outbox.web.proxy import Proxy

TRIAL_S = 30.0
"""An endpoint's own time-out may be longer; who waits that long may use the command."""
AT_ONCE_MAX = 8
TENANT_MAX = 2
"""Of one tenant, so that a few slow receivers are in nobody else's way."""
RETRY_S = 5
"""Whoever was one too many may come again after so long."""
CONTEXTS_MAX = 8


class TooMany(Exception):
    """As many trials as there may be are under way."""


class Trials:
    """Trials of endpoints from this process.

    Args:
        proxy: deliveries leave by it.
    """

    def __init__(self, policy: EgressPolicy, proxy: Proxy | None = None) -> None:
        self._policy = policy
        self._proxy = proxy
        self._transport: Transport | None = None
        self._making = asyncio.Lock()
        self._running: Counter[str | None] = Counter()

    async def attempt(self, endpoint: Tried, tenant: str | None) -> test_delivery.Trial:
        """Send one signed delivery of the type `outbox.test`, within `TRIAL_S`.

        Args:
            tenant: whose token asks for it; None: an operator's.

        Raises:
            TooMany: are under way.
        """
        with self._place(tenant):
            return await test_delivery.attempt(await self._shared(), endpoint, total_s_max=TRIAL_S)

    async def aclose(self) -> None:
        """Close what is open; trials under way fail."""
        if self._transport is not None:
            await self._transport.aclose()

    @contextmanager
    def _place(self, tenant: str | None) -> Iterator[None]:
        if self._running.total() >= AT_ONCE_MAX:
            raise TooMany(f"{AT_ONCE_MAX} test deliveries are under way")
        if tenant is not None and self._running[tenant] >= TENANT_MAX:
            raise TooMany(f"{TENANT_MAX} test deliveries of this tenant are under way")
        self._running[tenant] += 1
        try:
            yield
        finally:
            self._running[tenant] -= 1
            if not self._running[tenant]:
                del self._running[tenant]

    async def _shared(self) -> Transport:
        async with self._making:
            if self._transport is None:
                # In a thread: reading the system's trust store takes its time.
                self._transport = Outbound(
                    self._policy,
                    proxy=self._proxy,
                    tls=await asyncio.to_thread(system_context),
                    keep_alive_s=None,
                    contexts_max=CONTEXTS_MAX,
                )
            return self._transport
