"""The suite of brokers over streams of RabbitMQ, which neither compare nor fence."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from rstream.amqp import amqp_decoder

from outbox.destination import BrokerAddress, Server
from outbox_brokers.plugins import RABBITMQ
from outbox_devtools.destination_suite import (
    PATIENT_S,
    BrokerConformance,
    FixedResolver,
    Stored,
    proxied,
)
from tests.support.brokers.rabbitmq import PASSWORD, USER
from tests.support.brokers.rigs import LOOPBACK

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager

    from outbox.destination import Broker, Resolver
    from outbox_devtools.destination_suite import ProxiedLink
    from packages.brokers.tests.rabbitmq.conftest import Stage

pytestmark = pytest.mark.full


class RabbitRig:
    """Streams of a server that takes frames up to 1 MiB."""

    destination = RABBITMQ
    lanes = ("orders-1-0", "orders-1-1", "orders-1-2")
    too_large = 1024 * 1024
    can_trim = False
    """It removes whole segments, in its own time: see the tests of positions."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def _stream(self, lane: str) -> str:
        return f"{self._stage.prefix}.{lane}"

    def link(self, timeout_s: float = PATIENT_S) -> AbstractAsyncContextManager[ProxiedLink]:
        return proxied(self._stage.server.port, self._make, self._settle, timeout_s)

    @asynccontextmanager
    async def absent(self) -> AsyncIterator[Broker]:
        broker = self._make(1, PATIENT_S, FixedResolver())
        yield broker
        await broker.aclose()

    def address(self, server: Server | None = None) -> BrokerAddress:
        server = server or Server("127.0.0.1", self._stage.server.port)
        url = f"rabbitmq-stream://{server}/{self._stage.prefix}?create=1"
        return BrokerAddress(url, f"{USER}:{PASSWORD}")

    def _make(self, port: int, timeout_s: float, resolver: Resolver) -> Broker:
        address = replace(self.address(Server("127.0.0.1", port)), timeout_s=timeout_s)
        return RABBITMQ.connect(address, LOOPBACK, resolver)

    async def _settle(self) -> None:
        for _ in range(5):
            await self._stage.raw.exists(self._stream(self.lanes[0]))

    async def stored(self, lane: str) -> list[Stored]:
        if not await self._stage.raw.exists(self._stream(lane)):
            return []
        found = [
            amqp_decoder(each).application_properties
            for each in await self._stage.raw.messages(self._stream(lane))
        ]
        return [Stored(int(each[b"X-Sequence"]), each[b"X-Delivery"].decode()) for each in found]

    async def forget(self, lane: str) -> None:
        await self._stage.raw.delete(self._stream(lane))

    async def trim(self, lane: str) -> None:
        raise NotImplementedError

    async def write_as_another(self, lane: str) -> None:
        await self._stage.raw.publish(self._stream(lane), "another", [(1000, b"another's")])


class TestRabbitMq(BrokerConformance):
    @pytest.fixture
    def rig(self, stage: Stage) -> RabbitRig:
        return RabbitRig(stage)
