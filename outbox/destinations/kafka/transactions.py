"""Transactions: the lanes that wait are appended together, all or none.

Experimental.  One transactional producer for an endpoint has the id `outbox/<identity>/<endpoint>`.
Initializing it aborts the open transaction of a former owner and fences it: what that owner sends
later is refused.  The lanes' positions are read after that, so that a comparison with the position
that this driver keeps is a comparison with the partition.  No test against Apache Kafka shows this:
librdkafka's mock cluster does not fence.

A message that the client library does not take, or the broker refuses, does not by itself fail the
transaction of the others: any such error aborts it.  Then the append that has the error is sent
again message by message, and the others together.
"""

from __future__ import annotations

import queue
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaError, Producer

from outbox.core.brokers.port import Appended, Stop, StopKind
from outbox.destinations.kafka.failures import (
    CLIENT_ERRORS,
    FENCED,
    REFUSED,
    Troubles,
    describe,
    error_of,
    stop_before_sending,
)
from outbox.destinations.kafka.loops import SILENT, call_in_loop
from outbox.destinations.kafka.reader import Receipt
from outbox.destinations.kafka.settings import transaction_settings

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from outbox.core.brokers.port import Message
    from outbox.destinations.kafka.settings import Settings

GATHER_S = 0.02
"""How long a transaction waits for as many lanes as were in the one before."""
APPENDS_MAX = 2000
BYTES_MAX = 16 * 1024 * 1024
"""Maximum size of a transaction's messages; its first append is accepted in any size."""
FLUSH_S = 1.0
ABORT_S = 2.0
TRIES_MAX = 3
"""librdkafka aborts the transaction after one with an error, to renumber its records."""


class PendingAppend:
    """An append that waits for its transaction."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        partition: int,
        after: int,
        messages: Sequence[Message],
        deadline: float,
    ) -> None:
        self.partition = partition
        self.messages = messages
        self.deadline = deadline
        self.through = after
        """The last sequence that is committed."""
        self.offset: int | None = None
        """The offset of the last message, when it is stored."""
        self.attempt = 0
        self.error: KafkaError | None = None
        """The first error of its messages in this transaction."""
        self.done: asyncio.Future[Appended] = loop.create_future()

    @property
    def size_bytes(self) -> int:
        return sum(message.size_bytes for message in self.messages)

    def begin(self) -> None:
        """Begin a transaction; results of an earlier one do not count any more."""
        self.attempt += 1
        self.error = None

    def report(self, attempt: int, is_last: bool, error: KafkaError | None, message: Any) -> None:
        """Take the result of a message."""
        if attempt != self.attempt:
            return
        if error is None:
            self.offset = message.offset() if is_last else self.offset
        elif error.code() in _PURGED:
            # The transaction is aborted for an error of another message.
            return
        elif self.error is None or self.error.code() not in REFUSED:
            self.error = error


_PURGED = (KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT)
_RESOLVED = KafkaError(KafkaError._NOOP)
_ABORTED = Stop(StopKind.UNAVAILABLE, "the transaction was aborted")


class _Ended(Exception):
    """The producer can do nothing any more."""

    def __init__(self, stop: Stop) -> None:
        super().__init__(stop.detail)
        self.stop = stop


class TransactionalProducer:
    """The producer of an endpoint, and its thread."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, shared: Settings, topic: str, transactional_id: str
    ) -> None:
        self._loop = loop
        self._topic = topic
        self._appends: queue.SimpleQueue[PendingAppend | None] = queue.SimpleQueue()
        self._deferred: list[PendingAppend] = []
        """Taken from the queue, and too large for the transaction."""
        self._discarded = threading.Event()
        self._in_flight: list[PendingAppend] = []
        self._thread: threading.Thread | None = None
        self._gathered = 1
        """Appends of the last transaction."""
        self.troubles = Troubles()
        self.stop: Stop | None = None
        """Why it can do nothing any more."""
        self.initialized: asyncio.Future[Stop | None] = loop.create_future()
        settings = transaction_settings(shared, self.troubles.report, transactional_id)
        self._producer = Producer(settings, logger=SILENT)
        self._is_renumbering = False
        """Whether it was aborted because the client library skipped numbers of the one before."""
        self._aborted: Stop | None = None
        """Why the last transaction was aborted."""

    @property
    def is_usable(self) -> bool:
        """Whether it is initialized, and neither fenced nor discarded."""
        return (
            self.initialized.done()
            and self.initialized.result() is None
            and self.stop is None
            and not self._discarded.is_set()
        )

    def start(self, deadline: float) -> None:
        """Initialize transactions, which fences former owners; `initialized` has the result."""
        self._thread = threading.Thread(
            target=self._run, args=(deadline,), name="outbox-kafka", daemon=True
        )
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        """Whether the client is gone, so that nothing can be sent any more."""
        return self._thread is not None and not self._thread.is_alive()

    def submit(self, append: PendingAppend) -> None:
        """Add an append to the next transaction."""
        self._appends.put(append)

    def discard(self) -> None:
        """Begin no transaction any more, and commit none unless the commit is on its way."""
        self._discarded.set()
        self._appends.put(None)

    def _run(self, deadline: float) -> None:
        started = time.monotonic()
        try:
            self._producer.init_transactions(max(0.1, deadline - started))
        except CLIENT_ERRORS as exception:
            waited_s = round(time.monotonic() - started, 1)
            stop = self.troubles.stop(error_of(exception), waited_s)
            call_in_loop(self._loop, _set_result, self.initialized, stop)
            del self._producer
            return
        if not call_in_loop(self._loop, _set_result, self.initialized, None):
            return
        try:
            while (appends := self._gather()) is not None:
                self._append(appends)
        except _Ended as ended:
            self.stop = ended.stop
        self._end_rest()

    def _gather(self) -> list[PendingAppend] | None:
        """Wait for appends, and return those of the next transaction; None: discarded."""
        first = self._deferred.pop(0) if self._deferred else self._next(None)
        if first is None:
            return None
        appends, size_bytes = [first], 0
        self._in_flight = appends
        until = time.monotonic() + GATHER_S
        while len(appends) < APPENDS_MAX:
            if self._deferred:
                append = self._deferred.pop(0)
            elif (found := self._next(0.0)) is not None:
                append = found
            elif len(appends) >= self._gathered:
                break
            elif (found := self._next(max(0.0, until - time.monotonic()))) is not None:
                append = found
            else:
                break
            size_bytes += append.size_bytes
            if size_bytes > BYTES_MAX:
                self._deferred.insert(0, append)
                break
            appends.append(append)
        self._gathered = len(appends)
        return None if self._discarded.is_set() else appends

    def _next(self, timeout_s: float | None) -> PendingAppend | None:
        try:
            if timeout_s == 0:
                return self._appends.get_nowait()
            return self._appends.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def _append(self, appends: list[PendingAppend]) -> None:
        """Append all in one transaction; if one has an error, that one message by message."""
        while appends:
            if self._try(appends, [append.messages for append in appends]):
                for append in appends:
                    self._complete(append, len(append.messages))
                return
            failed = [append for append in appends if append.error is not None]
            for append in failed:
                self._append_singly(append)
            if not failed:
                for append in appends:
                    self._resolve(append, self._aborted or _ABORTED)
            appends = [append for append in appends if append.error is None] if failed else []

    def _append_singly(self, append: PendingAppend) -> None:
        error = append.error
        if error is not None and error.code() not in REFUSED:
            self._resolve(append, stop_before_sending(error))
            return
        for message in append.messages:
            if self._try([append], [[message]]):
                append.through = message.sequence
                continue
            failure = append.error
            if failure is not None and failure.code() in REFUSED:
                stop = Stop(StopKind.REFUSED, describe(failure))
            elif failure is not None:
                stop = stop_before_sending(failure)
            else:
                stop = self._aborted or _ABORTED
            self._resolve(append, stop)
            append.error = failure or _RESOLVED
            return
        self._complete(append, len(append.messages))
        append.error = _RESOLVED

    def _try(self, appends: Sequence[PendingAppend], messages: Sequence[Sequence[Message]]) -> bool:
        """Commit one transaction; False: it was aborted, and nothing of it is stored.

        Raises:
            _Ended: it is not known whether it is committed, or the producer is fenced.
        """
        for _ in range(TRIES_MAX):
            if self._try_once(appends, messages):
                return True
            if not self._is_renumbering or any(append.error for append in appends):
                break
        return False

    def _try_once(
        self, appends: Sequence[PendingAppend], messages: Sequence[Sequence[Message]]
    ) -> bool:
        started = time.monotonic()
        deadline = min(append.deadline for append in appends)
        self._aborted, self._is_renumbering = None, False
        for append in appends:
            append.begin()
        producer = self._producer
        try:
            producer.begin_transaction()
            for append, each in zip(appends, messages, strict=True):
                self._produce(append, each)
            if any(append.error for append in appends):
                self._abort()
                return False
            self._flush(min(deadline, started + FLUSH_S))
            if any(append.error for append in appends):
                self._abort()
                return False
        except CLIENT_ERRORS as exception:
            return self._recover(error_of(exception))
        if self._discarded.is_set():
            self._abort()
            raise _Ended(Stop(StopKind.UNAVAILABLE, "the driver was closed"))
        return self._commit(deadline)

    def _flush(self, until: float) -> None:
        """Wait for the results of all messages, for a while.

        In a transaction that must be aborted the client library sends nothing any more, and says so
        only when it is told to commit.
        """
        while self._producer.flush(max(0.0, min(0.1, until - time.monotonic()))):
            if time.monotonic() >= until or self._discarded.is_set():
                break

    def _produce(self, append: PendingAppend, messages: Sequence[Message]) -> None:
        last = len(messages) - 1
        for index, message in enumerate(messages):
            try:
                self._producer.produce(
                    self._topic,
                    message.body,
                    message.key,
                    append.partition,
                    partial(append.report, append.attempt, index == last),
                    headers=[*message.headers],
                )
            except BufferError:
                append.error = KafkaError(KafkaError._QUEUE_FULL, "the client's queue is full")
                return
            except CLIENT_ERRORS as exception:
                append.error = error_of(exception)
                return

    def _commit(self, deadline: float) -> bool:
        while True:
            try:
                self._producer.commit_transaction(max(0.1, deadline - time.monotonic()))
            except CLIENT_ERRORS as exception:
                error = error_of(exception)
            else:
                return True
            if error.txn_requires_abort() or error.fatal() or error.code() in FENCED:
                return self._recover(error)
            is_over = self._discarded.is_set() or time.monotonic() >= deadline
            if is_over or not error.retriable():
                raise _Ended(Stop(StopKind.UNKNOWN, describe(error)))

    def _recover(self, error: KafkaError) -> bool:
        """Abort after an error.

        Raises:
            _Ended: the producer is fenced or cannot abort.
        """
        if error.code() in FENCED or error.fatal():
            kind = StopKind.MOVED if error.code() in FENCED else StopKind.UNKNOWN
            raise _Ended(Stop(kind, describe(error)))
        self._aborted = stop_before_sending(error)
        self._is_renumbering = error.code() == KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER
        self._abort()
        return False

    def _abort(self) -> None:
        try:
            self._producer.abort_transaction(ABORT_S)
        except CLIENT_ERRORS as exception:
            error = error_of(exception)
            if error.code() in FENCED or error.fatal():
                raise _Ended(Stop(StopKind.MOVED, describe(error))) from None
            # Never committed: the next owner's initialization or its time-out aborts it.
            raise _Ended(Stop(StopKind.UNAVAILABLE, describe(error))) from None

    def _complete(self, append: PendingAppend, count: int) -> None:
        last = append.messages[count - 1].sequence
        receipt = None
        if append.offset is not None:
            receipt = str(Receipt(append.partition, append.offset, last))
        call_in_loop(self._loop, _set_result, append.done, Appended(last, None, receipt))

    def _resolve(self, append: PendingAppend, stop: Stop) -> None:
        call_in_loop(self._loop, _set_result, append.done, Appended(append.through, stop))

    def _end_rest(self) -> None:
        stop = self.stop or Stop(StopKind.UNKNOWN, "the driver was closed")
        for append in (*self._in_flight, *self._deferred):
            self._resolve(append, stop)
        not_sent = stop if stop.kind is not StopKind.UNKNOWN else Stop(StopKind.MOVED, stop.detail)
        while True:
            try:
                waiting = self._appends.get_nowait()
            except queue.Empty:
                break
            if waiting is not None:
                self._resolve(waiting, not_sent)
        # What is not committed never will be.  The client ends here, where it may take its time.
        self._producer.purge()
        del self._producer


def _set_result(done: asyncio.Future[Any], result: object) -> None:
    if not done.done():
        done.set_result(result)
