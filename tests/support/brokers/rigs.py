"""Rigs of the conformance suite of destinations: Valkey, and the model of the protocol."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from outbox.core.brokers.port import Appended, Capabilities, Stop, StopKind
from outbox.destination import BrokerAddress, Destination, EgressPolicy, Server
from outbox_brokers.plugins import REDIS
from outbox_devtools.destination_suite import PATIENT_S, FixedResolver, Stored, proxied
from outbox_devtools.waiting import until
from tests.support.brokers.model import ModelBroker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from outbox.core.brokers.port import Message, Owner, Standing
    from outbox.destination import Broker, BrokerFinding, Resolver
    from outbox_devtools.destination_suite import Link, ProxiedLink
    from tests.support.brokers.valkey import Valkey

LOOPBACK = EgressPolicy(["127.0.0.0/8"])


class ValkeyRig:
    """Streams of a Valkey server, which takes bodies up to 1 MiB."""

    destination = REDIS
    lanes = ("ep-1-0", "ep-1-1", "ep-1-2")
    can_trim = True
    too_large = 1024 * 1024 + 1

    def __init__(self, server: Valkey) -> None:
        self._server = server

    async def prepare(self) -> None:
        await self._server.command("CONFIG", "SET", "proto-max-bulk-len", 1024 * 1024)

    def link(self, timeout_s: float = PATIENT_S) -> AbstractAsyncContextManager[ProxiedLink]:
        return proxied(self._server.port, self._make, self._settle, timeout_s)

    @asynccontextmanager
    async def absent(self) -> AsyncIterator[Broker]:
        broker = self._make(1, PATIENT_S, FixedResolver())
        yield broker
        await broker.aclose()

    def address(self, server: Server | None = None) -> BrokerAddress:
        return BrokerAddress(f"redis://{server or Server('127.0.0.1', self._server.port)}/events")

    def _make(self, port: int, timeout_s: float, resolver: Resolver) -> Broker:
        address = replace(self.address(Server("127.0.0.1", port)), timeout_s=timeout_s)
        return REDIS.connect(address, LOOPBACK, resolver)

    async def _settle(self) -> None:
        """Wait until no client has bytes that are not executed: the proxy is gone, or idle."""

        async def is_idle() -> bool:
            clients = (await self._server.command("CLIENT", "LIST")).decode().splitlines()
            return all(" qbuf=0 " in each or " cmd=client|list " in each for each in clients)

        await until(is_idle, what="the server")

    async def stored(self, lane: str) -> list[Stored]:
        return [
            Stored(int(id_.partition("-")[0]), fields["x-delivery"])
            for id_, fields in await self._server.entries(lane)
        ]

    async def forget(self, lane: str) -> None:
        await self._server.command("DEL", f"events:{{{lane}}}")

    async def trim(self, lane: str) -> None:
        await self._server.command("XTRIM", f"events:{{{lane}}}", "MAXLEN", 0)

    async def write_as_another(self, lane: str) -> None:
        await self._server.command("XADD", f"events:{{{lane}}}", "*", "a", "b")


class _ModelDriver:
    """The model behind the interface of drivers."""

    capabilities = Capabilities(compare=True, prefix=True, fence=True, position=True)

    def __init__(self, rig: ModelRig, timeout_s: float) -> None:
        self._rig = rig
        self._timeout_s = timeout_s
        self._closed = asyncio.Event()
        self.loses = False
        self.requests: list[Callable[[], object]] | None = None
        """Those that are held; None: none is."""

    async def open(
        self, lane: str, owner: Owner, after: int, receipt: str | None, *, force: bool = False
    ) -> Standing:
        standing: Standing = await self._call(
            lambda: self._rig.streams[lane].open(owner, force=force)
        )
        return standing

    async def append(
        self, lane: str, owner: Owner, after: int, messages: Sequence[Message]
    ) -> Appended:
        response = await self._call(lambda: self._rig.streams[lane].append(owner, after, messages))
        return Appended(after, response) if isinstance(response, Stop) else response

    async def _call(self, request: Callable[[], object]) -> Any:
        if self._closed.is_set():
            return Stop(StopKind.UNAVAILABLE, "the broker was closed")
        if self.requests is not None:
            self.requests.append(request)
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._closed.wait()
            except TimeoutError:
                pass
            return Stop(StopKind.UNKNOWN, "no response")
        response = request()
        return Stop(StopKind.UNKNOWN, "the response was lost") if self.loses else response

    async def check(self, lanes: Sequence[str]) -> list[BrokerFinding]:
        return []

    async def aclose(self) -> None:
        self._closed.set()


class _ModelLink:
    def __init__(self, driver: _ModelDriver) -> None:
        self.broker = driver

    def lose_responses(self) -> None:
        self.broker.loses = True

    def hold_requests(self) -> None:
        self.broker.requests = []

    async def held(self) -> None:
        await until(lambda: self.broker.requests, what="a request")

    async def release(self) -> None:
        requests, self.broker.requests = self.broker.requests or [], None
        for request in requests:
            request()

    def heal(self) -> None:
        self.broker.loses = False


class _Unreachable(_ModelDriver):
    async def _call(self, request: Callable[[], object]) -> Any:
        return Stop(StopKind.UNAVAILABLE, "connection refused")


class _ModelTarget(NamedTuple):
    """Without a server."""

    servers: Sequence[tuple[str, int]] = ()
    secure: bool = False
    streams: str = "model"


class ModelRig:
    """The model of the protocol's simulation."""

    lanes = ("a", "b", "c")
    can_trim = True
    too_large = 1000

    def __init__(self, make: type[ModelBroker] = ModelBroker) -> None:
        self.destination = Destination(
            title="Model",
            example="model://localhost/",
            help="It is in memory.",
            parse_url=lambda _: _ModelTarget(),
            connect=lambda address, policy, resolver: _ModelDriver(self, address.timeout_s),
            checks_every_address=True,
        )
        self.streams = {
            lane: make(refuses=lambda each: len(each.body) >= self.too_large) for lane in self.lanes
        }

    @asynccontextmanager
    async def link(self, timeout_s: float = PATIENT_S) -> AsyncIterator[Link]:
        driver = _ModelDriver(self, timeout_s)
        yield _ModelLink(driver)
        await driver.aclose()

    @asynccontextmanager
    async def absent(self) -> AsyncIterator[Broker]:
        yield _Unreachable(self, PATIENT_S)

    def address(self, server: Server | None = None) -> BrokerAddress:
        return BrokerAddress(self.destination.example)

    async def stored(self, lane: str) -> list[Stored]:
        return [Stored(each.sequence, each.delivery) for each in self.streams[lane].entries]

    async def forget(self, lane: str) -> None:
        self.streams[lane].delete()

    async def trim(self, lane: str) -> None:
        self.streams[lane].trim()

    async def write_as_another(self, lane: str) -> None:
        self.streams[lane].is_foreign = True
