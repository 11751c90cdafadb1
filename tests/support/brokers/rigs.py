"""What the conformance suite of brokers needs of each: links that fail, and the stream itself."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from outbox.core.brokers.port import Appended, Capabilities, Message, Position, Stop, StopKind
from outbox.destinations.broker import BrokerAddress
from outbox.network.dns import CachingResolver
from outbox.network.egress import EgressPolicy
from tests.support.brokers.cutting import CuttingProxy, cutting
from tests.support.brokers.model import ModelBroker
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from outbox.core.brokers.port import Owner, Standing
    from outbox.destinations.broker import Broker, BrokerFinding
    from tests.support.brokers.valkey import Valkey

PATIENT_S = 10.0
IN_DOUBT = (StopKind.UNKNOWN, StopKind.CLOSED)
"""After the loss of a response, the lane is opened: at once, if the connection was idle before."""
LOOPBACK = EgressPolicy(["127.0.0.0/8"])


def message(lane: str, sequence: int, size: int = 10) -> Message:
    """The delivery of a sequence of a lane."""
    delivery = f"d{sequence}"
    headers = (("X-Delivery", delivery), ("X-Lane", lane), ("X-Sequence", str(sequence)))
    return Message(sequence, delivery, headers, b"x" * size)


async def open_lane(broker: Broker, lane: str, owner: Owner, after: int = 0) -> Position:
    """Open a lane. On a slow machine, a short time-out may end before the first response."""

    async def attempt() -> Position | None:
        standing = await broker.open(lane, owner, after, None)
        return standing if isinstance(standing, Position) else None

    position = await until(attempt, what="the lane to be opened")
    assert position is not None
    return position


class Link(Protocol):
    """A driver, and the way of its bytes to the broker."""

    @property
    def broker(self) -> Broker: ...
    def lose_responses(self) -> None:
        """Until `heal`."""
        ...

    def hold_requests(self) -> None:
        """Until `release`; their senders may have gone by then."""
        ...

    async def held(self) -> None:
        """Wait for a request that is held."""
        ...

    async def release(self) -> None:
        """Let the held requests through, and wait until the broker has executed them."""
        ...

    def heal(self) -> None: ...


class Stored(NamedTuple):
    """A message of a stream."""

    sequence: int
    delivery: str


class Rig(Protocol):
    """A broker with empty streams of some lanes."""

    @property
    def lanes(self) -> Sequence[str]:
        """At least three."""
        ...

    @property
    def too_large(self) -> int:
        """Size of a body that the broker refuses."""
        ...

    @property
    def can_trim(self) -> bool: ...
    def link(self, timeout_s: float = PATIENT_S) -> AbstractAsyncContextManager[Link]: ...
    def absent(self) -> AbstractAsyncContextManager[Broker]:
        """A driver whose broker cannot be reached."""
        ...

    async def stored(self, lane: str) -> list[Stored]: ...
    async def forget(self, lane: str) -> None:
        """Delete a lane's stream, as an operator does; a restored backup may lack it, too."""
        ...

    async def trim(self, lane: str) -> None:
        """Remove the messages of a lane, as retention does."""
        ...

    async def write_as_another(self, lane: str) -> None:
        """Append a message that is not the relay's."""
        ...


class ProxiedLink:
    """A driver behind a proxy.

    Args:
        settle: waits until the broker has executed what was sent.
    """

    def __init__(self, broker: Broker, proxy: CuttingProxy, settle: Callable[[], Any]) -> None:
        self.broker = broker
        self._proxy = proxy
        self._settle = settle

    def lose_responses(self) -> None:
        self._proxy.response_bytes_max = 0

    def hold_requests(self) -> None:
        self._proxy.requests_pass.clear()

    async def held(self) -> None:
        await until(lambda: self._proxy.held_bytes, what="a request")

    async def release(self) -> None:
        proxy = self._proxy
        proxy.requests_pass.set()
        await until(lambda: proxy.released_bytes >= proxy.held_bytes, what="the late bytes")
        await self._settle()

    def heal(self) -> None:
        self._proxy.response_bytes_max = None


@asynccontextmanager
async def proxied(
    port: int,
    make: Callable[[int, float, CachingResolver], Broker],
    settle: Callable[[], Any],
    timeout_s: float,
) -> AsyncIterator[ProxiedLink]:
    """A driver behind a proxy to a port; `make` gets the proxy's port."""
    resolver = CachingResolver()
    async with cutting(port) as (proxy, own_port):
        broker = make(own_port, timeout_s, resolver)
        try:
            yield ProxiedLink(broker, proxy, settle)
        finally:
            proxy.requests_pass.set()
            await broker.aclose()
            await resolver.aclose()


class ValkeyRig:
    """Streams of a Valkey server, which takes bodies up to 1 MiB."""

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
        resolver = CachingResolver()
        broker = self._make(1, PATIENT_S, resolver)
        yield broker
        await broker.aclose()
        await resolver.aclose()

    def _make(self, port: int, timeout_s: float, resolver: CachingResolver) -> Broker:
        from outbox_brokers.redis.broker import RedisBroker

        url = f"redis://127.0.0.1:{port}/events"
        return RedisBroker(BrokerAddress(url, timeout_s=timeout_s), LOOPBACK, resolver)

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


class ModelRig:
    """The model of the protocol's simulation."""

    lanes = ("a", "b", "c")
    can_trim = True
    too_large = 1000

    def __init__(self, make: type[ModelBroker] = ModelBroker) -> None:
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

    async def stored(self, lane: str) -> list[Stored]:
        return [Stored(each.sequence, each.delivery) for each in self.streams[lane].entries]

    async def forget(self, lane: str) -> None:
        self.streams[lane].delete()

    async def trim(self, lane: str) -> None:
        self.streams[lane].trim()

    async def write_as_another(self, lane: str) -> None:
        self.streams[lane].is_foreign = True
