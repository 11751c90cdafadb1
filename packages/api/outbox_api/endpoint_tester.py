"""Test deliveries for the API, with limits on concurrency and time.

They run in the process of the API with a transport of their own, which has no connection pool,
because a test covers DNS, connect and TLS as well, and a small TLS context cache.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

from outbox.core.model.destination import is_stream
from outbox.core.model.stored_response import generalize_elapsed_s
from outbox.destinations import endpoint_test
from outbox.destinations.broker_check import run_broker_test
from outbox.destinations.http.transport import HttpTransport
from outbox.network.tls import system_context

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outbox.core.delivery.endpoint import Endpoint
    from outbox.destinations.interface import Transport
    from outbox.network.egress import EgressPolicy
    from outbox.web.proxy import Proxy

TEST_S = 30.0
"""Maximum duration; `outbox endpoint test` uses the endpoint's full time-out."""
CONCURRENT_MAX, TENANTS_MAX = 8, 6
"""Test deliveries at a time, and those of all tenants together."""
TENANT_MAX = 2
"""Those of a tenant, so that slow receivers of one tenant do not block others."""
TEST_RETRY_S = 5
"""Retry-After when the limit is reached."""
CONTEXTS_MAX = 8


class TooManyTests(Exception):
    """The limit of concurrent test deliveries is reached."""


class EndpointTester:
    """Sends test deliveries from this process.

    Args:
        proxy: proxy of the relay's deliveries.
    """

    def __init__(self, policy: EgressPolicy, proxy: Proxy | None = None) -> None:
        self._policy = policy
        self._proxy = proxy
        self._transport: Transport | None = None
        self._transport_lock = asyncio.Lock()
        self._running: Counter[str | None] = Counter()

    async def run_test(
        self, endpoint: Endpoint, tenant: str | None
    ) -> endpoint_test.EndpointTestResult:
        """Send one signed delivery of the type `outbox.test`, within `TEST_S`.

        For a tenant, a failure to connect takes whole seconds: how fast it failed would show
        whether a name leads into the relay's network.

        Args:
            tenant: tenant of the token; None: a system token.

        Raises:
            TooManyTests: the limit is reached.
        """
        with self._slot(tenant):
            started_at = asyncio.get_running_loop().time()
            if is_stream(endpoint.url):
                async with asyncio.timeout(TEST_S):
                    result = await run_broker_test(endpoint, self._policy)
            else:
                transport = await self._get_transport()
                result = await endpoint_test.send_test_delivery(
                    transport, endpoint, total_s_max=TEST_S
                )
            if tenant is not None:
                elapsed_s = asyncio.get_running_loop().time() - started_at
                shown_s = generalize_elapsed_s(result.response.get("failure"), elapsed_s)
                await asyncio.sleep(shown_s - elapsed_s)
            return result

    async def aclose(self) -> None:
        """Close the transport; running test deliveries fail."""
        if self._transport is not None:
            await self._transport.aclose()

    @contextmanager
    def _slot(self, tenant: str | None) -> Iterator[None]:
        if self._running.total() >= CONCURRENT_MAX:
            raise TooManyTests(f"{CONCURRENT_MAX} test deliveries are already running")
        if tenant is not None:
            if self._running[tenant] >= TENANT_MAX:
                raise TooManyTests(
                    f"{TENANT_MAX} test deliveries of this tenant are already running"
                )
            if self._running.total() - self._running[None] >= TENANTS_MAX:
                raise TooManyTests(f"{TENANTS_MAX} test deliveries of tenants are already running")
        self._running[tenant] += 1
        try:
            yield
        finally:
            self._running[tenant] -= 1
            if not self._running[tenant]:
                del self._running[tenant]

    async def _get_transport(self) -> Transport:
        async with self._transport_lock:
            if self._transport is None:
                # In a thread: loading the system trust store is slow.
                self._transport = HttpTransport(
                    self._policy,
                    proxy=self._proxy,
                    tls=await asyncio.to_thread(system_context),
                    keep_alive_s=None,
                    contexts_max=CONTEXTS_MAX,
                )
            return self._transport
