"""Deliveries whose content was read with their events: a prefix of each lane, of bounded size."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from uuid import UUID

from outbox.core.delivery.inline_deliveries import INLINE_BYTES_MAX, inline_deliveries
from outbox.core.model.delivery import EventContent

AT = 1_772_323_200.0


@dataclass
class LaneOf:
    name: str
    endpoint_id: UUID


LANES = {1: LaneOf("one", UUID(int=1)), 2: LaneOf("two", UUID(int=1))}


def content(n: int, size_bytes: int = 10) -> EventContent:
    payload = b"x" * (size_bytes - 2)
    return EventContent(UUID(int=n), "a.b", None, None, AT, None, payload, b"{}")


def test_a_lane_gets_its_deliveries_up_to_the_first_one_without_content() -> None:
    given = [(1, 5, 10), (2, 7, 11), (1, 6, 12), (1, 7, 13), (2, 8, 14), (3, 1, 10)]
    contents = {n: content(n) for n in (10, 11, 13, 14)}
    found = inline_deliveries(3, given, contents, LANES, datetime.fromtimestamp(AT, UTC))
    assert {lane: [d.seq for d in each] for lane, each in found.items()} == {1: [5], 2: [7, 8]}
    (first, *_) = found[2]
    assert (first.lane, first.batch, first.outbox_id) == ("two", 3, 11)
    assert (first.event_id, first.payload, first.waits_since) == (
        UUID(int=11), b"x" * 8, AT,
    )  # fmt: skip
    assert first.replay_of is first.backfill_id is None


def test_their_size_is_bounded_over_all_lanes() -> None:
    given = [(1, 1, 1), (2, 1, 2), (1, 2, 3), (2, 2, 4)]
    contents = {
        1: content(1, INLINE_BYTES_MAX - 30),
        2: content(2, 31),
        3: content(3, 30),
        4: content(4, 1),
    }
    found = inline_deliveries(1, given, contents, LANES, None)
    assert {lane: [d.seq for d in each] for lane, each in found.items()} == {1: [1, 2]}


def test_without_contents_or_lanes_there_are_none() -> None:
    given = [(1, 1, 1)]
    assert inline_deliveries(1, given, {}, LANES, None) == {}
    assert inline_deliveries(1, given, {1: content(1)}, {}, None) == {}
