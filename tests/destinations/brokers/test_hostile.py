"""Servers that send more than they were asked for: a relay neither keeps nor parses it."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from typing import TYPE_CHECKING, NamedTuple

import pytest

pytest.importorskip("rstream")

from rstream.constants import Key

from outbox.core.brokers.port import Message, Owner, Stop
from outbox.core.model.response import DETAIL_CHARS_MAX
from outbox.destinations.broker import BrokerAddress
from outbox.destinations.brokers import Brokers
from outbox.destinations.rabbitmq.connection import StreamConnection
from outbox.destinations.rabbitmq.position import _Tail
from outbox.network.egress import EgressPolicy
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outbox.destinations.broker import Broker

pytestmark = pytest.mark.system

WRITTEN_BYTES_MAX = 8 << 20
"""More than a relay takes from any server, with what the kernel holds of it."""
ENDLESS_BYTES = 64 << 20
INFO = (
    b"INFO %s\r\n"
    % json.dumps(
        {"server_id": "x", "version": "2.12.0", "headers": True, "max_payload": 1 << 30}
    ).encode()
)


class Attack(NamedTuple):
    """What a server sends: at the connect, and repeated after the first bytes that it gets."""

    url: str
    greeting: bytes
    prefix: bytes
    flood: bytes


REDIS, NATS = "redis://127.0.0.1:{port}/events", "nats://127.0.0.1:{port}/events"
RABBITMQ = "rabbitmq-stream://127.0.0.1:{port}/events"
ATTACKS = {
    "redis, a value of 3.9 GB": Attack(REDIS, b"", b"$3900000000\r\n", bytes(65536)),
    "redis, a line without an end": Attack(REDIS, b"", b"+", b"x" * 65536),
    "redis, an array in an array": Attack(REDIS, b"", b"", b"*1\r\n" * 16384),
    "redis, an array of a thousand million": Attack(
        REDIS, b"", b"*1000000000\r\n", b":1\r\n" * 9999
    ),
    "redis, values that nobody asked for": Attack(REDIS, b"", b"", b"+OK\r\n" * 9999),
    "redis, before a call": Attack(REDIS, b"x" * 65537, b"", bytes(65536)),
    "nats, a message of 3.9 GB": Attack(NATS, INFO, b"MSG x 1 3900000000\r\n", bytes(65536)),
    "nats, nothing but OK": Attack(NATS, INFO, b"PONG\r\n", b"+OK\r\n" * 9999),
    "nats, nothing but PING": Attack(NATS, INFO, b"PONG\r\n", b"PING\r\n" * 9999),
    "nats, INFO without an end": Attack(NATS, b"INFO {", b"", b" " * 65536),
    "nats, INFO without an end, later": Attack(NATS, INFO, b"PONG\r\nINFO {", b" " * 65536),
    "nats, a line without an end": Attack(NATS, INFO, b"PONG\r\nMSG ", b"x" * 65536),
    "rabbitmq, a frame of 60 MiB": Attack(
        RABBITMQ, b"", struct.pack(">IHH", 60 << 20, 17, 1), bytes(65536)
    ),
}


class Server:
    """Writes without a pause until its peer closes, and counts."""

    def __init__(self, attack: Attack) -> None:
        self._attack = attack
        self.connections = 0
        self.ended = 0
        self.written_bytes = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        sock: socket.socket = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
        writer.transport.set_write_buffer_limits(0)
        written = 0
        try:
            for data in self._data():
                writer.write(data)
                await writer.drain()
                written += len(data)
                if written == len(self._attack.greeting):
                    await reader.read(1)
        except ConnectionError:
            pass
        finally:
            self.written_bytes = max(self.written_bytes, written)
            self.ended += 1
            writer.transport.abort()

    def _data(self) -> Iterator[bytes]:
        _, greeting, prefix, flood = self._attack
        yield greeting
        yield prefix
        for _ in range(ENDLESS_BYTES // len(flood)):
            yield flood


async def open_or_append(broker: Broker) -> Stop | object:
    message = Message(1, "d1", (("X-Sequence", "1"),), b"{}")
    owner = Owner("db", 1)
    standing = await broker.open("lane", owner, 0, None)
    if isinstance(standing, Stop):
        return standing
    return (await broker.append("lane", owner, 0, [message])).stop


@pytest.mark.parametrize("name", ATTACKS)
async def test_a_server_that_sends_too_much_is_cut_off(name: str) -> None:
    attack = ATTACKS[name]
    server = Server(attack)
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    address = BrokerAddress(attack.url.format(port=port), timeout_s=1, connect_timeout_s=1)
    brokers = Brokers(EgressPolicy(["127.0.0.0/8"]))
    broker = brokers.connect(address)
    try:
        stop = await open_or_append(broker)
        assert isinstance(stop, Stop)
        assert len(stop.detail) <= DETAIL_CHARS_MAX
        await until(lambda: server.ended == server.connections)
    finally:
        await broker.aclose()
        await brokers.aclose()
        listener.close()
        await listener.wait_closed()
    assert server.connections >= 1
    assert server.written_bytes < WRITTEN_BYTES_MAX


def delivered(size: int) -> bytes:
    """A frame with a chunk of a stream of RabbitMQ."""
    body = struct.pack(">HHB", Key.Deliver.value, 1, 0) + bytes(size)
    return struct.pack(">I", len(body)) + body


class _Nowhere:
    def abort(self) -> None: ...


def subscribed() -> tuple[StreamConnection, _Tail]:
    """An authenticated connection with a subscription that waits for one chunk."""
    connection = StreamConnection()
    connection.connection_made(_Nowhere())  # type: ignore[arg-type]
    connection._tuned.set_result(None)  # type: ignore[arg-type]
    tail = _Tail(connection)
    connection.subscriptions[0] = tail.received
    connection.subscribed.add(0)
    return connection, tail


async def test_chunks_that_were_not_asked_for_are_not_kept() -> None:
    connection, tail = subscribed()
    for _ in range(3):
        connection.data_received(delivered(5_000_000))
    assert tail.chunks.qsize() == 1
    assert "not asked for" in str(connection.lost)


async def test_a_chunk_that_arrives_late_does_not_end_the_connection() -> None:
    """Other lanes use it, too; a large frame is one only after the subscription has ended."""
    connection, _ = subscribed()
    chunk = delivered(2_000_000)
    connection.data_received(chunk[:100_000])
    del connection.subscriptions[0]
    connection.data_received(chunk[100_000:])
    assert connection.lost is None
    connection.subscribed.clear()
    connection.data_received(chunk)
    assert connection.lost is not None
