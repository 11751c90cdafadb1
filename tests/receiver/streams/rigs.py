"""Streams on real servers, written by the relay's drivers."""

from __future__ import annotations

from base64 import b64decode
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol
from uuid import UUID

from outbox.core.brokers.message import end_message, messages_of
from outbox.core.brokers.port import Appended, Owner, Position
from outbox.core.model.headers import NO_HEADERS, EndpointHeaders
from outbox.core.model.ids import lane_name
from outbox.core.model.message_format import FormatName, MessageFormat
from outbox.destinations.broker import BrokerAddress
from outbox.destinations.brokers import Brokers
from outbox.network.egress import EgressPolicy
from tests.receiver.deliveries import ENDPOINT, delivery
from tests.support.brokers.nats import SUBJECT, NatsServer, nats_server
from tests.support.brokers.valkey import Valkey, valkey

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from outbox.core.brokers.port import Message
    from outbox.core.model.delivery import Delivery


class Settings:
    """The settings of an endpoint that its messages depend on."""

    def __init__(
        self, name: FormatName = "envelope", headers: EndpointHeaders = NO_HEADERS
    ) -> None:
        self.message_format = MessageFormat(name)
        self.headers = headers


def lane(slot: int = 0, generation: int = 1, endpoint: UUID = ENDPOINT) -> str:
    """The name of a lane."""
    return lane_name(endpoint, generation, slot)


class Server(Protocol):
    """A broker that can be killed and started again."""

    port: int

    async def start(self) -> None: ...
    def kill(self) -> None: ...
    def freeze(self) -> None: ...
    def thaw(self) -> None: ...


class Streams:
    """The streams of one endpoint, with what the relay knows of them."""

    def __init__(self, server: Server, url: str, brokers: Brokers) -> None:
        self.server = server
        self.url = url
        self._broker = brokers.connect(BrokerAddress(url, timeout_s=10))
        self._last: dict[str, int] = {}
        self._delivered: dict[str, int] = {}
        self._epoch = 0
        self._outbox_id = 0
        self.written: dict[str, list[int]] = {}
        """Sequences of the deliveries in each lane."""

    def url_at(self, port: int) -> str:
        """The URL of the same streams behind a proxy."""
        return self.url.replace(f":{self.server.port}/", f":{port}/")

    async def write(
        self, name: str, count: int = 1, *, settings: Settings | None = None, **changes: Any
    ) -> list[Delivery]:
        """Append deliveries to a lane."""
        first = self._last.get(name, 0) + 1
        deliveries = []
        for sequence in range(first, first + count):
            self._outbox_id += 1
            given = {"lane": name, "outbox_id": self._outbox_id, **changes}
            deliveries.append(delivery(sequence, event_id=UUID(int=self._outbox_id), **given))
        after = self._delivered.get(name, 0)
        messages = messages_of(settings or Settings(), deliveries, after)
        await self._append(name, messages)
        self.written.setdefault(name, []).extend(each.seq for each in deliveries)
        return deliveries

    def dead_letter(self, name: str, count: int = 1) -> None:
        """Dead-letter the next deliveries of a lane: the stream has nothing of them."""
        self._last[name] = self._last.get(name, 0) + count

    async def replay(self, name: str, dead: Delivery) -> None:
        """Append a delivery again, as the replay of a dead letter."""
        after = self._last[name]
        copy = dead._replace(seq=after + 1, lane=name, replay_of=(dead.lane, dead.seq))
        await self._append(name, messages_of(Settings(), [copy], self._delivered[name]))

    async def end(self, name: str, lanes: int) -> None:
        """Append the end entry of a lane."""
        after = self._delivered.get(name, 0)
        await self._append(name, [end_message(name, self._last.get(name, 0) + 1, after, lanes)])

    async def append_raw(self, name: str, messages: Sequence[Message]) -> None:
        """Append any messages."""
        await self._append(name, messages)

    async def _append(self, name: str, messages: Sequence[Message]) -> None:
        self._epoch += 1
        owner = Owner("7300000000000000000/16384", self._epoch)
        after = self._delivered.get(name, 0)
        opened = await self._broker.open(name, owner, after, None)
        assert isinstance(opened, Position), opened
        for start in range(0, len(messages), 500):
            part = messages[start : start + 500]
            appended = await self._broker.append(name, owner, after, part)
            assert isinstance(appended, Appended)
            assert appended.stop is None, appended
            after = part[-1].sequence
        self._last[name] = self._delivered[name] = after

    async def trim(self, name: str, through: int) -> None:
        """Remove the messages of a lane up to a sequence, as retention does."""
        raise NotImplementedError

    async def write_as_another(self, name: str) -> None:
        """Append a message that is not the relay's, with the lane's next sequence."""
        raise NotImplementedError

    async def aclose(self) -> None:
        await self._broker.aclose()


class ValkeyStreams(Streams):
    server: Valkey

    async def trim(self, name: str, through: int) -> None:
        key = f"events:{{{name}}}"
        await self.server.command("XTRIM", key, "MINID", f"{through + 1}-0")

    async def write_as_another(self, name: str) -> None:
        sequence = self._delivered.get(name, 0) + 1
        await self.server.command(
            "XADD", f"events:{{{name}}}", f"{sequence}-0", "x-delivery", "x", "body", "{}"
        )


class NatsStreams(Streams):
    server: NatsServer

    async def trim(self, name: str, through: int) -> None:
        subject, seq = f"{SUBJECT}.{name}.m", 1
        while True:
            query = {"seq": seq, "next_by_subj": subject}
            message = (await self.server.api("STREAM.MSG.GET.S", query))["message"]
            headers = b64decode(message["hdrs"]).decode()
            if f"X-Sequence: {through + 1}\r\n" in headers:
                break
            seq = message["seq"] + 1
        await self.server.api("STREAM.PURGE.S", {"filter": subject, "seq": message["seq"]})

    async def write_as_another(self, name: str) -> None:
        sequence = self._delivered.get(name, 0) + 1
        async with self.server.client() as client:
            await client.jetstream().publish(
                f"{SUBJECT}.{name}.m", b"{}", headers={"X-Sequence": str(sequence)}
            )


@asynccontextmanager
async def streams_of(kind: str, directory: Path) -> AsyncIterator[Streams]:
    """A server with the streams of an endpoint."""
    brokers = Brokers(EgressPolicy(["127.0.0.0/8"]))
    try:
        if kind == "valkey":
            async with valkey(directory / kind) as server:
                streams: Streams = ValkeyStreams(server, server.url(), brokers)
                yield streams
                await streams.aclose()
        else:
            async with nats_server(directory / kind) as nats:
                await nats.create_stream()
                streams = NatsStreams(nats, nats.url, brokers)
                yield streams
                await streams.aclose()
    finally:
        await brokers.aclose()
