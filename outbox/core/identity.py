"""Names that are derived, never stored, so that every process agrees on them."""

from __future__ import annotations

from uuid import UUID, uuid5


def delivery_id(endpoint_id: UUID, outbox_id: int, event_id: UUID) -> UUID:
    """The `X-Delivery` of one event at one endpoint.

    The same on every attempt, after a crash, after the event moved to another
    lane and on the replay of a dead letter: a receiver that drops what it has
    seen by this id processes each event once.  A version 5 UUID (RFC 9562, 5.5)
    with the endpoint as its name space and `<id>:<event_id>` as its name.

    Neither would do alone.  After a fail-over that lost commits the database
    gives the same ids to other events, which nobody may take for duplicates; and
    nothing but chance keeps two events from having one event_id.
    """
    return uuid5(endpoint_id, f"{outbox_id}:{event_id}")


def lane_name(endpoint_id: UUID, generation: int, slot: int) -> str:
    """The lane's name as receivers see it; to them an opaque string.

    A change of the number of lanes, or of the server's timeline, starts a new
    generation, and with it new names, because each of the new lanes counts from 1.
    """
    return f"{endpoint_id.hex[:12]}-{generation}-{slot}"
