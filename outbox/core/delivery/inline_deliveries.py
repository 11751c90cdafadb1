"""Deliveries whose content was read together with their events, before their batch was written.

A lane that has no other pending deliveries can send them at once.  Those of larger batches are
read by the delivery fetcher, in chunks of bounded size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

from outbox.core.model.delivery import Delivery, earliest_commit, epoch_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from datetime import datetime
    from uuid import UUID

    from outbox.core.model.delivery import EventContent

INLINE_DELIVERIES_MAX = 64
"""Deliveries of a batch."""
INLINE_BYTES_MAX = 32 << 10
"""Payloads and headers of a batch."""


class LaneIdentity(Protocol):
    """The identity of a lane, as receivers see it."""

    @property
    def endpoint_id(self) -> UUID: ...
    @property
    def name(self) -> str: ...


L = TypeVar("L", bound=LaneIdentity)


def inline_deliveries(
    batch: int,
    deliveries: Iterable[tuple[int, int, int]],
    contents: Mapping[int, EventContent],
    lanes: Mapping[int, L],
    committed_after: datetime | None,
) -> dict[int, list[Delivery]]:
    """The deliveries of some lanes, each up to the first one whose content was not read.

    Args:
        deliveries: lane, sequence and event of all deliveries of the batch; none of these lanes
            has a replay in it.
        contents: the content of events by id.
        lanes: the lanes that need them, by id.
        committed_after: lower bound of the commit time of the batch's events.
    """
    by_lane: dict[int, list[Delivery]] = {}
    after = epoch_seconds(committed_after)
    complete, left_bytes = set(lanes if contents else ()), INLINE_BYTES_MAX
    for lane_id, seq, outbox_id in deliveries:
        if not complete:
            break
        if lane_id not in complete:
            continue
        content = contents.get(outbox_id)
        if content is None or content.size_bytes > left_bytes:
            complete.discard(lane_id)
            continue
        left_bytes -= content.size_bytes
        lane = lanes[lane_id]
        delivery = Delivery(
            lane.endpoint_id,
            lane.name,
            seq,
            batch,
            outbox_id,
            *content,
            waits_since=earliest_commit(content.published_at, after),
        )
        by_lane.setdefault(lane_id, []).append(delivery)
    return by_lane
