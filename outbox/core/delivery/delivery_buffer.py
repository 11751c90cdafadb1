"""What a lane has in its owner's memory of what it owes, in order and without a hole.

It is asked for in portions (`Fetch`), or given when it is numbered; how much there may be is
bounded in number and, where several go together, in what they take in a body.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING

from outbox.core.delivery.batch import BATCH_BYTES_MAX, element_bytes
from outbox.core.delivery.commands import Fetch, Gone

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from outbox.core.delivery.message import Delivery

FETCH_LOW = 8
"""A lane asks for more when it has no more than this many deliveries in hand."""


class InHand:
    """The next deliveries of a lane.

    Args:
        after_seq: all numbers up to this one have ended.
        floor_batch: nothing that is owed lies below this batch.
        batch_max: so many may go together; None: each goes by itself.
    """

    __slots__ = (
        "_bytes",
        "_fetching",
        "_outdated",
        "_read_from_batch",
        "_stray",
        "batch_max",
        "fetched_seq",
        "queue",
    )

    def __init__(self, after_seq: int, floor_batch: int, batch_max: int | None) -> None:
        self.queue: deque[Delivery | Gone] = deque()
        self.fetched_seq = after_seq
        """It was read, or is over, up to here."""
        self.batch_max = batch_max
        # What is in the queue would take in bodies; counted only while some may go together.
        self._bytes = 0
        self._read_from_batch = floor_batch
        self._fetching = False
        # It is to be read again; an answer on its way is of no use.
        self._outdated = self._stray = False

    def batch_up_to(self, batch_max: int | None) -> None:
        """So many may go together from now on."""
        self.batch_max = batch_max
        self._bytes = 0 if batch_max is None else sum(map(_bytes_of, self.queue))

    @property
    def outdated(self) -> bool:
        """What is here may not be what is stored any more."""
        return self._outdated

    def reread(self) -> None:
        """Read it again before anything of it is sent."""
        self._outdated = True

    def drop(self, acked_seq: int, floor_batch: int) -> None:
        """Forget it, to be read again behind this number."""
        self._outdated = False
        self._stray = self._fetching
        self.queue.clear()
        self._bytes = 0
        self.fetched_seq = acked_seq
        self._read_from_batch = floor_batch

    @property
    def is_low(self) -> bool:
        """Whether it is time to ask for more, so that the next request need not wait for it."""
        count = len(self.queue)
        if count <= FETCH_LOW:
            return True
        if self.batch_max is None or count > self.batch_max:
            return False
        return self._bytes <= BATCH_BYTES_MAX

    def fetch(self, last_seq: int) -> Fetch | None:
        """What to read of a lane that has numbers up to `last_seq`; None: nothing now."""
        if self._fetching or self.fetched_seq >= last_seq or not self.is_low:
            return None
        self._fetching = True
        return Fetch(self.fetched_seq, self._read_from_batch)

    def given(self, deliveries: Iterable[Delivery]) -> None:
        """What need not be read, if it follows what is here; the rest is left to be read."""
        for delivery in deliveries:
            if delivery.seq == self.fetched_seq + 1:
                self._take(delivery)

    def fetched(self, deliveries: Sequence[Delivery | Gone]) -> None:
        """The answer to a Fetch.

        Raises:
            AssertionError: it has a hole.
        """
        self._fetching = False
        if self._stray:
            self._stray = False
            return
        for delivery in deliveries:
            if delivery.seq <= self.fetched_seq:
                continue  # Given up, or given, while it was read.
            if delivery.seq != self.fetched_seq + 1:
                raise AssertionError(f"number {delivery.seq} follows {self.fetched_seq}")
            self._take(delivery)

    def together(self, count_max: int, now: float) -> tuple[Delivery, ...]:
        """What may go in one request: the first one, and those behind it."""
        together: list[Delivery] = []
        room_bytes = BATCH_BYTES_MAX
        for each in islice(self.queue, count_max):
            if isinstance(each, Gone):
                break
            room_bytes -= element_bytes(each)
            if together and (is_expired(each, now) or room_bytes < 0):
                break
            together.append(each)
        return tuple(together)

    def passed(self, seq: int) -> int | None:
        """All up to this number is over; returns the batch of the last that was here."""
        batch, queue = None, self.queue
        while queue and queue[0].seq <= seq:
            passed = queue.popleft()
            if self.batch_max is not None:
                self._bytes -= _bytes_of(passed)
            batch = passed.batch
        if seq > self.fetched_seq:
            self.fetched_seq = seq
        return batch

    def _take(self, delivery: Delivery | Gone) -> None:
        self.queue.append(delivery)
        if self.batch_max is not None:
            self._bytes += _bytes_of(delivery)
        self.fetched_seq = delivery.seq
        self._read_from_batch = delivery.batch


def _bytes_of(each: Delivery | Gone) -> int:
    return 0 if isinstance(each, Gone) else element_bytes(each)


def is_expired(delivery: Delivery, now: float) -> bool:
    """Whether it is not worth sending any more."""
    return delivery.expires_at is not None and delivery.expires_at.timestamp() <= now
