"""The lanes of an endpoint in a topic of Kafka, each in the partition of its slot.

An idempotent producer appends: in order and without holes, and after the end of a process or a
take-over there may be copies, with the same lane, sequence and X-Delivery.  Kafka does not compare
an append with the lane's position, and refuses no former owner.

Calls of the client library are made in threads, and their results come back to the loop.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING

from confluent_kafka import KafkaError, KafkaException

from outbox.core.brokers.port import Appended, Capabilities, Stop, StopKind
from outbox.destinations.broker import BrokerFinding
from outbox.errors import UsageError
from outbox_brokers.kafka.check import check_topic
from outbox_brokers.kafka.egress import ClientLimits, ServerChecks
from outbox_brokers.kafka.failures import (
    ABSENT,
    MISCONFIGURED,
    REFUSED,
    describe,
    stop_before_sending,
    stop_without_client,
)
from outbox_brokers.kafka.loops import build_client
from outbox_brokers.kafka.producer import IdempotentProducer
from outbox_brokers.kafka.reader import Places, Reader, Receipt, Topic
from outbox_brokers.kafka.settings import client_settings
from outbox_brokers.kafka.target import parse_url, partition_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.core.brokers.port import Message, Owner, Standing
    from outbox.destinations.broker import BrokerAddress
    from outbox.network.dns import Resolver
    from outbox.network.egress import EgressPolicy
    from outbox_brokers.kafka.settings import Settings

ABSENT_S = 30.0
"""How long a topic may be absent before a person must act: its metadata may be on its way."""
READER_CLOSE_S = 2.0
RENEWAL_S_MIN = 60.0
"""Time between two renewals of the clients: a name may have other addresses at each look-up, and
each renewal costs threads, connections, and a request alone for each partition."""
CLOSED = Stop(StopKind.UNKNOWN, "the driver was closed")


class KafkaBroker:
    """The lanes of one endpoint."""

    capabilities = Capabilities(compare=False, prefix=True, fence=False, position=True)

    def __init__(self, address: BrokerAddress, policy: EgressPolicy, resolver: Resolver) -> None:
        self._address = address
        self._policy, self._resolver = policy, resolver
        self._target = parse_url(address.url)
        self._checks = ServerChecks(policy, resolver, address.networks, secure=self._target.secure)
        self._settings: Settings | None = None
        self._connecting = asyncio.Lock()
        self._reader: Reader | None = None
        self._places = Places()
        self._topic: Topic | None = None
        self._producer: IdempotentProducer | None = None
        self._replaced: list[IdempotentProducer] = []
        """Producers with messages in flight that another one replaces."""
        self._limits: ClientLimits | None = None
        """The limits of reader and producer together; None: there are none."""
        self._renewable_at = 0.0
        self._absent_since: float | None = None
        self._is_closed = False

    async def open(
        self, lane: str, owner: Owner, after: int, receipt: str | None, *, force: bool = False
    ) -> Standing:
        deadline = time.monotonic() + self._address.timeout_s
        try:
            async with asyncio.timeout(self._address.timeout_s):
                return await self._open(lane, receipt, deadline)
        except TimeoutError:
            if self._reader is None:
                return self._no_response(StopKind.UNAVAILABLE, None)
            return self._reader.troubles.stop(None, self._address.timeout_s)

    async def append(
        self, lane: str, owner: Owner, after: int, messages: Sequence[Message]
    ) -> Appended:
        deadline = time.monotonic() + self._address.timeout_s
        if self._is_closed:
            return Appended(after, CLOSED)
        producer = await self._connect(partition_of(lane), deadline)
        if isinstance(producer, Stop):
            return Appended(after, producer)
        return await self._append(producer, partition_of(lane), after, messages, deadline)

    async def check(self, lanes: Sequence[str]) -> list[BrokerFinding]:
        try:
            return await check_topic(self._address, self._policy, self._resolver, len(lanes))
        except UsageError as error:
            return [BrokerFinding(True, str(error), "change the endpoint's settings")]

    async def aclose(self) -> None:
        self._is_closed = True
        for producer in (*self._replaced, self._producer):
            if producer is not None:
                self._discard(producer)
        if (reader := self._reader) is not None:
            reader.discard()
            await asyncio.wait([reader.ended], timeout=READER_CLOSE_S)

    async def _open(self, lane: str, receipt: str | None, deadline: float) -> Standing:
        if self._is_closed:
            return CLOSED
        try:
            partition = partition_of(lane)
        except UsageError as error:
            return Stop(StopKind.MISCONFIGURED, str(error))
        self._retire_old()
        if self._topic is None or partition >= self._topic.partitions:
            self._topic = None
        if (stop := await self._connect_reader(partition, deadline)) is not None:
            return stop
        assert self._reader is not None
        position = await self._reader.position(lane, partition, receipt, deadline)
        if isinstance(position, Stop) and position.kind is StopKind.UNAVAILABLE:
            # The partition may not exist any more.
            self._topic = None
        return position

    async def _connect_reader(self, partition: int, deadline: float) -> Stop | None:
        """Connect, check all servers and the topic; None: the partition exists."""
        async with self._connecting:
            if self._settings is None:
                try:
                    # Parses certificates and keys.
                    self._settings = await asyncio.to_thread(
                        client_settings, self._target, self._address
                    )
                except UsageError as error:
                    return Stop(StopKind.MISCONFIGURED, str(error))
            if self._reader is None:
                if (stop := await self._checks.check(self._target.servers)) is not None:
                    return stop
                try:
                    self._reader = await build_client(
                        partial(
                            Reader,
                            asyncio.get_running_loop(),
                            self._settings,
                            self._target.topic,
                            self._places,
                        )
                    )
                except (KafkaException, OSError, MemoryError, RuntimeError) as error:
                    return stop_without_client(error)
            if self._topic is None:
                topic = await self._reader.topic(
                    min(deadline, time.monotonic() + self._address.connect_timeout_s)
                )
                if isinstance(topic, Stop):
                    return topic
                if (stop := await self._checks.check(topic.servers)) is not None:
                    self._reader.discard()
                    self._reader = None
                    return stop
                if not topic.partitions:
                    return self._absent()
                self._absent_since = None
                self._topic = topic
                self._limits = self._limits or self._checks.limits()
        if partition >= self._topic.partitions:
            return Stop(
                StopKind.MISCONFIGURED,
                f"topic {self._target.topic} has {self._topic.partitions} partitions, and the lane "
                f"needs partition {partition}: add partitions, or use fewer lanes",
            )
        return None

    def _retire_old(self) -> None:
        """Replace the clients if they are too old, or an address has left its name.

        Calls in flight end with the old ones.  The lanes' positions belong to the topic.
        """
        now = time.monotonic()
        if self._limits is None or self._connecting.locked() or now < self._renewable_at:
            return
        if self._limits.allow():
            return
        self._renewable_at = now + RENEWAL_S_MIN
        self._limits = self._topic = None
        if self._reader is not None:
            self._reader.retire()
            self._reader = None
        if self._producer is not None:
            self._producer.retire()
            self._replaced = [each for each in self._replaced if not each.has_ended]
            self._replaced.append(self._producer)
            self._producer = None

    def _absent(self) -> Stop:
        now = time.monotonic()
        if self._absent_since is None:
            self._absent_since = now
        is_long = now - self._absent_since >= ABSENT_S
        return Stop(
            StopKind.MISCONFIGURED if is_long else StopKind.UNAVAILABLE,
            f"topic {self._target.topic} does not exist, or the user has no right to describe it",
        )

    async def _connect(self, partition: int, deadline: float) -> IdempotentProducer | Stop:
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                return await self._connect_producer(partition, deadline)
        except TimeoutError:
            return self._no_response(StopKind.UNAVAILABLE, self._producer)

    async def _connect_producer(self, partition: int, deadline: float) -> IdempotentProducer | Stop:
        self._retire_old()
        is_there = self._topic is not None and partition < self._topic.partitions
        if not is_there and (stop := await self._connect_reader(partition, deadline)) is not None:
            return stop
        if self._producer is not None and self._producer.is_usable:
            return self._producer
        async with self._connecting:
            if self._producer is None or not self._producer.is_usable:
                assert self._settings is not None
                try:
                    self._producer = await build_client(
                        partial(
                            IdempotentProducer,
                            asyncio.get_running_loop(),
                            self._settings,
                            self._target.topic,
                        )
                    )
                except (KafkaException, OSError, MemoryError, RuntimeError) as error:
                    return stop_without_client(error)
            return self._producer

    async def _append(
        self,
        producer: IdempotentProducer,
        partition: int,
        after: int,
        messages: Sequence[Message],
        deadline: float,
    ) -> Appended:
        result = Appended(after)
        rest = messages
        is_single = False
        while rest:
            if producer.is_retired:
                # Between two batches: everything before is stored.
                replacing = await self._connect(partition, deadline)
                if isinstance(replacing, Stop):
                    return result._replace(stop=replacing)
                producer = replacing
            count = 1 if is_single or not producer.is_known(partition) else len(rest)
            batch = producer.send(partition, rest[:count])
            try:
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    await batch.done
            except TimeoutError:
                self._discard(producer)
            except asyncio.CancelledError:
                self._discard(producer)
                raise
            stored = batch.count_stored()
            if stored:
                producer.mark_known(partition)
                last = rest[stored - 1].sequence
                offset = batch.offset if stored == count else None
                receipt = None if offset is None else str(Receipt(partition, offset, last))
                result = Appended(last, None, receipt or result.receipt)
                rest = rest[stored:]
            if stored == count:
                continue
            error = batch.results[stored]
            assert error is not None
            if error.code() in REFUSED and batch.is_local(stored):
                return result._replace(stop=Stop(StopKind.REFUSED, describe(error)))
            is_ordered = batch.find_stored(stored) is None
            if error.code() in REFUSED and count > 1 and is_ordered:
                # Another message or all together may be too large: find out alone.
                is_single = True
                self._discard(producer)
                next_producer = await self._connect(partition, deadline)
                if isinstance(next_producer, Stop):
                    return result._replace(stop=next_producer)
                producer = next_producer
                continue
            if not is_ordered:
                later = batch.find_stored(stored) or stored
                self._discard(producer)
                return result._replace(
                    stop=Stop(
                        StopKind.MISCONFIGURED,
                        f"the broker stored sequence {rest[later - stored].sequence} without the "
                        f"one before ({describe(error)}): it does not support idempotent producers",
                    )
                )
            return result._replace(stop=self._stop_of(producer, error, stored))
        return result

    def _stop_of(self, producer: IdempotentProducer, error: KafkaError, stored: int) -> Stop:
        """Classify the error of the first message that is not stored."""
        if error.code() == KafkaError._QUEUE_FULL:
            return stop_before_sending(error)
        self._discard(producer)
        if error.code() in REFUSED:
            return Stop(StopKind.REFUSED, describe(error))
        if error.code() in MISCONFIGURED:
            return Stop(StopKind.MISCONFIGURED, describe(error))
        if error.code() in ABSENT:
            self._topic = None
            return Stop(StopKind.UNAVAILABLE, describe(error))
        if error.code() == KafkaError._IN_PROGRESS:
            kind = StopKind.UNKNOWN
            if producer.lacks_resources(self._address.timeout_s):
                kind = StopKind.LOCAL
            return self._no_response(kind, producer)
        return Stop(StopKind.UNKNOWN, describe(error))

    def _no_response(self, kind: StopKind, producer: IdempotentProducer | None) -> Stop:
        troubles = producer.troubles.suffix() if producer is not None else ""
        return Stop(kind, f"no response within {self._address.timeout_s:g} s{troubles}")

    def _discard(self, producer: IdempotentProducer) -> None:
        producer.discard()
        if self._producer is producer:
            self._producer = None
