"""Names that are derived, never stored, so that every process agrees on them."""

from __future__ import annotations

from hashlib import blake2b
from uuid import UUID

_TAG_BITS, _ID_BITS = 58, 64
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
    told = b"%d:%b:%d" % (outbox_id, event_id.bytes, backfill_id or 0)
    if was_backfill_id is not None:
        told += b":%d" % was_backfill_id
    tag = int.from_bytes(_hash(endpoint_id, told, b"tag")) & _TAG_MASK
    # Tests of an endpoint are of no event, and have negative ids.
    return _uuid8(tag << _ID_BITS | outbox_id & _ID_MASK ^ _mask(endpoint_id, tag))


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
    return int.from_bytes(_hash(endpoint_id, tag.to_bytes(8), b"mask"))


def _hash(key: UUID, told: bytes, purpose: bytes) -> bytes:
    return blake2b(told, digest_size=_ID_BITS // 8, key=key.bytes, person=purpose).digest()


def _uuid8(free: int) -> UUID:
    """A version 8 UUID with these 122 bits."""
    high, middle, low = free >> 74, free >> 62 & 0xFFF, free & (1 << 62) - 1
    return UUID(int=high << 80 | 8 << 76 | middle << 64 | 2 << 62 | low)
