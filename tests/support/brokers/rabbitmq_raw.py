"""What a stream holds, and another writer: with rstream's own client."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from rstream import schema
from rstream.amqp import amqp_decoder
from rstream.client import Client
from rstream.constants import OffsetType

from tests.support.brokers.rabbitmq import PASSWORD, USER
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

_SUBSCRIPTION = 7


class RawClient:
    """A client that reads whole streams and publishes what it likes."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._confirmed: list[int] = []
        client.add_handler(schema.PublishConfirm, self._on_confirm, name="confirms")
        client.add_handler(schema.Deliver, lambda _: None, name=str(_SUBSCRIPTION))

    def _on_confirm(self, frame: schema.PublishConfirm) -> None:
        self._confirmed += frame.publishing_ids

    async def create(self, stream: str, arguments: Mapping[str, Any] | None = None) -> None:
        await self._client.create_stream(stream, dict(arguments or {}))

    async def delete(self, stream: str) -> None:
        await self._client.delete_stream(stream)

    async def exists(self, stream: str) -> bool:
        return await self._client.stream_exists(stream)

    async def messages(self, stream: str) -> list[bytes]:
        """All messages of a stream, as they are stored."""
        await self._client.subscribe(
            stream, _SUBSCRIPTION, schema.OffsetSpec(OffsetType.FIRST), initial_credit=60_000
        )
        # The server sends all chunks before it responds to the next request.
        await self._client.stream_exists(stream)
        await self._client.unsubscribe(_SUBSCRIPTION)
        queue = self._client._frames[_SUBSCRIPTION]
        found: list[bytes] = []
        while not queue.empty():
            found += queue.get_nowait().get_messages()
        return found

    async def sequences(self, stream: str) -> list[int]:
        """The X-Sequence of each message of a stream."""
        return [
            int(amqp_decoder(each).application_properties[b"X-Sequence"])
            for each in await self.messages(stream)
        ]

    async def publish(
        self, stream: str, reference: str | None, messages: Sequence[tuple[int, bytes]]
    ) -> None:
        """Publish as another writer, and wait for the confirms."""
        await self._client.declare_publisher(stream, reference, 1)
        self._confirmed.clear()
        await self._client.send_publish_frame(
            schema.Publish(1, [schema.Message(each, None, data) for each, data in messages])
        )
        await until(lambda: len(self._confirmed) == len(messages), what="the confirms")
        await self._client.delete_publisher(1)

    async def publish_batch(self, stream: str, reference: str, number: int, data: bytes) -> None:
        """Publish a batch of one message, as clients with sub-entry batching do."""
        await self._client.declare_publisher(stream, reference, 1)
        self._confirmed.clear()
        entry = len(data).to_bytes(4, "big") + data
        await self._client.send_frame(
            schema.PublishSubBatching(1, 1, number, 0x80, 1, len(entry), len(entry), entry)
        )
        await until(lambda: self._confirmed, what="the confirm")
        await self._client.delete_publisher(1)


@asynccontextmanager
async def raw_client(port: int) -> AsyncIterator[RawClient]:
    client = Client("127.0.0.1", port, frame_max=1024 * 1024, heartbeat=60)
    await client.start()
    try:
        await client.authenticate("/", USER, PASSWORD)
        yield RawClient(client)
    finally:
        connection = client._conn
        await client.close()
        # It leaves a connection open that the server has closed.
        if connection is not None and connection._writer is not None:
            connection._writer.transport.abort()
