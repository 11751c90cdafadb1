"""The suite of brokers over streams of RabbitMQ, which neither compare nor fence."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from rstream.amqp import amqp_decoder

from outbox.destinations.broker import BrokerAddress
from outbox.network.dns import CachingResolver
from outbox_brokers.rabbitmq.broker import RabbitMqBroker
from outbox_devtools.destination_suite import BrokerConformance
from tests.support.brokers.rabbitmq import PASSWORD, USER
from tests.support.brokers.rigs import LOOPBACK, PATIENT_S, Stored, proxied

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager

    from outbox.destinations.broker import Broker
    from packages.brokers.tests.rabbitmq.conftest import Stage
    from tests.support.brokers.rigs import ProxiedLink

pytestmark = pytest.mark.full


class RabbitRig:
    """Streams of a server that takes frames up to 1 MiB."""

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
        resolver = CachingResolver()
        broker = self._make(1, PATIENT_S, resolver)
        yield broker
        await broker.aclose()
        await resolver.aclose()

    def _make(self, port: int, timeout_s: float, resolver: CachingResolver) -> Broker:
        url = f"rabbitmq-stream://127.0.0.1:{port}/{self._stage.prefix}?create=1"
        address = BrokerAddress(url, f"{USER}:{PASSWORD}", timeout_s=timeout_s)
        return RabbitMqBroker(address, LOOPBACK, resolver)

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
