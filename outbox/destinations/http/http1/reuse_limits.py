"""How long a connection may carry further requests.

A steady stream of requests would otherwise stay on one connection for ever: on an address that the
name of the receiver no longer has, past a renewed certificate and a changed egress rule.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from outbox.network.egress import literal

if TYPE_CHECKING:
    import asyncio

    from outbox.destinations.http.http1.connection import Connection
    from outbox.network.dns import Resolver

AGE_MAX_S = 120.0
"""Maximum age of a connection that carries another request."""
AGE_JITTER = 0.25
"""Share of the maximum age that is random, so that connections do not all end together."""
ADDRESS_CHECK_S = 1.0
"""Interval at which a connection's address is compared with those of its name."""


class ReuseLimits:
    """Limits of one connection: its age, and its peer's address.

    Args:
        resolver: looks names up again when their cached addresses expire.
    """

    __slots__ = ("_check_at", "_loop", "_resolver", "_retire_at")

    def __init__(self, resolver: Resolver, loop: asyncio.AbstractEventLoop) -> None:
        self._resolver = resolver
        self._loop = loop
        now = loop.time()
        self._retire_at = now + AGE_MAX_S * random.uniform(1 - AGE_JITTER, 1)  # noqa: S311
        self._check_at = now + ADDRESS_CHECK_S

    def allow(self, connection: Connection) -> bool:
        """Whether the connection may carry another request."""
        now = self._loop.time()
        if now >= self._retire_at:
            return False
        if now < self._check_at:
            return True
        self._check_at = now + ADDRESS_CHECK_S
        target = connection.target
        if target.via_proxy or literal(target.host) is not None:
            return True
        addresses = self._resolver.current(target.host)
        # Unknown for the moment: a name that does not resolve now ends no connection that works.
        if addresses is None or connection.address in addresses:
            return True
        self._retire_at = now
        return False
