"""Transport router: direct deliveries, or deliveries through a proxy.

Direct deliveries are the hot path and use our own HTTP/1.1 client.  aiohttp's connections and
parser handle proxied deliveries, and all deliveries if `OUTBOX_TRANSPORT` is set to it.  Both
pass the same conformance suite.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from outbox.core.model.response import AttemptResult, Failure
from outbox.destinations.http.aiohttp.client import AiohttpClient
from outbox.destinations.http.connector import ConnectionOpener
from outbox.destinations.http.dns import CachingResolver
from outbox.destinations.http.http1.client import Http1Client
from outbox.destinations.http.targets import DestinationCache
from outbox.destinations.http.tls_contexts import SYSTEM_MAX, ContextCache
from outbox.destinations.interface import KEEP_ALIVE_S
from outbox.errors import UsageError

if TYPE_CHECKING:
    import ssl
    from collections.abc import Coroutine

    from outbox.destinations.http.dns import Resolver
    from outbox.destinations.http.egress import EgressPolicy
    from outbox.destinations.http.targets import Destination
    from outbox.destinations.interface import Following, Request
    from outbox.web.proxy import Proxy

TransportKind: TypeAlias = Literal["wire", "aiohttp"]


class Client(Protocol):
    """HTTP client for receivers."""

    async def send(
        self, destination: Destination, request: Request, following: Following | None
    ) -> AttemptResult:
        """See `Transport.send`; the destination passed the URL check."""
        ...

    async def aclose(self) -> None:
        """Close all connections; requests in flight fail."""
        ...


class TransportRouter:
    """A `Transport`, bound to the event loop in which it was created.

    Args:
        proxy: CONNECT proxy for receivers outside of open networks.
        kind: client for direct deliveries.
        tls: replaces the system trust store for endpoints without their own.
        resolver: replaces c-ares.
        keep_alive_s: idle time-out of pooled connections; None: no pooling.
        contexts_max: maximum number of cached TLS contexts of endpoints with a client
            certificate and the system trust store.
    """

    def __init__(
        self,
        policy: EgressPolicy,
        *,
        proxy: Proxy | None = None,
        kind: TransportKind = "wire",
        tls: ssl.SSLContext | None = None,
        resolver: Resolver | None = None,
        keep_alive_s: float | None = KEEP_ALIVE_S,
        contexts_max: int = SYSTEM_MAX,
    ) -> None:
        self._destinations = DestinationCache(policy, proxied=proxy is not None)
        self._resolver = resolver or CachingResolver()
        self._contexts = ContextCache(tls, system_max=contexts_max)
        opener = ConnectionOpener(policy, self._resolver, self._contexts, proxy)
        direct_client = Http1Client if kind == "wire" else AiohttpClient
        self._direct: Client = direct_client(opener, keep_alive_s)
        self._proxied: Client | None = None
        if proxy is not None:
            self._proxied = AiohttpClient(opener, keep_alive_s)

    def send(
        self, request: Request, following: Following | None = None
    ) -> Coroutine[Any, Any, AttemptResult]:
        # Returns the client's coroutine instead of awaiting it: one coroutine per request.
        try:
            destination = self._destinations.resolve(request.recipient)
        except UsageError as error:
            return _refused(str(error))
        client = self._proxied if destination.target.via_proxy else self._direct
        assert client is not None  # Only set if a proxy is configured.
        return client.send(destination, request, following)

    async def aclose(self) -> None:
        await self._direct.aclose()
        if self._proxied is not None:
            await self._proxied.aclose()
        await self._resolver.aclose()
        self._contexts.close()


async def _refused(reason: str) -> AttemptResult:
    return AttemptResult.failed(Failure.EGRESS_REFUSED, reason, 0.0)
