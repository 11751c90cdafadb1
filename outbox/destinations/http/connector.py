"""How a connection comes about: resolved, guarded, encrypted.

The guard is asked about the final address of every connection, whatever it came from, and
right before it is opened.
"""

from __future__ import annotations

import asyncio
import functools
import os
import socket
import ssl
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from aiohappyeyeballs import start_connection

from outbox.core.model.response import Failure
from outbox.destinations.http.dns import Unresolved
from outbox.destinations.http.egress import literal
from outbox.destinations.http.proxy_tunnel import Tunnel
from outbox.destinations.http.tls import reason, system_context
from outbox.destinations.interface import NotConnected
from outbox.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox.destinations.http.dns import Resolver
    from outbox.destinations.http.egress import EgressPolicy, Network
    from outbox.destinations.http.tls_contexts import Contexts
    from outbox.destinations.interface import Tls
    from outbox.web.proxy import Proxy

P = TypeVar("P", bound=asyncio.Protocol)

ADDRESSES_TRIED_MAX = 4
"""A name may have a thousand addresses at which nobody answers."""
NEXT_ADDRESS_S = 0.25
"""So long an address has before the next one is tried beside it (RFC 8305, 5)."""
GOODBYE_S = 1.0
"""So long a receiver has to end TLS with us."""


class Target(NamedTuple):
    """Whom a connection is to, and under which rules; the key of its pool."""

    secure: bool
    host: str
    port: int
    networks: tuple[Network, ...]
    tls: Tls | None
    by_proxy: bool

    # aiohttp's connector takes a request for its part and asks it for these.
    @property
    def proxy(self) -> None:
        return None

    @property
    def connection_key(self) -> Target:
        return self

    @property
    def is_ssl(self) -> bool:
        return self.secure


class Connecting:
    """Opens connections.

    Args:
        proxy: connects to receivers outside of open networks.
    """

    def __init__(
        self,
        policy: EgressPolicy,
        resolver: Resolver,
        contexts: Contexts,
        proxy: Proxy | None = None,
    ) -> None:
        self._policy = policy
        self._resolver = resolver
        self._contexts = contexts
        self._proxy = proxy
        self._to_proxy = system_context() if proxy is not None and proxy.secure else None
        self._loop = asyncio.get_running_loop()

    async def open(self, target: Target, factory: Callable[[], P], timeout_s: float) -> P:
        """A new connection, which is what `factory` made.

        Raises:
            NotConnected: there is none.
        """
        try:
            async with asyncio.timeout(timeout_s) as limit:
                if target.by_proxy:
                    return await self._by_proxy(target, factory)
                return await self._directly(target, factory)
        except TimeoutError as error:
            if not limit.expired():
                raise _failed(error, target.host, target.port) from error
            raise NotConnected(Failure.TIMEOUT, f"no connection within {timeout_s:g} s") from None
        except (OSError, UsageError) as error:
            raise _failed(error, target.host, target.port) from error

    async def _directly(self, target: Target, factory: Callable[[], P]) -> P:
        context = await self._contexts.get(target.tls) if target.secure else None
        refusal = functools.partial(
            self._policy.refusal, port=target.port, tls=target.secure, networks=target.networks
        )
        reached = await self._reach(target.host, target.port, refusal)
        _, protocol = await self._speak(factory, reached, context, target.host)
        return protocol

    async def _by_proxy(self, target: Target, factory: Callable[[], P]) -> P:
        proxy = self._proxy
        assert proxy is not None
        # Of names the proxy finds the addresses; the rest can be said here.
        why = self._policy.refusal_by_proxy(target.host, port=target.port, networks=target.networks)
        if why is not None:
            raise NotConnected(Failure.EGRESS_REFUSED, why)
        context = await self._contexts.get(target.tls)
        try:
            # Its address is the operator's own choice.
            reached = await self._reach(proxy.host, proxy.port, lambda _: None)
            transport, tunnel = await self._speak(Tunnel, reached, self._to_proxy, proxy.host)
        except (OSError, NotConnected) as error:
            failed = error if isinstance(error, NotConnected) else None
            failed = failed or _failed(error, proxy.host, proxy.port)
            raise NotConnected(Failure.CONNECT, f"the proxy: {failed.detail}") from error
        try:
            await tunnel.open(proxy, target.host, target.port)
            protocol = factory()
            inner = await self._loop.start_tls(
                transport,
                protocol,
                context,
                server_hostname=_name(target.host),
                ssl_shutdown_timeout=GOODBYE_S,
            )
            if inner is None:
                raise ConnectionResetError("the connection was closed before TLS")
            protocol.connection_made(inner)
        except BaseException:
            transport.abort()
            raise
        return protocol

    async def _reach(
        self, host: str, port: int, refusal: Callable[[str], str | None]
    ) -> socket.socket:
        """Connect to one of a host's addresses for which there is no refusal."""
        try:
            found = [host] if literal(host) is not None else await self._resolver.resolve(host)
        except Unresolved as error:
            raise NotConnected(Failure.DNS, f"{host}: {error}") from None
        allowed: list[str] = []
        refused = ""
        for address in found:
            if (why := refusal(address)) is None:
                allowed.append(address)
            refused = refused or why or ""
        if not allowed:
            raise NotConnected(Failure.EGRESS_REFUSED, refused)
        return await start_connection(
            [_info(address, port) for address in allowed[:ADDRESSES_TRIED_MAX]],
            happy_eyeballs_delay=NEXT_ADDRESS_S,
            loop=self._loop,
        )

    async def _speak(
        self,
        factory: Callable[[], P],
        reached: socket.socket,
        context: ssl.SSLContext | None,
        host: str,
    ) -> tuple[asyncio.Transport, P]:
        if context is None:
            return await self._loop.create_connection(factory, sock=reached)
        return await self._loop.create_connection(
            factory,
            sock=reached,
            ssl=context,
            server_hostname=_name(host),
            ssl_shutdown_timeout=GOODBYE_S,
        )


def _info(address: str, port: int) -> Any:
    if ":" in address:
        return (socket.AF_INET6, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, port, 0, 0))
    return (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, port))


def _name(host: str) -> str:
    """The name in a certificate, which does not end with a dot."""
    return host.rstrip(".")


def _failed(error: Exception, host: str, port: int) -> NotConnected:
    if isinstance(error, ssl.SSLError):
        return NotConnected(Failure.TLS, f"{reason(error)} at {host}:{port}")
    if isinstance(error, UsageError):
        return NotConnected(Failure.TLS, str(error))
    # What the system says, without what asyncio puts in its place.
    said = os.strerror(number) if (number := getattr(error, "errno", None)) else str(error)
    return NotConnected(Failure.CONNECT, f"{said[:1].lower()}{said[1:]} at {host}:{port}")
