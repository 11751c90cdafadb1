"""A NATS server for the conformance suite."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from outbox.destination import BrokerAddress, Server
from outbox_brokers.plugins import NATS
from outbox_devtools.destination_suite import PATIENT_S, FixedResolver, Stored, proxied
from tests.support.brokers.nats import STREAM, SUBJECT
from tests.support.brokers.rigs import LOOPBACK

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager

    from outbox.destination import Broker, Resolver
    from outbox_devtools.destination_suite import ProxiedLink
    from tests.support.brokers.nats import NatsServer


class NatsRig:
    """Subjects of a stream; the server takes payloads up to 1 MiB."""

    destination = NATS
    lanes = ("ep-1-0", "ep-1-1", "ep-1-2")
    can_trim = True
    too_large = 1_100_000

    def __init__(self, server: NatsServer) -> None:
        self._server = server

    def link(self, timeout_s: float = PATIENT_S) -> AbstractAsyncContextManager[ProxiedLink]:
        return proxied(self._server.port, self._make, self._settle, timeout_s)

    @asynccontextmanager
    async def absent(self) -> AsyncIterator[Broker]:
        broker = self._make(1, PATIENT_S, FixedResolver())
        yield broker
        await broker.aclose()

    def address(self, server: Server | None = None) -> BrokerAddress:
        server = server or Server("127.0.0.1", self._server.port)
        return BrokerAddress(f"nats://{server}/{SUBJECT}")

    def _make(self, port: int, timeout_s: float, resolver: Resolver) -> Broker:
        address = replace(self.address(Server("127.0.0.1", port)), timeout_s=timeout_s)
        return NATS.connect(address, LOOPBACK, resolver)

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
