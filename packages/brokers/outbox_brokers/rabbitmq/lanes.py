"""The lanes that are open, and the append that a lane has in flight."""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rstream.constants import Key

from outbox_brokers.rabbitmq.messages import encode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.core.brokers.port import Message
    from outbox_brokers.rabbitmq.connection import Lost, StreamConnection

FRAME_BYTES = 1024 * 1024
"""Size of a frame with several messages, at most; the server's limit by default."""
FRAME_OVERHEAD_BYTES = 32
"""Bytes of a frame with one message besides the message: header, publisher, count, publishing id
and sizes."""
ENTRY_OVERHEAD_BYTES = 12
"""Bytes of a further message besides the message: publishing id and size."""
PUBLISH_VERSION = 1
"""Version of the Publish frame."""

_PUBLISH = struct.Struct(">IHHBI")
"""Size, key, version, publisher, count."""
_ENTRY = struct.Struct(">QI")


@dataclass(slots=True)
class OpenLane:
    """A lane whose position was read on a connection that is open since."""

    connection: StreamConnection
    slot: int
    """Its publisher and its subscription on the connection."""
    identity: str
    position: int
    """The last sequence that is in the stream for certain."""


class Publishing:
    """The messages of one append, until the server has responded for each.

    The server confirms in any order; a message counts as stored when all before it are too.
    """

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = ids
        self._unconfirmed = set(ids)
        self.failed_ids: dict[int, int] = {}
        """Codes by publishing id."""
        self.error: Lost | None = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def through(self, after: int) -> int:
        """The last id of which all before it are confirmed; `after`: not even the first is."""
        first = min(self._unconfirmed, default=None)
        if first is None:
            return self._ids[-1]
        return max((each for each in self._ids if each < first), default=after)

    @property
    def is_confirmed(self) -> bool:
        return not self._unconfirmed

    @property
    def has_response(self) -> bool:
        """Whether nothing is in doubt."""
        return self._unconfirmed <= self.failed_ids.keys()

    def confirmed(self, ids: tuple[int, ...]) -> bool:
        unconfirmed = len(self._unconfirmed)
        self._unconfirmed.difference_update(ids)
        if not self._unconfirmed:
            self._end()
        return len(self._unconfirmed) < unconfirmed

    def failed(self, errors: list[tuple[int, int]]) -> None:
        self.failed_ids.update(errors)
        self._end()

    def lost(self, error: Lost) -> None:
        self.error = error
        self._end()

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


def fit(messages: Sequence[Message], frame_bytes_max: int) -> list[bytes]:
    """Encode the messages before the first one that no frame can hold."""
    encoded: list[bytes] = []
    for message in messages:
        data = encode(message)
        if len(data) + FRAME_OVERHEAD_BYTES > frame_bytes_max:
            break
        encoded.append(data)
    return encoded


def publish_frames(
    slot: int, ids: Sequence[int], encoded: Sequence[bytes], frame_bytes_max: int
) -> bytes:
    """Encode Publish frames; no batches of several messages with one id."""
    frames: list[bytes] = []
    several_bytes_max = min(frame_bytes_max, FRAME_BYTES)
    start, size = 0, FRAME_OVERHEAD_BYTES
    for place, data in enumerate(encoded):
        if place > start and size + len(data) + ENTRY_OVERHEAD_BYTES > several_bytes_max:
            frames.append(_frame(slot, ids[start:place], encoded[start:place]))
            start, size = place, FRAME_OVERHEAD_BYTES
        size += len(data) + ENTRY_OVERHEAD_BYTES
    frames.append(_frame(slot, ids[start:], encoded[start:]))
    return b"".join(frames)


def _frame(slot: int, ids: Sequence[int], encoded: Sequence[bytes]) -> bytes:
    # rstream's encoder takes several times as long, and has an object for each message.
    parts = [b""]
    for each, data in zip(ids, encoded, strict=True):
        parts += (_ENTRY.pack(each, len(data)), data)
    size = sum(map(len, parts)) + _PUBLISH.size - 4
    parts[0] = _PUBLISH.pack(size, Key.Publish.value, PUBLISH_VERSION, slot, len(ids))
    return b"".join(parts)
