"""Egress checks of a cluster's servers.

librdkafka resolves names and connects by itself, and its Python binding has no callback for
either.  Therefore the addresses of all servers are checked twice: those of the URL before a client
is made, and those that the cluster names in its metadata before anything is produced or read.

What remains: a name that resolves to another address between the check and the connect (DNS
rebinding), and the connections that librdkafka opens to servers of the metadata before the check
is complete, or to servers that join later.  Such a connection carries the protocol's handshake,
and the credentials if there are any.  So this driver is for endpoints of the operator.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from outbox.core.brokers.port import Stop, StopKind
from outbox.core.model.response import one_line
from outbox.network.dns import Unresolved
from outbox.network.egress import OPTION, SETTING, literal
from outbox.network.reuse_limits import ReuseLimits

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from outbox.core.brokers.broker_url import Server
    from outbox.network.dns import Resolver
    from outbox.network.egress import EgressPolicy, Network


class _Peer(NamedTuple):
    address: str


SERVERS_NAMED_MAX = 1000
"""Servers of a cluster that are checked: each is looked up, and checked again each second."""


class ClientLimits:
    """How long a client of the library may be used.

    librdkafka keeps a busy connection for ever, and a name is resolved only when it connects.  To
    which of a name's addresses it is connected, it does not say: all must still be the name's.
    """

    def __init__(self, resolver: Resolver, found: Mapping[str, Sequence[str]]) -> None:
        loop = asyncio.get_running_loop()
        self._limits = [
            (ReuseLimits(resolver, loop, host), _Peer(address))
            for host, addresses in found.items()
            for address in addresses
        ]

    def allow(self) -> bool:
        """Whether it may carry another call."""
        return all(limits.allow(peer) for limits, peer in self._limits)


class ServerChecks:
    """Egress checks for the servers of one endpoint."""

    def __init__(
        self,
        policy: EgressPolicy,
        resolver: Resolver,
        networks: tuple[Network, ...],
        *,
        secure: bool,
    ) -> None:
        self._policy = policy
        self._resolver = resolver
        self._networks = networks
        self._secure = secure
        self._found: dict[str, tuple[str, ...]] = {}
        """The addresses that were checked, by name."""

    async def check(self, servers: Sequence[Server]) -> Stop | None:
        """Return why a server must not be connected to; None: all are allowed.

        Every address of a name must be allowed, because librdkafka chooses one of them.  Of
        several names some may be without an address now.
        """
        if len(servers) > SERVERS_NAMED_MAX:
            return Stop(StopKind.MISCONFIGURED, f"the cluster names {len(servers)} servers")
        unresolved: Stop | None = None
        is_any_resolved = False
        for server in servers:
            host = server.host
            try:
                addresses = [host] if literal(host) else await self._resolver.resolve(host)
            except Unresolved as error:
                unresolved = Stop(StopKind.UNAVAILABLE, one_line(f"{host}: {error}"))
                continue
            is_any_resolved = True
            self._found[host] = tuple(addresses)
            for address in addresses:
                if (reason := self._refusal(address, server.port)) is not None:
                    return Stop(StopKind.MISCONFIGURED, one_line(f"{server}: {reason}"))
        return None if is_any_resolved else unresolved

    def limits(self) -> ClientLimits:
        """The limits of a client that is made now for the servers that were checked."""
        found, self._found = self._found, {}
        return ClientLimits(self._resolver, found)

    def _refusal(self, address: str, port: int) -> str | None:
        refusal = partial(self._policy.refusal, address, port=port, networks=self._networks)
        reason = refusal(tls=True)
        if reason is not None or self._secure or refusal(tls=False) is None:
            return reason
        return (
            "kafka:// is not encrypted; use kafka+tls://, or open the network with "
            f"{OPTION} (for this endpoint alone) or {SETTING} (for all)"
        )
