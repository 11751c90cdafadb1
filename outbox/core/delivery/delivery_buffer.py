"""Delivery buffer: a lane's next deliveries in memory, in order and without holes.

Deliveries come from a `Fetch` or directly from the sequencer.  The buffer is bounded by count, and
by bytes: its lane's own, and the share of the lane's tenant in the budget of the relay (see
`buffer_budget`).

The content of a lane that waits long is released.  Its first delivery stays without content, as
`stub`: whether it expires, and since when it waits, must be known meanwhile.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING

from outbox.core.delivery.buffer_budget import (
    COPIES,
    READ_BYTES_MAX,
    ROW_BYTES,
    UNREAD_BYTES,
    BufferBudget,
    ReadBounds,
    read_bounds,
    row_bytes,
)
from outbox.core.delivery.commands import ErasedEvent, Fetch
from outbox.core.messages.batch import BATCH_BYTES_MAX, element_bytes
from outbox.core.model.delivery import Delivery

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.core.delivery.buffer_budget import BufferShare

MEAN_FALL = 4
"""A lane assumes at least this part of the content that it assumed before: the server converts all
rows that a read may return, and large events may follow a few small ones."""
REFILL_LEVEL = 8
"""A lane fetches more when its buffer holds at most this many deliveries."""


class DeliveryBuffer:
    """The next deliveries of a lane.

    Args:
        after_seq: all deliveries up to this sequence were delivered or dead-lettered.
        floor_batch: no pending delivery has a batch below this one.
        batch_max: deliveries per request; None: requests are not batches.
        share: the share of its tenant in the budget; None: there is no budget.
    """

    __slots__ = (
        "_beyond",
        "_beyond_seq",
        "_bytes",
        "_counts",
        "_discard_fetch",
        "_fetching",
        "_mean_bytes",
        "_read_from_batch",
        "_share",
        "batch_max",
        "fetched_seq",
        "outdated",
        "queue",
        "reserved",
        "stub",
    )

    def __init__(
        self,
        after_seq: int,
        floor_batch: int,
        batch_max: int | None,
        share: BufferShare | None = None,
    ) -> None:
        self._share = share or BufferBudget().share_of(None)
        self.queue: deque[Delivery | ErasedEvent] = deque()
        # The bytes of each of them; 0 for what has no content.
        self._counts: deque[int] = deque()
        self.stub: Delivery | None = None
        """The first delivery, if its content was released; the only one in the buffer."""
        self.fetched_seq = after_seq
        """The last sequence that was buffered or is no longer pending."""
        self.batch_max = batch_max
        # What the queue holds of the budget; and of the row that it holds beyond it, if any, the
        # sequence and the bytes.
        self._bytes = self._beyond_seq = self._beyond = 0
        self.reserved = 0
        """What the read in progress may add to it, at most."""
        # Mean content of the rows of the last read, or more: see `MEAN_FALL`.
        self._mean_bytes = UNREAD_BYTES
        self._read_from_batch = floor_batch
        self._fetching = False
        self.outdated = False
        """Whether the buffered deliveries may be stale."""
        # The result of a Fetch from before the reset is discarded.
        self._discard_fetch = False

    def set_share(self, share: BufferShare) -> None:
        """Count what is held for another holder, because the tenant was changed."""
        held = self._bytes - self._beyond + self.reserved
        self._share.give_bytes_back(held)
        share.take_bytes(held)
        self._share = share

    def invalidate(self) -> None:
        """Mark the buffered deliveries as stale; see `reset`."""
        self.outdated = True

    def reset(self, acked_seq: int, floor_batch: int) -> None:
        """Empty the buffer; the next Fetch starts after `acked_seq`."""
        self.outdated = False
        self._discard_fetch = self._fetching
        self.queue.clear()
        self.stub = None
        self._give_back_all()
        self.fetched_seq = acked_seq
        self._read_from_batch = floor_batch

    def release(self) -> None:
        """Release the content of all deliveries, which are read again when they are sent."""
        if self.stub is not None or not self.queue:
            return
        first = self.queue[0]
        if isinstance(first, Delivery):
            first = self.stub = first._replace(payload=b"", headers=None)
        self._discard_fetch = self._fetching
        self.queue.clear()
        self._give_back_all()
        self.queue.append(first)
        self._counts.append(0)
        self.fetched_seq, self._read_from_batch = first.seq, first.batch

    @property
    def is_low(self) -> bool:
        """Whether to fetch more now, so that the next request does not wait for a read."""
        count = len(self.queue)
        if count <= 1:
            return self.stub is None
        if self.batch_max is not None and count <= self.batch_max:
            return self._bytes <= COPIES * BATCH_BYTES_MAX
        return count <= REFILL_LEVEL and self._bytes <= COPIES * READ_BYTES_MAX

    def fetch(self, last_seq: int) -> Fetch | None:
        """The next Fetch of a lane with sequences up to `last_seq`; None: not needed now, or there
        is no room for more than the deliveries that are buffered.
        """
        if self._fetching or self.fetched_seq >= last_seq or not self.is_low:
            return None
        if self.queue and (
            self._beyond or self._share.room < ROW_BYTES + COPIES * self._mean_bytes
        ):
            return None
        self._fetching = True
        return Fetch(self.fetched_seq, self._read_from_batch)

    def reserve(self, rows_max: int) -> ReadBounds:
        """Reserve room for the rows of a Fetch that begins now; returns its bounds.

        Args:
            rows_max: rows that the lane needs.
        """
        bytes_max = READ_BYTES_MAX if self.batch_max is None else BATCH_BYTES_MAX
        room = max(self._share.room, 0)
        bounds = read_bounds(room, rows_max, self._mean_bytes, bytes_max)
        self.reserved = min(room, bounds.rows_max * ROW_BYTES + COPIES * bounds.bytes_max)
        self._share.take_bytes(self.reserved)
        return bounds

    def append_fetched(self, deliveries: Sequence[Delivery | ErasedEvent]) -> None:
        """Add the result of a Fetch.

        Raises:
            AssertionError: a sequence is missing.
        """
        self._fetching = False
        reserved, self.reserved = self.reserved, 0
        if self._discard_fetch:
            self._discard_fetch, deliveries = False, ()
        held, known_seq = self._bytes, self.fetched_seq
        for delivery in deliveries:
            if delivery.seq <= self.fetched_seq:
                continue  # Dead-lettered during the read.
            if delivery.seq != self.fetched_seq + 1:
                raise AssertionError(f"sequence {delivery.seq} follows {self.fetched_seq}")
            count = row_bytes(delivery) if isinstance(delivery, Delivery) else 0
            if count <= reserved:
                reserved -= count
            elif not self._take_row(delivery.seq, count):
                break
            self._append(delivery, count)
        self._share.give_bytes_back(reserved)
        if count := self.fetched_seq - known_seq:
            mean = ((self._bytes - held) // count - ROW_BYTES) // COPIES
            self._mean_bytes = max(mean, self._mean_bytes // MEAN_FALL, 1)

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
            batch = self.pop_first().batch
        if seq > self.fetched_seq:
            self.fetched_seq = seq
        return batch

    def pop_first(self) -> Delivery | ErasedEvent:
        """Remove and return the first delivery."""
        first, count = self.queue.popleft(), self._counts.popleft()
        self.stub = None
        if count:
            self._bytes -= count
            if first.seq == self._beyond_seq:
                self._share.take_beyond(-count)
                self._beyond_seq = self._beyond = 0
            else:
                self._share.give_bytes_back(count)
        return first

    def _take_row(self, seq: int, count: int) -> bool:
        """Take the bytes of a row; whether there is room, or it is the one that is guaranteed."""
        if count <= self._share.room:
            self._share.take_bytes(count)
        elif self.queue:
            return False
        else:
            self._beyond_seq, self._beyond = seq, count
            self._share.take_beyond(count)
        return True

    def _append(self, delivery: Delivery | ErasedEvent, count: int) -> None:
        self.queue.append(delivery)
        self._counts.append(count)
        self._bytes += count
        self.fetched_seq = delivery.seq
        self._read_from_batch = delivery.batch

    def _give_back_all(self) -> None:
        self._share.give_bytes_back(self._bytes - self._beyond)
        self._share.take_beyond(-self._beyond)
        self._counts.clear()
        self._bytes = self._beyond_seq = self._beyond = 0


def is_expired(delivery: Delivery, now: float) -> bool:
    """Whether the event expired at or before `now`."""
    return delivery.expires_at is not None and delivery.expires_at <= now
