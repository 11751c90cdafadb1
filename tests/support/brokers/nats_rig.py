"""A NATS server for the conformance suite."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from outbox.destinations.broker import BrokerAddress
from outbox.network.dns import CachingResolver
from outbox_brokers.nats.broker import NatsBroker
from tests.support.brokers.nats import STREAM, SUBJECT
from tests.support.brokers.rigs import LOOPBACK, PATIENT_S, Stored, proxied

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager

    from outbox.destinations.broker import Broker
    from tests.support.brokers.nats import NatsServer
    from tests.support.brokers.rigs import ProxiedLink


class NatsRig:
    """Subjects of a stream; the server takes payloads up to 1 MiB."""

    lanes = ("ep-1-0", "ep-1-1", "ep-1-2")
    can_trim = True
    too_large = 1_100_000

    def __init__(self, server: NatsServer) -> None:
        self._server = server

    def link(self, timeout_s: float = PATIENT_S) -> AbstractAsyncContextManager[ProxiedLink]:
        return proxied(self._server.port, self._make, self._settle, timeout_s)

    @asynccontextmanager
    async def absent(self) -> AsyncIterator[Broker]:
        resolver = CachingResolver()
        broker = self._make(1, PATIENT_S, resolver)
        yield broker
        await broker.aclose()
        await resolver.aclose()

    def _make(self, port: int, timeout_s: float, resolver: CachingResolver) -> Broker:
        url = f"nats://127.0.0.1:{port}/{SUBJECT}"
        return NatsBroker(BrokerAddress(url, timeout_s=timeout_s), LOOPBACK, resolver)

    async def _settle(self) -> None:
        # The server does not say what it has read; it reads within a few round trips.
        for _ in range(5):
            await self._server.api(f"STREAM.INFO.{STREAM}")

    async def stored(self, lane: str) -> list[Stored]:
        messages = (await self._server.messages()).get(f"{SUBJECT}.{lane}.m", ())
        return [Stored(int(each["X-Sequence"]), each["X-Delivery"]) for each in messages]

    async def forget(self, lane: str) -> None:
        await self._server.api(f"STREAM.DELETE.{STREAM}")
        await self._server.create_stream()

    async def trim(self, lane: str) -> None:
        await self._server.api(f"STREAM.PURGE.{STREAM}", {"filter": f"{SUBJECT}.{lane}.m"})

    async def write_as_another(self, lane: str) -> None:
        async with self._server.client() as client:
            await client.jetstream().publish(f"{SUBJECT}.{lane}.m", b"another's")
