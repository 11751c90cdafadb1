"""An idempotent producer and the thread that polls it.

librdkafka numbers the records of a producer for each partition, and the broker refuses a number
that does not follow the last one: of several requests in flight it stores a prefix.  Two things
must hold for that:

* The broker knows the producer in this partition.  It accepts any first number of a producer that
  it does not know, so that the second of two requests could be stored alone; librdkafka would then
  report the first as stored, too (an implicit acknowledgement).  Therefore the first message to a
  partition is sent alone (`is_known`).
* librdkafka gives up no message by itself, see `producer_settings`.  The driver discards the whole
  producer instead; after that nothing is sent any more.
"""

from __future__ import annotations

import contextlib
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaError, KafkaException, Producer

from outbox_brokers.kafka.failures import CLIENT_ERRORS, Troubles, error_of
from outbox_brokers.kafka.loops import SILENT, call_in_loop
from outbox_brokers.kafka.settings import producer_settings

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from outbox.core.brokers.port import Message
    from outbox_brokers.kafka.settings import Settings

PRODUCER_POLL_S = 0.2
"""Bounds how long the thread remains after its producer was discarded."""
FATAL_RESULTS_S = 1.0
"""Bounds the wait for the results of messages after a fatal error."""
KNOWN_S = 3600.0
"""Brokers forget a producer that wrote nothing for `producer.id.expiration.ms` (a day)."""


_IN_PROGRESS = KafkaError(KafkaError._IN_PROGRESS)


class Batch:
    """Messages of one append that were given to a producer, and the result of each."""

    def __init__(self, loop: asyncio.AbstractEventLoop, size: int) -> None:
        self.results: list[KafkaError | None] = [_IN_PROGRESS] * size
        self.offset: int | None = None
        """The offset of the last of the messages, if it is stored."""
        self.done: asyncio.Future[None] = loop.create_future()
        # Both are compared after each change, and changed by one thread each.
        self._sent: int | None = None
        self._reported = 0

    @property
    def is_complete(self) -> bool:
        """Whether all messages have a result."""
        return self._reported == self._sent

    def report(self, index: int, error: KafkaError | None, message: Any) -> None:
        """Take the result of a message; called in the thread of the producer."""
        self.results[index] = error
        if error is None and index + 1 == len(self.results):
            self.offset = message.offset()
        self._reported += 1

    def count_stored(self) -> int:
        """Return how many messages are stored before the first one that is not."""
        for index, error in enumerate(self.results):
            if error is not None:
                return index
        return len(self.results)

    def find_stored(self, start: int) -> int | None:
        """Return the first message from an index on that is stored."""
        for index in range(start, len(self.results)):
            if self.results[index] is None:
                return index
        return None

    def is_local(self, index: int) -> bool:
        """Whether a message was refused by the client library alone."""
        return index == self._sent

    def end(self, sent: int, failure: KafkaError | None) -> None:
        """Say how many messages the client library took, and why not the others."""
        if failure is not None:
            self.results[sent:] = [failure] * (len(self.results) - sent)
        self._sent = sent

    def finish(self) -> None:
        """Report to the loop that no result comes any more."""
        if not self.done.done():
            self.done.set_result(None)


class IdempotentProducer:
    """A producer for the lanes of one endpoint."""

    def __init__(self, loop: asyncio.AbstractEventLoop, shared: Settings, topic: str) -> None:
        self._loop = loop
        self._topic = topic
        self._pending: set[Batch] = set()
        self._complete: list[Batch] = []
        """Batches to report; used by the thread only."""
        self._known: dict[int, float] = {}
        self._discarded = threading.Event()
        self.is_retired = False
        """Whether another producer replaces it when its messages have results."""
        self.troubles = Troubles()
        self.fatal: KafkaError | None = None
        """Why it can send nothing any more."""
        self._producer: Producer | None = Producer(
            producer_settings(shared, self.troubles.report), logger=SILENT
        )
        self._thread = threading.Thread(target=self._poll, name="outbox-kafka", daemon=True)
        self._thread.start()

    @property
    def is_usable(self) -> bool:
        """Whether it can send."""
        return self.fatal is None and not self.is_retired and not self._discarded.is_set()

    @property
    def has_ended(self) -> bool:
        """Whether the client is gone, so that nothing can be sent any more."""
        return not self._thread.is_alive()

    def is_known(self, partition: int) -> bool:
        """Whether the broker knows this producer in the partition."""
        return time.monotonic() < self._known.get(partition, -KNOWN_S) + KNOWN_S

    def lacks_resources(self, waited_s: float) -> bool:
        """Whether it never had a connection, because of this process: nothing was sent."""
        troubles = self.troubles
        return not self._known and troubles.are_local and troubles.is_local(waited_s)

    def mark_known(self, partition: int) -> None:
        """Take note that the broker has stored a message of this producer in the partition."""
        self._known[partition] = time.monotonic()

    def send(self, partition: int, messages: Sequence[Message]) -> Batch:
        """Start to send messages, without waiting for their results.

        The first one that the client library does not take ends the batch.
        """
        batch = Batch(self._loop, len(messages))
        self._pending.add(batch)
        if (producer := self._producer) is None:
            batch.end(0, self.fatal or _IN_PROGRESS)
            batch.finish()
            return batch
        produce, topic = producer.produce, self._topic
        failure: KafkaError | None = None
        sent = 0
        for message in messages:
            try:
                produce(
                    topic,
                    message.body,
                    message.key,
                    partition,
                    partial(self._report, batch, sent),
                    headers=encode_headers(message.headers),
                )
            except BufferError:
                failure = KafkaError(KafkaError._QUEUE_FULL, "the queue of the client is full")
                break
            except KafkaException as error:
                failure = error_of(error)
                break
            sent += 1
        batch.end(sent, failure)
        if batch.is_complete:
            self._finish([batch])
        return batch

    def retire(self) -> None:
        """Send nothing new; messages in flight get their results."""
        self.is_retired = True
        if not self._pending:
            self.discard()

    def discard(self) -> None:
        """Send nothing any more; messages in flight have no result."""
        if not self._discarded.is_set():
            self._discarded.set()
            if (producer := self._producer) is not None:
                producer.purge(blocking=False)
        for batch in self._pending:
            batch.finish()
        self._pending.clear()

    def _report(self, batch: Batch, index: int, error: KafkaError | None, message: Any) -> None:
        batch.report(index, error, message)
        if batch.is_complete:
            self._complete.append(batch)

    def _poll(self) -> None:
        """Serve delivery reports until the producer is discarded."""
        producer = self._producer
        assert producer is not None
        while not self._discarded.is_set() and self.fatal is None:
            try:
                producer.poll(PRODUCER_POLL_S)
            except CLIENT_ERRORS as error:
                self.fatal = error_of(error)
                self._collect_results(producer)
            if self._complete or self.fatal is not None:
                complete, self._complete = self._complete, []
                if not call_in_loop(self._loop, self._finish, complete):
                    break
        self._discarded.set()
        producer.purge()
        # Frees what the messages hold, and then the client, which joins its own threads.
        with contextlib.suppress(*CLIENT_ERRORS):
            while producer.poll(0):
                pass
        self._producer = None

    def _collect_results(self, producer: Producer) -> None:
        """After a fatal error, take the results that say which message caused it."""
        producer.purge()
        until = time.monotonic() + FATAL_RESULTS_S
        while len(producer) and time.monotonic() < until:
            with contextlib.suppress(*CLIENT_ERRORS):
                producer.poll(0.05)

    def _finish(self, complete: list[Batch]) -> None:
        for batch in complete:
            batch.finish()
            self._pending.discard(batch)
        if self.fatal is not None or (self.is_retired and not self._pending):
            self.discard()


def encode_headers(headers: Sequence[tuple[str, str]]) -> list[tuple[str, str | bytes | None]]:
    """Return headers as the client library takes them."""
    return [*headers]
