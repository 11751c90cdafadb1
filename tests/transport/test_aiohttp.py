from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

import pytest
from aiohttp.abc import AbstractResolver, ResolveResult

from outbox.transport.client import AiohttpTransport
from tests.transport.conformance import LOOPBACK, Make, TransportConformance

if TYPE_CHECKING:
    import ssl
    from collections.abc import Mapping

    from outbox.transport.egress import EgressPolicy


class Hosts(AbstractResolver):
    def __init__(self, hosts: Mapping[str, list[str] | None]) -> None:
        self._hosts = hosts

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        if host not in self._hosts:
            raise OSError(None, f"{host}: name not known")
        addresses = self._hosts[host]
        if addresses is None:
            await asyncio.get_running_loop().create_future()
            raise AssertionError
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for address in addresses
        ]

    async def close(self) -> None:
        pass


class TestAiohttp(TransportConformance):
    @pytest.fixture
    def make(self) -> Make:
        def make(
            policy: EgressPolicy = LOOPBACK,
            *,
            in_flight_max: int = 1000,
            tls: ssl.SSLContext | None = None,
            hosts: Mapping[str, list[str] | None] | None = None,
        ) -> AiohttpTransport:
            resolver = None if hosts is None else Hosts(hosts)
            return AiohttpTransport(
                policy, in_flight_max=in_flight_max, tls=tls, resolver=resolver, dns_ttl_s=0
            )

        return make
