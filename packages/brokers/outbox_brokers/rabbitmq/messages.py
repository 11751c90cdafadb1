"""Messages as the streams keep them.

A message is AMQP 1.0 (OASIS, part 3): the delivery's headers are its application properties, and
the body is its data section.  The bytes of a stream are delivered in chunks, whose layout is the
one of osiris, RabbitMQ's log.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

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
IDENTIFIED_BYTES_MAX = 64 * 1024
"""Bytes at the start of a message in which its properties are looked for."""
# By the first half of a type's code (AMQP 1.0, 1.2).
_FIXED_BYTES = {0x4: 0, 0x5: 1, 0x6: 2, 0x7: 4, 0x8: 8, 0x9: 16}
_SIZE_BYTES = {0xA: 1, 0xB: 4, 0xC: 1, 0xD: 4, 0xE: 1, 0xF: 4}
"""Bytes of the size, and of the number of values, of types of variable size."""


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
        found = _application_properties(entry[:IDENTIFIED_BYTES_MAX])
        return Stored(found["x-lane"], int(found["x-sequence"]), found["x-delivery"])
    except (IndexError, KeyError, ValueError):
        # Another writer's message may have any bytes.
        return None


def _application_properties(entry: bytes) -> dict[str, str]:
    """The texts among a message's application properties, by their names in lower case.

    Each step passes at least one byte, which rstream's decoder does not promise: an array of
    4,294,967,295 nulls has some bytes.
    """
    place = 0
    while entry[place] == 0:
        descriptor = place + 1
        place = _end(entry, descriptor)
        if int.from_bytes(entry[descriptor + 1 : place]) == _APPLICATION_PROPERTIES[-1]:
            break
        place = _end(entry, place)
    width = _SIZE_BYTES[entry[place] >> 4]
    name, end = place + 1 + 2 * width, _end(entry, place)
    found: dict[str, str] = {}
    while name < end:
        value = _end(entry, name)
        found[_text(entry, name).lower()] = _text(entry, value)
        name = _end(entry, value)
    return found


def _text(data: bytes, place: int) -> str:
    """The text at a place; empty if the value there is of another type."""
    kind = data[place] >> 4
    if kind not in (0xA, 0xB):
        return ""
    return data[place + 1 + _SIZE_BYTES[kind] : _end(data, place)].decode()


def _end(data: bytes, place: int) -> int:
    """The end of the value at a place."""
    kind = data[place] >> 4
    place += 1
    if kind in _FIXED_BYTES:
        return place + _FIXED_BYTES[kind]
    size_bytes = _SIZE_BYTES[kind]
    return place + size_bytes + int.from_bytes(data[place : place + size_bytes])


def _string(text: str) -> bytes:
    encoded = text.encode()
    size = len(encoded)
    return (bytes((0xA1, size)) if size < 256 else b"\xb1" + size.to_bytes(4)) + encoded


@lru_cache(maxsize=256)
def _name(text: str) -> bytes:
    return _string(text)
