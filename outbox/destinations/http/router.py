"""The transport: straight to receivers, or by a proxy.

What goes straight is the hot path, on a client of our own.  aiohttp's connections and parser
carry what goes by a proxy, and everything where `OUTBOX_TRANSPORT` says so; one suite holds
for both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from outbox.core.model.response import Answer, Failure
from outbox.destinations.http.aiohttp.client import AiohttpClient
from outbox.destinations.http.connector import Connecting
from outbox.destinations.http.dns import Names
from outbox.destinations.http.http1.client import WireClient
from outbox.destinations.http.targets import Destinations
from outbox.destinations.http.tls_contexts import SYSTEM_MAX, Contexts
from outbox.destinations.interface import KEEP_ALIVE_S
from outbox.errors import UsageError

if TYPE_CHECKING:
    import ssl
    from collections.abc import Coroutine

    from outbox.destinations.http.dns import Resolver
    from outbox.destinations.http.egress import EgressPolicy
    from outbox.destinations.http.targets import Destination
    from outbox.destinations.interface import Request
    from outbox.web.proxy import Proxy

Kind: TypeAlias = Literal["wire", "aiohttp"]


class Client(Protocol):
    """Speaks HTTP with receivers."""

    async def send(self, destination: Destination, request: Request) -> Answer:
        """See `Transport.send`; the destination was looked at."""
        ...

    async def aclose(self) -> None:
        """Close all connections; what is in flight fails."""
        ...


class Outbound:
    """A `Transport`; use it in the event loop that it was made in.

    Args:
        proxy: connects to receivers outside of open networks.
        kind: how what goes straight is sent.
        tls: in place of the system's trust store, for endpoints without their own.
        resolver: in place of c-ares.
        keep_alive_s: an unused connection is kept so long; None: not at all.
        contexts_max: so many contexts are kept of endpoints that have an identity and no
            trust of their own.
    """

    def __init__(
        self,
        policy: EgressPolicy,
        *,
        proxy: Proxy | None = None,
        kind: Kind = "wire",
        tls: ssl.SSLContext | None = None,
        resolver: Resolver | None = None,
        keep_alive_s: float | None = KEEP_ALIVE_S,
        contexts_max: int = SYSTEM_MAX,
    ) -> None:
        self._destinations = Destinations(policy, proxied=proxy is not None)
        self._resolver = resolver or Names()
        self._contexts = Contexts(tls, system_max=contexts_max)
        connecting = Connecting(policy, self._resolver, self._contexts, proxy)
        straight = WireClient if kind == "wire" else AiohttpClient
        self._straight: Client = straight(connecting, keep_alive_s)
        self._by_proxy: Client | None = None
        if proxy is not None:
            self._by_proxy = AiohttpClient(connecting, keep_alive_s)

    def send(self, request: Request) -> Coroutine[Any, Any, Answer]:
        """See `Transport.send`."""
        # What it is handed to is awaited by whoever asked: one coroutine for a request is enough.
        try:
            destination = self._destinations.of(request)
        except UsageError as error:
            return _refused(str(error))
        client = self._by_proxy if destination.target.by_proxy else self._straight
        assert client is not None  # Without a proxy nothing leaves by one.
        return client.send(destination, request)

    async def aclose(self) -> None:
        """See `Transport.aclose`."""
        await self._straight.aclose()
        if self._by_proxy is not None:
            await self._by_proxy.aclose()
        await self._resolver.aclose()
        self._contexts.close()


async def _refused(why: str) -> Answer:
    return Answer.failed(Failure.EGRESS_REFUSED, why, 0.0)
