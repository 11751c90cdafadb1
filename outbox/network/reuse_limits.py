"""How long a connection may carry further requests.

A steady stream of requests would otherwise stay on one connection for ever: on an address that the
name of its peer no longer has, past a renewed certificate and a changed egress rule.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Protocol

from outbox.network.egress import literal

if TYPE_CHECKING:
    import asyncio

    from outbox.network.dns import Resolver

AGE_MAX_S = 120.0
"""Maximum age of a connection that carries another request."""
AGE_JITTER = 0.25
"""Share of the maximum age that is random, so that connections do not all end together."""
RESEND_WITHIN_S = 2.0
"""Seconds after a request in which the end of a reused connection, before a byte of the response,
is the close of an idle one."""
ADDRESS_CHECK_S = 1.0
"""Interval at which a connection's address is compared with those of its name."""


class Peer(Protocol):
    """A connection."""

    @property
    def address(self) -> str | None:
        """IP address of the peer; None: it is not known any more."""
        ...


class ReuseLimits:
    """Limits of one connection: its age, and its peer's address.

    Args:
        resolver: looks names up again when their cached addresses expire.
        host: the peer's name or address; None: another host resolves the name.
    """

    __slots__ = ("_check_at", "_host", "_loop", "_resolver", "_retire_at")

    def __init__(
        self, resolver: Resolver, loop: asyncio.AbstractEventLoop, host: str | None
    ) -> None:
        self._resolver = resolver
        self._loop = loop
        self._host = host
        now = loop.time()
        self._retire_at = now + AGE_MAX_S * random.uniform(1 - AGE_JITTER, 1)  # noqa: S311
        # Until then the connection may be reused.
        self._check_at = min(now + ADDRESS_CHECK_S, self._retire_at)

    def allow(self, peer: Peer) -> bool:
        """Whether the connection may carry another request."""
        now = self._loop.time()
        if now < self._check_at:
            return True
        if now >= self._retire_at:
            return False
        self._check_at = min(now + ADDRESS_CHECK_S, self._retire_at)
        host = self._host
        if host is None or literal(host) is not None:
            return True
        addresses = self._resolver.current(host)
        # Unknown for the moment: a name that does not resolve now ends no connection that works.
        if addresses is None or peer.address in addresses:
            return True
        self._check_at = self._retire_at = now
        return False


def peer_address(transport: asyncio.BaseTransport | None) -> str | None:
    """IP address of a transport's peer; None: it is not known any more."""
    peer = None if transport is None else transport.get_extra_info("peername")
    return str(peer[0]) if peer else None
