"""Metadata of a topic, and the positions of lanes, read by a consumer in a thread of its own.

A lane's position is the highest X-Sequence among the records of its partition that have its
X-Lane.  Only the records from a receipt on need to be read; without one it is the whole partition,
which other lanes and other writers may share.  If that takes longer than one call, the next call
goes on where it stopped.

A receipt has the form `partition:offset:sequence`.  It is evidence of a position only while the
record with that sequence is at that offset, or has expired with all that are older.
"""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from outbox.core.brokers.broker_url import Server
from outbox.core.brokers.port import Position, Stop, StopKind
from outbox_brokers.kafka.failures import ABSENT, Troubles, error_of, stop_before_sending
from outbox_brokers.kafka.loops import SILENT, call_in_loop
from outbox_brokers.kafka.settings import consumer_settings

if TYPE_CHECKING:
    import asyncio

    from confluent_kafka import Message as Record

    from outbox_brokers.kafka.settings import Settings

RECORDS_MAX = 1000
"""Records that are taken from the client library at once."""
READER_POLL_S = 0.5
_R = TypeVar("_R")


class Topic(NamedTuple):
    """What the cluster says of a topic."""

    servers: tuple[Server, ...]
    """All servers of the cluster."""
    partitions: int
    """0: the topic does not exist."""
    replicas: int
    """The least number of replicas of a partition."""
    leaderless: int
    """Partitions without a leader."""


class Receipt(NamedTuple):
    """Position of the last record whose result is known."""

    partition: int
    offset: int
    sequence: int

    def __str__(self) -> str:
        return f"{self.partition}:{self.offset}:{self.sequence}"

    @classmethod
    def parse(cls, text: str | None, partition: int) -> Receipt | None:
        """Parse a receipt; None: it is absent, or of another form or partition."""
        try:
            found, offset, sequence = map(int, (text or "").split(":"))
        except ValueError:
            return None
        receipt = cls(found, offset, sequence)
        return receipt if receipt.partition == partition else None


class _Progress:
    """How far the partition of a lane was read."""

    def __init__(self, offset: int) -> None:
        self.next_offset = offset
        self.offset: int | None = None
        """The offset of the record with the highest sequence."""
        self.sequence = 0
        self.delivery: str | None = None

    def add(self, record: Record, lane: bytes) -> int | None:
        """Add a record; returns its sequence if it is of the lane."""
        offset = record.offset() or 0
        self.next_offset = offset + 1
        fields = cast("list[tuple[str, bytes | None]]", record.headers() or [])
        headers = {name.lower(): value for name, value in fields}
        if headers.get("x-lane") != lane:
            return None
        text = headers.get("x-sequence") or b""
        if not text.isdigit():
            return None
        sequence = int(text)
        if sequence >= self.sequence:
            self.sequence, self.offset = sequence, offset
            self.delivery = _decode(headers.get("x-delivery"))
        return sequence


@dataclass(frozen=True, slots=True)
class Places:
    """What was read of the lanes; another reader goes on from it."""

    found: dict[str, Receipt] = field(default_factory=dict)
    """The last record of each lane that was opened."""
    unfinished: dict[str, _Progress] = field(default_factory=dict)


class _Request(NamedTuple):
    """A lane to open."""

    lane: str
    partition: int
    receipt: Receipt | None
    deadline: float
    done: asyncio.Future[Position | Stop]


class _MetadataRequest(NamedTuple):
    deadline: float
    done: asyncio.Future[Topic | Stop]


class Reader:
    """A consumer for the lanes of one endpoint."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, shared: Settings, topic: str, places: Places
    ) -> None:
        self._loop = loop
        self._topic = topic
        self._places = places
        self._requests: queue.SimpleQueue[_Request | _MetadataRequest | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self.troubles = Troubles()
        self.ended: asyncio.Future[None] = loop.create_future()
        """Done when the thread has ended."""
        settings = consumer_settings(shared, self.troubles.report)
        self._consumer = Consumer(settings, logger=SILENT)
        threading.Thread(target=self._run, name="outbox-kafka-reader", daemon=True).start()

    def discard(self) -> None:
        """End the thread; no request gets a response any more."""
        self._closed.set()
        self._requests.put(None)

    def retire(self) -> None:
        """End the thread after the requests that it has."""
        self._requests.put(None)

    async def topic(self, deadline: float) -> Topic | Stop:
        """Ask for the cluster's servers and the topic's partitions.

        Args:
            deadline: the latest time by `time.monotonic`; the caller bounds the call, too.
        """
        request = _MetadataRequest(deadline, self._loop.create_future())
        self._requests.put(request)
        return await request.done

    async def position(
        self, lane: str, partition: int, receipt: str | None, deadline: float
    ) -> Position | Stop:
        """Read the position of a lane."""
        request = _Request(
            lane,
            partition,
            Receipt.parse(receipt, partition),
            deadline,
            self._loop.create_future(),
        )
        self._requests.put(request)
        return await request.done

    def _run(self) -> None:
        while True:
            try:
                request = self._requests.get(timeout=READER_POLL_S)
            except queue.Empty:
                # Serves the callbacks of the client.
                self._consumer.poll(0)
                continue
            if request is None or self._closed.is_set():
                break
            if isinstance(request, _MetadataRequest):
                self._resolve(request.done, self._read_topic(request))
                continue
            self._resolve(request.done, self._read_position(request))
        self._consumer.close()
        call_in_loop(self._loop, _set_result, self.ended, None)

    def _resolve(self, done: asyncio.Future[_R], result: _R) -> None:
        call_in_loop(self._loop, _set_result, done, result)

    def _read_topic(self, request: _MetadataRequest) -> Topic | Stop:
        started = time.monotonic()
        try:
            found = self._consumer.list_topics(
                self._topic, timeout=max(0.01, request.deadline - started)
            )
        except KafkaException as exception:
            self._consumer.poll(0)  # Reports the errors of connections.
            return self.troubles.stop(error_of(exception), round(time.monotonic() - started, 1))
        topic = found.topics[self._topic]
        partitions = list(topic.partitions.values())
        if topic.error is not None and topic.error.code() not in ABSENT:
            return stop_before_sending(topic.error)
        return Topic(
            tuple(Server(each.host, each.port) for each in found.brokers.values()),
            0 if topic.error is not None else len(partitions),
            min((len(each.replicas) for each in partitions), default=0),
            sum(each.leader < 0 for each in partitions),
        )

    def _read_position(self, request: _Request) -> Position | Stop:
        place = TopicPartition(self._topic, request.partition)
        started = time.monotonic()
        try:
            low, high = self._consumer.get_watermark_offsets(
                place, timeout=max(0.01, request.deadline - started)
            )
            return self._scan(request, low, high)
        except KafkaException as exception:
            self._consumer.poll(0)  # Reports the errors of connections.
            error = error_of(exception)
            waited_s = round(time.monotonic() - started, 1)
            if error.code() == KafkaError._TIMED_OUT or self.troubles.is_local(waited_s):
                return self.troubles.stop(error, waited_s)
            return stop_before_sending(error)
        finally:
            self._consumer.unassign()

    def _scan(self, request: _Request, low: int, high: int) -> Position | Stop:
        """Read the records of a partition up to the end that it had at the start."""
        lane, partition = request.lane, request.partition
        kept = self._places.found.get(lane)
        receipt = max(filter(None, (request.receipt, kept)), default=None, key=_offset_of)
        if receipt is not None and receipt.offset >= high:
            receipt = None  # The topic was made anew.
        progress = self._places.unfinished.pop(lane, None)
        if progress is None or progress.next_offset > high:
            progress = _Progress(low) if receipt is None else _Progress(max(low, receipt.offset))
        if receipt is not None and receipt.offset < low:
            # The record has expired, which is no loss.
            progress.sequence = max(progress.sequence, receipt.sequence)
            receipt = None
        if receipt is not None and progress.next_offset != receipt.offset:
            receipt = None  # It was checked when this was begun.
        name = lane.encode()
        self._assign(partition, max(progress.next_offset, low))
        while not self._closed.is_set() and time.monotonic() < request.deadline:
            is_at_end = False
            for record in self._consumer.consume(RECORDS_MAX, timeout=0.1):
                error = record.error()
                if error is None:
                    sequence = progress.add(record, name)
                elif error.code() == KafkaError._PARTITION_EOF:
                    progress.next_offset = max(progress.next_offset, record.offset() or 0)
                    is_at_end, sequence = True, None
                else:
                    raise KafkaException(error)
                if receipt is not None:
                    is_proven = (record.offset(), sequence) == (receipt.offset, receipt.sequence)
                    receipt = None
                    if not is_proven:
                        # The topic was made anew, or compacted: the receipt proves nothing.
                        progress = _Progress(low)
                        self._assign(partition, low)
                        is_at_end = False
                        break
            if is_at_end and progress.next_offset >= high:
                if progress.offset is not None:
                    found = Receipt(partition, progress.offset, progress.sequence)
                    self._places.found[lane] = found
                return Position(progress.sequence, progress.delivery)
        self._places.unfinished[lane] = progress
        remain = high - progress.next_offset
        return Stop(
            StopKind.UNAVAILABLE,
            f"partition {partition} was not read to its end in time: {remain} offsets remain",
        )

    def _assign(self, partition: int, offset: int) -> None:
        self._consumer.assign([TopicPartition(self._topic, partition, offset)])


def _offset_of(receipt: Receipt) -> int:
    return receipt.offset


def _set_result(done: asyncio.Future[_R], result: _R) -> None:
    if not done.done():
        done.set_result(result)


def _decode(value: bytes | None) -> str | None:
    return None if value is None else value.decode("utf-8", "replace")
