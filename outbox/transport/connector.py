"""Connections: resolved, guarded, encrypted, and kept apart.

aiohttp's pool keeps them; how one comes about is told here, because a
connector of aiohttp's does not know for whom it connects.  The guard is asked
about the final address of every connection, whatever it came from, and right
before it is opened.

A kept connection is one of the `Target` that it was made for, and of no other:
what is open for one endpoint, or trusted by it, or says who we are, is nothing
to its neighbour with the same URL.
"""

from __future__ import annotations

import asyncio
import functools
import os
import socket
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

import aiohttp
from aiohappyeyeballs import start_connection

from outbox.core.answer import Failure
from outbox.errors import UsageError
from outbox.transport.egress import literal
from outbox.transport.port import NotConnected
from outbox.transport.protocol import Protocol
from outbox.transport.resolving import Unresolved
from outbox.transport.tls import reason, system_context
from outbox.transport.tunnel import Tunnel

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp.connector import Connection

    from outbox.transport.contexts import Contexts
    from outbox.transport.egress import EgressPolicy, Network
    from outbox.transport.port import Tls
    from outbox.transport.resolving import Resolver
    from outbox.web.proxy import Proxy

POOLS_MAX = 1024
"""So many targets have kept connections; those of others are closed."""
ADDRESSES_TRIED_MAX = 4
"""A name may have a thousand addresses at which nobody answers."""
NEXT_ADDRESS_S = 0.25
"""So long an address has before the next one is tried beside it (RFC 8305, 5)."""
GOODBYE_S = 1.0
"""So long a receiver has to end TLS with us."""


@dataclass(frozen=True, slots=True)
class Target:
    """Whom a connection is to, and under which rules; the key of its pool."""

    secure: bool
    host: str
    port: int
    networks: tuple[Network, ...]
    tls: Tls | None
    by_proxy: bool

    # aiohttp's connector takes a request for its part and asks it for these.
    proxy: ClassVar[None] = None

    @property
    def connection_key(self) -> Target:
        return self

    @property
    def is_ssl(self) -> bool:
        return self.secure


class Connector(aiohttp.BaseConnector):
    """Pools of connections.

    Args:
        keep_alive_s: an unused connection is kept so long; None: not at all.
    """

    def __init__(
        self,
        policy: EgressPolicy,
        resolver: Resolver,
        contexts: Contexts,
        proxy: Proxy | None,
        *,
        keep_alive_s: float | None,
    ) -> None:
        if keep_alive_s is None:
            super().__init__(limit=0, force_close=True)
        else:
            super().__init__(limit=0, keepalive_timeout=keep_alive_s)
        self._policy = policy
        self._resolver = resolver
        self._contexts = contexts
        self._proxy = proxy
        self._to_proxy = system_context() if proxy is not None and proxy.secure else None
        self._factory: Any = functools.partial(Protocol, self._loop)

    async def open(self, target: Target, timeout_s: float) -> Connection:
        """A kept connection on which it is quiet, or a new one.

        Raises:
            NotConnected: there is none.
        """
        if self.closed:
            raise NotConnected(Failure.RESET, "the transport is closed")
        timeout = _timeout(timeout_s)
        while True:
            connection = await self.connect(cast("Any", target), [], timeout)
            protocol = cast("Protocol | None", connection.protocol)
            if protocol is None or not protocol.used or not protocol.should_close:
                return connection
            connection.close()

    def _release(self, key: Any, protocol: Any, *, should_close: bool = False) -> None:
        super()._release(key, protocol, should_close=should_close)
        if len(self._conns) > POOLS_MAX:
            # A pool goes when its last connection is taken and comes back
            # with it, so the first one is that which was used longest ago.
            for kept, _ in self._conns.pop(next(iter(self._conns))):
                kept.close()

    async def _create_connection(
        self,
        req: Any,
        traces: Any,
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 (aiohttp calls it)
    ) -> Protocol:
        target: Target = req
        try:
            async with asyncio.timeout(timeout.sock_connect) as limit:
                if target.by_proxy:
                    return await self._by_proxy(target)
                return await self._directly(target)
        except TimeoutError as error:
            if not limit.expired():
                raise _failed(error, target.host, target.port) from error
            raise NotConnected(
                Failure.TIMEOUT, f"no connection within {timeout.sock_connect:g} s"
            ) from None
        except (OSError, UsageError) as error:
            raise _failed(error, target.host, target.port) from error

    async def _directly(self, target: Target) -> Protocol:
        context = await self._contexts.get(target.tls) if target.secure else None
        refusal = functools.partial(
            self._policy.refusal, port=target.port, tls=target.secure, networks=target.networks
        )
        reached = await self._reach(target.host, target.port, refusal)
        _, protocol = await self._speak(self._factory, reached, context, target.host)
        return cast("Protocol", protocol)

    async def _by_proxy(self, target: Target) -> Protocol:
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
            await cast("Tunnel", tunnel).open(proxy, target.host, target.port)
            protocol: Protocol = self._factory()
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
        self, factory: Any, reached: socket.socket, context: ssl.SSLContext | None, host: str
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        if context is None:
            return await self._loop.create_connection(factory, sock=reached)
        return await self._loop.create_connection(
            factory,
            sock=reached,
            ssl=context,
            server_hostname=_name(host),
            ssl_shutdown_timeout=GOODBYE_S,
        )


@functools.lru_cache(1024)
def _timeout(connect_s: float) -> aiohttp.ClientTimeout:
    # Not aiohttp's own for connecting, which it rounds to whole seconds.
    return aiohttp.ClientTimeout(connect=None, sock_connect=connect_s)


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
