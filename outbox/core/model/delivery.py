"""A delivery: one event in one lane of an endpoint, and what it takes from the event."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, NamedTuple

from outbox.core.model.ids import message_id

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID


class Delivery(NamedTuple):
    """One event in one lane of an endpoint: the content, without retry state."""

    endpoint_id: UUID
    lane: str
    """The public name, see `outbox.core.model.ids.lane_name`."""
    seq: int
    batch: int
    outbox_id: int
    event_id: UUID
    type: str
    tenant: str | None
    key: str | None
    published_at: float
    """Epoch seconds, like all times of this module."""
    expires_at: float | None
    payload: bytes
    """JSON text, or any bytes if there is a content type."""
    headers: bytes | None
    """JSON text of an object of strings."""
    content_type: str | None = None
    """The content type of a payload that is not JSON; None: it is JSON."""
    replay_of: tuple[str, int] | None = None
    """The lane and sequence that the replay of a dead letter replaces."""
    backfill_id: int | None = None
    """The backfill that sends the event again, with its own X-Delivery."""
    waits_since: float | None = None
    """`earliest_commit` of its event; None: it was fed, or is a replay or a backfill."""

    @property
    def message_id(self) -> str:
        """The X-Delivery, stable over all attempts."""
        return message_id(self.endpoint_id, self.outbox_id, self.event_id, self.backfill_id)


class EventContent(NamedTuple):
    """What the first delivery of an event takes from it; the fields are those of `Delivery`."""

    event_id: UUID
    type: str
    tenant: str | None
    key: str | None
    published_at: float
    expires_at: float | None
    payload: bytes
    headers: bytes | None
    content_type: str | None = None

    @property
    def size_bytes(self) -> int:
        """Size of payload and headers."""
        return len(self.payload) + len(self.headers or b"")


def epoch_seconds(at: datetime | None) -> float | None:
    """Epoch seconds of an optional time; exact to the microsecond for a few centuries."""
    return None if at is None else at.timestamp()


def earliest_commit(published_at: float, committed_after: float | None) -> float | None:
    """The earliest commit time of an event; None: it was fed, long after its commit.

    An event may have been inserted long before its transaction committed.

    Args:
        committed_after: a lower bound of the commit time; None: not known; infinite: it was fed.
    """
    if committed_after is None or committed_after < published_at:
        return published_at
    return committed_after if committed_after < inf else None
