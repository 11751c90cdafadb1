"""Deliveries by HTTP, directly or through a proxy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.core.model.response import AttemptResult, Failure
from outbox.destinations.http.http1.client import Http1Client
from outbox.destinations.http.targets import DestinationCache
from outbox.destinations.interface import IDLE_BYTES_MAX, KEEP_ALIVE_S
from outbox.errors import UsageError
from outbox.network.connector import ConnectionOpener
from outbox.network.dns import CachingResolver
from outbox.network.tls_contexts import SYSTEM_MAX, ContextCache

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Coroutine

    from outbox.destinations.interface import Following, Request
    from outbox.network.dns import Resolver
    from outbox.network.egress import EgressPolicy
    from outbox.web.proxy import Proxy


class HttpTransport:
    """A `Transport`, bound to the event loop in which it was created.

    Args:
        proxy: CONNECT proxy for receivers outside of open networks.
        tls: replaces the system trust store for endpoints without their own.
        resolver: replaces c-ares.
        keep_alive_s: idle time-out of pooled connections; None: no pooling.
        idle_bytes_max: what pooled connections may take in memory.
        contexts_max: maximum number of cached TLS contexts of endpoints with a client
            certificate and the system trust store.
    """

    def __init__(
        self,
        policy: EgressPolicy,
        *,
        proxy: Proxy | None = None,
        tls: ssl.SSLContext | None = None,
        resolver: Resolver | None = None,
        keep_alive_s: float | None = KEEP_ALIVE_S,
        idle_bytes_max: int = IDLE_BYTES_MAX,
        contexts_max: int = SYSTEM_MAX,
    ) -> None:
        self._destinations = DestinationCache(policy, proxied=proxy is not None)
        self._resolver = resolver or CachingResolver()
        self._contexts = ContextCache(tls, system_max=contexts_max)
        opener = ConnectionOpener(policy, self._resolver, self._contexts, proxy)
        self._client = Http1Client(opener, self._resolver, keep_alive_s, idle_bytes_max)

    def send(
        self,
        request: Request,
        following: Following | None = None,
        before_write: Callable[[], object] | None = None,
    ) -> Coroutine[Any, Any, AttemptResult]:
        # Returns the client's coroutine instead of awaiting it: one coroutine per request.
        try:
            destination = self._destinations.resolve(request.recipient)
        except UsageError as error:
            return _refused(str(error))
        return self._client.send(destination, request, following, before_write)

    async def aclose(self) -> None:
        await self._client.aclose()
        await self._resolver.aclose()
        self._contexts.close()


async def _refused(reason: str) -> AttemptResult:
    return AttemptResult.failed(Failure.EGRESS_REFUSED, reason, 0.0)
