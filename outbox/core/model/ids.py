"""Ids that are derived and not stored: X-Delivery and lane names."""

from __future__ import annotations

import re
from functools import lru_cache
from hashlib import blake2b
from struct import Struct
from typing import NamedTuple
from uuid import UUID

_LANE_NAME = re.compile(r"([0-9a-f]{12})-([0-9]{1,18})-([0-9]{1,9})")
_TAG_BITS, _ID_BITS = 58, 64
# Version and variant bits of a version 8 UUID in its halves; the other 122 bits are free.
_VERSION, _VARIANT = 8 << 12, 2 << 62
_TAG_MASK, _ID_MASK = (1 << _TAG_BITS) - 1, (1 << _ID_BITS) - 1

# Bound once, for the hot path.
_number, _pack = int.from_bytes, Struct(">QQ").pack


def delivery_id(
    endpoint_id: UUID,
    outbox_id: int,
    event_id: UUID,
    backfill_id: int | None = None,
) -> UUID:
    """The `X-Delivery` of one event at one endpoint.

    It is the same on every attempt, after a crash, after the event moved to another lane and
    on the replay of a dead letter.  A receiver that deduplicates by it processes each event
    once.

    Both the outbox id and the event id are part of it.  After a failover that lost commits the
    database assigns the same outbox ids to other events, which must not be deduplicated; and
    event ids are unique only by chance.

    It is a version 8 UUID (RFC 9562, 5.8).  Its 122 free bits are a tag and the masked outbox
    id.  The tag is a hash of all arguments with the endpoint's id as the key; the mask is a
    hash of the tag with the same key.  `outbox_id_of` can therefore map an X-Delivery to its
    event without a table, and a receiver cannot infer the number of events.

    Args:
        backfill_id: the backfill that sends the event again.  Receivers may have most of
            its events and must not drop these.  Acknowledged events are not excluded: the
            relay cannot distinguish an event that was not received from one whose response
            was lost, and others are still in flight.
    """
    return UUID(message_id(endpoint_id, outbox_id, event_id, backfill_id))


def message_id(
    endpoint_id: UUID,
    outbox_id: int,
    event_id: UUID,
    backfill_id: int | None = None,
) -> str:
    """`delivery_id` as text."""
    identity = b"%d:%b:%d" % (outbox_id, event_id.bytes, backfill_id or 0)
    tags, masks = _hashes(endpoint_id)
    tag_hash = tags.copy()
    tag_hash.update(identity)
    tag = _number(tag_hash.digest(), "big") & _TAG_MASK
    mask_hash = masks.copy()
    mask_hash.update(tag.to_bytes(8, "big"))
    # Test deliveries have no event and negative ids.
    low = outbox_id & _ID_MASK ^ _number(mask_hash.digest(), "big")
    text = _pack(
        tag >> 10 << 16 | _VERSION | (tag & 0x3FF) << 2 | low >> 62,
        _VARIANT | low & (1 << 62) - 1,
    ).hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def outbox_id_of(delivery: UUID, endpoint_id: UUID) -> int | None:
    """The outbox id of an X-Delivery of this endpoint.

    For an X-Delivery of another endpoint the result is None or a meaningless number, so
    callers must derive the X-Delivery of the event found and compare.
    """
    n = delivery.int
    free = (n >> 80) << 74 | (n >> 64 & 0xFFF) << 62 | n & (1 << 62) - 1
    outbox_id = (free & _ID_MASK) ^ _mask(endpoint_id, free >> _ID_BITS)
    return outbox_id if 0 < outbox_id < 1 << 63 else None


def lane_name(endpoint_id: UUID, generation: int, slot: int) -> str:
    """The public name of a lane, an opaque string for receivers.

    A change of the lane count, a failover or a restore starts a new generation with new
    names, because the sequences of the new lanes start at 1.
    """
    return lane_name_at(endpoint_id.hex[:12], generation, slot)


def lane_name_at(endpoint: str, generation: int, slot: int) -> str:
    """The name of a lane from the first digits of its endpoint's id."""
    return f"{endpoint}-{generation}-{slot}"


class LaneName(NamedTuple):
    """The parts of a lane's public name."""

    endpoint: str
    """The first digits of the endpoint's id."""
    generation: int
    slot: int


def parse_lane_name(name: str) -> LaneName | None:
    """Parse a name of `lane_name`; None: it has another form."""
    found = _LANE_NAME.fullmatch(name)
    return LaneName(found[1], int(found[2]), int(found[3])) if found else None


def _mask(endpoint_id: UUID, tag: int) -> int:
    keyed = _hashes(endpoint_id)[1].copy()
    keyed.update(tag.to_bytes(8))
    return int.from_bytes(keyed.digest())


@lru_cache(1024)
def _hashes(endpoint_id: UUID) -> tuple[blake2b, blake2b]:
    """Keyed hashes for tags and masks; a copy costs a fifth of a new one."""
    size, key = _ID_BITS // 8, endpoint_id.bytes
    return (
        blake2b(digest_size=size, key=key, person=b"tag"),
        blake2b(digest_size=size, key=key, person=b"mask"),
    )
