"""Brokers that a test kills under load, with settings that keep what they have acknowledged."""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol

from outbox_devtools.embedded.launch import command, spawn_thread
from tests.support.brokers.guarantees import (
    StreamMessage,
    check_at_most_once,
    check_copies_recognisable,
    check_exact,
)
from tests.support.brokers.nats import SUBJECT, nats_server
from tests.support.brokers.valkey import valkey
from tests.support.ports import free_port
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Mapping
    from pathlib import Path

    from tests.support.brokers.guarantees import Check
    from tests.support.brokers.nats import NatsServer
    from tests.support.brokers.rabbitmq import RabbitMq
    from tests.support.brokers.valkey import Valkey

    Streams = dict[str, list[StreamMessage]]

MESSAGE_BYTES_MAX = 128 * 1024
"""The brokers' limit, where it can be so low."""
KAFKA_COMMAND = os.environ.get("OUTBOX_TEST_KAFKA_COMMAND")
"""Starts a Kafka server that keeps its records, with {port} and {directory}; it may be killed."""
TOPIC = "events"


class KilledBroker(Protocol):
    """A running broker."""

    @property
    def url(self) -> str:
        """Of the endpoint."""
        ...

    @property
    def credentials(self) -> str | None: ...
    @property
    def refused_bytes(self) -> int | None:
        """Size of a payload that it refuses; None: it has no limit."""
        ...

    @property
    def check(self) -> Check:
        """What it guarantees."""
        ...

    def kill(self) -> None:
        """Kill -9."""
        ...

    async def start(self) -> None:
        """Start it again with the same data, and wait until it responds."""
        ...

    async def streams(self, lanes: Collection[str]) -> Streams:
        """The streams of these lanes, and all others, by the lane's name."""
        ...


class KilledValkey:
    """Valkey, which syncs its log before it responds."""

    credentials = None
    refused_bytes = 1024 * 1024
    check = staticmethod(check_exact)

    def __init__(self, server: Valkey) -> None:
        self._server = server
        self.url = server.url()
        self.kill = server.kill
        self.start = server.start

    async def streams(self, lanes: Collection[str]) -> Streams:
        keys = [key.decode() for key in await self._server.command("KEYS", "events:*}")]
        names = {key.partition("{")[2].removesuffix("}") for key in keys}
        return {
            name: [
                message_of(fields, "x-sequence", "x-delivery")
                for _, fields in await self._server.entries(name)
            ]
            for name in names | set(lanes)
        }


class KilledNats:
    """A JetStream of one server, which syncs each message before it responds."""

    credentials = None
    refused_bytes = MESSAGE_BYTES_MAX
    check = staticmethod(check_exact)

    def __init__(self, server: NatsServer) -> None:
        self._server = server
        self.url = server.url
        self.kill = server.kill
        self.start = server.start

    async def streams(self, lanes: Collection[str]) -> Streams:
        found: Streams = {lane: [] for lane in lanes}
        for subject, messages in (await self._server.messages()).items():
            # Beside the messages of a lane is its fence.
            if not subject.endswith(".f"):
                lane = subject.removeprefix(f"{SUBJECT}.").removesuffix(".m")
                found[lane] = [message_of(each) for each in messages]
        return found


class KilledRabbitMq:
    """RabbitMQ streams of one server."""

    refused_bytes = MESSAGE_BYTES_MAX
    check = staticmethod(check_at_most_once)

    def __init__(self, server: RabbitMq) -> None:
        from tests.support.brokers.rabbitmq import PASSWORD, USER

        self._server = server
        self.url = f"rabbitmq-stream://127.0.0.1:{server.port}/events?create=1"
        self.credentials = f"{USER}:{PASSWORD}"
        self.kill = server.kill

    async def start(self) -> None:
        await asyncio.to_thread(spawn_thread.run, self._server.start)

    async def streams(self, lanes: Collection[str]) -> Streams:
        from rstream.amqp import amqp_decoder

        from tests.support.brokers.rabbitmq_raw import raw_client

        found: Streams = {}
        async with raw_client(self._server.port) as client:
            for lane in lanes:
                found[lane] = [
                    message_of(
                        {
                            name.decode(): value.decode()
                            for name, value in amqp_decoder(each).application_properties.items()
                        }
                    )
                    for each in await client.messages(f"events.{lane}")
                ]
        return found


class KilledKafka:
    """A topic of one server."""

    credentials = None
    check = staticmethod(check_copies_recognisable)

    def __init__(
        self,
        server: str,
        kill: Callable[[], None],
        start: Callable[[], None],
        refused_bytes: int | None,
    ) -> None:
        self._server = server
        self._start = start
        self.url = f"kafka://{server}/{TOPIC}"
        self.refused_bytes = refused_bytes
        self.kill = kill

    async def start(self) -> None:
        from confluent_kafka.admin import AdminClient

        from outbox_brokers.kafka.loops import SILENT

        self._start()
        client = AdminClient({"bootstrap.servers": self._server}, logger=SILENT)

        def responds() -> bool:
            return client.list_topics(TOPIC, timeout=5).topics[TOPIC].error is None

        await until(lambda: asyncio.to_thread(responds), what="the server")

    async def streams(self, lanes: Collection[str]) -> Streams:
        from outbox_brokers.kafka.target import partition_of
        from tests.support.brokers.kafka import read_records

        found: Streams = {}
        for lane in lanes:
            records = await asyncio.to_thread(read_records, self._server, TOPIC, partition_of(lane))
            assert records[0].offset == 0, "the cluster no longer has the first records"
            found[lane] = [message_of(each.headers) for each in records]
        return found


def message_of(
    headers: Mapping[str, str], sequence: str = "X-Sequence", delivery: str = "X-Delivery"
) -> StreamMessage:
    """The message with these headers."""
    number = headers.get(sequence)
    return StreamMessage(None if number is None else int(number), headers.get(delivery))


@asynccontextmanager
async def killed_valkey(directory: Path, lanes: int) -> AsyncIterator[KilledBroker]:
    async with valkey(directory, "--proto-max-bulk-len", str(KilledValkey.refused_bytes)) as server:
        yield KilledValkey(server)


@asynccontextmanager
async def killed_nats(directory: Path, lanes: int) -> AsyncIterator[KilledBroker]:
    limit = f"max_payload: {MESSAGE_BYTES_MAX}"
    async with nats_server(directory, limit, jetstream="sync_interval: always") as server:
        await server.create_stream()
        yield KilledNats(server)


@asynccontextmanager
async def killed_rabbitmq(directory: Path, lanes: int) -> AsyncIterator[KilledBroker]:
    from tests.support.brokers.rabbitmq import RabbitMq

    server = RabbitMq(directory, settings=[f"stream.frame_max = {MESSAGE_BYTES_MAX}"])
    # The server ends with the thread that starts it.
    await asyncio.to_thread(spawn_thread.run, server.__enter__)
    try:
        yield KilledRabbitMq(server)
    finally:
        server.__exit__()


@asynccontextmanager
async def cut_kafka(directory: Path, lanes: int) -> AsyncIterator[KilledBroker]:
    """The mock cluster, which has its records in memory: it is not killed, but its connections are
    closed, and new ones refused.
    """
    from tests.support.brokers.kafka import MockCluster

    cluster = MockCluster()
    cluster.create_topic(TOPIC, lanes)
    try:
        yield KilledKafka(cluster.server, cluster.stop_server, cluster.start_server, None)
    finally:
        cluster.close()


@asynccontextmanager
async def killed_kafka(directory: Path, lanes: int) -> AsyncIterator[KilledBroker]:
    """A server of `OUTBOX_TEST_KAFKA_COMMAND`."""
    from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

    from outbox_brokers.kafka.loops import SILENT

    await asyncio.to_thread(directory.mkdir)
    port = free_port()
    assert KAFKA_COMMAND is not None
    words = shlex.split(KAFKA_COMMAND.format(port=port, directory=directory))
    process: subprocess.Popen[bytes] | None = None

    def start() -> None:
        nonlocal process
        with (directory / "log").open("ab") as log:
            process = spawn_thread.run(
                lambda: subprocess.Popen(command(words, None), stdout=log, stderr=log)
            )

    def kill() -> None:
        if process is not None:
            process.kill()
            process.wait()

    start()
    try:
        client = AdminClient({"bootstrap.servers": f"127.0.0.1:{port}"}, logger=SILENT)
        limit = {"max.message.bytes": str(MESSAGE_BYTES_MAX)}
        created = client.create_topics([NewTopic(TOPIC, lanes, 1, config=limit)])
        await asyncio.to_thread(created[TOPIC].result, 20)
        yield KilledKafka(f"127.0.0.1:{port}", kill, start, MESSAGE_BYTES_MAX)
    finally:
        kill()
