"""Connections to brokers: the egress rules and TLS settings of all other deliveries.

The address of every connection is checked immediately before the connect, as for HTTP; see
`BrokerPolicy` for public ones.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING, TypeVar

from outbox.core.brokers.port import Stop, StopKind
from outbox.core.model.response import Failure, one_line
from outbox.network.connector import ConnectionOpener, Target
from outbox.network.reuse_limits import ReuseLimits
from outbox.network.tls_contexts import ContextCache

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox.destinations.broker import BrokerAddress
    from outbox.network.dns import Resolver
    from outbox.network.egress import EgressPolicy
    from outbox.network.errors import NotConnected

P = TypeVar("P", bound="asyncio.Protocol")

_NEEDS_A_PERSON = (Failure.EGRESS_REFUSED, Failure.TLS)


class BrokerOpener:
    """Opens the connections of one endpoint."""

    def __init__(
        self, address: BrokerAddress, policy: EgressPolicy, resolver: Resolver, *, secure: bool
    ) -> None:
        self._address = address
        self._resolver = resolver
        # Without TLS none is used: reading the system trust store would occupy the event loop.
        self._contexts = ContextCache(None if secure else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        self._opener = ConnectionOpener(policy, resolver, self._contexts)

    async def open(self, host: str, port: int, factory: Callable[[], P], *, secure: bool) -> P:
        """Open a connection; returns the protocol that `factory` made.

        Raises:
            NotConnected: no connection could be established.
        """
        address = self._address
        target = Target(
            secure, host, port, address.networks, address.tls if secure else None,
            via_proxy=False, endpoint=None,
        )  # fmt: skip
        return await self._opener.open(target, factory, address.connect_timeout_s)

    def limits(self, host: str) -> ReuseLimits:
        """The limits of a connection to a host that is opened now."""
        return ReuseLimits(self._resolver, asyncio.get_running_loop(), host)

    def close(self) -> None:
        """Release what connections shared."""
        self._contexts.close()


def stop_of(error: NotConnected) -> Stop:
    """Why nothing can be sent without a connection."""
    if error.failure is Failure.LOCAL:
        return Stop(StopKind.LOCAL, one_line(error.detail))
    kind = StopKind.MISCONFIGURED if error.failure in _NEEDS_A_PERSON else StopKind.UNAVAILABLE
    return Stop(kind, one_line(error.detail))
