"""Feeds: which batch sequenced which event, and where a feed goes on after any crash."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outbox.core.sequencing.feeds import (
    FED_PENDING_MAX,
    FEED_LIVE_S,
    IDLE_MAX,
    LARGE_BATCH,
    LIVE_DUE,
    LIVE_MAX,
    LIVE_PER_S,
    Feed,
    FeedPace,
    LoadedFeed,
    PassedBatch,
    PastEvent,
    Place,
    split_by_batch,
)
from outbox.core.sequencing.router import RoutableEvent, Route

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.core.model.int_ranges import Range

ENDPOINT = UUID(int=1)
ROUTE = Route(ENDPOINT, ("**",), None, all_tenants=False, lane_ids=(10, 11))


class History:
    """Batches that pass ids, leave gaps, and find some of them later; others are rolled back."""

    def __init__(self, draw: st.DataObject) -> None:
        self.batches: list[PassedBatch] = []
        self.ids_of: list[list[int]] = []
        high, young = 0, list[int]()
        for _ in range(draw.draw(st.integers(1, 12))):
            found = sorted(each for each in young if draw.draw(st.integers(0, 2)) == 0)
            dead = [e for e in young if e not in found and draw.draw(st.integers(0, 3)) == 0]
            young = [each for each in young if each not in found and each not in dead]
            new = range(high + 1, high + 1 + draw.draw(st.integers(0, 6)))
            # The highest id that a batch passes is that of an event.
            late = [e for e in new[:-1] if draw.draw(st.integers(0, 3)) == 0]
            ids = found + [each for each in new if each not in late]
            young += late
            row = PassedBatch(
                len(self.batches), high, high + len(new), _ranges(young), _ranges(found), len(ids)
            )
            self.batches.append(row)
            self.ids_of.append(ids)
            high = row.high
        self.events = [_event(i) for i in sorted(i for ids in self.ids_of for i in ids)]

    def sequenced(self) -> list[tuple[int, int]]:
        """Batch and id of every event, in the order in which it was sequenced."""
        return [(n, i) for n, ids in enumerate(self.ids_of) for i in ids]


def _ranges(ids: Sequence[int]) -> tuple[Range, ...]:
    return tuple((each, each) for each in ids)


def _event(event_id: int, *, erased: bool = False, expired: bool = False) -> PastEvent:
    return PastEvent(RoutableEvent(event_id, None, "a.b", event_id), erased, expired)


def _loaded(place: Place, seen: tuple[Range, ...] = (), **options: int) -> Feed:
    feed = Feed(LoadedFeed(1, ENDPOINT, place, seen, ROUTE, **options))
    feed.pending_max = None
    return feed


@given(st.data())
def test_the_batches_alone_say_which_events_they_sequenced(draw: st.DataObject) -> None:
    history = History(draw)
    first = draw.draw(st.integers(0, len(history.batches) - 1))
    chunk = history.batches[first : first + draw.draw(st.integers(1, 5))]
    split = split_by_batch(chunk, history.events)
    assert [[e.event.id for e in some] for some in split] == [
        history.ids_of[row.batch] for row in chunk
    ]
    assert [len(some) for some in split] == [row.events for row in chunk]


@given(st.data())
@settings(max_examples=200)
def test_a_feed_gives_every_event_once_in_order_whatever_is_lost(draw: st.DataObject) -> None:
    """Also if it is loaded again, from the place that was written, in the middle of a batch."""
    history = History(draw)
    start = draw.draw(
        st.sampled_from([Place(-1, 0), *(Place(b, h) for b, _, h, *_ in history.batches)])
    )
    ids = [i for _, i in history.sequenced()]
    seen = _ranges([i for i in ids if draw.draw(st.integers(0, 4)) == 0])
    feed, got, place = _loaded(start, seen), list[int](), start
    for _ in range(400):
        rest = [b for b in history.batches if Place(b.batch, b.high) > feed.read_to]
        step = draw.draw(st.integers(0, 5))
        if step == 0:
            feed = _loaded(place, seen)
        elif step <= 2 and rest:
            batches = rest[: draw.draw(st.integers(1, 3))]
            assert feed.add(feed.read_to, batches, split_by_batch(batches, history.events), {}) == 0
        part = feed.plan_part(draw.draw(st.integers(0, 3)))
        if draw.draw(st.booleans()):
            feed.rejected()
            continue
        feed.committed(part)
        got += [i for _, i in part.deliveries]
        place = part.place
        if place.batch == len(history.batches) - 1 and place.id == history.batches[-1].high:
            break
    else:
        return  # It was loaded again too often.
    hidden = {lo for lo, _ in seen}
    wanted = [i for n, i in history.sequenced() if (n, i) > start and i not in hidden]
    assert got == wanted


def test_what_cannot_be_sent_is_counted_when_its_batch_is_passed() -> None:
    feed = _loaded(Place(-1, 0), seen=((5, 5),))
    batch = PassedBatch(0, 0, 6, (), (), 6)
    events = [
        _event(1), _event(2, erased=True), _event(3, expired=True), _event(4),
        _event(5, erased=True),
    ]  # fmt: skip
    assert feed.add(feed.read_to, [batch], split_by_batch([batch], events), {}) == 1
    first = feed.plan_part(1)
    assert (first.place, first.skipped.erased) == (Place(0, 1), 0)
    feed.committed(first)
    rest = feed.plan_part(5)
    assert [i for _, i in rest.deliveries] == [4]
    assert (rest.place, rest.skipped) == (Place(0, 6), type(rest.skipped)(1, 1, 1))


def test_batches_that_leave_a_hole_are_not_added() -> None:
    """They were read for another feed, which was further."""
    feed = _loaded(Place(0, 2))
    batches = [PassedBatch(n, 2 * n, 2 * n + 2, (), (), 2) for n in range(3)]
    events = [_event(i) for i in range(1, 7)]
    feed.add(Place(1, 4), batches[2:], split_by_batch(batches[2:], events), {})
    assert (feed.read_to, feed.ahead) == (Place(0, 2), 0)
    feed.add(Place(-1, 0), batches[:2], split_by_batch(batches[:2], events), {})
    assert [i for _, i in feed.plan_part(9).deliveries] == [3, 4]


def test_no_more_is_fed_than_may_be_pending() -> None:
    feed = _loaded(Place(-1, 0))
    batch = PassedBatch(0, 0, 5, (), (), 5)
    feed.add(feed.read_to, [batch], split_by_batch([batch], [_event(i) for i in range(1, 6)]), {})
    feed.pending_max = 2
    part = feed.plan_part(100)
    assert len(part.deliveries) == 2
    feed.committed(part)
    assert feed.plan_part(100).deliveries == []


@pytest.mark.parametrize(("backlog_max", "most"), [(None, FED_PENDING_MAX), (100, 50), (1, 1)])
def test_a_feed_does_not_fill_a_bounded_backlog(backlog_max: int | None, most: int) -> None:
    """Above the bound, the oldest deliveries would become dead letters."""
    loaded = LoadedFeed(1, ENDPOINT, Place(0, 0), (), ROUTE, backlog_max)
    assert loaded.pending_max == most


def test_what_was_read_ahead_stays_if_the_tables_say_the_same() -> None:
    feed = _loaded(Place(0, 5))
    assert feed.continues(LoadedFeed(1, ENDPOINT, Place(0, 5), (), ROUTE))
    assert not feed.continues(LoadedFeed(1, ENDPOINT, Place(0, 4), (), ROUTE))
    other = Route(ENDPOINT, ("a.*",), None, all_tenants=False, lane_ids=(10, 11))
    assert not feed.continues(LoadedFeed(1, ENDPOINT, Place(0, 5), (), other))


@given(st.lists(st.floats(1 / LIVE_PER_S, (LIVE_MAX - 1) / LIVE_PER_S), min_size=50))
def test_batches_feed_at_the_whole_pace_however_they_come(pauses_s: list[float]) -> None:
    now, fed = 100.0, 0
    pace = FeedPace(live_until=inf)
    pace.limit(now, 0)
    pace.record_fed(now)
    for pause_s in pauses_s:
        now += pause_s
        fed += pace.limit(now, 0)
        pace.record_fed(now)
    assert (now - 100.0) * LIVE_PER_S - 1.01 < fed <= (now - 100.0) * LIVE_PER_S + 0.01


def test_live_events_make_the_pace_slower_but_never_stop_a_feed() -> None:
    pace = FeedPace()
    assert pace.limit(100.0, 0) == IDLE_MAX
    pace.record_live_events(100.0)
    assert pace.limit(100.0, 3) == LIVE_MAX
    pace.record_fed(100.0)
    assert pace.limit(100.0, 3) == 0
    assert pace.limit(100.0 + 10.5 / LIVE_PER_S, 3) == 10
    assert pace.limit(pace.next_at + 1e-6, 3) == LIVE_DUE
    # One that comes late makes up for it, up to a limit.
    assert pace.limit(pace.next_at + 5.5 / LIVE_PER_S, 3) == LIVE_DUE + 5
    assert pace.limit(pace.next_at + 1.0, 3) == LIVE_MAX
    # While a batch is written, the next one earns.
    slow = FeedPace(live_until=200.0)
    slow.limit(100.0, 3)
    slow.record_fed(100.0 + 4.5 / LIVE_PER_S)
    assert slow.limit(slow.next_at + 1e-6, 3) == LIVE_DUE + 4
    # In a batch of its own, or with many live events; if there is neither, with a few.
    assert pace.may_go_with(100.0, LARGE_BATCH)
    assert not pace.may_go_with(100.0, 0)
    assert pace.may_go_with(pace.next_at, 0)
    assert not pace.may_go_with(pace.next_at, 1)
    assert pace.may_go_with(2 * pace.next_at - 100.0, 1)
    # A relay that catches up itself has large batches.
    assert pace.limit(101.0, 5_000) > 5_000
    assert pace.limit(100.0 + FEED_LIVE_S, 0) == IDLE_MAX


def test_feeds_are_served_in_turn() -> None:
    pace, some = FeedPace(), [_loaded(Place(0, n)) for n in range(3)]
    firsts = [pace.in_turn(some)[0].place.id for _ in range(6)]
    assert sorted(firsts) == [0, 0, 1, 1, 2, 2]
    assert pace.in_turn([]) == []
