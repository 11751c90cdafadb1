"""Names that are derived, never stored, so that every process agrees on them."""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from uuid import UUID

_TAG_BITS, _ID_BITS = 58, 64
# What makes it a version 8 UUID, around its 122 free bits.
_VERSION, _VARIANT = 8 << 76, 2 << 62
_TAG_MASK, _ID_MASK = (1 << _TAG_BITS) - 1, (1 << _ID_BITS) - 1


def delivery_id(
    endpoint_id: UUID,
    outbox_id: int,
    event_id: UUID,
    backfill_id: int | None = None,
    was_backfill_id: int | None = None,
) -> UUID:
    """The `X-Delivery` of one event at one endpoint.

    The same on every attempt, after a crash, after the event moved to another
    lane and on the replay of a dead letter: a receiver that drops what it has
    seen by this id processes each event once.

    The database's id and the event's own both count.  After a fail-over that lost
    commits the database gives the same ids to other events, which nobody may take
    for duplicates; and nothing but chance keeps two events from having one event_id.

    A version 8 UUID (RFC 9562, 5.8).  Its 122 free bits are a tag, hashed from all
    of this with the endpoint's id as the key, and the outbox id under a mask, hashed
    from the tag in the same way: so `outbox_id_of` leads from an X-Delivery back to
    its event, though no table has it, and a receiver learns nothing about how many
    events there are.

    Args:
        backfill_id: the backfill that sends it once more.  That is for receivers that
            have, or had, most of it, and they must not drop it.  Which of the events
            they acknowledged is not asked: who answered, and whose answer was lost,
            look the same from here, and the ones in between are still on their way.
        was_backfill_id: of what its receiver asked for again: the backfill that this was
            of, since a lane may have an event and the same once more.
    """
    return UUID(message_id(endpoint_id, outbox_id, event_id, backfill_id, was_backfill_id))


def message_id(
    endpoint_id: UUID,
    outbox_id: int,
    event_id: UUID,
    backfill_id: int | None = None,
    was_backfill_id: int | None = None,
) -> str:
    """The same as text."""
    told = b"%d:%b:%d" % (outbox_id, event_id.bytes, backfill_id or 0)
    if was_backfill_id is not None:
        told += b":%d" % was_backfill_id
    tags, masks = _hashes(endpoint_id)
    tag = int.from_bytes(_hash(tags, told)) & _TAG_MASK
    # Tests of an endpoint are of no event, and have negative ids.
    low = outbox_id & _ID_MASK ^ int.from_bytes(_hash(masks, tag.to_bytes(8)))
    n = (
        tag >> 10 << 80
        | _VERSION
        | (tag & 0x3FF) << 66
        | low >> 62 << 64
        | _VARIANT
        | low & (1 << 62) - 1
    )
    text = n.to_bytes(16).hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def outbox_id_of(delivery: UUID, endpoint_id: UUID) -> int | None:
    """The event that an X-Delivery is of, provided that it is of this endpoint.

    Of another endpoint's it makes a number of no meaning, or None: whoever asks
    makes the X-Delivery anew from what is found there, and compares.
    """
    n = delivery.int
    free = (n >> 80) << 74 | (n >> 64 & 0xFFF) << 62 | n & (1 << 62) - 1
    outbox_id = (free & _ID_MASK) ^ _mask(endpoint_id, free >> _ID_BITS)
    return outbox_id if 0 < outbox_id < 1 << 63 else None


def lane_name(endpoint_id: UUID, generation: int, slot: int) -> str:
    """The lane's name as receivers see it; to them an opaque string.

    A change of the number of lanes, or of the server's timeline, starts a new
    generation, and with it new names, because each of the new lanes counts from 1.
    """
    return f"{endpoint_id.hex[:12]}-{generation}-{slot}"


def _mask(endpoint_id: UUID, tag: int) -> int:
    return int.from_bytes(_hash(_hashes(endpoint_id)[1], tag.to_bytes(8)))


def _hash(begun: blake2b, told: bytes) -> bytes:
    found = begun.copy()
    found.update(told)
    return found.digest()


@lru_cache(1024)
def _hashes(endpoint_id: UUID) -> tuple[blake2b, blake2b]:
    """Of tags and of masks, begun with an endpoint's key: a copy costs a fifth of a new one."""
    size, key = _ID_BITS // 8, endpoint_id.bytes
    return (
        blake2b(digest_size=size, key=key, person=b"tag"),
        blake2b(digest_size=size, key=key, person=b"mask"),
    )
