"""Buffer budget: the bytes that all lanes of a relay hold in memory, and each tenant's part.

A lane takes bytes when its deliveries are read and gives them back when they end, or when it waits
so long that its content is released.  Bytes are those in memory, never compressed ones.

**Sharing** is by dynamic thresholds (Choudhury and Hahne, 1998): a holder takes more while it holds
at most `SHARE_FACTOR` times what is free.  One holder alone uses four fifths of the budget; several
get equal parts, and something is always free for the next one.  No list of waiting holders is
needed.  The holder is the tenant, or the endpoint if it has no tenant.

**Guarantee.**  A lane without a delivery may always take one row, so no lane waits for what another
one holds.  Such a row is beyond the budget, at most one per lane, and only of lanes that may send:
the others have released theirs.  It is counted apart, so that many lanes of one holder do not take
the room of the others.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from outbox.core.model.delivery import Delivery

BUFFER_BYTES_MAX = 128 << 20
"""Default of the budget."""
SHARE_FACTOR = 4
"""How many times what is free one holder may hold."""
COPIES = 3
"""A delivery in flight is in memory three times: its content, the body of its request, and the
bytes that a connection or a broker's client sends."""
ROW_BYTES = 1024
"""What a buffered delivery takes besides its content: objects, ids, key and times."""
READ_BYTES_MAX = 512 << 10
"""Content that a lane reads at once, except one that is larger and the first."""
UNREAD_BYTES = 64 << 10
"""Assumed content of a row before the first read of its lane, which converts all rows that it may
return on the server."""
RESPONSES_PART = 8
"""One such part of the budget is for responses that are not written to the log yet,"""
EVENTS_PART = 8
"""and one for events that were read lately (`event_cache`)."""


class ReadBounds(NamedTuple):
    """The bounds of one lane's read; the first row is always read."""

    rows_max: int
    bytes_max: int
    """The largest sum of its payloads and headers."""


def row_bytes(delivery: Delivery) -> int:
    """The bytes of a buffered delivery."""
    headers = delivery.headers
    content = len(delivery.payload) + (0 if headers is None else len(headers))
    return ROW_BYTES + COPIES * content


class BufferBudget:
    """The budget of a relay.

    Args:
        bytes_max: what all lanes may hold, the responses that are not written yet, and the events
            that were read lately.
    """

    __slots__ = (
        "_shares", "beyond", "bytes_max", "events_bytes_max", "held", "responses_bytes_max",
    )  # fmt: skip

    def __init__(self, bytes_max: int = BUFFER_BYTES_MAX) -> None:
        self.responses_bytes_max = bytes_max // RESPONSES_PART
        """The part of the responses."""
        self.events_bytes_max = bytes_max // EVENTS_PART
        """The part of the events."""
        self.bytes_max = bytes_max - self.responses_bytes_max - self.events_bytes_max
        """The part of the lanes."""
        self.held = 0
        """Bytes that are held within the budget, never more than `bytes_max`."""
        self.beyond = 0
        """Bytes of the guaranteed rows that are held beyond it."""
        # While a lane of the holder exists.
        self._shares: WeakValueDictionary[Hashable, BufferShare] = WeakValueDictionary()

    def share_of(self, holder: Hashable) -> BufferShare:
        """The share of a tenant, or of an endpoint without one."""
        share = self._shares.get(holder)
        if share is None:
            share = self._shares[holder] = BufferShare(self)
        return share


class BufferShare:
    """What one holder has of the budget."""

    __slots__ = ("__weakref__", "_budget", "held")

    def __init__(self, budget: BufferBudget) -> None:
        self._budget = budget
        self.held = 0
        """Bytes that its lanes hold within the budget."""

    @property
    def room(self) -> int:
        """Bytes that it may take now; not positive: none."""
        free = self._budget.bytes_max - self._budget.held
        # What is taken is no longer free.
        return (SHARE_FACTOR * free - self.held) // (SHARE_FACTOR + 1)

    def take_bytes(self, count: int) -> None:
        """Count bytes as held."""
        self.held += count
        self._budget.held += count

    def give_bytes_back(self, count: int) -> None:
        """Count bytes as held no more."""
        self.held -= count
        self._budget.held -= count

    @contextmanager
    def holding(self, count: int) -> Iterator[None]:
        """Hold bytes during a block."""
        self.take_bytes(count)
        try:
            yield
        finally:
            self.give_bytes_back(count)

    def take_beyond(self, count: int) -> None:
        """Count a guaranteed row, or, if negative, that it is held no more."""
        self._budget.beyond += count


def read_bounds(room: int, rows_max: int, mean_bytes: int, bytes_max: int) -> ReadBounds:
    """Bounds of a read that takes at most `room`, except its first row.

    Args:
        rows_max: rows that the lane needs.
        mean_bytes: the content of a row, as far as it is known from the last read.
        bytes_max: content that the lane needs.
    """
    rows = min(rows_max, bytes_max // mean_bytes + 1, room // (ROW_BYTES + COPIES * mean_bytes))
    rows = max(rows, 1)
    return ReadBounds(rows, min(bytes_max, max(room - rows * ROW_BYTES, 0) // COPIES))
