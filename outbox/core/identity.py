"""Names that are derived, never stored, so that every process agrees on them."""

from __future__ import annotations

from uuid import UUID, uuid5


def delivery_id(endpoint_id: UUID, outbox_id: int) -> UUID:
    """The `X-Delivery` of one event at one endpoint.

    The same on every attempt, after a crash, after the event moved to another
    lane and on the replay of a dead letter: a receiver that drops what it has
    seen by this id processes each event once.  A version 5 UUID (RFC 9562, 5.5)
    with the endpoint as its name space and the decimal id as its name.
    """
    return uuid5(endpoint_id, str(outbox_id))


def lane_name(endpoint_id: UUID, generation: int, slot: int) -> str:
    """The lane's name as receivers see it; to them an opaque string.

    A change of the number of lanes starts a new generation, and with it new
    names, because each of the new lanes counts from 1.
    """
    return f"{endpoint_id.hex[:12]}-{generation}-{slot}"
