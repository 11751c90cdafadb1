from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest

from outbox.transport import connector
from outbox.transport.client import AiohttpTransport
from outbox.transport.resolving import Unresolved
from tests.transport.conformance import LOOPBACK, Make, TransportConformance, closing, to
from tests.transport.guarding import Guarding, authority, connected
from tests.transport.receivers import HostileReceivers
from tests.transport.servers import OK, answering, serving

if TYPE_CHECKING:
    import ssl
    from collections.abc import Mapping

    from outbox.transport.egress import EgressPolicy
    from outbox.web.proxy import Proxy


__all__ = ("authority", "connected")  # Fixtures.


class Hosts:
    """A resolver: None for never answering, and an absent name does not exist."""

    def __init__(self, hosts: Mapping[str, list[str] | None]) -> None:
        self._hosts = hosts

    async def resolve(self, host: str) -> list[str]:
        if host not in self._hosts:
            raise Unresolved("name not known")
        addresses = self._hosts[host]
        if addresses is None:
            await asyncio.get_running_loop().create_future()
            raise AssertionError
        return addresses

    async def aclose(self) -> None:
        pass


class TestAiohttp(TransportConformance, Guarding, HostileReceivers):
    @pytest.fixture
    def make(self) -> Make:
        def make(
            policy: EgressPolicy = LOOPBACK,
            *,
            in_flight_max: int = 1000,
            tls: ssl.SSLContext | None = None,
            hosts: Mapping[str, list[str] | None] | None = None,
            proxy: Proxy | None = None,
        ) -> AiohttpTransport:
            resolver = None if hosts is None else Hosts(hosts)
            return AiohttpTransport(
                policy, proxy=proxy, in_flight_max=in_flight_max, tls=tls, resolver=resolver
            )

        return make


async def test_kept_connections_are_those_of_a_bounded_number_of_targets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the one that was used longest ago they are closed; what is in use stays."""
    monkeypatch.setattr(connector, "POOLS_MAX", 2)
    async with AsyncExitStack() as stack:
        transport = await stack.enter_async_context(closing(AiohttpTransport(LOOPBACK)))
        servers = [await stack.enter_async_context(serving(answering(OK))) for _ in range(3)]
        for n in (0, 1, 0, 2):
            assert (await transport.send(to(servers[n]))).status == 200
        await servers[1].ended()
        assert [bool(server._tasks) for server in servers] == [True, False, True]
        for n in (0, 1, 2):
            assert (await transport.send(to(servers[n]))).status == 200
        assert [server.connections for server in servers] == [1, 2, 2]
