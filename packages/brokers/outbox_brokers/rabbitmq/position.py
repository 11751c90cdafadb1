"""Reads where a lane stands: the publisher's sequence, and the stream's last message."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple, cast

from rstream import schema
from rstream.constants import OffsetType
from rstream.encoding import encode_frame

from outbox.core.brokers.port import Foreign, Position, StopKind
from outbox.core.model.text import quoted
from outbox_brokers.rabbitmq.connection import Lost, Rejected
from outbox_brokers.rabbitmq.leader import placement_of, require_leader
from outbox_brokers.rabbitmq.messages import (
    IDENTIFIED_BYTES_MAX,
    MalformedChunk,
    identify,
    last_entry,
)
from outbox_brokers.rabbitmq.stops import Stopped, rejected

if TYPE_CHECKING:
    from outbox_brokers.rabbitmq.connection import StreamConnection

TRIMMED_WAIT_S = 2.0
"""How long a chunk is waited for that the server has not sent by itself at once: it has none, if
retention has removed all messages."""
COMMIT_WAIT_S = 5.0
"""How long the last message may wait for the replicas' confirmation."""


async def read_position(
    connection: StreamConnection,
    slot: int,
    stream: str,
    lane: str,
    reference: str,
    *,
    force: bool = False,
) -> Position | Foreign:
    """Declare the publisher, and read where the lane stands.

    Args:
        force: whether the last message may be of another publisher.

    Raises:
        Stopped: the server refused something, or the last message is not readable yet.
        Lost: the connection ended.
    """
    tail = _Tail(connection)
    connection.subscriptions[slot] = tail.received
    connection.subscribed.add(slot)
    try:
        # All in one system call: the server responds in this order.
        declared = connection.request(
            schema.DeclarePublisher, publisher_id=slot, stream=stream, reference=reference
        )
        placed = connection.request(schema.Metadata, streams=[stream])
        queried = connection.request(
            schema.QueryPublisherSequence, publisher_ref=reference, stream=stream
        )
        subscribed = connection.request(
            schema.Subscribe,
            subscription_id=slot,
            stream=stream,
            offset_spec=schema.OffsetSpec(OffsetType.LAST),
            credit=1,
            properties=[],
        )
        # The server sends a subscription's first chunk before it responds to the next request.
        barrier = connection.request(schema.Metadata, streams=[stream])
        await asyncio.gather(declared, placed, queried, subscribed, barrier, return_exceptions=True)
        _require(declared, f"publishing to stream {stream} (right to write)")
        # A leader that moves later ends this publisher.
        placement = placement_of(cast("schema.MetadataResponse", placed.result()), stream)
        if placement is None:
            raise Stopped(StopKind.UNAVAILABLE, f"stream {stream} was deleted just now")
        require_leader(connection, placement)
        _require(queried, f"the publisher's sequence of stream {stream}")
        _require(subscribed, f"reading stream {stream} (right to read)")
        sequence = cast("schema.QueryPublisherSequenceResponse", queried.result()).sequence
        return await _compare(slot, tail, stream, lane, sequence, force=force)
    finally:
        connection.subscriptions.pop(slot, None)


async def unsubscribe(connection: StreamConnection, slot: int) -> None:
    await connection.exchange(schema.Unsubscribe, schema.UnsubscribeResponse, subscription_id=slot)
    connection.subscribed.discard(slot)


async def delete_publisher(connection: StreamConnection, slot: int) -> None:
    await connection.exchange(
        schema.DeletePublisher, schema.DeletePublisherResponse, publisher_id=slot
    )


class _Last(NamedTuple):
    """The last message of a chunk."""

    entry: bytes | None
    problem: str | None = None
    """Why the chunk could not be read."""


class _Tail:
    """The chunks that a subscription has received, each for one credit."""

    def __init__(self, connection: StreamConnection) -> None:
        self._connection = connection
        self._credits = 1  # Of the subscription itself.
        self.entries: asyncio.Queue[_Last] = asyncio.Queue()
        """The start of the last message of each: a chunk may have 64 MiB."""

    def request(self, slot: int) -> None:
        """Let the server send one more."""
        self._credits += 1
        self._connection.send(encode_frame(schema.Credit(subscription_id=slot, credit=1)))

    def received(self, chunk: bytes) -> None:
        self._credits -= 1
        if self._credits < 0:
            self._connection.abort("the server sent a chunk that was not asked for")
            return
        try:
            entry = last_entry(chunk)
            last = _Last(None if entry is None else entry[:IDENTIFIED_BYTES_MAX])
        except (MalformedChunk, IndexError) as error:
            last = _Last(None, str(error))
        self.entries.put_nowait(last)

    async def next(self, wait_s: float) -> _Last | None:
        """The last message of the next chunk; None: it did not come."""
        if self.entries.empty() and wait_s <= 0:
            return None
        try:
            async with asyncio.timeout(wait_s):
                return await self.entries.get()
        except TimeoutError:
            if self._connection.lost is not None:
                raise self._connection.lost from None
            return None


async def _compare(
    slot: int,
    tail: _Tail,
    stream: str,
    lane: str,
    sequence: int,
    *,
    force: bool,
) -> Position | Foreign:
    last = await tail.next(TRIMMED_WAIT_S if sequence else 0)
    if last is None:
        return Position(sequence, None)
    loop = asyncio.get_running_loop()
    waits_until = loop.time() + COMMIT_WAIT_S
    while True:
        result = _check_last(last, stream, lane, sequence, force=force)
        if result is not None:
            return result
        # The server counts a message before all replicas have it, and delivers it after.
        tail.request(slot)
        last = await tail.next(waits_until - loop.time())
        if last is None:
            raise Stopped(
                StopKind.UNAVAILABLE,
                f"sequence {sequence} of stream {stream} is not committed: are replicas missing?",
            )


def _check_last(
    last: _Last, stream: str, lane: str, sequence: int, *, force: bool
) -> Position | Foreign | None:
    """Compare a chunk's last message with the publisher's sequence; None: it is an older one."""
    if last.problem is not None:
        raise Stopped(StopKind.UNAVAILABLE, f"a chunk of stream {stream}: {last.problem}")
    stored = None if last.entry is None else identify(last.entry)
    if stored is None:
        return Foreign(f"the last message of stream {stream} is not from a relay of outbox")
    if stored.lane != lane:
        return Foreign(f"the last message of stream {stream} is of lane {quoted(stored.lane)}")
    if stored.sequence == sequence or (force and stored.sequence > sequence):
        # The server keeps the ids of each publisher, so this one's may begin after it.
        return Position(stored.sequence, stored.delivery)
    if stored.sequence > sequence:
        return Foreign(
            f"the last message of stream {stream} has sequence {stored.sequence}, and this "
            f"database's publisher stands at {sequence}: another database publishes here"
        )
    return None


def _require(responded: asyncio.Future[schema.Frame], what: str) -> None:
    """Raise what a request ended with, if it failed."""
    error = responded.exception()
    if isinstance(error, Rejected):
        stop = rejected(error.code, what)
        raise Stopped(stop.kind, stop.detail)
    if isinstance(error, Lost):
        raise error
