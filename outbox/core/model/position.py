"""Positions: which events a snapshot of the database saw, as an opaque text.

The text is base64url without padding of

    1 byte      the version, 1
    16 bytes    incarnation
    varints     timeline, batch, high, and `at` in microseconds since 1970
    varints     of each range of `seen`: the distance from the last id of the range before (of the
                first one: from 0) to its first id, and from there to its last id
    4 bytes     the beginning of the SHA-256 of all before

A varint is an unsigned LEB128 number, of at most 63 bits.  schema/0027_positions.sql writes the
same text in the database.
"""

from __future__ import annotations

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import TYPE_CHECKING
from uuid import UUID

from outbox.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outbox.core.model.int_ranges import Range

POSITION_CHARS_MAX = 65_536
"""Length of a text: about 24,000 ranges."""

_VERSION = b"\x01"
_IDENTITY_BYTES = 16
_CHECKSUM_BYTES = 4
_BASE64URL = re.compile(r"[A-Za-z0-9_-]*")
_NUMBER_MAX = (1 << 63) - 1
_NUMBER_BYTES_MAX = 9
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class Position:
    """All events that batches up to `batch` sequenced, and those of `seen`."""

    incarnation: UUID
    """The id of the state: a restored one has another."""
    timeline: int
    """The server's, as the relay has stored it; 0: not known."""
    batch: int
    high: int
    """The greatest outbox id that the batch has passed."""
    at: datetime
    """When it was written, in UTC."""
    seen: tuple[Range, ...]
    """Outbox ids that were seen before they were sequenced: ranges in ascending order, which
    neither overlap nor touch."""


def encode(position: Position) -> str:
    """The text of a position.

    Raises:
        UsageError: a number or the text is too large, or the ranges have another form.
    """
    content = _VERSION + position.incarnation.bytes
    content += b"".join(_varint(number) for number in _numbers(position))
    content += _checksum(content)
    text = urlsafe_b64encode(content).decode().rstrip("=")
    if len(text) > POSITION_CHARS_MAX:
        raise UsageError(f"position: longer than {POSITION_CHARS_MAX} characters")
    return text


def parse_position(text: str) -> Position:
    """Parse the text of a position.

    Raises:
        UsageError: it is no position, has another version, or was altered or cut off.
    """
    if len(text) > POSITION_CHARS_MAX:
        raise UsageError(f"position: longer than {POSITION_CHARS_MAX} characters")
    if not _BASE64URL.fullmatch(text) or len(text) % 4 == 1:
        raise UsageError("position: it is no text of letters, digits, - and _ in base64url")
    content = urlsafe_b64decode(text + "=" * (-len(text) % 4))
    content, checksum = content[:-_CHECKSUM_BYTES], content[-_CHECKSUM_BYTES:]
    if checksum != _checksum(content):
        raise UsageError("position: it was altered or cut off; copy all of it")
    if content[:1] != _VERSION:
        raise UsageError("position: it has another version than this program reads")
    try:
        position = _decode(content)
        is_canonical = encode(position) == text
    except (ValueError, StopIteration, OverflowError):
        is_canonical = False
    if not is_canonical:
        raise UsageError("position: its numbers are not as a position has them")
    return position


def _numbers(position: Position) -> Iterator[int]:
    at = (position.at - _EPOCH) // _MICROSECOND
    yield from (position.timeline, position.batch, position.high, at)
    before = 0
    for lo, hi in position.seen:
        # The first one may begin at 1.
        if not before + bool(before) < lo <= hi <= _NUMBER_MAX:
            raise UsageError(f"position: the range {lo} to {hi} does not follow {before}")
        yield lo - before
        yield hi - lo
        before = hi


def _decode(content: bytes) -> Position:
    body = iter(content[1 + _IDENTITY_BYTES :])
    incarnation = UUID(bytes=content[1 : 1 + _IDENTITY_BYTES])
    timeline, batch, high, at_us = [_read_varint(next(body), body) for _ in range(4)]
    seen: list[Range] = []
    before = 0
    for first in body:
        lo = before + _read_varint(first, body)
        before = lo + _read_varint(next(body), body)
        seen.append((lo, before))
    at = _EPOCH + at_us * _MICROSECOND
    return Position(incarnation, timeline, batch, high, at, tuple(seen))


def _varint(number: int) -> bytes:
    if not 0 <= number <= _NUMBER_MAX:
        raise UsageError(f"position: {number} is not from 0 to {_NUMBER_MAX}")
    digits = bytearray()
    while number > 0x7F:
        digits.append(number & 0x7F | 0x80)
        number >>= 7
    digits.append(number)
    return bytes(digits)


def _read_varint(first: int, following: Iterator[int]) -> int:
    number, byte = first & 0x7F, first
    for place in range(1, _NUMBER_BYTES_MAX):
        if byte < 0x80:
            break
        byte = next(following)
        number |= (byte & 0x7F) << 7 * place
    if byte >= 0x80:
        raise UsageError("position: a number is too large")
    return number


def _checksum(content: bytes) -> bytes:
    return sha256(content).digest()[:_CHECKSUM_BYTES]
