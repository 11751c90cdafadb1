"""Events are read once for all lanes, and what is kept of them is bounded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from uuid import UUID

from outbox.core.delivery.buffer_budget import ROW_BYTES
from outbox.core.delivery.event_cache import LARGE_PART, PART_EVENTS_MAX, EventCache, Placed
from outbox.core.model.delivery import EventContent

AT = 1_772_323_200.0
LANE: Any = SimpleNamespace(id=1, name="lane", endpoint_id=UUID(int=1))


def content(n: int, size_bytes: int = 10) -> EventContent:
    payload = b"x" * (size_bytes - 2)
    return EventContent(UUID(int=n), "a.b", None, None, AT, None, payload, b"{}")


def contents(*numbers: int, size_bytes: int = 10) -> dict[int, EventContent]:
    return {n: content(n, size_bytes) for n in numbers}


def placed(*outbox_ids: int, after: float | None = None) -> list[Placed]:
    return [(seq, 3, outbox_id, after) for seq, outbox_id in enumerate(outbox_ids, 5)]


def test_a_lane_gets_its_deliveries_up_to_the_first_event_that_is_not_there() -> None:
    cache = EventCache()
    cache.add(contents(10, 11))
    found = cache.deliveries(LANE, placed(10, 12, 11, 13), 1000, contents(12))
    assert [(each.seq, each.outbox_id, each.event_id) for each in found] == [
        (5, 10, UUID(int=10)),
        (6, 12, UUID(int=12)),
        (7, 11, UUID(int=11)),
    ]
    first = found[0]
    assert (first.endpoint_id, first.lane, first.batch) == (UUID(int=1), "lane", 3)
    assert (first.payload, first.headers, first.waits_since) == (b"x" * 8, b"{}", AT)
    assert first.replay_of is first.backfill_id is None
    assert cache.deliveries(LANE, placed(12), 1000, {}) == []


def test_an_event_waits_since_it_can_have_been_committed() -> None:
    cache = EventCache()
    cache.add(contents(1))
    (found,) = cache.deliveries(LANE, placed(1, after=AT + 3), 1000, {})
    assert found.waits_since == AT + 3


def test_what_a_lane_takes_is_bounded_except_its_first_delivery() -> None:
    cache = EventCache()
    cache.add(contents(1, 2, 3, size_bytes=100))
    for bytes_max, count in ((0, 1), (100, 1), (199, 1), (200, 2), (1000, 3)):
        assert len(cache.deliveries(LANE, placed(1, 2, 3), bytes_max, {})) == count


def test_the_older_half_goes_when_the_newer_one_is_full() -> None:
    cache = EventCache(bytes_max=10 * (ROW_BYTES + 10))
    cache.add(contents(*range(10)))
    assert all(n in cache for n in range(10))
    cache.add(contents(3, 10, 11))
    assert [n for n in range(12) if n in cache] == list(range(5, 12))
    assert len(cache.deliveries(LANE, placed(7, 10), 1000, {})) == 2
    many = EventCache(bytes_max=1 << 40)
    many.add(contents(*range(2 * PART_EVENTS_MAX + 1)))
    first = PART_EVENTS_MAX
    assert [n for n in range(first - 2, first + 2) if n in many] == [first, first + 1]


def test_an_event_that_would_replace_many_others_is_not_kept() -> None:
    cache = EventCache(bytes_max=2 * LARGE_PART * 50_000)
    cache.add(contents(1, size_bytes=50_000) | contents(2, size_bytes=50_001))
    assert (1 in cache, 2 in cache) == (True, False)
    assert 1 not in EventCache(bytes_max=0)
