"""Connection establishment: DNS, egress check, connect, TLS.

The egress policy checks the final address of every connection immediately before the
connect, so that DNS rebinding cannot bypass it.
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
from outbox.errors import UsageError
from outbox.network.descriptors import socket_factory
from outbox.network.dns import Unresolved
from outbox.network.egress import literal
from outbox.network.errors import NotConnected, is_own_failure
from outbox.network.proxy_tunnel import Tunnel
from outbox.network.tls import ssl_error_reason, system_context

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    from outbox.network.dns import Resolver
    from outbox.network.egress import EgressPolicy, Network
    from outbox.network.tls import Tls
    from outbox.network.tls_contexts import ContextCache
    from outbox.web.proxy import Proxy

P = TypeVar("P", bound=asyncio.Protocol)

ADDRESSES_TRIED_MAX = 4
"""Bounds the attempts for a name with many unreachable addresses."""
ATTEMPT_DELAY_S = 0.25
"""Connection attempt delay of Happy Eyeballs (RFC 8305, 5)."""
RECEIVE_BYTES = 64 * 1024
"""Bytes that the kernel holds for a connection, about.  All that has arrived is parsed in one
iteration of the loop: a receiver that floods pauses other deliveries for less time.  With less
than a segment of the loopback interface (64 KiB), a sender there waits 0.2 s again and again."""
TLS_SHUTDOWN_S = 1.0
"""Timeout of the TLS shutdown handshake."""


class Target(NamedTuple):
    """Peer, egress rules and TLS settings of a connection; the key of its pool."""

    secure: bool
    host: str
    port: int
    networks: tuple[Network, ...]
    tls: Tls | None
    via_proxy: bool
    endpoint: UUID | None
    """The endpoint whose requests it carries; None: those without one."""


class ConnectionOpener:
    """Opens connections.

    Args:
        proxy: CONNECT proxy for receivers outside of open networks.
    """

    def __init__(
        self,
        policy: EgressPolicy,
        resolver: Resolver,
        contexts: ContextCache,
        proxy: Proxy | None = None,
    ) -> None:
        self._policy = policy
        self._resolver = resolver
        self._contexts = contexts
        self._proxy = proxy
        self._proxy_context = system_context() if proxy is not None and proxy.secure else None
        self._open_socket = socket_factory()
        self._loop = asyncio.get_running_loop()

    async def open(self, target: Target, factory: Callable[[], P], timeout_s: float) -> P:
        """Open a connection; returns the protocol that `factory` made.

        Raises:
            NotConnected: no connection could be established.
        """
        try:
            async with asyncio.timeout(timeout_s) as limit:
                if target.via_proxy:
                    return await self._connect_via_proxy(target, factory)
                return await self._connect_directly(target, factory)
        except TimeoutError as error:
            if not limit.expired():
                raise _to_not_connected(error, target.host, target.port) from error
            raise NotConnected(Failure.TIMEOUT, f"no connection within {timeout_s:g} s") from None
        except (OSError, UsageError, MemoryError) as error:
            raise _to_not_connected(error, target.host, target.port) from error

    async def _connect_directly(self, target: Target, factory: Callable[[], P]) -> P:
        context = await self._contexts.get(target.tls) if target.secure else None
        refusal = functools.partial(
            self._policy.refusal, port=target.port, tls=target.secure, networks=target.networks
        )
        sock = await self._connect_socket(target.host, target.port, refusal)
        _, protocol = await self._start_protocol(factory, sock, context, target.host)
        return protocol

    async def _connect_via_proxy(self, target: Target, factory: Callable[[], P]) -> P:
        proxy = self._proxy
        assert proxy is not None
        # The proxy resolves names; checks that need no address are made here.
        reason = self._policy.proxy_refusal(target.host, port=target.port, networks=target.networks)
        if reason is not None:
            raise NotConnected(Failure.EGRESS_REFUSED, reason)
        context = await self._contexts.get(target.tls)
        try:
            # No egress check: the operator configured the proxy.
            sock = await self._connect_socket(proxy.host, proxy.port, lambda _: None)
            transport, tunnel = await self._start_protocol(
                Tunnel, sock, self._proxy_context, proxy.host
            )
        except (OSError, NotConnected) as error:
            failed = error if isinstance(error, NotConnected) else None
            failed = failed or _to_not_connected(error, proxy.host, proxy.port)
            if failed.failure is Failure.LOCAL:
                raise failed from error
            raise NotConnected(Failure.CONNECT, f"the proxy: {failed.detail}") from error
        try:
            await tunnel.open(proxy, target.host, target.port)
            protocol = factory()
            inner = await self._loop.start_tls(
                transport,
                protocol,
                context,
                server_hostname=_server_name(target.host),
                ssl_shutdown_timeout=TLS_SHUTDOWN_S,
            )
            if inner is None:
                raise ConnectionResetError("the connection was closed before TLS")
            protocol.connection_made(inner)
        except BaseException:
            transport.abort()
            raise
        return protocol

    async def _connect_socket(
        self, host: str, port: int, refusal: Callable[[str], str | None]
    ) -> socket.socket:
        """Connect to one of a host's addresses that the policy allows."""
        try:
            addresses = [host] if literal(host) is not None else await self._resolver.resolve(host)
        except Unresolved as error:
            raise NotConnected(Failure.DNS, f"{host}: {error}") from None
        allowed: list[str] = []
        refused = ""
        for address in addresses:
            if (reason := refusal(address)) is None:
                allowed.append(address)
            refused = refused or reason or ""
        if not allowed:
            raise NotConnected(Failure.EGRESS_REFUSED, refused)
        tried = allowed[:ADDRESSES_TRIED_MAX]
        try:
            connection = await start_connection(
                [_address_info(address, port) for address in tried],
                happy_eyeballs_delay=ATTEMPT_DELAY_S,
                loop=self._loop,
                socket_factory=self._open_socket,
            )
        except OSError as error:
            if is_own_failure(error, tried):
                raise NotConnected(Failure.LOCAL, _message(error)) from error
            raise
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        return connection

    async def _start_protocol(
        self,
        factory: Callable[[], P],
        sock: socket.socket,
        context: ssl.SSLContext | None,
        host: str,
    ) -> tuple[asyncio.Transport, P]:
        if context is None:
            return await self._loop.create_connection(factory, sock=sock)
        return await self._loop.create_connection(
            factory,
            sock=sock,
            ssl=context,
            server_hostname=_server_name(host),
            ssl_shutdown_timeout=TLS_SHUTDOWN_S,
        )


def _address_info(address: str, port: int) -> Any:
    if ":" in address:
        return (socket.AF_INET6, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, port, 0, 0))
    return (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, port))


def _server_name(host: str) -> str:
    """Return the TLS server name, without a trailing dot."""
    return host.rstrip(".")


def _to_not_connected(error: Exception, host: str, port: int) -> NotConnected:
    if isinstance(error, ssl.SSLError):
        return NotConnected(Failure.TLS, f"{ssl_error_reason(error)} at {host}:{port}")
    if isinstance(error, UsageError):
        return NotConnected(Failure.TLS, str(error))
    if is_own_failure(error):
        return NotConnected(Failure.LOCAL, _message(error))
    return NotConnected(Failure.CONNECT, f"{_message(error)} at {host}:{port}")


def _message(error: Exception) -> str:
    """The system's message, without asyncio's addition."""
    if isinstance(error, MemoryError):
        return "out of memory"
    message = os.strerror(number) if (number := getattr(error, "errno", None)) else str(error)
    return message[:1].lower() + message[1:]
