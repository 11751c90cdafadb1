"""Clusters of Kafka for tests.

The mock cluster of librdkafka speaks Kafka's protocol on loopback, in threads of this process.  It
can be told to fail requests.  It does not compare the sequence numbers of idempotent producers.
For that `OUTBOX_TEST_KAFKA` names a real cluster by one of its servers: host:port, where topics may
be created and removed.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
import threading
import time
from contextlib import asynccontextmanager, suppress
from ctypes import c_char_p, c_int, c_int16, c_int32, c_int64, c_size_t, c_void_p
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

import confluent_kafka
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from outbox.core.brokers.port import Message, Owner
from outbox.destinations.broker import Broker, BrokerAddress
from outbox.network.dns import CachingResolver
from outbox.network.egress import EgressPolicy
from outbox_brokers.kafka.broker import KafkaBroker
from outbox_brokers.kafka.loops import SILENT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence
    from concurrent.futures import Future

REAL = os.environ.get("OUTBOX_TEST_KAFKA")
"""A server of a real cluster, if there is one for tests."""
PRODUCE = 0
"""Number of a request, of Kafka's protocol."""


class Record(NamedTuple):
    """A record of a partition."""

    offset: int
    sequence: int | None
    key: bytes | None
    value: bytes | None
    headers: dict[str, str]


@cache
def _library() -> ctypes.CDLL:
    """The librdkafka of the client library, for functions that have no Python binding."""
    (path,) = Path(f"{confluent_kafka.__path__[0]}.libs").glob("librdkafka-*.so*")
    library = ctypes.CDLL(str(path))
    library.rd_kafka_conf_new.restype = c_void_p
    library.rd_kafka_conf_set.argtypes = [c_void_p, c_char_p, c_char_p, c_char_p, c_size_t]
    library.rd_kafka_new.restype = c_void_p
    library.rd_kafka_new.argtypes = [c_int, c_void_p, c_char_p, c_size_t]
    library.rd_kafka_destroy.argtypes = [c_void_p]
    library.rd_kafka_mock_cluster_new.restype = c_void_p
    library.rd_kafka_mock_cluster_new.argtypes = [c_void_p, c_int]
    library.rd_kafka_mock_cluster_destroy.argtypes = [c_void_p]
    library.rd_kafka_mock_cluster_bootstraps.restype = c_char_p
    library.rd_kafka_mock_cluster_bootstraps.argtypes = [c_void_p]
    library.rd_kafka_mock_topic_create.argtypes = [c_void_p, c_char_p, c_int, c_int]
    library.rd_kafka_mock_topic_set_error.argtypes = [c_void_p, c_char_p, c_int]
    library.rd_kafka_mock_push_request_errors_array.argtypes = [
        c_void_p,
        c_int16,
        c_size_t,
        c_void_p,
    ]
    library.rd_kafka_mock_clear_request_errors.argtypes = [c_void_p, c_int16]
    library.rd_kafka_mock_broker_set_down.argtypes = [c_void_p, c_int32]
    library.rd_kafka_mock_broker_set_up.argtypes = [c_void_p, c_int32]
    library.rd_kafka_mock_broker_set_rtt.argtypes = [c_void_p, c_int32, c_int]
    library.rd_kafka_mock_broker_set_host_port.argtypes = [c_void_p, c_int32, c_char_p, c_int]
    library.rd_kafka_mock_partition_delete_records.argtypes = [
        c_void_p,
        c_char_p,
        c_int32,
        c_int64,
    ]
    return library


class MockCluster:
    """librdkafka's mock cluster of one server."""

    def __init__(self) -> None:
        self._library = library = _library()
        settings = library.rd_kafka_conf_new()
        reason = ctypes.create_string_buffer(512)
        library.rd_kafka_conf_set(settings, b"bootstrap.servers", b"127.0.0.1:1", reason, 512)
        library.rd_kafka_conf_set(settings, b"log_level", b"0", reason, 512)
        self._client = library.rd_kafka_new(0, settings, reason, 512)
        self._cluster = library.rd_kafka_mock_cluster_new(self._client, 1)
        self.server = library.rd_kafka_mock_cluster_bootstraps(self._cluster).decode()

    def create_topic(self, topic: str, partitions: int) -> None:
        self._library.rd_kafka_mock_topic_create(self._cluster, topic.encode(), partitions, 1)

    def fail_topic(self, topic: str, code: int) -> None:
        """Report an error for the topic in metadata."""
        self._library.rd_kafka_mock_topic_set_error(self._cluster, topic.encode(), code)

    def fail(self, request: int, *codes: int) -> None:
        """Fail the next requests of a kind, each with a code."""
        self._library.rd_kafka_mock_push_request_errors_array(
            self._cluster, request, len(codes), (c_int * len(codes))(*codes)
        )

    def heal(self, request: int) -> None:
        self._library.rd_kafka_mock_clear_request_errors(self._cluster, request)

    def stop_server(self) -> None:
        self._library.rd_kafka_mock_broker_set_down(self._cluster, 1)

    def start_server(self) -> None:
        self._library.rd_kafka_mock_broker_set_up(self._cluster, 1)

    def delay(self, delay_ms: int) -> None:
        """Delay all responses."""
        self._library.rd_kafka_mock_broker_set_rtt(self._cluster, 1, delay_ms)

    def advertise(self, host: str, port: int) -> None:
        """Name another address in metadata."""
        self._library.rd_kafka_mock_broker_set_host_port(self._cluster, 1, host.encode(), port)

    def delete_records(self, topic: str, partition: int, before: int) -> None:
        self._library.rd_kafka_mock_partition_delete_records(
            self._cluster, topic.encode(), partition, before
        )

    def close(self) -> None:
        self._library.rd_kafka_mock_cluster_destroy(self._cluster)
        self._library.rd_kafka_destroy(self._client)


class Proxy:
    """Forwards connections to a server, and cuts or holds what passes.

    Threads, because a frozen event loop must not stop it.
    """

    def __init__(self, server: str) -> None:
        host, _, port = server.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        self.response_bytes_left: int | None = None
        """Bytes of responses that pass before all connections are cut."""
        self.request_bytes_left: int | None = None
        self._open = threading.Event()
        self._open.set()
        threading.Thread(target=self._accept, daemon=True).start()

    def hold(self) -> None:
        """Forward nothing for now."""
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    def cut(self) -> None:
        """Close all connections."""
        sockets, self._sockets = self._sockets, []
        for each in sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def close(self) -> None:
        self._listener.close()
        self.release()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
            except OSError:
                return
            self._sockets += [client, server]
            for source, sink, is_response in ((client, server, False), (server, client, True)):
                threading.Thread(
                    target=self._forward, args=(source, sink, is_response), daemon=True
                ).start()

    def _forward(self, source: socket.socket, sink: socket.socket, is_response: bool) -> None:
        while True:
            try:
                data = source.recv(65536)
                self._open.wait()
                left = self.response_bytes_left if is_response else self.request_bytes_left
                if left is not None and len(data) >= left:
                    sink.sendall(data[:left])
                    self.cut()
                    return
                if left is not None and is_response:
                    self.response_bytes_left = left - len(data)
                elif left is not None:
                    self.request_bytes_left = left - len(data)
                if data:
                    sink.sendall(data)
                    continue
            except OSError:
                pass
            with suppress(OSError):
                sink.shutdown(socket.SHUT_RDWR)
            return


def address_of(server: str, topic: str, **changes: object) -> BrokerAddress:
    """The address of a topic, for tests: short time-outs."""
    settings = {"url": f"kafka://{server}/{topic}", "connect_timeout_s": 3.0, "timeout_s": 5.0}
    return BrokerAddress(**(settings | changes))  # type: ignore[arg-type]


@asynccontextmanager
async def broker_at(server: str, topic: str, **changes: object) -> AsyncIterator[KafkaBroker]:
    """A driver for a topic; loopback is open."""
    resolver = CachingResolver()
    address = address_of(server, topic, **changes)
    broker = KafkaBroker(address, EgressPolicy(["127.0.0.0/8"]), resolver)
    _: Broker = broker
    try:
        yield broker
    finally:
        async with asyncio.timeout(20):
            await broker.aclose()
            await resolver.aclose()


def message(lane: str, sequence: int, body: bytes = b"{}", delivery: str | None = None) -> Message:
    """A delivery of a lane."""
    name = delivery or f"delivery-{sequence}"
    headers = (("X-Delivery", name), ("X-Lane", lane), ("X-Sequence", str(sequence)))
    return Message(sequence, name, headers, body, key=b"key")


def messages(lane: str, sequences: Sequence[int], body: bytes = b"{}") -> list[Message]:
    return [message(lane, sequence, body) for sequence in sequences]


OWNER = Owner("database-1", 1)


def read_records(server: str, topic: str, partition: int) -> list[Record]:
    """All records of a partition."""
    consumer = Consumer(
        {
            "bootstrap.servers": server,
            "group.id": "test",
            "enable.partition.eof": True,
            "enable.auto.commit": False,
            "isolation.level": "read_uncommitted",
            "fetch.wait.max.ms": 10,
        },
        logger=SILENT,
    )
    try:
        low, _ = consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=10)
        consumer.assign([TopicPartition(topic, partition, low)])
        return list(_poll_records(consumer))
    finally:
        consumer.close()


def _poll_records(consumer: Consumer) -> Iterator[Record]:
    until = time.monotonic() + 10
    while time.monotonic() < until:
        record = consumer.poll(0.2)
        if record is None:
            continue
        if record.error() is not None:
            return
        headers = {name: bytes(value or b"").decode() for name, value in record.headers() or ()}  # type: ignore[str-unpack, arg-type]
        sequence = int(headers["X-Sequence"]) if "X-Sequence" in headers else None
        yield Record(record.offset() or 0, sequence, record.key(), record.value(), headers)
    raise AssertionError("the partition was not read to its end")


def sequences(server: str, topic: str, partition: int) -> list[int]:
    """The sequences of a partition's records, in the order of their offsets."""
    records = read_records(server, topic, partition)
    return [record.sequence for record in records if record.sequence is not None]


def write_foreign(server: str, topic: str, partition: int, count: int) -> None:
    """Append records of another application."""
    producer = Producer({"bootstrap.servers": server}, logger=SILENT)
    for _ in range(count):
        producer.produce(topic, b"foreign", partition=partition)
    assert producer.flush(10) == 0


@asynccontextmanager
async def real_topic(partitions: int = 4) -> AsyncIterator[str]:
    """A topic of the real cluster, removed at the end."""
    assert REAL is not None
    admin = AdminClient({"bootstrap.servers": REAL}, logger=SILENT)
    topic = f"outbox-test-{uuid4().hex[:12]}"

    def wait(futures: dict[str, Future[Any]]) -> None:
        for future in futures.values():
            future.result(20)

    await asyncio.to_thread(lambda: wait(admin.create_topics([NewTopic(topic, partitions, 1)])))
    try:
        yield topic
    finally:
        await asyncio.to_thread(lambda: wait(admin.delete_topics([topic])))
