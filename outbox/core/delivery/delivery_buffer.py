"""Delivery buffer: a lane's next deliveries in memory, in order and without holes.

Deliveries come from a `Fetch` or directly from the sequencer.  The buffer is bounded by count
and, for endpoints with batches, by body bytes.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING

from outbox.core.delivery.batch import BATCH_BYTES_MAX, element_bytes
from outbox.core.delivery.commands import ErasedEvent, Fetch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from outbox.core.model.delivery import Delivery

REFILL_LEVEL = 8
"""A lane fetches more when its buffer holds at most this many deliveries."""


class DeliveryBuffer:
    """The next deliveries of a lane.

    Args:
        after_seq: all deliveries up to this sequence were delivered or dead-lettered.
        floor_batch: no pending delivery has a batch below this one.
        batch_max: deliveries per request; None: requests are not batches.
    """

    __slots__ = (
        "_bytes",
        "_discard_fetch",
        "_fetching",
        "_outdated",
        "_read_from_batch",
        "batch_max",
        "fetched_seq",
        "queue",
    )

    def __init__(self, after_seq: int, floor_batch: int, batch_max: int | None) -> None:
        self.queue: deque[Delivery | ErasedEvent] = deque()
        self.fetched_seq = after_seq
        """The last sequence that was buffered or is no longer pending."""
        self.batch_max = batch_max
        # Upper bound of the queue's body bytes; counted only for endpoints with batches.
        self._bytes = 0
        self._read_from_batch = floor_batch
        self._fetching = False
        # The buffer is stale; the result of a Fetch from before the reset is discarded.
        self._outdated = self._discard_fetch = False

    def set_batch_max(self, batch_max: int | None) -> None:
        """Set the deliveries per request; None: requests are not batches."""
        self.batch_max = batch_max
        self._bytes = 0 if batch_max is None else sum(map(_delivery_bytes, self.queue))

    @property
    def outdated(self) -> bool:
        """Whether the buffered deliveries may be stale."""
        return self._outdated

    def invalidate(self) -> None:
        """Mark the buffered deliveries as stale; see `reset`."""
        self._outdated = True

    def reset(self, acked_seq: int, floor_batch: int) -> None:
        """Empty the buffer; the next Fetch starts after `acked_seq`."""
        self._outdated = False
        self._discard_fetch = self._fetching
        self.queue.clear()
        self._bytes = 0
        self.fetched_seq = acked_seq
        self._read_from_batch = floor_batch

    @property
    def is_low(self) -> bool:
        """Whether to fetch more now, so that the next request does not wait for a read."""
        count = len(self.queue)
        if count <= REFILL_LEVEL:
            return True
        if self.batch_max is None or count > self.batch_max:
            return False
        return self._bytes <= BATCH_BYTES_MAX

    def fetch(self, last_seq: int) -> Fetch | None:
        """The next Fetch of a lane with sequences up to `last_seq`; None: not needed now."""
        if self._fetching or self.fetched_seq >= last_seq or not self.is_low:
            return None
        self._fetching = True
        return Fetch(self.fetched_seq, self._read_from_batch)

    def append(self, deliveries: Iterable[Delivery]) -> None:
        """Add new deliveries that continue the buffer; others are ignored and fetched later."""
        for delivery in deliveries:
            if delivery.seq == self.fetched_seq + 1:
                self._append(delivery)

    def append_fetched(self, deliveries: Sequence[Delivery | ErasedEvent]) -> None:
        """Add the result of a Fetch.

        Raises:
            AssertionError: a sequence is missing.
        """
        self._fetching = False
        if self._discard_fetch:
            self._discard_fetch = False
            return
        for delivery in deliveries:
            if delivery.seq <= self.fetched_seq:
                continue  # Dead-lettered, or appended, during the read.
            if delivery.seq != self.fetched_seq + 1:
                raise AssertionError(f"sequence {delivery.seq} follows {self.fetched_seq}")
            self._append(delivery)

    def select_batch(self, count_max: int, now: float) -> tuple[Delivery, ...]:
        """The first deliveries, as many as fit in one request."""
        batch_deliveries: list[Delivery] = []
        room_bytes = BATCH_BYTES_MAX
        for each in islice(self.queue, count_max):
            if isinstance(each, ErasedEvent):
                break
            room_bytes -= element_bytes(each)
            if batch_deliveries and (is_expired(each, now) or room_bytes < 0):
                break
            batch_deliveries.append(each)
        return tuple(batch_deliveries)

    def discard_through(self, seq: int) -> int | None:
        """Remove deliveries up to this sequence; returns the batch of the last one removed."""
        batch, queue = None, self.queue
        while queue and queue[0].seq <= seq:
            removed = queue.popleft()
            if self.batch_max is not None:
                self._bytes -= _delivery_bytes(removed)
            batch = removed.batch
        if seq > self.fetched_seq:
            self.fetched_seq = seq
        return batch

    def _append(self, delivery: Delivery | ErasedEvent) -> None:
        self.queue.append(delivery)
        if self.batch_max is not None:
            self._bytes += _delivery_bytes(delivery)
        self.fetched_seq = delivery.seq
        self._read_from_batch = delivery.batch


def _delivery_bytes(each: Delivery | ErasedEvent) -> int:
    return 0 if isinstance(each, ErasedEvent) else element_bytes(each)


def is_expired(delivery: Delivery, now: float) -> bool:
    """Whether the event expired at or before `now`."""
    return delivery.expires_at is not None and delivery.expires_at <= now
