"""Messages as the streams keep them.

A message is AMQP 1.0 (OASIS, part 3): the delivery's headers are its application properties, and
the body is its data section.  The bytes of a stream are delivered in chunks, whose layout is the
one of osiris, RabbitMQ's log.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from rstream.amqp import amqp_decoder

if TYPE_CHECKING:
    from outbox.core.brokers.port import Message

# Descriptors of sections: 0x00, a small unsigned long (0x53), and the code.
_APPLICATION_PROPERTIES = b"\x00\x53\x74"
_DATA = b"\x00\x53\x75"

_CHUNK = struct.Struct(">BBHIqQQIIII")
"""Magic and version, type, entries, records, timestamp, epoch, offset, CRC, sizes of data and
trailer, reserved."""
_MAGIC = 5
_USER_DATA = 0
_BATCHED = 0x80
"""First bit of an entry that has several messages."""


class Stored(NamedTuple):
    """What identifies a message of a lane in its stream."""

    lane: str
    sequence: int
    delivery: str


class MalformedChunk(Exception):
    """The server sent a chunk that has another layout."""


def encode(message: Message) -> bytes:
    """Encode a delivery as an AMQP 1.0 message."""
    properties = dict(message.headers)
    items = b"".join([_name(name) + _string(value) for name, value in properties.items()])
    count = len(properties) * 2
    if len(items) < 255 and count < 256:
        head = bytes((0xC1, len(items) + 1, count))
    else:
        head = b"\xd1" + struct.pack(">II", len(items) + 4, count)
    size = len(message.body)
    data = bytes((0xA0, size)) if size < 256 else b"\xb0" + size.to_bytes(4)
    return b"".join((_APPLICATION_PROPERTIES, head, items, _DATA, data, message.body))


def last_entry(chunk: bytes) -> bytes | None:
    """Return the last message of a chunk; None: it is a batch of several, or there is none.

    Raises:
        MalformedChunk: the layout is not the expected one.
    """
    if len(chunk) < _CHUNK.size:
        raise MalformedChunk("it is too short")
    magic, kind, entries, _, _, _, _, _, data_bytes, _, _ = _CHUNK.unpack_from(chunk)
    if magic >> 4 != _MAGIC:
        raise MalformedChunk(f"its magic number is {magic >> 4}")
    if kind != _USER_DATA or not entries:
        return None
    place, end = _CHUNK.size, _CHUNK.size + data_bytes
    last: bytes | None = None
    for _ in range(entries):
        if chunk[place] & _BATCHED:
            place += 11 + int.from_bytes(chunk[place + 7 : place + 11])
            last = None
        else:
            size = int.from_bytes(chunk[place : place + 4])
            last = chunk[place + 4 : place + 4 + size]
            place += 4 + size
        if place > min(end, len(chunk)):
            raise MalformedChunk("an entry ends after it")
    return last


def identify(entry: bytes) -> Stored | None:
    """Read what a message says of itself; None: it is not a delivery of this relay."""
    try:
        properties = amqp_decoder(entry).application_properties or {}
        found = {_text(name).lower(): _text(value) for name, value in properties.items()}
        return Stored(found["x-lane"], int(found["x-sequence"]), found["x-delivery"])
    # Another writer's message may have any bytes, and the decoder raises what they lead to.
    except Exception:
        return None


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _string(text: str) -> bytes:
    encoded = text.encode()
    size = len(encoded)
    return (bytes((0xA1, size)) if size < 256 else b"\xb1" + size.to_bytes(4)) + encoded


@lru_cache(maxsize=256)
def _name(text: str) -> bytes:
    return _string(text)
