"""Events that were read lately: each is read once for all the lanes that deliver it.

Memory decides the cost and never the result: what is not here is read, and what a read of events
does not return is asked for again with its delivery, which says whether it was erased.  When the
count of erasures changes, the cache is replaced by a new one; a read that is under way keeps the
old one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias

from outbox.core.delivery.buffer_budget import BUFFER_BYTES_MAX, EVENTS_PART, ROW_BYTES
from outbox.core.model.delivery import Delivery, EventContent, earliest_commit

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from uuid import UUID

PART_EVENTS_MAX = 2048
"""Events of one part: the lanes of an endpoint read ahead so many together."""
LARGE_PART = 32
"""Content larger than such a part of one part would replace too many others, and is not kept."""


class LaneIdentity(Protocol):
    """The identity of a lane, in the database and as receivers see it."""

    @property
    def id(self) -> int: ...
    @property
    def endpoint_id(self) -> UUID: ...
    @property
    def name(self) -> str: ...


Placed: TypeAlias = tuple[int, int, int, float | None]
"""A delivery of an event that repeats no other delivery, without its content: its sequence and
batch, the event's id, and a lower bound of its commit time in epoch seconds, if that is known."""


class EventCache:
    """The content of events by id, in two parts: when one is full, the older one goes.

    Args:
        bytes_max: what it may hold in memory.
    """

    def __init__(self, bytes_max: int = BUFFER_BYTES_MAX // EVENTS_PART) -> None:
        self._part_bytes_max = bytes_max // 2
        self._bytes = 0
        self._newer: dict[int, EventContent] = {}
        self._older: dict[int, EventContent] = {}

    def __contains__(self, outbox_id: int) -> bool:
        return outbox_id in self._newer or outbox_id in self._older

    def add(self, contents: Mapping[int, EventContent]) -> None:
        """Keep events that were read."""
        large = self._part_bytes_max // LARGE_PART
        for outbox_id, content in contents.items():
            size_bytes = content.size_bytes
            if size_bytes > large or outbox_id in self:
                continue
            self._bytes += ROW_BYTES + size_bytes
            if self._bytes > self._part_bytes_max or len(self._newer) == PART_EVENTS_MAX:
                self._older, self._newer = self._newer, {}
                self._bytes = ROW_BYTES + size_bytes
            self._newer[outbox_id] = content

    def deliveries(
        self,
        lane: LaneIdentity,
        placed: Iterable[Placed],
        bytes_max: int,
        read: Mapping[int, EventContent],
    ) -> list[Delivery]:
        """The deliveries of a lane up to the first event that is neither here nor in `read`.

        Args:
            bytes_max: maximum bytes of payloads and headers; the first one is not limited.
        """
        found: list[Delivery] = []
        newer, older, endpoint_id, name = self._newer, self._older, lane.endpoint_id, lane.name
        for seq, batch, outbox_id, after in placed:
            content = newer.get(outbox_id) or read.get(outbox_id) or older.get(outbox_id)
            if content is None:
                break
            bytes_max -= len(content[6]) + len(content[7] or b"")
            if bytes_max < 0 and found:
                break
            since = earliest_commit(content[4], after)
            row = endpoint_id, name, seq, batch, outbox_id, *content, None, None, since
            found.append(Delivery._make(row))
        return found
